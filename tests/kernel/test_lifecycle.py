"""Creation, records, teardown, and what a SIGKILL leaves behind (nothing)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from tests.waiting import running, until

from minisandbox.errors import InvalidValue, SandboxCreationError
from minisandbox.host import reaper, registry
from minisandbox.launch.kernel import cgroups
from minisandbox.sandbox import Sandbox, helper_process, live_sandboxes, network
from minisandbox.sandbox.controller import current_controller, shut_down
from minisandbox.sandbox.run import SandboxRun
from minisandbox.types import ImageSpec, Network

pytestmark = pytest.mark.kernel


def test_a_live_sandbox_is_listed_and_a_stopped_one_is_not(spec: ImageSpec) -> None:
    with Sandbox.create(spec) as box:
        record = next(record for record in live_sandboxes() if record.id == box.id)
        assert (record.owner, record.image, record.network) == (os.getpid(), "base", "off")
        assert running(record.pid)
        assert box.alive
        assert 0 < box.created_in < 60
    assert box.id not in [record.id for record in live_sandboxes()]
    assert not box.alive
    assert not running(record.pid)


def test_a_missing_layer_is_an_error_that_names_the_step(tmp_path: Path) -> None:
    with pytest.raises(SandboxCreationError, match="no-such-layer") as caught:
        Sandbox.create(ImageSpec("x", (tmp_path / "no-such-layer",)))
    assert caught.value.errno == 2
    assert "doctor" in (caught.value.hint or "")


def test_an_image_without_layers_is_refused() -> None:
    with pytest.raises(InvalidValue):
        Sandbox.create(ImageSpec("x", ()))


def test_layers_with_odd_paths(spec: ImageSpec, tmp_path: Path) -> None:
    for name in ("with space", "co:lon,comma", "b\\ack", "caf\udce9", "ünïcode", "n" * 200):
        tree = tmp_path / name / "tree"
        tree.mkdir(parents=True)
        (tree / "odd").write_text(name, errors="surrogateescape")
        with Sandbox.create(ImageSpec("odd", (*spec.layers, tree))) as box:
            assert box.files.read_bytes("/odd") == name.encode("utf-8", "surrogateescape")


def test_many_layers(spec: ImageSpec, tmp_path: Path) -> None:
    layers = []
    for number in range(120):
        tree = tmp_path / str(number)
        tree.mkdir()
        (tree / "top").write_text(str(number))
        (tree / f"file-{number}").touch()
        layers.append(tree)
    with Sandbox.create(ImageSpec("many", (*spec.layers, *layers))) as box:
        assert box.exec("cat /top; ls / | grep -c ^file-").stdout == "119120\n"


def test_many_at_once(spec: ImageSpec) -> None:
    boxes: list[Sandbox] = []

    def make() -> None:
        boxes.append(Sandbox.create(spec))

    threads = [threading.Thread(target=make) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(box.exec("cat /proc/self/uid_map").ok for box in boxes)
    assert len({box.id for box in boxes}) == 40
    if os.geteuid() == 0:
        maps = {Path(f"/proc/{record.pid}/uid_map").read_text() for record in live_sandboxes()}
        assert len(maps) >= 40
    for box in boxes:
        box.stop()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_it_ends_when_its_handle_is_forgotten(spec: ImageSpec) -> None:
    box = Sandbox.create(spec)
    pid = next(record.pid for record in live_sandboxes() if record.id == box.id)
    del box
    until(lambda: not running(pid))


def test_a_forked_process_does_not_stop_its_parents_sandbox(spec: ImageSpec) -> None:
    code = """
import os, sys
from pathlib import Path
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec
box = Sandbox.create(ImageSpec("f", (Path(sys.argv[1]),)))
if os.fork() == 0:
    sys.exit(0)
