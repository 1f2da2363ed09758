"""Limits: each is enforced, reported as what it is, and ends only what ran into it; with control groups and without."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import SLOW_AS_ROOT

from minisandbox.errors import HostError, InvalidValue, SandboxGone
from minisandbox.host import registry
from minisandbox.launch.kernel import cgroups
from minisandbox.sandbox import AsyncSandbox, Sandbox
from minisandbox.sandbox.controller import current_controller, shut_down
from minisandbox.sandbox.launcher import NO_GROUPS
from minisandbox.sandbox.run import SandboxRun
from minisandbox.types import ImageSpec, Limits, Outcome
from minisandbox.values import MiB

pytestmark = pytest.mark.kernel

MECHANISMS = ("as found", "without control groups")
HOLD = "import time; held = bytearray({size}); held[::4096] = bytes(len(held[::4096])); print('held', flush=True)"


@pytest.fixture(params=MECHANISMS)
def mechanism(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A launcher that may use control groups, where there are any, and one that may not."""
    if request.param == MECHANISMS[1]:
        shut_down()
        monkeypatch.setenv(NO_GROUPS, "1")
    yield request.param
    if request.param == MECHANISMS[1]:
        shut_down()


def python(script: str) -> list[str]:
    return ["python3", "-c", script]


def test_a_memory_bomb_ends_by_itself_and_is_named(spec: ImageSpec, mechanism: str) -> None:
    with Sandbox.create(spec, limits=Limits(memory="64M")) as box, Sandbox.create(spec) as neighbour:
        assert box.exec(python(HOLD.format(size=8 * MiB))).stdout == "held\n"
        bomb = box.exec(python(HOLD.format(size=512 * MiB)), timeout=60)
        assert not bomb.ok
        # one process meets RLIMIT_DATA, which is a MemoryError of its own and no kill
        assert bomb.limits_hit == ("memory",) or "MemoryError" in bomb.stderr
        assert neighbour.exec("echo here").stdout == "here\n"
        assert box.exec("echo here", timeout=30).stdout == "here\n"


def test_many_small_processes_are_one_memory_bomb(spec: ImageSpec, mechanism: str) -> None:
    script = HOLD.format(size=24 * MiB) + "; time.sleep(3)"
    with Sandbox.create(spec, limits=Limits(memory="96M")) as box:
        result = box.exec(f'for i in 1 2 3 4 5 6 7 8; do python3 -c "{script}" & done; wait', timeout=60)
        assert "memory" in result.limits_hit
        next_result = box.exec("echo here", timeout=30)
        assert next_result.limits_hit == (), (result, next_result)


def test_processes_without_their_first_threads_are_one_memory_bomb(spec: ImageSpec, mechanism: str) -> None:
    """Such a process looks like a zombie, which holds nothing."""
    script = """
import ctypes, os, threading, time
def hold():
    held = b"x" * (60 << 20)
    time.sleep(60)
for _ in range(6):
    if os.fork() == 0:
        threading.Thread(target=hold).start()
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)  # exit: this thread alone
os.wait()
"""
    with Sandbox.create(spec, limits=Limits(memory="200M")) as box:
        assert "memory" in box.exec(["python3", "-c", script], timeout=60).limits_hit
        assert box.exec("echo here").stdout == "here\n"


def test_a_fork_bomb_ends_inside(spec: ImageSpec, mechanism: str) -> None:
    with Sandbox.create(spec, limits=Limits(processes=50)) as box, Sandbox.create(spec) as neighbour:
        bomb = box.exec("bomb() { bomb | bomb & }; bomb; sleep 1", timeout=30)
        if dict(box.info().enforced)["processes"].startswith("cgroup"):
            assert "processes" in bomb.limits_hit
        else:
            assert "Resource temporarily unavailable" in bomb.stderr
        assert neighbour.exec("echo here", timeout=30).stdout == "here\n"
        if box.alive:  # under a bomb that never stops it may have been given up
            box.exec("kill -9 -1", timeout=30)


