"""What batches of rollouts cost: CPU over the bare commands, requests in flight, memory, the event loop's pauses.

python benchmarks/rollouts.py [overhead] [flight] [memory] [many] [--full] [--directory DIR]

overhead  the same commands and tests as replayed rollouts and in bare directories: CPU seconds of everything, by a
          control group (needs one that this user may make)
flight    128 rollouts at once whose model answers after 2 s: how many requests are in flight
memory    128 rollouts with long conversations: what the controller holds for each
many      1,000 rollouts at once: they finish

Without names all of them. Without --full sizes are small, for machines that are busy; the numbers of docs/benchmarks.md
are those of --full. The event loop's longest pause is printed beside each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.scripted_model import SimulatedModel

from minisandbox.agents import AgentLimits, BashAgent, ReplayAgent
from minisandbox.grade import Verdict
from minisandbox.images import Image, build
from minisandbox.models import Request
from minisandbox.rollouts import Batch, Budgets, RunReader, Setup, Summary
from minisandbox.sandbox.controller import shut_down
from minisandbox.spec import LocalSource, PythonRecipe
from minisandbox.store import Store
from minisandbox.tasks import Form, PytestGrader, Task

PARTS = ("overhead", "flight", "memory", "many")
PYTHON = "/usr/bin/python3"
MODULE = "def add(a, b):\n    return a - b\n\n\ndef slow(n):\n    return sum(i * i for i in range(n))\n"
HIDDEN = "from calc.core import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
TEST = """\
from calc.core import slow


def test_slow():
    assert slow({work}) > 0
"""
MEMORY = Path("/dev/shm")
WORK = 8_000_000
BUG = """\
--- a/calc/core.py
+++ b/calc/core.py
@@ -1,3 +1,3 @@
 def add(a, b):