os.wait()
print(box.exec("echo alive").stdout, end="")
box.stop()
"""
    command = [sys.executable, "-c", code, str(spec.layers[0])]
    assert subprocess.run(command, capture_output=True, check=True, timeout=60).stdout == b"alive\n"


def test_a_disk_upper_becomes_a_layer(spec: ImageSpec, tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    with Sandbox.create(spec, upper=upper) as box:
        box.exec("mkdir /testbed/d; echo 1 > /testbed/d/f; rm /etc/shells; rm -rf /var/log; mkdir /var/log").check()
        box.exec("echo tmp > /tmp/t; echo run > /run/r").check()
        if os.geteuid() == 0:
            box.exec("echo u > /usr/share/new-file; chown 7:8 /testbed/d/f").check()
    assert [entry.name for entry in upper.iterdir()] == ["tree"]
    tree = upper / "tree"
    owner = (7, 8) if os.geteuid() == 0 else (os.getuid(), os.getgid())
    assert ((tree / "testbed/d/f").stat().st_uid, (tree / "testbed/d/f").stat().st_gid) == owner
    assert not (tree / "tmp").exists()
    assert not (tree / "run").exists()
    image = ImageSpec("two", (*spec.layers, tree))
    with Sandbox.create(image) as box:
        assert box.exec("cat /testbed/d/f; ls /etc/shells; ls -A /var/log").stdout == "1\n"
        if os.geteuid() == 0:
            assert box.exec("cat /usr/share/new-file; stat -c %u:%g /testbed/d/f").stdout == "u\n7:8\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_an_upper_of_another_user_is_refused(spec: ImageSpec, tmp_path: Path) -> None:
    """Its owner could run what is setuid in it."""
    upper = tmp_path / "upper"
    upper.mkdir()
    os.chown(upper, 12345, -1)
    with pytest.raises(InvalidValue, match="belongs to the user 12345"):
        Sandbox.create(spec, upper=upper)
    os.chown(upper, 0, -1)
    (tmp_path / "link").symlink_to(upper)
    with pytest.raises(InvalidValue, match="not an absolute path"):
        Sandbox.create(spec, upper=tmp_path / "link")
    assert not list(upper.iterdir())


def test_a_used_upper_is_refused(spec: ImageSpec, tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    with pytest.raises(InvalidValue, match="empty directory"):
        Sandbox.create(spec, upper=tmp_path)


CONTROLLER = """
import sys, time
from pathlib import Path
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec
boxes = [Sandbox.create(ImageSpec("k", (Path(sys.argv[1]),))) for _ in range(4)]
daemon = "import os,signal,time; [signal.signal(n, signal.SIG_IGN) for n in range(1, 32) if n not in (9, 19)]; "
daemon += "os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(600)"
for box in boxes:
    box.exec(["python3", "-c", daemon])
    box.exec("trap '' TERM HUP INT; sleep 600 &")
print("up", flush=True)
{then}
"""


@pytest.mark.parametrize(
    "then",
    ["time.sleep(600)", "import os; os.fork(); time.sleep(600)", "boxes[0].exec('sleep 600')"],
    ids=["idle", "with a fork that holds its descriptors", "during a command"],
)
def test_sigkill_of_the_controller_leaves_nothing(spec: ImageSpec, then: str) -> None:
    with running_controller(spec, then) as (controller, pids):
        owner = registry.owner_name(controller)
        os.kill(controller, signal.SIGKILL)
        until(partial(none_runs, pids))
    assert not mounts_of(spec)
    assert "records" in {one.kind for one in reaper.reap(registry.runtime_directory()) if one.owner == owner}
    assert owner not in {name for name, _ in cgroups.owners(cgroups.find_roots())}
    assert not [record for record in live_sandboxes() if record.owner == controller]


def mounts_of(spec: ImageSpec) -> list[str]:
    """Mounts of this process's namespace that show a layer of the image, itself or as part of an overlay."""
    layers = [str(layer) for layer in spec.layers]
    lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    return [line for line in lines if any(layer in line for layer in layers)]


WITHOUT_STREAMS = """
import os, sys
from pathlib import Path
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec, Network

said = os.dup(1)
for number in map(int, sys.argv[2:]):
    os.close(number)
with Sandbox.create(ImageSpec("k", (Path(sys.argv[1]),)), network=Network.allow("h.example")) as box:
    ask = "exec 3<>/dev/tcp/127.0.0.1/3128; echo -e 'CONNECT x:1 HTTP/1.1\\r\\n\\r' >&3; head -1 <&3"
    refused = box.exec(ask).stdout
    os.write(said, f"{box.exec('cat; echo no >&2', stdin=b'yes')!r} {refused} {box.refusals().count}".encode())
"""


