"""The private world: what of the host can be seen, touched or reached from inside (nothing)."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path, PurePosixPath

import pytest

from minisandbox.errors import InvalidValue, SandboxCreationError
from minisandbox.launch.kernel.identity import last_id
from minisandbox.sandbox import Sandbox, live_sandboxes
from minisandbox.sandbox.controller import current_controller
from minisandbox.sandbox.plans import _SHOWN
from minisandbox.types import ImageSpec, Mount, Network

pytestmark = pytest.mark.kernel

CAPABILITIES = "00000000000000fb"  # CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID


def test_it_is_root_of_its_own_ids_with_the_one_capability_set(box: Sandbox) -> None:
    status = dict(
        line.split(":\t", 1) for line in box.exec("cat /proc/self/status").stdout.splitlines() if ":\t" in line
    )
    assert status["Uid"].split() == ["0"] * 4
    assert status["Gid"].split() == ["0"] * 4
    assert (status["CapPrm"], status["CapEff"], status["CapBnd"]) == (CAPABILITIES,) * 3
    assert int(status["CapInh"], 16) == int(status["CapAmb"], 16) == 0
    assert status["NoNewPrivs"] == "1"


def id_map(text: str) -> list[tuple[int, ...]]:
    """Rows of a uid_map: first id inside, first outside, how many (user_namespaces(7))."""
    return [tuple(map(int, line.split())) for line in text.splitlines()]


@pytest.mark.parametrize("kind", ["uid", "gid"])
def test_host_id_0_is_not_mapped(box: Sandbox, kind: str) -> None:
    pid = next(record.pid for record in live_sandboxes() if record.id == box.id)
    # the map as the namespace of this test sees it is that of a process of the sandbox
    outside = id_map(Path(f"/proc/{pid}/{kind}_map").read_text())
    assert all(first > 0 for _, first, _ in outside)
    if os.geteuid() == 0:
        assert outside[0][1] >= 0x70000000
        assert outside[1:] in ([], [(65536, 1 << 31, last_id() - 65535)]), "above its own range: ids that no user has"
    else:
        assert [row[0] for row in outside] == sorted({0, *([1] if len(outside) > 1 else [])})
        own = os.getuid() if kind == "uid" else os.getgid()
        assert outside[0] == (0, own, 1)
        assert id_map(box.exec(f"cat /proc/self/{kind}_map").stdout)[0] == (0, 1, 1)


def test_as_many_ids_as_were_asked_for(box: Sandbox) -> None:
    """`tests/as_user.py` says what this run is about; elsewhere the launcher says what it found."""
    counted = sum(count for *_, count in id_map(box.exec("cat /proc/self/uid_map").stdout))
    expected = {"range": 65536, "one": 1}.get(os.environ.get("MINISANDBOX_TEST_IDS", ""))
    assert counted == (expected or (last_id() + 1 if os.geteuid() == 0 else current_controller().launcher.ids))
    if counted > 1:
        box.exec("touch /tmp/f; chown 4242:17 /tmp/f").check()
        assert box.exec("stat -c %u:%g /tmp/f; id -G").stdout == "4242:17\n0\n"
    else:
        assert not box.exec("touch /tmp/f; chown 4242 /tmp/f").ok


def test_every_namespace_is_its_own(box: Sandbox) -> None:
    inside = box.exec("readlink /proc/self/ns/*").stdout.split()
    outside = {os.readlink(entry.path) for entry in os.scandir("/proc/self/ns")}
    kinds = {name.split(":")[0] for name in inside if name not in outside}
    assert kinds >= {"user", "mnt", "pid", "ipc", "uts", "net", "cgroup"}


def test_no_host_process_is_visible(box: Sandbox) -> None:
    assert box.exec("ps -eo pid --no-headers | wc -l").stdout.strip() in {"4", "5"}
    assert str(os.getpid()) not in box.exec("ls /proc").stdout.split() or os.getpid() < 10


def test_no_host_directory_is_visible(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    assert box.exec(["cat", str(tmp_path / "secret")]).exit_code != 0
    for directory in ("/home", "/root", "/var/log", "/mnt", "/srv", "/sys", "/tmp"):
        assert box.exec(["ls", "-A", directory]).stdout == ""
    assert Path("/etc/shadow").exists()
    assert box.exec("ls /etc/shadow /etc/machine-id /etc/ssh /old_root").stdout == ""


def test_no_host_path_is_in_the_mount_table(box: Sandbox, spec: ImageSpec) -> None:
    table = box.exec("cat /proc/self/mountinfo /proc/1/mounts").stdout
    for layer in spec.layers:
        assert str(layer) not in table
        assert layer.parent.name not in table
    assert "pytest" not in table
    assert str(Path.home()) not in table.replace(" /root ", "")


def test_pid_1_says_nothing_of_the_host(box: Sandbox) -> None:
    text = box.exec(
        "cat /proc/1/cmdline /proc/1/comm; cat /proc/1/environ; ls -l /proc/1/fd /proc/1/exe /proc/1/cwd"
    ).stdout
    assert "/" not in text.replace("/proc/1/", "")
    assert box.exec("cat /proc/1/environ").exit_code != 0
    assert box.exec("cat /proc/1/maps").exit_code != 0


def test_the_interpreter_of_the_host_is_not_in_reach(box: Sandbox) -> None:
    """A worker is about to execute what a command names, and it is the worker's own program until it has."""
    box.files.write_text("/tmp/script", "#!/proc/self/exe /usr/bin/readlink\n", mode=0o755)
    ways = (["/proc/self/exe", "/usr/bin/readlink", "/proc/self/exe"], ["/tmp/script"])
    said = [(result.exit_code, result.stderr) for result in map(box.exec, ways)]
    assert [code for code, _ in said] == [126, 126], said
    assert not any(os.path.realpath(sys.executable) in text for _, text in said)