-    return a + b
+    return a - b
{blank}
""".replace("{blank}", " ")
COMMANDS = (
    "ls -R calc tests",
    "grep -rn def calc tests",
    "cat calc/core.py tests/test_slow.py",
    f"{PYTHON} -c 'from calc.core import add; print(add(2, 3))'",
    f"{PYTHON} -m pytest -q tests/test_slow.py",
    "git status --short",
    "sed -i 's/a - b/{fix}/' calc/core.py",
    "git diff",
    f"{PYTHON} -c 'from calc.core import add; print(add(2, 3))'",
    f"{PYTHON} -m pytest -q tests/test_slow.py",
)
FIXES = {"fail": "a * b", "resolve": "a + b"}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--full", action="store_true", help="the sizes of docs/benchmarks.md")
    parser.add_argument("--directory", type=Path, default=Path.home(), help="where the store is made (default: home)")
    parser.add_argument("--inner", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        run_inner(json.loads(options.inner))
        return
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {min(unknown)!r}")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, uid {os.geteuid()}", flush=True)
    place = Path(tempfile.mkdtemp(prefix="minisandbox-bench-", dir=options.directory))
    try:
        make_source(place)
        task = make_task(place)
        build(task.recipe(), store=Store.open(place / "store"), name=task.instance_id)
        for part in options.parts or PARTS:
            print(f"\n{part}", flush=True)
            MEASURES[part](place, options.full)
    finally:
        shut_down()
        shutil.rmtree(place, ignore_errors=True)


def make_source(place: Path) -> None:
    """Write a project with its pytest beside it."""
    source = place / "source"
    files = {
        "calc/__init__.py": "", "calc/core.py": MODULE.replace("a - b", "a + b"),
        "tests/test_add.py": HIDDEN,
        "tests/test_slow.py": TEST.format(work=WORK), "setup.cfg": "[tool:pytest]\n", ".gitignore": "__pycache__/\n",
    }  # fmt: skip
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    command = [PYTHON, "-c", "import sys; print('.'.join(map(str, sys.version_info[:2])))"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "install",
            "-q",
            "--python-version",
            version,
            "--target",
            source / "vendor",
            "pytest",
        ],
        check=True,
    )
    # byte code that is valid wherever it is copied to: neither side compiles pytest
    compiled = [PYTHON, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", str(source / "vendor")]
    subprocess.run(compiled, check=True)


def make_task(place: Path) -> Task:
    """A task on the project."""
    return Task(
        instance_id="bench__calc-1",
        repo="bench/calc",
        base_commit="",
        problem_statement="add() subtracts",
        patch=BUG,
        test_patch="",
        FAIL_TO_PASS=("tests/test_add.py::test_add",),
        PASS_TO_PASS=("tests/test_slow.py::test_slow",),
        form=Form.SWESMITH,
        build=PythonRecipe(
            python=None,
            source=LocalSource(place / "source"),
            environment=(("PYTHONPATH", "/testbed/vendor"),),
        ),
        grader=PytestGrader(f"{PYTHON} -m pytest"),
    )


# --- overhead --------------------------------------------------------------------------------------------------------


def measure_overhead(place: Path, full: bool) -> None:
    """CPU seconds of replayed rollouts, and of the same commands and tests in bare directories."""
    for kind, fix in FIXES.items():
        rollouts = {"fail": 500, "resolve": 100}[kind] if full else 16
        # a pass is confirmed: its tests run once more, with some that have to fail
        runs = 2 if kind == "resolve" else 1
        bare = in_group(place, {"what": "bare", "fix": fix, "rollouts": rollouts, "runs": runs})
        ours = in_group(place, {"what": "replayed", "fix": fix, "rollouts": rollouts})
        if bare is None or ours is None:
            print("  not measured: no control group of cpuacct or version 2 can be made here")
            return
        print(
            f"  {rollouts} rollouts whose submissions {kind}: {ours.seconds:.1f} CPU s; bare, tests run {runs} x: "
            f"{bare.seconds:.1f} CPU s; ratio {ours.seconds / bare.seconds:.3f} (aim: at most 1.15); "
            f"{pauses(ours.said)}",
            flush=True,
        )


@dataclass(frozen=True)
class Measured:
    """What a process of its own has taken.

    Attributes:
        seconds: of CPU, its descendants included.
        said: what it printed.
    """

    seconds: float
    said: dict[str, float]


def in_group(place: Path, what: dict[str, object]) -> Measured | None:
    """Run a part of this program in a control group that counts the CPU of all that comes of it."""
    found = make_group()
    if found is None:
        return None
    group, read = found
    try:
        said = inner(place, what, enter=group)
        return Measured(read(), said)
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def make_group() -> tuple[Path, Callable[[], float]] | None:
    """A control group, and what tells its CPU seconds; None where none can be made."""
    name = f"minisandbox-bench-{os.getpid()}"
    old, new = Path("/sys/fs/cgroup/cpuacct"), Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        if (old / "cpuacct.usage").exists():
            (old / name).mkdir()
            return old / name, lambda: int((old / name / "cpuacct.usage").read_text()) / 1e9
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        group = new / own / name
        group.mkdir()
        return group, lambda: int((group / "cpu.stat").read_text().split()[1]) / 1e6
    return None


def bare(place: Path, what: dict[str, object]) -> dict[str, float]:
    """The same commands and tests, in copies of the repository."""
    with tempfile.TemporaryDirectory(prefix="minisandbox-bench-", dir=MEMORY if MEMORY.is_dir() else place) as memory:
        bare_in(Path(memory), place, what)
    return {}


def bare_in(memory: Path, place: Path, what: dict[str, object]) -> None:
    """The same, in a directory that is in memory: disks would make it slower, above all the removal of files."""
    template = memory / "bare"
    shutil.copytree(place / "source", template)
    (template / "calc" / "core.py").write_text(MODULE)
    git = ["git", "-c", "user.name=b", "-c", "user.email=b@b", "-C", str(template)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A", "-f"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda number: bare_rollout(memory, number, what), range(int(str(what["rollouts"])))))


def bare_rollout(place: Path, number: int, what: dict[str, object]) -> None:
    """One rollout without anything of ours: work in a copy, take the patch, apply it to another, run the tests."""
    work, clean = place / f"work-{number}", place / f"clean-{number}"
    for one in (work, clean):
        subprocess.run(["cp", "-R", place / "bare", one], check=True)
    for command in commands(str(what["fix"])):
        bash(command, work)
    patch = bash("git add -A && git diff --cached", work)
    subprocess.run(["git", "apply", "-"], cwd=clean, input=patch, check=True)
    for _ in range(int(str(what["runs"]))):
        bash(f"{PYTHON} -m pytest tests/test_add.py tests/test_slow.py", clean)
    for one in (work, clean):
        subprocess.run(["rm", "-rf", one], check=True)


def bash(command: str, place: Path) -> bytes:
    """Run a command as an agent does."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(place / "vendor"), "HOME": "/tmp"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=place, env=environment, capture_output=True, stdin=subprocess.DEVNULL, check=False
    )
    return done.stdout


