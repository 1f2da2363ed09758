"""Many busy sandboxes for half an hour, and what grows meanwhile: ``make soak-steady``.

One controller keeps its sandboxes busy: commands, files, shells, daemons, snapshots, stops and new sandboxes. Every few
seconds the memory, descriptors, processes, mounts and control groups of all of it are counted, and how long a
command takes. The means of the last minutes must be those of the first ones, after a warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean, median

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.adversarial.soak import below, title  # noqa: E402 - after the path is set

from minisandbox import ImageSpec, Limits, Sandbox  # noqa: E402
from minisandbox.errors import MiniSandboxError  # noqa: E402
from minisandbox.host import registry  # noqa: E402
from minisandbox.images.base import base_entries, write_base  # noqa: E402
from minisandbox.launch.kernel import cgroups  # noqa: E402

SUPERVISORS = ("minisandbox-launcher", "minisandbox-zygote", "minisandbox-template", "minisandbox-setup")
WORK = (
    "echo work > /testbed/file; cat /testbed/file",
    "for i in 1 2 3 4 5; do :; done",
    "head -c 100000 /dev/zero > /tmp/f; rm /tmp/f",
    "(setsid sleep 5 &) ; true",
    "git --version >/dev/null 2>&1; ls / >/dev/null",
)
SMALL = Limits(memory=128 << 20, disk=64 << 20, processes=64)
TOLERANCE = 0.1
SPARE = {"controller_mib": 4.0, "supervisors_mib": 4.0, "descriptors": 8, "zygote_descriptors": 8, "processes": 40}
"""What may be more at the end, whatever the proportion: a spare, a daemon that has not ended yet."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What there was at a moment.

    Attributes:
        controller_mib: memory of this process (Pss).
        supervisors_mib: memory of the launcher, the zygote and the setup workers (Pss).
        machine_mib: memory in use on the machine, page cache not counted.
        descriptors: open descriptors of this process.
        zygote_descriptors: those of the zygote.
        processes: processes below this one.
        mounts: mounts of the zygote's namespace.
        groups: directories of the control groups of this owner.
        records: files in the runtime directory.
        command_ms: median of the commands since the last sample, in milliseconds.
        creation_ms: the same for creations, up to the first command's end.
    """

    controller_mib: float
    supervisors_mib: float
    machine_mib: float
    descriptors: float
    zygote_descriptors: float
    processes: float
    mounts: float
    groups: float
    records: float
    command_ms: float
    creation_ms: float


class Busy:
    """Sandboxes that are kept busy by threads."""

    def __init__(self, image: ImageSpec, count: int, threads: int, seed: int) -> None:
        self._image = image
        self._boxes = [Sandbox.create(image, limits=SMALL) for _ in range(count)]
        self._locks = [threading.Lock() for _ in range(count)]
        self._ended = threading.Event()
        self.commands: list[float] = []
        self.creations: list[float] = []
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._go_on, args=(random.Random(seed + n),)) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether every thread still works: one that met an error of no sandbox has ended."""
        return all(thread.is_alive() for thread in self._threads)

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        for box in self._boxes:
            box.stop()

    def _go_on(self, dice: random.Random) -> None:
        while not self._ended.is_set():
            place = dice.randrange(len(self._boxes))
            if not self._locks[place].acquire(blocking=False):
                continue
            try:
                self._act(place, dice)
            except MiniSandboxError as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                with contextlib.suppress(MiniSandboxError):
                    self._boxes[place] = Sandbox.create(self._image, limits=SMALL)
            finally:
                self._locks[place].release()

    def _act(self, place: int, dice: random.Random) -> None:
        box, kind = self._boxes[place], dice.random()
        began = time.monotonic()
        if kind < 0.1:
            box.stop()
            began = time.monotonic()
            box = self._boxes[place] = Sandbox.create(self._image, limits=SMALL)
            box.exec(["true"], timeout=60)
            self.creations.append(time.monotonic() - began)
        elif kind < 0.15:
            with box.shell() as shell:
                shell.run("cd /tmp; x=1", timeout=60)
                shell.run("exit 1", timeout=60)
        elif kind < 0.2:
            box.files.write_text("/testbed/written", "text\n" * 1000)
            box.files.read_bytes("/testbed/written")
        elif kind < 0.22:
            kept = box.snapshot()
            with Sandbox.create(kept, limits=SMALL) as other:
                other.exec(["true"], timeout=60)
            box.reset(kept)
        else:
            result = box.exec(dice.choice(WORK), timeout=60)
            self.commands.append(time.monotonic() - began)
            if result.exit_code != 0:
                self.failures.append(f"{result.fate}: {result.stderr[:200]!r}")


