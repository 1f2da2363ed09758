"""Run the engines in processes of their own, ask them in alternation, and leave nothing behind."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.engines.accounts import Account, accounts_of
from benchmarks.engines.engine import Project
from benchmarks.engines.projects import build_projects, copy_for
from benchmarks.engines.registry import engine_class
from benchmarks.engines.results import Quantity, Results, Sample

_PREFIX = "bench-engines-"
_SOURCE = Path(__file__).parents[2]
_UID = 61184 + os.getpid() % 4096  # of the ordinary user: systemd's range for ids without an entry
_TIMEOUT = 900.0  # seconds for one sample
_SETTLE = 0.5  # seconds until work that goes on after a reply is counted


def measure(
    names: Iterable[str], projects: Sequence[str], plan: Sequence[Quantity], results: Results, base: Path
) -> None:
    """Take every sample that the results lack.

    Args:
        names: the engines.
        projects: names of ``benchmarks/projects.json``.
        plan: what to measure.
        results: where samples are read and added.
        base: where a temporary directory is made; on a disk, and every user may pass through.
    """
    owing = [name for name in names if any(_owes(name, one, results) for one in plan)]
    if not owing:
        return
    with temporary_place(base) as place, ExitStack() as stack:
        say(f"building {', '.join(projects)}")
        built, python = build_projects(place / "projects", projects), interpreter()
        shutil.copytree(_SOURCE / "src", place / "code")
        shutil.copytree(_SOURCE / "benchmarks/engines", place / "code/benchmarks/engines")
        workers = {}
        for name in owing:
            say(f"opening {name}")
            worker = workers[name] = Worker(name, place, built, python)
            stack.callback(worker.close)
            results.note(name, worker.status)
        for quantity in plan:
            for number in range(quantity.rounds):
                for name, worker in workers.items():
                    if len(results.samples(name, quantity.name)) == number and _owes(name, quantity, results):
                        sample = worker.sample(quantity)
                        results.add(name, quantity.name, sample)
                        outcome = sample.get("failed") or f"{sample['took']:.1f} s, load {sample['load']:.1f}"
                        say(f"{quantity.name} {number + 1}/{quantity.rounds} {name}: {outcome}")


def _owes(name: str, quantity: Quantity, results: Results) -> bool:
    return quantity.kind in engine_class(name).measures and results.owes(name, quantity)


class Worker:
    """The process of an engine.

    Args:
        name: the engine.
        place: the run's temporary directory.
        projects: what sandboxes are made of.
        python: the interpreter for all engines.

    Attributes:
        status: ``version``, or ``failed`` with the reason.
    """

    def __init__(self, name: str, place: Path, projects: Sequence[Project], python: str) -> None:
        self._name = name
        self._process: subprocess.Popen[str] | None = None
        self._account: Account | None = None
        kind, root = engine_class(name), os.geteuid() == 0
        if kind.needs_root and not root:
            self.status: Sample = {"failed": "needs root"}
            return
        own, group = place / name, f"{place.name}-{name}"
        for part in ("tmp", "run", "home", "work"):
            (own / part).mkdir(parents=True)
        identity: dict[str, Any] = {}
        if kind.as_user and root:
            projects = copy_for(projects, own, _UID)
            identity = {"user": _UID, "group": _UID, "extra_groups": []}
        command = [python, "-m", "benchmarks.engines.worker", name, f"{own}/work", group]
        if kind.private:
            command = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /run && exec "$@"', "sh", *command]
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8",
            "HOME": f"{own}/home", "TMPDIR": f"{own}/tmp", "MINISANDBOX_RUNTIME": f"{own}/run",
            "MINISANDBOX_STORE": f"{own}/store", "PYTHONPATH": f"{place}/code",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [*command, *(str(project.home) for project in projects)], cwd=place, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, **identity,
        )  # fmt: skip
        account = Account(group)
        self._account = account if account.enter(self._process.pid) else None
        self.status = self._read()

    def sample(self, quantity: Quantity) -> Sample:
        """Take a sample, with the machine's load before it and the CPU seconds of everything that it caused."""
        load, start = os.getloadavg()[0], time.monotonic()
        before = self._account.cpu() if self._account else 0.0
        ask = self._at_once if quantity.kind == "at-once" else self._ask
        sample = ask(quantity.kind, quantity.arguments)
        took = time.monotonic() - start
        time.sleep(_SETTLE)
        sample["cpu"] = self._account.cpu() - before if self._account else None
        return {**sample, "load": load, "took": took}

    def _at_once(self, _: str, arguments: Mapping[str, Any]) -> Sample:
        empty = self._account.memory() if self._account else 0
        sample = self._ask("hold", arguments)
        if "failed" in sample:
            return sample
        time.sleep(_SETTLE)
        memory = (self._account.memory() - empty) / arguments["count"] if self._account else None
        return {**sample, "memory": memory, **self._ask("release", {})}

    def _ask(self, what: str, arguments: Mapping[str, Any]) -> Sample:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then there is no reply either
            self._process.stdin.write(json.dumps({"measure": what, **arguments}) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> Sample:
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _TIMEOUT)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self._process.kill()
        found: Sample = json.loads(line or '{"failed": "its process ended, or did not reply in time"}')
        return found

    def close(self) -> None:
        """Let the process remove what it made, and kill what remains after a minute."""
        if self._process is not None:
            say(f"closing {self._name}")
            assert self._process.stdin is not None
            with suppress(BrokenPipeError, subprocess.TimeoutExpired):
                self._process.stdin.close()
                self._process.wait(60)
            self._process.kill()
            self._process.wait()


@contextmanager
def temporary_place(base: Path) -> Iterator[Path]:
    """A directory that is removed at the end with every process of this run; also those of runs that were killed."""
    for left in base.glob(f"{_PREFIX}*"):
        with suppress(OSError), open(left / "lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(left)
    place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    place.chmod(0o755)
    with open(place / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield place
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _remove(place)
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _remove(place: Path) -> None:
    for account in accounts_of(f"{place.name}-"):
        account.remove()
    shutil.rmtree(place, ignore_errors=True)


def interpreter() -> str:
    """Return a Python for all engines: this one, or the system's where an ordinary user cannot run this one."""
    identity: dict[str, Any] = {"user": _UID, "group": _UID, "extra_groups": []} if os.geteuid() == 0 else {}
    for candidate in (sys.executable, "/usr/bin/python3"):
        command = [candidate, "-I", "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        with suppress(OSError):
            if subprocess.run(command, cwd="/", stderr=subprocess.DEVNULL, check=False, **identity).returncode == 0:
                return candidate
    raise SystemExit("no Python >= 3.11 that an ordinary user can run")


def say(text: str) -> None:
    """Report progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
