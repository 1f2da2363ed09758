"""SIGKILL at random moments among busy sandboxes, and what is left of them: ``make soak``.

A controller makes sandboxes and keeps them busy: commands, daemons that ignore signals, files, stops and new ones. At a
random moment it, its launcher, its zygote or the first process of one sandbox is killed. Two seconds later there must
be no process and no mount of what was killed; after the next start, no control group, no record and no held range of
ids; at the end, the layer must be what it was.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.waiting import locked_bytes  # noqa: E402 - after the path is set

from minisandbox.host import reaper, registry  # noqa: E402 - after the path is set
from minisandbox.images.base import base_entries, write_base  # noqa: E402
from minisandbox.launch.kernel import cgroups, identity  # noqa: E402

MOMENTS, SANDBOXES = 200, 50
GRACE = 30.0  # the promise is 2 s on a machine that has time for it
STARTUP = 60.0
LONGEST_WAIT = 0.6  # seconds until the next kill, at most
VICTIMS = {"controller": 3, "minisandbox-zygote": 2, "minisandbox-launcher": 1, "minisandbox-init": 6}  # how often

CONTROLLER = r"""
import random, sys, threading, time
from pathlib import Path
from minisandbox.errors import MiniSandboxError
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec

image, count, seed = ImageSpec("soak", (Path(sys.argv[1]),)), int(sys.argv[2]), int(sys.argv[3])
stubborn = "import os, signal, time; [signal.signal(n, signal.SIG_IGN) for n in range(1, 32) if n not in (9, 19)]; "
stubborn += "os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(600)"
WORK = ("echo work > /testbed/file; cat /testbed/file", "for i in 1 2 3 4 5; do :; done; sleep 0.02",
        "head -c 100000 /dev/zero > /usr/local/f 2>/dev/null; true", ["python3", "-c", stubborn], "sleep 30 &")
boxes = [Sandbox.create(image) for _ in range(count)]

def go_on(number):
    dice = random.Random(seed + number)
    while True:
        place = dice.randrange(count)
        try:
            if dice.random() < 0.1:
                boxes[place].stop()
                boxes[place] = Sandbox.create(image)
            else:
                boxes[place].exec(dice.choice(WORK), timeout=10)
        except MiniSandboxError:  # somebody has killed it
            try:
                boxes[place] = Sandbox.create(image)
            except MiniSandboxError:
                time.sleep(0.1)

for number in range(4):
    threading.Thread(target=go_on, args=(number,), daemon=True).start()