def sample(busy: Busy) -> Sample:
    """Look at everything once."""
    me = os.getpid()
    tree = below(me)
    supervisors = [pid for pid in tree if title(pid) in SUPERVISORS]
    zygote = next(pid for pid in supervisors if title(pid) == "minisandbox-zygote")
    commands, busy.commands = busy.commands, []
    creations, busy.creations = busy.creations, []
    return Sample(
        controller_mib=pss(me),
        supervisors_mib=sum(map(pss, supervisors)),
        machine_mib=machine_memory(),
        descriptors=len(os.listdir("/proc/self/fd")),
        zygote_descriptors=len(os.listdir(f"/proc/{zygote}/fd")),
        processes=len(tree),
        mounts=len(Path(f"/proc/{zygote}/mountinfo").read_bytes().splitlines()),
        groups=sum(count_directories(path) for name, path in cgroups.owners(cgroups.find_roots()) if name == owner()),
        records=sum(len(names) for _, _, names in os.walk(registry.runtime_directory())),
        command_ms=1000 * median(commands) if commands else 0.0,
        creation_ms=1000 * median(creations) if creations else 0.0,
    )


def owner() -> str:
    return registry.owner_name(os.getpid())


def count_directories(path: str) -> int:
    return len(list(os.walk(path)))


def pss(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def machine_memory() -> float:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    numbers = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return (numbers["MemTotal"] - numbers["MemAvailable"]) / 1024


def compare(first: list[Sample], last: list[Sample]) -> list[str]:
    """Print a table; returns what has grown."""
    grown = []
    print(f"{'':20} {'first':>10} {'last':>10}")
    for name in (one.name for one in fields(Sample)):
        before, after = (fmean(getattr(one, name) for one in part) for part in (first, last))
        print(f"{name:20} {before:10.1f} {after:10.1f}")
        allowed = before * (2 if name.endswith("_ms") else 1 + TOLERANCE) + SPARE.get(name, 2)
        if name != "machine_mib" and after > allowed:  # other programs use the machine's memory too
            grown.append(f"{name} has grown from {before:.1f} to {after:.1f}")
    return grown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sandboxes", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--window", type=float, default=3.0, help="minutes that are averaged, first and last")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between samples")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="minisandbox-steady-") as base:
        os.chmod(base, 0o755)
        os.environ["MINISANDBOX_RUNTIME"] = f"{base}/runtime"
        layer = Path(base, "tree")
        write_base(base_entries(), layer)
        busy = Busy(ImageSpec("steady", (layer,)), chosen.sandboxes, chosen.threads, chosen.seed)
        began, samples = time.monotonic(), []
        try:
            while (now := time.monotonic() - began) < chosen.minutes * 60:
                time.sleep(chosen.every)
                samples.append((now, sample(busy)))
                if not busy.alive:
                    break
        finally:
            busy.end()
    window, end = chosen.window * 60, chosen.minutes * 60
    first = [one for at, one in samples if at <= window][1:]
    last = [one for at, one in samples if at > end - window]
    if not first or not last:
        print("a thread ended with an error, before there was anything to compare")
        return 1
    grown = compare(first, last)
    print(f"seed {chosen.seed}: {chosen.sandboxes} sandboxes, {chosen.minutes:g} minutes, {len(samples)} samples")
    print(f"failures: {len(busy.failures)} {busy.failures[:3]}")
    print("\n".join(f"! {line}" for line in grown) or "nothing has grown")
    return int(bool(grown or busy.failures))


if __name__ == "__main__":
    sys.exit(main())
