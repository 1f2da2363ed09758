"""A virtual machine that runs tests and ends: QEMU, with disks that forget what is written to them."""

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
"""Lines of the kernel's console to show where the machine ended without a word."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the tests of a machine ended.

    Attributes:
        statuses: pytest's exit status, by user; a user whose tests did not end is missing.
        last_lines: the last line that each user's tests printed: with pytest its counts.
        console: what the kernel wrote to its console last.
    """

    statuses: dict[str, int]
    last_lines: dict[str, str]
    console: str


def run(kernel: Kernel, root: Path, checkout: Path, console: Path, seconds: float, *, network: bool = False) -> Ended:
    """Boot a machine, print what its tests print, and wait for its end.

    Args:
        kernel: what to boot.
        root: the disk of the root file system.
        checkout: the disk of the checkout, with the settings of ``guest-init``.
        console: file for the kernel's console.
        seconds: after these the machine is ended.
        network: whether it reaches what this machine reaches.
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
        "setpriv", "--pdeathsig=KILL",  # the machine ends with this process, however that ends
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