def test_a_full_disk_and_too_much_output_are_named(spec: ImageSpec, mechanism: str) -> None:
    with Sandbox.create(spec, limits=Limits(disk="8M", output="10K")) as box:
        assert box.exec("head -c 20M /dev/zero > /testbed/big").limits_hit == ("disk",)
        box.exec("rm /testbed/big").check()
        assert box.exec("head -c 1M /dev/zero").limits_hit == ("output",)
        assert box.exec("i=0; while : > /testbed/$((i++)); do :; done 2>/dev/null", timeout=60).limits_hit == ("disk",)
        assert box.exec("rm -rf /testbed; echo fine").limits_hit == ()


def test_what_processes_share_counts_once(spec: ImageSpec, mechanism: str) -> None:
    script = (
        HOLD.format(size=100 * MiB)
        + """
import os
children = [os.fork() or time.sleep(1) or os._exit(0) for _ in range(6)]
print([os.waitpid(child, 0)[1] for child in children])
"""
    )
    with Sandbox.create(spec, limits=Limits(memory="256M")) as box:
        result = box.exec(["python3", "-c", script], timeout=60)
        assert (result.stdout, result.limits_hit) == ("held\n" + str([0] * 6) + "\n", ())


def test_who_is_about_to_execute_something_does_not_count_for_itself(spec: ImageSpec, mechanism: str) -> None:
    """A child of vfork(2) has its parent's memory until it executes something; here it waits for a FIFO's writer."""
    script = """
import os, time
os.mkfifo("/tmp/fifo")
reader, writer = os.pipe()
if os.fork() == 0:
    os.read(reader, 1)
    time.sleep(0.15)
    os.close(os.open("/tmp/fifo", os.O_WRONLY))
    os._exit(0)
held = bytearray(160 << 20)
held[::4096] = bytes(len(held[::4096]))
reading = (os.POSIX_SPAWN_OPEN, 9, "/tmp/fifo", os.O_RDONLY, 0)
os.write(writer, b"x")
child = os.posix_spawn("/bin/true", ["true"], {}, file_actions=[reading])
print(os.waitpid(child, 0)[1])
"""
    with Sandbox.create(spec, limits=Limits(memory="256M")) as box:
        result = box.exec(["python3", "-c", script], timeout=60)
        assert (result.stdout, result.limits_hit) == ("0\n", ())


FORKING = """
import os, signal, sys, time
kept = bytearray(90 << 20)
stopped = os.fork()
if not stopped:
    time.sleep(60)
os.kill(stopped, signal.SIGSTOP)
count, end = 0, time.monotonic() + 3
while time.monotonic() < end:
    children = [os.fork() for _ in range(4)]
    if 0 in children:
        os._exit(0)
    count += sum(os.waitpid(child, 0)[1] == 0 for child in children)
state = open(f"/proc/{stopped}/stat").read().split()[2]
os.kill(stopped, signal.SIGKILL)
print(state, count > 8)
"""


def test_children_that_come_and_go_do_not_count_for_themselves(spec: ImageSpec, mechanism: str) -> None:
    """Each shows all of its parent's memory while it lives. Who was stopped stays so when all are looked at."""
    with Sandbox.create(spec, limits=Limits(memory="128M")) as box:
        result = box.exec(["python3", "-c", FORKING], timeout=60)
        assert (result.limits_hit, result.stdout) == ((), "T True\n"), result


def test_a_file_larger_than_allowed_is_named(spec: ImageSpec) -> None:
    with Sandbox.create(spec, limits=Limits(file_size="1M")) as box:
        assert box.exec("head -c 1M /dev/zero > /testbed/big").limits_hit == ()
        result = box.exec(["dd", "if=/dev/zero", "of=/testbed/big", "bs=2M", "count=2"])
        assert (result.signal, result.limits_hit) == (signal.SIGXFSZ, ("file_size",))
        assert box.exec("head -c 2M /dev/zero > /testbed/big").limits_hit == ("file_size",)
    with Sandbox.create(spec) as box:
        assert box.exec("truncate -s 60G /testbed/sparse").ok
        assert box.exec("truncate -s 1T /testbed/sparse").limits_hit == ("file_size",)
    with Sandbox.create(spec, limits=Limits(file_size=None)) as box:
        assert box.exec("truncate -s 1T /testbed/sparse").ok


