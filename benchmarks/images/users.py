"""The command line of MiniSandbox as root, as a user with a range of ids, and as a user with one id."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import e2b_dockerfile_utils
import isal
import packaging
import uv
import zstandard
from benchmarks.images.views import id_map
from tests import as_user

import minisandbox

MODES = ("root", "range", "one")
_WAIT = 60.0  # seconds for a sandbox


@dataclass(frozen=True, slots=True)
class User:
    """Who calls MiniSandbox, with a store.

    Attributes:
        mode: one of :data:`MODES`.
        python: the interpreter.
        store: the store's directory.
        environment: variables.
        identity: arguments of Popen that make a process this user's.
    """

    mode: str
    python: str
    store: Path
    environment: Mapping[str, str]
    identity: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keeps_owners(self) -> bool:
        """Whether files of images keep their owners."""
        return self.mode == "root"

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start ``minisandbox``."""
        return subprocess.Popen(
            [self.python, "-m", "minisandbox", *words], cwd="/", text=True, errors="surrogateescape",
            env={**self.environment, "MINISANDBOX_STORE": str(self.store)}, start_new_session=True,
            stdin=subprocess.DEVNULL, **self.identity, **options,
        )  # fmt: skip

    def call(self, *words: str) -> tuple[int, str]:
        """Run ``minisandbox``; returns its exit status and what it prints."""
        process = self.start(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        text, _ = process.communicate()
        return process.returncode, text

    def check(self, *words: str) -> None:
        """Run ``minisandbox``.

        Raises:
            SystemExit: it fails.
        """
        status, text = self.call(*words)
        if status:
            raise SystemExit(f"minisandbox {' '.join(words)} as {self.mode} ends with {status}:\n{text}")

    def pull(self, reference: str, name: str) -> None:
        """Take an image in.

        Raises:
            SystemExit: that fails.
        """
        self.check("image", "pull", reference, "--name", name)

    def run(self, image: str, command: str) -> tuple[int, str]:
        """Run a shell command in a new sandbox."""
        return self.call("sandbox", "run", "--image", image, "--", "sh", "-c", command)

    @contextmanager
    def sandbox(self, image: str) -> Iterator[tuple[Path, Sequence[Any]]]:
        """Keep a sandbox alive; yields its root as the host sees it, and the maps from the host's ids to its own.

        Raises:
            SystemExit: it does not start.
        """
        mark = f"{10**8 + time.monotonic_ns() % 10**8}"
        process = self.start(
            "sandbox", "run", "--image", image, "--user", "root", "--", "sleep", mark,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            pid = _find(mark, process)
            maps = [id_map(Path(f"/proc/{pid}/{kind}_map").read_text().splitlines()) for kind in ("uid", "gid")]
            yield Path(f"/proc/{pid}/root"), maps
        finally:
            process.terminate()
            process.communicate()


def _find(mark: str, process: subprocess.Popen[str]) -> int:
    """Find the sandbox's process, once its root is the image's."""
    wanted, deadline = f"sleep\0{mark}\0".encode(), time.monotonic() + _WAIT
    while time.monotonic() < deadline and process.poll() is None:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if path.read_bytes() == wanted:
                    return int(path.parent.name)
        time.sleep(0.05)
    assert process.stderr is not None
    process.kill()
    raise SystemExit(f"no sandbox starts: {process.stderr.read()}")


@contextmanager
def user_of(mode: str, place: Path) -> Iterator[User]:
    """Make a user of a mode, with an empty store; both are removed at the end.

    Raises:
        SystemExit: there can be none here.
    """
    common = {"PATH": as_user.PATH, "LANG": "C.UTF-8"}
    if mode == "root":
        own = place / "root"
        for part in ("run", "home"):
            (own / part).mkdir(parents=True, exist_ok=True)
        code = str(Path(minisandbox.__file__).parents[1])
        environment = {**common, "PYTHONPATH": code, "HOME": f"{own}/home", "MINISANDBOX_RUNTIME": f"{own}/run"}
        yield User(mode, sys.executable, own / "store", environment)
        shutil.rmtree(own)
        return
    with as_user.temporary_user() as account:
        python = as_user.find_python(account)
        if python is None:
            raise SystemExit("no Python >= 3.11 that other users can execute")
        for module in (minisandbox, e2b_dockerfile_utils, isal, packaging, uv, zstandard):
            source = Path(module.__file__ or "").parent
            shutil.copytree(source, account.base / "code" / source.name)
        environment = {**account.environment(), "PYTHONPATH": f"{account.base}/code"}
        if mode == "one":
            environment["MINISANDBOX_ONE_ID"] = "1"
        else:
            environment["PATH"] = f"{as_user.find_mappers(account)}:{as_user.PATH}"
            as_user.give_range(account)
        identity = {"user": account.uid, "group": account.gid, "extra_groups": [], "umask": 0o022}
        yield User(mode, python, account.base / "home" / "store", environment, identity)


def at(user: User, store: str) -> User:
    """Return the user with another store."""
    return replace(user, store=user.store.with_name(store))


def remove_store(user: User) -> None:
    """Remove a store; layers may have directories that are closed to their owner."""
    shutil.rmtree(user.store, ignore_errors=True)
    if os.path.lexists(user.store):
        subprocess.run(["rm", "-rf", str(user.store)], check=False)
