"""Run tests in a QEMU virtual machine, whose disks discard all writes."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.kernels.disks import Kernel

PROCESSORS = 2
MEMORY = "3G"
_CONSOLE_LINES = 20
"""Number of console lines to show if the machine exits without test results."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The results of the tests in a machine.

    Attributes:
        statuses: pytest's exit status, by user; a user whose tests did not finish is missing.
        last_lines: the last line of each user's output, in which pytest counts the tests.
        console: the last lines of the kernel's console.
    """

    statuses: dict[str, int]
    last_lines: dict[str, str]
    console: str


def run(kernel: Kernel, root: Path, checkout: Path, console: Path, seconds: float, *, network: bool = False) -> Ended:
    """Boot a machine, print the output of its tests, and wait until it exits.

    Args:
        kernel: the kernel to boot.
        root: the disk of the root file system.
        checkout: the disk of the checkout, with the settings of ``guest-init``.
        console: the file to write the kernel's console to.
        seconds: the time after which the machine is terminated.
        network: whether the machine can use this machine's network.
    """
    console.write_bytes(b"")
    disks = [root, kernel.directory / "modules.ext4", checkout]
    with _started(_command(kernel, disks, console, network=network)) as machine:
        timer = threading.Timer(seconds, machine.terminate)
        timer.daemon = True
        timer.start()
        assert machine.stdout is not None
        statuses, last_lines = _follow(machine.stdout)
        timer.cancel()
    last = console.read_text(errors="replace").splitlines()[-_CONSOLE_LINES:]
    return Ended(statuses, last_lines, "\n".join(last))


def _command(kernel: Kernel, disks: list[Path], console: Path, *, network: bool) -> list[str | Path]:
    card = ["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net"] if network else []
    drives = [word for disk in disks for word in ("-drive", f"file={disk},if=virtio,format=raw,snapshot=on")]
    return [
        "setpriv", "--pdeathsig=KILL",  # kill the machine when this process exits
        "qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-smp", str(PROCESSORS), "-m", MEMORY,
        "-nodefaults", "-display", "none", "-no-reboot",
        "-kernel", kernel.directory / "vmlinuz", "-initrd", kernel.directory / "initrd.gz",
        "-append", "console=ttyS0 quiet panic=-1 mitigations=off",
        *drives, *card, "-serial", f"file:{console}", "-serial", "stdio",
    ]  # fmt: skip


@contextlib.contextmanager
def _started(command: list[str | Path]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as machine:
        try:
            yield machine
        finally:
            machine.terminate()


def _follow(output: Iterable[str]) -> tuple[dict[str, int], dict[str, str]]:
    statuses, last_lines, last = {}, {}, ""
    for line in output:
        words = line.split()
        if words[:1] == ["status"] and len(words) == 3:
            statuses[words[1]], last_lines[words[1]] = int(words[2]), last
        else:
            print(line, end="", flush=True)
            last = line.strip() or last
    return statuses, last_lines