def test_shells_and_processes_tell_too(spec: ImageSpec, mechanism: str) -> None:
    fill = "head -c 20M /dev/zero > /testbed/big"
    with Sandbox.create(spec, limits=Limits(disk="8M")) as box:
        with box.shell() as shell:
            assert shell.run(fill).limits_hit == ("disk",)
            assert shell.run("rm /testbed/big").limits_hit == ()
        with box.start(fill) as process:
            assert process.wait(30).limits_hit == ("disk",)


def test_a_cpu_limit_holds_or_is_refused(spec: ImageSpec, mechanism: str) -> None:
    limits = Limits(cpu=0.2)
    if "cpu" not in current_controller().launcher.enforcement:
        with pytest.raises(HostError, match="cpu"):
            Sandbox.create(spec, limits=limits)
        return
    with Sandbox.create(spec, limits=limits) as box:
        busy = box.exec("while :; do :; done", timeout=2.0)
        assert busy.outcome is Outcome.TIMEOUT
        assert box.usage().cpu < 1.2


PRIORITIES = """
import ctypes, os, resource
def attempt(what):
    try:
        what()
    except OSError:
        return "refused"
    return "done"
number = {"x86_64": 252, "aarch64": 31}[os.uname().machine]  # ioprio_get
realtime = ctypes.CDLL(None).syscall(number, 1, 0) >> 13 == 1
allowed = map(resource.getrlimit, (resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE))
print(os.sched_getscheduler(0), os.nice(0), realtime, *allowed,
      attempt(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))), attempt(lambda: os.nice(-1)),
      attempt(lambda: open("/proc/self/oom_score_adj", "w", buffering=1).write("-1\\n")))
"""
OWNER = """
import contextlib, ctypes, os, resource, sys
from pathlib import Path
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec
for kind, amount in (resource.RLIMIT_RTPRIO, 50), (resource.RLIMIT_NICE, 40):
    with contextlib.suppress(ValueError):
        resource.setrlimit(kind, (amount, amount))
with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
    score.write("-500")
with contextlib.suppress(OSError):
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
with contextlib.suppress(OSError):
    os.nice(-5)
number = {"x86_64": 251, "aarch64": 30}[os.uname().machine]  # ioprio_set
ctypes.CDLL(None).syscall(number, 1, 0, 1 << 13)
with Sandbox.create(ImageSpec("base", (Path(sys.argv[2]),))) as box:
    print(os.nice(0), box.exec(["python3", "-c", sys.argv[1]]).check().stdout, end="")
"""


