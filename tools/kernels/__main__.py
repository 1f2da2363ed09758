"""Run tests on other kernels in virtual machines, for ``make test-kernels``.

    python -m tools.kernels [--users root tester] [--tests ...] [--bombs N] SERIES...
    python -m tools.kernels --network --command 'minisandbox quickstart' SERIES...

SERIES is a kernel version without its last number; Debian 12 has 6.1 and 6.12. The virtual machine has Debian 12, two
processors, control groups of version 2 and, without --network, no network. QEMU emulates the processors, so KVM is not
needed. Tests run as root and as an ordinary user. All files are in the directory $KERNELS_CACHE, and are rebuilt when
their inputs change. The exit status is 0, or the first status of pytest that is not 0.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.kernels import disks, machine
from tools.kernels.debian import Archive, MissingError

PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "debootstrap": "debootstrap",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "depmod": "kmod",
    "mke2fs": "e2fsprogs",
    "setpriv": "util-linux",
}
TESTS = (
    "tests/kernel/test_memory_bombs.py",
    "tests/kernel/test_limits.py",
    "tests/kernel/test_lifecycle.py",
    "tests/kernel/test_isolation.py",
    "tests/kernel/test_snapshots.py",
    "tests/kernel/test_disk_upper.py",
    "tests/kernel/test_doctor.py",
    "tests/kernel/test_build.py::test_git_source",
    "tests/kernel/test_build.py::test_patch_hidden_and_tests_layer",
    "tests/kernel/test_build.py::test_environment_is_captured_and_the_hosts_is_not",
    "tests/conformance/test_conformance.py",
)
"""The tests that depend most on the kernel, and a few builds. All tests would take hours in an emulator.

The emulator runs 20 to 30 tests a minute, so these take about ten minutes for each kernel and user.
"""
TOPICS = ("changes", "ending", "lifetimes", "snapshots", "trees", "users")
"""Topics of the conformance suite to run, only with the synchronous sandbox: its files, users and end."""
SLOW = (
    "too_many_snapshots_one_over_the_other", "path_too_long_for_an_answer", "sigkill_at_any_moment_of_creation",
    "trees-many_files",
)  # fmt: skip
"""Parts of the names of tests that take a minute or more in the emulator and depend little on the kernel."""
CHOSEN = " or ".join(["not test_conformance", *(f"[sync-{topic}-" for topic in TOPICS)])
SELECTION = f"({CHOSEN}) and not ({' or '.join(SLOW)})"
USERS = ("root", disks.USER)
PYTHON = "/opt/venv/bin/python"


def default_cache() -> Path:
    """Return the default directory for disks, downloads and logs."""
    configured = os.environ.get("KERNELS_CACHE")
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(configured) if configured else user / "minisandbox-kernels"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests on each kernel; return the exit status."""
    options = _parse(arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        _check_machine()
        with _locked(options.cache):
            return _run_all(options)
    except MissingError as error:
        print(f"test-kernels: {error}", file=sys.stderr)
    except subprocess.CalledProcessError as error:
        command = shlex.join(map(str, error.cmd))
        print(f"test-kernels: exit status {error.returncode}: {command}\n{options.cache} has logs", file=sys.stderr)
    return 2


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("series", nargs="+", metavar="SERIES")
    parser.add_argument("--users", nargs="+", choices=USERS, default=USERS)
    parser.add_argument("--tests", nargs="+", help="files or ids of tests, in place of the list here")
    parser.add_argument("--command", help="a shell command to run in place of pytest")
    parser.add_argument("--network", action="store_true", help="let the machine reach what this one reaches")
    parser.add_argument("--pytest-args", default="", help="more arguments for pytest, in one word")
    parser.add_argument("--bombs", type=int, default=20, help="memory bombs of tests/kernel/test_memory_bombs.py")
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("--minutes", type=float, default=90.0, help="time for the tests of a kernel")
    return parser.parse_args(arguments)


def _check_machine() -> None:
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if missing:
        raise MissingError(f"missing programs: apt-get install --no-install-recommends {' '.join(missing)}")
    if os.geteuid() != 0:
        raise MissingError("debootstrap needs root, also to make the files of the disk root's")


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MissingError(f"another run uses {cache}; name another directory: KERNELS_CACHE=DIR") from None
        disks.remove_unfinished(cache)
        yield


def _run_all(options: argparse.Namespace) -> int:
    archive = Archive.find(options.cache / "apt")
    archive.update()
    root = disks.root_disk(options.cache, archive)
    statuses = [_run_one(options, archive, root, series) for series in options.series]
    return next((status for status in statuses if status), 0)


def _run_one(options: argparse.Namespace, archive: Archive, root: Path, series: str) -> int:
    kernel = disks.kernel(options.cache, archive, series)
    pytest = [PYTHON, "-m", "pytest", "-n", str(machine.PROCESSORS), "-q"]
    command = [*pytest, *shlex.split(options.pytest_args), *(options.tests or (*TESTS, "-k", SELECTION))]
    if options.command:
        command = ["bash", "-c", options.command]
    network = ["yes"] if options.network else []
    environment = [*([] if network else ["MINISANDBOX_TEST_OFFLINE=1"]), f"MINISANDBOX_TEST_BOMBS={options.bombs}"]
    settings = {"users": options.users, "environment": environment, "command": command, "network": network}
    console = options.cache / f"console-{series}.log"
    begun = time.monotonic()
    with disks.checkout_disk(options.cache, settings) as checkout:
        ended = machine.run(kernel, root, checkout, console, options.minutes * 60, network=options.network)
    print(f"== {kernel.package}: {time.monotonic() - begun:.0f} s")
    for user in options.users:
        print(f"   as {user}: exit status {ended.statuses.get(user, 'missing')}; {ended.last_lines.get(user, '')}")
    if len(ended.statuses) < len(options.users):
        print(
            f"== the machine ended, or {options.minutes:.0f} minutes were over; {console} ends with:\n{ended.console}"
        )
        return 1
    return next((status for status in ended.statuses.values() if status), 0)


if __name__ == "__main__":
    sys.exit(main())
