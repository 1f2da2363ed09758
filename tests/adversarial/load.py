"""Bombs, each in a sandbox of its own, while neighbours go on working: ``make adversarial-load``.

Each bomb must end within its deadline, harm nobody else, and be told for what it was.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from minisandbox.errors import SandboxGone  # noqa: E402 - after the path is set
from minisandbox.images.base import base_entries, write_base  # noqa: E402
from minisandbox.sandbox import Sandbox  # noqa: E402
from minisandbox.types import ExecResult, ImageSpec, Limits, Outcome  # noqa: E402

MIB = 1 << 20
NEIGHBOURS = 20
QUIET = 3.0  # seconds for which neighbours are timed before the bombs
SLOWEST = 2.0  # times the median of a quiet machine
PATIENCE = 120.0
SLACK = 30.0  # seconds that a busy machine may add to a deadline
OUTPUT = 1_000_000_000

HOLD = "import time\nheld = []\nwhile True: held.append(bytearray(b'x' * (1 << 23)))"
IGNORE = """
import signal, time
for n in range(1, 65):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: time.sleep(1)
"""
INODES = "import itertools, os\nos.mkdir('/tmp/i')\nfor n in itertools.count(): os.mknod(f'/tmp/i/{n}')"
DAEMONS = """
import os, signal, time
for n in range(500):
    if os.fork() == 0:
        os.setsid()
        for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(s, signal.SIG_IGN)
        while True: time.sleep(600)
"""

Check = Callable[[ExecResult, Sandbox], str]


def hit(name: str, *, instead: str = "") -> Check:
    """The result names a limit; or the command's errors say it, where one process met a limit of its own."""

    def check(result: ExecResult, box: Sandbox) -> str:
        told = name in result.limits_hit or bool(instead and instead in result.stderr)
        if name == "processes" and not dict(box.info().enforced)[name].startswith("cgroup"):
            told = True  # RLIMIT_NPROC refuses, and nobody counts
        return "" if told else f"{name} is not among {result.limits_hit}: {result.stderr[-200:]}"

    return check


def all_counted(result: ExecResult, box: Sandbox) -> str:
    counted = len(result.stdout_bytes) + result.dropped_stdout
    fine = result.ok and "output" in result.limits_hit and OUTPUT <= counted < OUTPUT + 1000
    return "" if fine else f"{result.fate}, {counted} bytes, {result.limits_hit}"


def timed_out(result: ExecResult, box: Sandbox) -> str:
    fine = result.outcome is Outcome.TIMEOUT and result.duration < 3 + SLACK
    return "" if fine else f"{result.fate} after {result.duration:.1f} s"


def all_left(result: ExecResult, box: Sandbox) -> str:
    return "" if result.ok and result.left_running == 500 else f"{result.fate}, {result.left_running} left"


@dataclass(frozen=True, slots=True)
class Bomb:
    """Something that takes all that it can get."""

    name: str
    command: tuple[str, ...]
    check: Check
    timeout: float = PATIENCE
    memory: int = 512 * MIB


def python(script: str) -> tuple[str, ...]:
    return ("python3", "-c", script)


def shell(script: str) -> tuple[str, ...]:
    return ("bash", "-c", script)


BOMBS = (
    Bomb("fork bomb", shell("bomb() { bomb | bomb & }; bomb; sleep 3"), hit("processes")),
    Bomb("memory bomb", python(HOLD), hit("memory", instead="MemoryError")),
    Bomb("disk filler", shell("cat /dev/zero > /tmp/fill"), hit("disk")),
    Bomb("10^9 bytes of output", shell(f"head -c {OUTPUT} /dev/zero"), all_counted, timeout=PATIENCE),
    Bomb("inode filler", python(INODES), hit("disk"), timeout=PATIENCE),
    Bomb("ignores every signal", python(IGNORE), timed_out, timeout=3.0),
    Bomb("500 daemons", python(DAEMONS), all_left, memory=4096 * MIB),
)


def limits_for(bomb: Bomb) -> Limits:
    return Limits(memory=bomb.memory, disk=64 * MIB, processes=700)