def commands(fix: str) -> list[str]:
    """What is replayed."""
    return [command.replace("{fix}", fix) for command in COMMANDS]


def replayed(place: Path, what: dict[str, object]) -> dict[str, float]:
    """The same as rollouts."""
    setup = Setup(agent=ReplayAgent(commands(str(what["fix"]))))
    verdict = Verdict.RESOLVED if what["fix"] == FIXES["resolve"] else Verdict.FAILED
    watched = Watched()
    found = asyncio.run(
        watched.run(place, setup, int(str(what["rollouts"])), Budgets(workers=2 * (os.cpu_count() or 1)))
    )
    assert {(one.verdict, one.steps) for one in found} == {(verdict, len(COMMANDS))}, found
    return {"pause": watched.pause, "own": watched.own}


# --- scripted models -------------------------------------------------------------------------------------------------


def measure_flight(place: Path, full: bool) -> None:
    """How many requests are in flight."""
    turns, rounds = (15, 3) if full else (6, 1)
    for workers in (128, 144):
        said = inner(
            place,
            {
                "what": "scripted",
                "workers": workers,
                "rollouts": rounds * workers,
                "turns": turns,
                "latency": 2.0,
                "flight": 128,
            },
        )
        print(
            f"  {workers} rollouts at once, {turns} turns of 2 s: {said['mean'] / 128:.1%} of 128 requests in flight "
            f"on average, 128 or more {said['share']:.1%} of the time (aim: 90 %); {pauses(said)}",
            flush=True,
        )


def measure_memory(place: Path, full: bool) -> None:
    """What the controller holds for each live rollout."""
    turns = 50 if full else 20
    said = inner(
        place,
        {
            "what": "scripted",
            "workers": 128,
            "rollouts": 128,
            "turns": turns,
            "latency": 0.5,
            "output": 2000,
            "spread": 0.5,
            "flight": 128,
        },
    )
    print(
        f"  128 rollouts, {turns} turns, {said['tokens']:.0f} tokens each: {said['memory'] / 128 / 1e6:.2f} MB each "
        f"at the most (aim: at most 4 MB); {pauses(said)}",
        flush=True,
    )


def measure_many(place: Path, full: bool) -> None:
    """A thousand at once."""
    count = 1000 if full else 200
    said = inner(
        place,
        {
            "what": "scripted",
            "workers": count,
            "rollouts": count,
            "turns": 4,
            "latency": 5.0,
            "spread": 0.5,
            "flight": count,
        },
    )
    print(
        f"  {count} rollouts at once, {count} finished in {said['seconds']:.1f} s; {said['most']:.0f} requests in "
        f"flight at most; {pauses(said)}; {said['memory'] / count / 1e6:.2f} MB each",
        flush=True,
    )


def scripted(place: Path, what: dict[str, object]) -> dict[str, float]:
    """Rollouts of the bash agent with a model that answers after a while."""
    turns, latency = int(str(what["turns"])), float(str(what["latency"]))
    output = int(str(what.get("output", 200)))

    def answer(request: Request) -> str:
        asked = sum(message.role == "assistant" for message in request.messages)
        if asked + 1 >= turns:
            return "```submit\n```"
        return f"I look at it.\n\n```bash\nhead -c {output} /dev/zero | tr '\\0' 'x'\n```"

    spread = float(str(what.get("spread", 0.0)))
    # engines do not answer all in the same moment; the script's own tokeniser would hold the loop once for each
    model = SimulatedModel(answer, latency=lambda _: latency * random.uniform(1 - spread, 1 + spread))
    workers = int(str(what["workers"]))
    setup = Setup(agent=BashAgent(), model=model, agent_limits=AgentLimits(steps=turns + 1))
    watched = Watched(model, int(str(what["flight"])))
    began = time.monotonic()
    found = asyncio.run(watched.run(place, setup, int(str(what["rollouts"])), Budgets(workers=workers)))
    assert all(one.finished and one.turns == turns for one in found), failed(found)
    return {
        "seconds": time.monotonic() - began, "pause": watched.pause, "own": watched.own, "most": model.most_in_flight,
        "memory": watched.memory, "mean": watched.mean, "share": watched.share,
        "tokens": max(one.usage.completion + one.usage.prompt for one in found) / turns,
    }  # fmt: skip