def test_the_hosts_name_is_not_inside(box: Sandbox) -> None:
    assert box.exec("uname -n; cat /etc/hostname /proc/sys/kernel/hostname").stdout == "sandbox\nsandbox\n"
    assert box.exec("cat /proc/sys/kernel/domainname").stdout == "(none)\n"


def test_only_loopback_and_it_is_up(box: Sandbox) -> None:
    script = """
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=lambda: server.accept()[0].sendall(b"hi")).start()
print(socket.create_connection(server.getsockname()).recv(2).decode())
print(sorted(name for _, name in socket.if_nameindex()))
try:
    socket.create_connection(("192.0.2.1", 80), timeout=20)
except OSError as error:
    print(error.strerror)
print(socket.gethostbyname("localhost"))
"""
    assert box.exec(["python3", "-c", script], timeout=30).stdout.splitlines() == [
        "hi", "['lo']", "Network is unreachable", "127.0.0.1",
    ]  # fmt: skip


def test_host_sockets_are_out_of_reach(box: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0minisandbox-test-{os.getpid()}")
        abstract.listen()
        port, name = server.getsockname()[1], f"\\0minisandbox-test-{os.getpid()}"
        script = f"""
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_UNIX, "{name}")):
    try:
        socket.socket(family).connect(address); print("reached")
    except OSError as error:
        print(error.strerror)
"""
        assert box.exec(["python3", "-c", script]).stdout == "Connection refused\n" * 2


def test_the_hosts_network_where_it_was_asked_for(spec: ImageSpec) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, Sandbox.create(spec, network=Network.host()) as box:
        script = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]})); print('reached')"
        assert box.exec(["python3", "-c", script], timeout=20).stdout == "reached\n"