@pytest.mark.parametrize("closed", ["0", "2", "0 1", "1 2", "0 1 2"])
def test_an_owner_whose_standard_streams_are_closed(spec: ImageSpec, closed: str) -> None:
    """As daemons' are: what is opened next gets their numbers."""
    command = [sys.executable, "-c", WITHOUT_STREAMS, str(spec.layers[0]), *closed.split()]
    said = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True).stdout
    assert "exit_code=0" in said
    assert "HTTP/1.1 403" in said
    assert said.endswith(" 1")


def test_an_owner_that_may_have_few_files_is_told_so(spec: ImageSpec) -> None:
    script = WITHOUT_STREAMS.replace(
        "said =", "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99)); said ="
    )
    command = [sys.executable, "-c", script, str(spec.layers[0])]
    said = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True).stderr
    assert "sandboxes need 128 open files at least, and this process may have 99 (ulimit -Hn)" in said


FIRST_THREAD_ENDS = """
import ctypes, os, sys, threading, time, traceback
from pathlib import Path
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.controller import shut_down
from minisandbox.types import ImageSpec

spec = ImageSpec("k", (Path(sys.argv[1]),))
box = Sandbox.create(spec)
first = Path(f"/proc/self/task/{threading.get_native_id()}/stat")

def go_on():
    while " Z " not in first.read_text():
        time.sleep(0.01)
    print(box.id, flush=True)
    sys.stdin.readline()
    try:
        with Sandbox.create(spec) as other:
            print(box.exec("echo old").stdout, other.exec("echo new").stdout, Sandbox.attach(box.id).id, flush=True)
        box.stop()
        shut_down()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)

threading.Thread(target=go_on).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_an_owner_whose_first_thread_has_ended_keeps_its_sandboxes(spec: ImageSpec) -> None:
    """/proc calls it a zombie, and shows no descriptors of it."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", FIRST_THREAD_ENDS, str(spec.layers[0])]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        assert name in {one.id for one in live_sandboxes()}
        assert not {one for one in reaper.reap(registry.runtime_directory()) if one.owner.startswith(f"{owner.pid}-")}
        with Sandbox.attach(name) as box:
            assert box.exec("echo attached").stdout == "attached\n"
        owner.stdin.write("\n")
        owner.stdin.close()
        assert owner.stdout.read().split() == ["old", "new", name]
        assert owner.wait(60) == 0


ORPHANS = """
import socket, struct
here, kept = socket.create_server(("127.0.0.1", 0), backlog=100), []
for _ in range(100):
    client = socket.create_connection(here.getsockname())
    served, _ = here.accept()
    served.setsockopt(socket.IPPROTO_IP, 21, 255)  # IP_MINTTL: it hears no answer
    served.send(b"x" * 5000)
    kept += [client, served]
"""


def orphans() -> int:
    """Connections of the whole machine that no process holds any more."""
    words = Path("/proc/net/sockstat").read_text().splitlines()[1].split()
    return int(words[words.index("orphan") + 1])


def test_connections_that_nobody_answers_end_soon(spec: ImageSpec) -> None:
    """They keep their network namespace and what they have to send: 100 s, where nobody has set anything."""
    before = orphans()
    with Sandbox.create(spec) as box:
        box.exec(["python3", "-c", ORPHANS]).check()
        assert orphans() >= before + 50
    until(lambda: orphans() < before + 50, seconds=20)


@pytest.mark.parametrize("name", [b"minisandbox-launcher", b"minisandbox-zygote"])
def test_sigkill_of_the_launcher_ends_its_sandboxes(spec: ImageSpec, name: bytes) -> None:
    with running_controller(spec, "time.sleep(600)") as (_, pids):
        (target,) = (pid for pid in pids if cmdline(pid).startswith(name))
        os.kill(target, signal.SIGKILL)
        until(partial(none_runs, pids))
    reaper.reap(registry.runtime_directory())