def pauses(said: dict[str, float]) -> str:
    """The loop's longest pause, in words."""
    return f"longest pause {said['pause'] * 1000:.0f} ms, {said['own'] * 1000:.0f} of its own doing (aim: at most 100)"


def failed(found: Sequence[Summary]) -> list[tuple[str, str]]:
    """What went wrong."""
    return [(one.exit_status, one.detail) for one in found if not one.finished][:3]


@dataclass
class Watched:
    """A batch that is watched: how long the event loop pauses, what is in flight, what memory it takes.

    Attributes:
        model: whose requests are counted.
        flight: how many are to be in flight.
        pause: seconds of the loop's longest pause.
        own: the longest of those in which this process was working, and not waiting for a core: of a pause no more
            counts than the CPU seconds that all its threads took in it.
        memory: bytes that the process took at most, beyond those before.
        samples: requests in flight, every now and then.
    """

    model: SimulatedModel | None = None
    flight: int = 0
    pause: float = 0.0
    own: float = 0.0
    memory: int = 0
    samples: list[int] = field(default_factory=list)

    @property
    def steady(self) -> list[int]:
        """The samples between the first and the last moment with most of them in flight."""
        enough = 0.8 * min(self.flight, max(self.samples, default=0))
        high = [number for number, one in enumerate(self.samples) if one >= enough]
        return self.samples[high[0] : high[-1] + 1] if high else [0]

    @property
    def mean(self) -> float:
        """Requests in flight on average."""
        return sum(min(one, self.flight) for one in self.steady) / len(self.steady)

    @property
    def share(self) -> float:
        """Share of the time with as many as there are to be."""
        return sum(one >= self.flight for one in self.steady) / len(self.steady)

    async def run(self, place: Path, setup: Setup, rollouts: int, budgets: Budgets) -> Sequence[Summary]:
        """Run it."""
        store = Store.open(place / "store")
        task = make_task(place)
        image: Image = await asyncio.to_thread(build, task.recipe(), store=store, name=task.instance_id)
        out = place / f"run-{os.getpid()}-{threading.get_ident()}"
        batch = Batch([task], setup, out, image_of=lambda _: image, attempts=rollouts, budgets=budgets)
        gc.collect()
        before = rss()
        watch = asyncio.create_task(self._watch(before))
        try:
            return await batch.run()
        finally:
            watch.cancel()
            with RunReader(out) as run:
                assert len(list(run.summaries())) == rollouts
            shutil.rmtree(out)

    async def _watch(self, before: int) -> None:
        step = 0.01
        sampled = 0.0
        while True:
            began, worked = time.monotonic(), time.process_time()
            await asyncio.sleep(step)
            now = time.monotonic()
            self.pause = max(self.pause, now - began - step)
            self.own = max(self.own, min(now - began - step, time.process_time() - worked))
            if now - sampled > 0.05:
                sampled = now
                self.memory = max(self.memory, rss() - before)
                if self.model is not None:
                    self.samples.append(self.model.in_flight)


def rss() -> int:
    """Bytes that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# --- processes -------------------------------------------------------------------------------------------------------


def inner(place: Path, what: dict[str, object], *, enter: Path | None = None) -> dict[str, float]:
    """Run a part of this program in a process of its own; returns what it says."""
    command = [sys.executable, __file__, "--inner", json.dumps({**what, "place": str(place)})]

    def join() -> None:
        if enter is not None:
            (enter / "cgroup.procs").write_text("0")

    done = subprocess.run(command, stdout=subprocess.PIPE, preexec_fn=join, check=True)
    said: dict[str, float] = json.loads(done.stdout)
    return said


def run_inner(what: dict[str, object]) -> None:
    """Do what the process was made for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    work = {"bare": bare, "replayed": replayed, "scripted": scripted}[str(what["what"])]
    try:
        print(json.dumps(work(Path(str(what["place"])), what)))
    finally:
        shut_down()


MEASURES: dict[str, Callable[[Path, bool], None]] = {
    "overhead": measure_overhead, "flight": measure_flight, "memory": measure_memory, "many": measure_many,
}  # fmt: skip


if __name__ == "__main__":
    main()