print("up", flush=True)
time.sleep(3600)
"""


def parents() -> dict[int, int]:
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError):
            fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] not in (b"Z", b"X"):
                found[int(name)] = int(fields[1])
    return found


def below(*tops: int) -> set[int]:
    """Every live process below these, and themselves."""
    children: dict[int, list[int]] = {}
    table = parents()
    for pid, parent in table.items():
        children.setdefault(parent, []).append(pid)
    found, queue = set(), list(tops)
    while queue:
        pid = queue.pop()
        if pid not in found:
            found.add(pid)
            queue += children.get(pid, [])
    return found & set(table)


def title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    return ""


@dataclass(slots=True)
class Soak:
    """One run.

    Attributes:
        layer: the only layer of the image.
        sandboxes: how many live at once.
        dice: what decides everything; its seed repeats a run but for the scheduling.
        complaints: what was left, if anything.
        killed: how often what was killed.
    """

    layer: Path
    sandboxes: int
    dice: random.Random
    complaints: list[str] = field(default_factory=list)
    killed: Counter[str] = field(default_factory=Counter)
    controller: subprocess.Popen[bytes] | None = None
    _ended: list[str] = field(default_factory=list)  # names of owners

    def run(self, moments: int) -> None:
        """Kill so many times."""
        mounts, before, held = mount_table(), digest_of(self.layer), held_ranges()
        try:
            for _ in range(moments):
                self.kill_something()
                if mount_table() != mounts:
                    self.complaints.append("a mount is left")
        finally:
            self.end()
        self.look_after_the_next_start()
        if (now := held_ranges()) > held:
            self.complaints.append(f"{now - held} ranges of ids are still held")
        if digest_of(self.layer) != before:
            self.complaints.append("the layer has changed")

    def kill_something(self) -> None:
        """Wait a moment, kill one process, and look after the grace what is left of what was below it."""
        if self.controller is None:
            self.controller = self.start()
        time.sleep(self.dice.uniform(0, LONGEST_WAIT))
        kind = self.dice.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        top = self.controller.pid
        candidates = [top] if kind == "controller" else [pid for pid in sorted(below(top)) if title(pid) == kind]
        if not candidates:
            return
        if kind == "minisandbox-zygote":  # what it has just forked bears its name for a moment
            candidates = [min(candidates, key=lambda pid: registry.start_time(pid) or 1 << 63)]
        victim = self.dice.choice(candidates)
        # whatever runs a sandbox is below the zygote; of a controller, all is its own
        doomed = below(victim) if kind == "minisandbox-init" else below(top) - {top}
        doomed |= {victim}
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            self.killed[kind] += 1
        doomed |= below(*doomed) - ({top} if kind != "controller" else set())
        if kind == "controller":
            self.controller.wait()
        self.expect_gone(kind, doomed, {pid: registry.start_time(pid) for pid in doomed})
        if kind != "minisandbox-init":
            self.end()

    def expect_gone(self, kind: str, doomed: set[int], started: dict[int, int | None]) -> None:
        deadline = time.monotonic() + GRACE
        left = doomed
        while left and time.monotonic() < deadline:
            left = {pid for pid in left if started[pid] is not None and registry.start_time(pid) == started[pid]}
            time.sleep(0.01)
        self.complaints += [f"{kind} was killed, and {GRACE:.0f} s later there is {pid}: {title(pid)}" for pid in left]

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", CONTROLLER, str(self.layer), str(self.sandboxes), str(self.dice.random())[2:9]]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True)
        self._ended.append(registry.owner_name(process.pid))
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n", "the controller did not start"
        return process

    def end(self) -> None:
        if self.controller is not None:
            doomed = below(self.controller.pid) - {self.controller.pid}
            self.controller.kill()
            self.controller.wait()
            if self.controller.stdout is not None:
                self.controller.stdout.close()
            self.expect_gone("the last controller", doomed, {pid: registry.start_time(pid) for pid in doomed})
            self.controller = None

    def look_after_the_next_start(self) -> None:
        """A start reclaims what the dead have left; then nothing of them may be there."""
        self.sandboxes = 1
        self.controller = self.start()
        self._ended.pop()
        groups = {name: directory for name, directory in cgroups.owners(cgroups.find_roots()) if name in self._ended}
        self.complaints += [f"a control group is left: {directory}" for directory in groups.values()]
        self.complaints += [f"a record is left: {path}" for path in self.left_records()]
        self.end()

    def left_records(self) -> Iterator[Path]:
        reaper.reap(registry.runtime_directory())
        for path in (registry.runtime_directory() / "owners").iterdir():
            if path.name in self._ended:
                yield path


def held_ranges() -> int:
    return locked_bytes(registry.ranges_directory(registry.runtime_directory()) / identity.LOCKS)


def mount_table() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.partition(" - ")[0].split()[4] for line in lines]


def digest_of(tree: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        status = path.lstat()
        total.update(repr((str(path), status.st_mode, status.st_uid, status.st_mtime_ns)).encode())
        if path.is_file() and not path.is_symlink():
            total.update(path.read_bytes())
    return total.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=MOMENTS)
    parser.add_argument("--sandboxes", type=int, default=SANDBOXES)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    chosen = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="minisandbox-soak-") as base:
        os.chmod(base, 0o755)
        os.environ["MINISANDBOX_RUNTIME"] = f"{base}/runtime"
        layer = Path(base, "tree")
        write_base(base_entries(), layer)
        soak = Soak(layer, chosen.sandboxes, random.Random(chosen.seed))
        soak.run(chosen.moments)
    times = ", ".join(f"{name} {count}" for name, count in soak.killed.most_common())
    print(f"seed {chosen.seed}: {chosen.moments} moments among {chosen.sandboxes} sandboxes: {times}")
    print("\n".join(f"! {line}" for line in soak.complaints) or f"nothing left; {time.monotonic() - began:.0f} s")
    return int(bool(soak.complaints))


if __name__ == "__main__":
    sys.exit(main())