@pytest.mark.kernel("landlock")
def test_the_hosts_network_has_no_abstract_sockets_of_the_host(spec: ImageSpec) -> None:
    knock = "import socket, sys; socket.socket(socket.AF_UNIX, int(sys.argv[2])).connect('\\0' + sys.argv[1])"
    name = f"minisandbox-test-{os.getpid()}"
    listen = f"""
import socket
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0{name}-own")
listener.listen()
print("on", flush=True)
listener.accept()
"""
    with contextlib.ExitStack() as stack:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            ours = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            ours.bind(f"\0{name}-{int(kind)}")
            if kind == socket.SOCK_STREAM:
                ours.listen()
        box = stack.enter_context(Sandbox.create(spec, network=Network.host()))
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            refused = box.exec(["python3", "-c", knock, f"{name}-{int(kind)}", str(int(kind))], timeout=20)
            assert "Operation not permitted" in refused.stderr
        process = stack.enter_context(box.start(["python3", "-c", listen]))
        next(iter(process.events()))
        assert box.exec(["python3", "-c", knock, f"{name}-own", "1"], timeout=20).ok  # of another worker's


@pytest.mark.parametrize(
    "command",
    [
        "unshare -U true", "unshare -m true", "mount -t tmpfs none /mnt", "umount /proc", "umount -l /usr",
        "mount -o remount,rw /usr", "chroot / true", "mknod /tmp/sda b 8 0", "hostname other", "ip link set lo down",
        "sysctl -w kernel.core_pattern=x", "echo x > /proc/sys/kernel/core_pattern", "echo c > /proc/sysrq-trigger",
        "nsenter -t 1 -m true", "dmesg -C",
    ],
)  # fmt: skip
def test_what_would_need_more_privilege_is_refused(box: Sandbox, command: str) -> None:
    assert box.exec(command, timeout=20).exit_code not in (0, None)


def test_pid_1_cannot_be_ended_or_traced(box: Sandbox) -> None:
    box.exec("kill -9 1; kill -STOP 1; kill -TERM 1")
    script = "import ctypes; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))"
    assert box.exec(["python3", "-c", script]).stdout == "-1\n"
    assert box.exec("echo alive").stdout == "alive\n"


def test_a_command_gets_three_descriptors_and_no_more(box: Sandbox) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    try:
        # /proc/self/fd of ls: its own three and the directory it reads
        assert box.exec(["ls", "/proc/self/fd"]).stdout.split() == ["0", "1", "2", "3"]
    finally:
        os.close(reader)
        os.close(writer)


def test_devices(box: Sandbox) -> None:
    script = """
set -e
echo gone > /dev/null; head -c 4 /dev/zero | od -An -tx1; head -c 8 /dev/urandom | wc -c
! echo x > /dev/full; test -c /dev/tty; ls -A /dev/shm
python3 -c 'import os, pty; a, b = pty.openpty(); print(os.ttyname(b)); from multiprocessing import Lock; Lock()'
"""
    result = box.exec(script)
    assert result.stdout.split() == ["00", "00", "00", "00", "8", "/dev/pts/0"]
    assert "No space left" in result.stderr


def test_writes_go_nowhere(spec: ImageSpec) -> None:
    before = {path: path.lstat().st_mtime_ns for path in spec.layers[0].rglob("*")}
    with Sandbox.create(spec) as box:
        box.exec(
            "rm -rf /etc/* /var /testbed; echo x > /new; chown 5:6 /etc 2>/dev/null; chmod 700 /root; true"
        ).check()
        assert box.exec("ls /etc; cat /new").stdout == "x\n"
    assert {path: path.lstat().st_mtime_ns for path in spec.layers[0].rglob("*")} == before
    with Sandbox.create(spec) as box:
        assert box.exec("test -e /etc/passwd && test ! -e /new").ok


def test_two_sandboxes_do_not_see_each_other(spec: ImageSpec) -> None:
    with Sandbox.create(spec) as one, Sandbox.create(spec) as two:
        one.exec("touch /tmp/mine /dev/shm/mine /testbed/mine /run/mine; sleep 50 &").check()
        assert "mine" not in two.exec("ls /tmp /dev/shm /testbed /run").stdout
        assert "sleep 50" not in two.exec("ps -eo args").stdout