def test_groups_in_another_memory_group_are_removed(spec: ImageSpec) -> None:
    """As of a service that was killed, and is started by hand: a dead owner's groups are not next to ours."""
    places = cgroups.find_roots()
    if places.version != 1:
        pytest.skip("needs writable control groups of version 1")
    elsewhere = Path(dict(places.directories)["memory"], f"elsewhere-{os.getpid()}")
    elsewhere.mkdir()
    try:
        first = f"import os; open({str(elsewhere / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        with running_controller(spec, "time.sleep(600)", first) as (controller, pids):
            (groups,) = elsewhere.glob(f"{cgroups.PREFIX}*")
            os.kill(controller, signal.SIGKILL)
            until(partial(none_runs, pids))
        reaper.reap(registry.runtime_directory())
        assert not groups.exists()
    finally:
        until(partial(removed, elsewhere))


def removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


@pytest.mark.slow
def test_sigkill_at_any_moment_of_creation(spec: ImageSpec) -> None:
    code = CONTROLLER.partition("daemon =")[0].replace("range(4)", "range(400)")
    for processes in (1, 2, 3, 5, 8, 20):  # the launcher, the zygote, and more and more sandboxes
        controller = subprocess.Popen([sys.executable, "-c", code, str(spec.layers[0])], start_new_session=True)
        try:
            pids = until(lambda: at_least(processes, descendants(controller.pid)))  # noqa: B023 - it is called at once
        finally:
            controller.kill()
            controller.wait()
        until(partial(none_runs, pids))
    reaper.reap(registry.runtime_directory())


def at_least(number: int, pids: set[int]) -> set[int]:
    return pids if len(pids) >= number else set()


def none_runs(pids: set[int]) -> bool:
    return not any(map(running, pids))


@contextmanager
def running_controller(spec: ImageSpec, then: str, first: str = "") -> Iterator[tuple[int, set[int]]]:
    """A controller in a process of its own with four sandboxes full of stubborn daemons: its pid, and all of theirs."""
    arguments = [sys.executable, "-c", first + CONTROLLER.replace("{then}", then), str(spec.layers[0])]
    controller = subprocess.Popen(arguments, stdout=subprocess.PIPE, start_new_session=True)
    assert controller.stdout is not None
    try:
        assert controller.stdout.readline() == b"up\n"
        own = cmdline(controller.pid)
        pids = {pid for pid in descendants(controller.pid) if cmdline(pid) != own}
        assert sum(b"sleep" in cmdline(pid) for pid in pids) >= 4
        yield controller.pid, pids
    finally:
        os.killpg(controller.pid, signal.SIGKILL)  # a forked child included
        controller.stdout.close()
        controller.wait()


def descendants(pid: int) -> set[int]:
    parents: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents.setdefault(int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]), []).append(
                int(name)
            )
        except OSError:
            continue
    found: set[int] = set()
    queue = [pid]
    while queue:
        children = parents.get(queue.pop(), [])
        found.update(children)
        queue.extend(children)
    return found


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError], ids=["ctrl-c", "alarm"])
def test_an_interrupt_while_one_is_made_harms_no_other(
    spec: ImageSpec, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """What a signal's handler raises comes between a request and its answer, which nobody may take for another's."""

    def interrupted(_: SandboxRun) -> NoReturn:
        monkeypatch.undo()
        raise error

    with Sandbox.create(spec) as other:
        monkeypatch.setattr(SandboxRun, "_receive", interrupted)
        with pytest.raises(error):
            Sandbox.create(spec)
        with Sandbox.create(spec) as box, box.snapshot() as snapshot, Sandbox.create(snapshot) as fork:
            assert [each.exec("echo ok").stdout for each in (box, fork, other)] == ["ok\n"] * 3


@pytest.mark.parametrize("whose", ["gateway", "launcher"])
def test_a_stopped_process_of_ours_ends_with_its_owner(
    spec: ImageSpec, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees nothing any more, and would be left behind."""
    monkeypatch.setattr(helper_process, "_PATIENCE", 0.2)
    monkeypatch.setattr(network, "_PATIENCE", 0.2)
    with Sandbox.create(spec, network=Network.allow("packages.example.org")):
        controller = current_controller()
        process = controller.gateway._process if whose == "gateway" else controller.launcher._process
        assert process is not None
        pid = process.pid
    os.kill(pid, signal.SIGSTOP)
    shut_down()
    assert not running(pid)