def test_nobody_inside_gets_the_priorities_that_its_owner_may_have(spec: ImageSpec) -> None:
    """As far as this process can give them to an owner."""
    owner = [sys.executable, "-c", OWNER, PRIORITIES, str(spec.layers[0])]
    found = subprocess.run(owner, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    owners, _, rest = found.stdout.partition(" ")
    assert rest == f"0 {max(int(owners), 0)} False (0, 0) (0, 0) refused refused refused\n"


def test_inotify_instances_are_limited(spec: ImageSpec) -> None:
    script = (
        "import ctypes; libc = ctypes.CDLL(None); n = 0\n"
        "while libc.inotify_init() >= 0: n += 1\nprint(n)"
    )  # fmt: skip
    with Sandbox.create(spec, limits=Limits(inotify=5)) as box, Sandbox.create(spec) as other:
        assert box.exec(python(script)).stdout == "5\n"
        assert int(other.exec(python(script)).stdout) <= 32


def test_info_names_what_enforces(spec: ImageSpec, mechanism: str) -> None:
    with Sandbox.create(spec) as box:
        by = dict(box.info().enforced)
        assert by["memory"] in ("cgroup v1", "cgroup v2", "watchdog")
        if mechanism == MECHANISMS[1]:
            disk = "tmpfs" if current_controller().launcher.memory_upper else "watchdog"
            assert by == {"memory": "watchdog", "processes": "rlimit", "disk": disk}


def test_a_limit_of_the_disk_and_an_upper_on_disk_are_refused_together(spec: ImageSpec, tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    with pytest.raises(InvalidValue, match=r"Limits\.disk=16777216 and upper=.*limited by that disk alone.*leave out"):
        Sandbox.create(spec, upper=upper, limits=Limits(disk="16M"))
    with pytest.raises(InvalidValue, match=r"Limits\.disk"):
        asyncio.run(AsyncSandbox.create(spec, upper=upper, limits=Limits(disk="16M")))
    assert not list(upper.iterdir())  # nothing was begun
    with Sandbox.create(spec, upper=upper, limits=Limits(processes=50)) as box:
        assert "disk" not in dict(box.info().enforced)


def test_no_group_is_left_behind(spec: ImageSpec) -> None:
    with Sandbox.create(spec):
        mine = [directory for name, directory in cgroups.owners(cgroups.find_roots()) if name == registry.owner_name()]
        assert bool(mine) == dict(current_controller().launcher.enforcement)["memory"].startswith("cgroup")
    shut_down()
    assert not [path for path in mine if Path(path).exists()]


@pytest.mark.parametrize(
    "limits", [{"memory": 0}, {"memory": "1M"}, {"cpu": 0.0}, {"cpu": float("nan")}, {"inotify": 0}]
)
def test_nonsense_is_refused(limits: dict[str, int]) -> None:
    with pytest.raises(InvalidValue):
        Limits(**limits)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has more than one id without newuidmap")
def test_other_uids_do_not_get_round_the_memory_limit(spec: ImageSpec) -> None:
    with Sandbox.create(spec, limits=Limits(memory="64M")) as box:
        result = box.exec(python(HOLD.format(size=512 * MiB)), user=1000, timeout=60)
        assert not result.ok


def test_the_end_of_a_lifetime_is_told(spec: ImageSpec) -> None:
    with Sandbox.create(spec, limits=Limits(lifetime=1)) as box:
        with pytest.raises(SandboxGone, match=r"lifetime of 1 s is over"):
            box.exec("sleep 600")
        with pytest.raises(SandboxGone, match=r"lifetime of 1 s is over"):
            box.exec("true")
    with pytest.raises(SandboxGone, match="is stopped"):
        box.exec("true")


def test_the_end_of_a_lifetime_is_told_where_its_maker_was_slow(
    spec: ImageSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = SandboxRun.await_ready

    def late(life: SandboxRun) -> None:
        ready(life)
        time.sleep(1.2)

    monkeypatch.setattr(SandboxRun, "await_ready", late)
    with (
        Sandbox.create(spec, limits=Limits(lifetime=1)) as box,
        pytest.raises(SandboxGone, match=r"lifetime of 1 s is over"),
    ):
        box.exec("true")


FILL_TCP = """
import select, socket, sys
listener = socket.create_server(("127.0.0.1", 0), backlog=512)
kept, held, piece = [], 0, b"x" * (1 << 16)
for _ in range(400):
    one = socket.create_connection(listener.getsockname())
    kept += [one, listener.accept()[0]]
    one.setblocking(False)
    while select.select([], [one], [], 0.05)[1]:
        try:
            held += one.send(piece)
        except OSError:
            break
    if held > 200 << 20:
        break
print(held >> 20)
"""


@SLOW_AS_ROOT
def test_what_the_network_buffers_is_memory(spec: ImageSpec) -> None:
    with Sandbox.create(spec, limits=Limits(memory="64M")) as box:
        if not dict(box.info().enforced)["memory"].startswith("cgroup"):
            pytest.skip("without control groups nobody counts the kernel's own memory")
        done = box.exec(["python3", "-c", FILL_TCP], timeout=120)
        assert not done.ok or int(done.stdout) < 150
