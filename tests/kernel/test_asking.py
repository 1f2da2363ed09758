"""What pid 1 may not look into it learns as the user whose it is; what nobody may look into could be anything."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.kernel, pytest.mark.once]

USER = 64321
HOLDER = """
import ctypes, os, socket, sys
user = int(sys.argv[1])
os.setgroups([])
os.setgid(user)
os.setuid(user)
hidden, under_way = "hidden" in sys.argv, "under way" in sys.argv
kept = [os.open("/", os.O_RDONLY) for _ in range(3)] + [os.open("/dev/null", os.O_RDONLY) for _ in range(30)]
if under_way:
    left, right = socket.socketpair()
    socket.send_fds(left, [b"x"], kept[:1])
ctypes.CDLL(None).prctl(4, not hidden, 0, 0, 0)  # PR_SET_DUMPABLE
print("ready", flush=True)
sys.stdin.read()
"""
PID_1 = """
import ctypes, sys, time
from minisandbox.launch import kernel_memory, syscalls as sc
sc.capset(sc.capget()[1] & ~(1 << 19))  # CAP_SYS_PTRACE
kernel_memory._tables = lambda spared: iter([f"/proc/{sys.argv[1]}/fd"])
begun = time.monotonic()
print(kernel_memory._open_directories(set(), 100_000), time.monotonic() - begun < 5)
"""


@pytest.mark.parametrize(
    ("holder", "found"), [((), 3), (("under way",), 3 + 4096), (("hidden",), 4096), (("hidden", "under way"), 4096)]
)
def test_directories_that_another_user_holds_are_counted(holder: tuple[str, ...], found: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("being another user takes root")
    command = [sys.executable, "-c", HOLDER, str(USER), *holder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        asked = subprocess.run(
            [sys.executable, "-c", PID_1, str(process.pid)], capture_output=True, text=True, check=False
        )
        process.communicate()
    assert asked.stdout == f"{found} True\n", asked.stderr