def test_a_mount_is_shown_read_only(spec: ImageSpec, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    mounts = (
        Mount(tmp_path, PurePosixPath("/run/given/dir")),
        Mount(tmp_path / "file", PurePosixPath("/given-file")),
    )
    with Sandbox.create(spec, mounts=mounts) as box:
        assert box.exec("cat /run/given/dir/file /given-file").stdout == "contentcontent"
        assert "Read-only" in box.exec("echo x > /run/given/dir/new").stderr
        assert "Read-only" in box.exec("echo x > /given-file").stderr
        assert str(tmp_path) not in box.exec("cat /proc/self/mountinfo").stdout.replace(str(tmp_path.name), "")
    assert (tmp_path / "file").read_text() == "content"


def test_a_mount_is_not_redirected_by_a_link_in_the_image(spec: ImageSpec, tmp_path: Path) -> None:
    tree = tmp_path / "layer"
    tree.mkdir()
    (tree / "trap").symlink_to("etc")
    image = ImageSpec("trap", (*spec.layers, tree))
    with pytest.raises(SandboxCreationError, match="trap") as caught:
        Sandbox.create(image, mounts=(Mount(tmp_path, PurePosixPath("/trap/dir")),))
    assert caught.value.errno == 40  # ELOOP


@pytest.mark.parametrize(
    ("source", "target", "read_only"),
    [("/usr", "relative", True), ("/usr", "/a/../b", True), ("/usr", "/", True), ("/no/such", "/x", True),
     ("usr", "/x", True), ("/usr", "/x", False)],
)  # fmt: skip
def test_mounts_that_cannot_be(spec: ImageSpec, source: str, target: str, read_only: bool) -> None:
    with pytest.raises(InvalidValue):
        Sandbox.create(spec, mounts=(Mount(Path(source), PurePosixPath(target), read_only),))


SHOWING = """
import os
for name in os.listdir("/proc"):
    try:
        if os.listdir(f"/proc/{name}") if os.path.isdir(f"/proc/{name}") else open(f"/proc/{name}", "rb").read(1):
            print(name)
    except PermissionError:
        pass
"""


def test_only_what_is_known_shows_in_proc(spec: ImageSpec) -> None:
    with Sandbox.create(spec) as box:
        shown = box.exec(["python3", "-c", SHOWING]).check().stdout.split()
    assert {name for name in shown if not name.isdigit()} <= _SHOWN
    assert "swaps" not in _SHOWN


@pytest.mark.parametrize("name", ["kcore", "kallsyms", "keys", "timer_list", "cmdline", "sysrq-trigger", "interrupts"])
def test_the_hosts_part_of_proc_is_empty(box: Sandbox, name: str) -> None:
    if Path("/proc", name).exists():
        assert box.exec(f"cat /proc/{name}").stdout_bytes == b""
        assert not box.exec(f"echo x > /proc/{name}").ok


@pytest.mark.parametrize("name", ["sys", "irq", "bus", "fs"])
def test_settings_of_the_kernel_are_read_only(box: Sandbox, name: str) -> None:
    if Path("/proc", name).exists():
        mounted = [line.split()[4:6] for line in box.exec("cat /proc/self/mountinfo").stdout.splitlines()]
        assert any(point == f"/proc/{name}" and options.startswith("ro") for point, options in mounted)


def test_what_programs_need_of_proc_is_there(box: Sandbox) -> None:
    box.exec("grep -q processor /proc/cpuinfo; grep -q MemTotal /proc/meminfo; cat /proc/sys/kernel/ostype").check()
    box.exec(
        "head -c 1 /proc/self/maps; ls /proc/self/fd; cat /proc/mounts /proc/stat /proc/loadavg /proc/uptime"
    ).check()


def test_there_is_no_keyring_to_look_into(box: Sandbox) -> None:
    script = (
        "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\n"
        "libc.syscall(250 if os.uname().machine == 'x86_64' else 219, 0, -3, 1)\n"
        "print(os.strerror(ctypes.get_errno()))"
    )
    assert "not permitted" in box.exec(["python3", "-c", script]).stdout
