"""Processes that stop at their end for one another (PTRACE_O_TRACEEXIT): in a ring they would never end.

The filter refuses the option. Whoever changes that tries it where a restart of the machine harms nobody: nothing else
ends such a ring.
"""

from __future__ import annotations

import errno
import platform

import pytest

from minisandbox.sandbox import Sandbox

pytestmark = pytest.mark.kernel

TRACE = """
import ctypes, os, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # with it whoever is traced would be stopped
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes, libc.ptrace.restype = [ctypes.c_long] * 4, ctypes.c_long
OLDSETOPTIONS, SETOPTIONS, SEIZE, INTERRUPT = 21, 0x4200, 0x4206, 0x4207
TRACESYSGOOD, TRACEEXIT, WALL = 0x1, 0x40, 0x40000000

def ptrace(request, pid, data=0):
    return 0 if libc.ptrace(request, pid, 0, data) != -1 else ctypes.get_errno()

def trace(pid, way, options):
    # the last call's errno: of the one that asks for the options
    if way == SEIZE:
        return ptrace(SEIZE, pid, options)
    error = ptrace(SEIZE, pid) or ptrace(INTERRUPT, pid)
    if error:
        raise OSError(error, "to attach")
    os.waitpid(pid, WALL)
    return ptrace(way, pid, options)

for options in (TRACEEXIT, TRACEEXIT | TRACESYSGOOD, TRACESYSGOOD):
    child = os.fork()
    if child == 0:
        time.sleep(600)
    print(trace(child, int(sys.argv[1]), options))
    os.kill(child, signal.SIGKILL)
"""


@pytest.mark.parametrize("way", [21, 0x4200, 0x4206], ids=["oldsetoptions", "setoptions", "seize"])
def test_nobody_is_stopped_at_its_end(box: Sandbox, way: int) -> None:
    if way == 21 and platform.machine() != "x86_64":
        pytest.skip("PTRACE_OLDSETOPTIONS is of x86")
    result = box.exec(["python3", "-c", TRACE, str(way)]).check()
    assert result.stdout.split() == [str(errno.EPERM), str(errno.EPERM), "0"]


def test_strace_says_that_it_may_not(box: Sandbox) -> None:
    """It always asks for that option: a limit, which docs/security names."""
    if not box.exec("command -v strace").ok:
        pytest.skip("there is no strace here")
    result = box.exec("strace -f true", timeout=60)
    assert (result.exit_code, "Operation not permitted" in result.stderr) == (1, True)


def test_a_debugger_works(box: Sandbox) -> None:
    if not box.exec("command -v gdb").ok:
        pytest.skip("there is no gdb here")
    result = box.exec("gdb -q -batch -nx -ex 'catch syscall exit_group' -ex run -ex bt /bin/true", timeout=60)
    assert "Catchpoint 1 (call to syscall" in result.stdout, result
    attached = box.exec("sleep 60 & gdb -q -batch -nx -p $! -ex 'info threads'; kill %1", timeout=60)
    assert "sleep" in attached.stdout, attached