@dataclass(slots=True)
class Neighbours:
    """Sandboxes that answer all the time, each in turn, and how long each answer took."""

    boxes: list[Sandbox]
    times: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Ask them, one after the other, meanwhile."""
        self.times = []
        self._stop = threading.Event()
        thread = threading.Thread(target=self._ask)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _ask(self) -> None:
        for number, box in zip(itertools.count(), itertools.cycle(self.boxes)):
            if self._stop.wait(0.005):
                return
            began = time.monotonic()
            try:
                answer = box.exec(["echo", str(number)], timeout=PATIENCE)
            except SandboxGone as error:
                self.wrong.append(str(error))
                return
            self.times.append(time.monotonic() - began)
            if answer.stdout != f"{number}\n":
                self.wrong.append(answer.fate)

    def median(self) -> float:
        return statistics.median(self.times) if self.times else PATIENCE


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What became of bombs and neighbours."""

    complaints: tuple[str, ...]
    quiet: float
    loaded: float
    lines: tuple[str, ...]


def set_off(bomb: Bomb, box: Sandbox) -> tuple[str, str]:
    """Run a bomb to its end; returns what is wrong, and a line about it."""
    began = time.monotonic()
    try:
        result = box.exec(bomb.command, timeout=bomb.timeout)
        wrong, fate = bomb.check(result, box), f"{result.fate}; {', '.join(result.limits_hit) or 'no limit met'}"
    except SandboxGone as error:
        wrong, fate = f"the sandbox ended: {error}", "the sandbox ended"
    ran = time.monotonic() - began
    box.stop()
    stopped = time.monotonic() - began - ran
    if ran > bomb.timeout + SLACK:
        wrong = wrong or f"it took {ran:.1f} s, and had {bomb.timeout:.0f}"
    if stopped > SLACK:
        wrong = wrong or f"stopping took {stopped:.1f} s"
    return wrong, f"{bomb.name:<22} {ran:5.1f} s, stopped in {stopped * 1000:4.0f} ms  {fate}"


def run(
    image: ImageSpec, bombs: Sequence[Bomb] = BOMBS, neighbours: int = NEIGHBOURS, quiet: float = QUIET
) -> Outcomes:
    """All bombs at once, beside neighbours."""
    with contextlib.ExitStack() as stack:
        beside = Neighbours([stack.enter_context(Sandbox.create(image)) for _ in range(neighbours)])
        with beside.working():
            time.sleep(quiet)
        before = beside.median()
        boxes = [stack.enter_context(Sandbox.create(image, limits=limits_for(bomb))) for bomb in bombs]
        ended: list[tuple[str, str]] = [("it never ended", "")] * len(bombs)

        def one(number: int) -> None:
            ended[number] = set_off(bombs[number], boxes[number])

        threads = [threading.Thread(target=one, args=(number,)) for number in range(len(bombs))]
        with beside.working():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        wrong = [f"{bomb.name}: {complaint}" for bomb, (complaint, _) in zip(bombs, ended, strict=True) if complaint]
        wrong += [f"neighbour: {complaint}" for complaint in beside.wrong]
        answered = all(box.exec("echo here", timeout=PATIENCE).stdout == "here\n" for box in beside.boxes)
        wrong += [] if answered else ["a neighbour does not answer any more"]
        return Outcomes(tuple(wrong), before, beside.median(), tuple(line for _, line in ended))


def make_image(base: Path) -> ImageSpec:
    tree = base / "tree"
    write_base(base_entries(), tree)
    return ImageSpec("load", (tree,))


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="minisandbox-load-") as base:
        os.chmod(base, 0o755)
        outcomes = run(make_image(Path(base)))
    print("\n".join(outcomes.lines))
    ratio = outcomes.loaded / outcomes.quiet
    quiet, loaded = outcomes.quiet * 1000, outcomes.loaded * 1000
    print(f"{NEIGHBOURS} neighbours: median {quiet:.2f} ms before, {loaded:.2f} ms meanwhile: {ratio:.2f} times")
    complaints = [*outcomes.complaints, *(["the neighbours became too slow"] if ratio > SLOWEST else [])]
    print("\n".join(f"! {line}" for line in complaints) or "all as it should be")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
