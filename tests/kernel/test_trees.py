"""Trees between host and sandbox, and inside: odd names, deep, sparse, hostile, changing, full."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from minisandbox.errors import FileAccessError, InvalidValue
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.io_sync import carry_out
from minisandbox.sandbox.protocol import file_operations
from minisandbox.sandbox.protocol.wire import Operation
from minisandbox.store.disk.trees import remove_tree
from minisandbox.types import ImageSpec, Limits, Mount, Transfer

pytestmark = pytest.mark.kernel
Do = Callable[[Operation[Any]], Any]


@pytest.fixture
def do(box: Sandbox) -> Do:
    return lambda operation: carry_out(box._core, operation)


def up(local: Path, path: str) -> Operation[Transfer]:
    return file_operations.upload(local, path, cwd="/")


def down(path: str, local: Path, limit: int | None = 1 << 30) -> Operation[Transfer]:
    return file_operations.download(path, local, cwd="/", limit=limit)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- there and back --------------------------------------------------------------------------------------------------

ODD_NAMES = (
    b"with space", b"quote'\"", b"new\nline", b"-rf", b"caf\xe9", b"\xff\xfe", "ünïcode".encode(), b"x" * 255,
    b"\xff" * 255, b"...", b"\\", b"*", b"\x01",
)  # fmt: skip


def test_a_tree_goes_there_and_back(do: Do, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "empty").mkdir(parents=True)
    (tree / "sub/deeper").mkdir(parents=True)
    for number, name in enumerate(ODD_NAMES):
        Path(os.fsdecode(os.fsencode(tree / "sub") + b"/" + name)).write_bytes(name * number)
    (tree / "big").write_bytes(os.urandom(3_500_000))
    (tree / "sub/run").write_text("#!/bin/sh\n")
    (tree / "sub/run").chmod(0o750)
    (tree / "sub/deeper").chmod(0o700)
    (tree / "link").symlink_to("sub/run")
    (tree / "sub/back").symlink_to("../big")
    os.utime(tree / "big", ns=(1_000_000_007, 1_234_567_890_123_456_789))
    os.utime(tree / "sub", ns=(5, 99_000_000_000))
    before = descriptors()
    sent = do(up(tree, "/testbed/there"))
    came = do(down("/testbed/there", tmp_path / "back"))
    assert sent == came
    assert (sent.files, sent.skipped) == (len(ODD_NAMES) + 2, ())
    assert listing(tree) == listing(tmp_path / "back")
    assert descriptors() == before
    assert sorted(os.listdir(tmp_path)) == ["back", "tree"]


def listing(tree: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for directory, names, files in os.walk(tree):
        for name in (*names, *files, "."):
            path = os.path.join(directory, name)
            status = os.lstat(path)
            content: object = None
            if stat.S_ISREG(status.st_mode):
                content = Path(path).read_bytes()
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            found[os.path.relpath(path, tree)] = (status.st_mode, status.st_mtime_ns, content)
    return found


def test_a_file_goes_there_and_back_with_its_mode_and_time(do: Do, box: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "script"
    source.write_bytes(b"#!/bin/sh\necho hello\n")
    source.chmod(0o755)
    os.utime(source, (1, 1_000_000_000))
    assert do(up(source, "/testbed/new/script")) == Transfer(1, 21)
    assert box.exec(["stat", "-c", "%a %Y", "/testbed/new/script"]).stdout == "755 1000000000\n"
    assert box.files.upload(source, "/testbed/other", mode=0o600) == Transfer(1, 21)
    assert box.exec(["stat", "-c", "%a", "/testbed/other"]).stdout == "600\n"
    assert do(down("/testbed/new/script", tmp_path / "back")) == Transfer(1, 21)
    assert listing(tmp_path / "back") == listing(source)


def test_links_are_links_and_hard_links_are_files(do: Do, box: Sandbox, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_text("a")
    os.link(tree / "a", tree / "b")
    (tree / "out").symlink_to("/etc/passwd")
    (tree / "loop").symlink_to("loop")
    assert do(up(tree, "/tmp/t")).files == 2
    shown = box.exec("cd /tmp/t; readlink out loop; stat -c '%h %s' a b").stdout
    assert shown == "/etc/passwd\nloop\n1 1\n1 1\n"


def test_the_top_may_be_a_link_on_both_sides(do: Do, box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/a").write_text("a")
    (tmp_path / "link").symlink_to("tree")
    box.exec("mkdir /tmp/real; ln -s real /tmp/link").check()
    do(up(tmp_path / "link", "/tmp/link"))
    assert box.files.read_text("/tmp/real/a") == "a"
    do(down("/tmp/link", tmp_path / "back"))
    assert (tmp_path / "back/a").read_text() == "a"


# --- what is special -------------------------------------------------------------------------------------------------


def test_what_is_no_file_is_skipped_both_ways(do: Do, box: Sandbox, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_text("a")
    os.mkfifo(tree / "fifo")
    with socket.socket(socket.AF_UNIX) as one:
        here = os.getcwd()
        os.chdir(tree)  # the name of a socket may only be short
        try:
            one.bind("socket")
        finally:
            os.chdir(here)
        sent = do(up(tree, "/tmp/t"))
    assert (sent.files, sorted(sent.skipped)) == (1, [("fifo", "a FIFO"), ("socket", "a socket")])
    box.exec(
        "cd /tmp/t; mkfifo pipe; mkdir sub; mkfifo sub/pipe; ln -s /etc/passwd absolute; ln -s ../x out; "
        "ln -s sub/../a through; ln -s ../a sub/fine; ln -s ../../a sub/out; ln -s . self; ln -s nowhere dangling"
    ).check()
    came = do(down("/tmp/t", tmp_path / "back"))
    assert [path for path, _ in sorted(came.skipped)] == ["absolute", "out", "pipe", "sub/out", "sub/pipe", "through"]
    assert {name: os.readlink(tmp_path / "back" / name) for name in ("sub/fine", "self", "dangling")} == {
        "sub/fine": "../a", "self": ".", "dangling": "nowhere",
    }  # fmt: skip
    assert sorted(os.listdir(tmp_path / "back")) == ["a", "dangling", "self", "sub"]


def test_links_that_lead_out_together_are_not_kept(do: Do, box: Sandbox, tmp_path: Path) -> None:
    """Each of them stays inside if one only counts names; following both leads out."""
    box.exec(
        "mkdir -p /tmp/t/a/b; cd /tmp/t; ln -s ../.. a/b/top; ln -s a/b/top/../.. far; ln -s a/b/top/. fine"
    ).check()
    came = do(down("/tmp/t", tmp_path / "back"))
    assert [path for path, _ in came.skipped] == ["far"]
    for name in ("a/b/top", "fine"):
        assert (tmp_path / "back" / name).resolve().is_relative_to(tmp_path / "back")


def test_setuid_stays_inside(do: Do, box: Sandbox, tmp_path: Path) -> None:
    box.exec("mkdir /tmp/t; cp /bin/true /tmp/t/true; chmod 6755 /tmp/t/true; chmod 3777 /tmp/t").check()
    do(down("/tmp/t", tmp_path / "back"))
    assert (tmp_path / "back").stat().st_mode & 0o7000 == 0
    assert (tmp_path / "back/true").stat().st_mode & 0o7777 == 0o755


def test_what_nobody_may_read_inside_comes_readable(do: Do, box: Sandbox, tmp_path: Path) -> None:
    box.exec("mkdir -p /tmp/t/d; echo x > /tmp/t/d/f; chmod 000 /tmp/t/d/f /tmp/t/d").check()
    do(down("/tmp/t", tmp_path / "back"))
    assert (tmp_path / "back/d/f").read_text() == "x\n"
    assert (tmp_path / "back/d/f").stat().st_mode & 0o777 == 0o600


def test_a_fifo_never_blocks(do: Do, box: Sandbox, tmp_path: Path) -> None:
    box.exec("mkfifo /tmp/odd; mkdir /tmp/t; mkfifo /tmp/t/a").check()
    (tmp_path / "a").write_text("new")
    for operation in (down("/tmp/odd", tmp_path / "x"), up(tmp_path / "a", "/tmp/odd"), up(tmp_path, "/tmp/odd")):
        with pytest.raises(FileAccessError, match="/tmp/odd"):
            do(operation)
    do(up(tmp_path, "/tmp/t"))
    assert box.files.read_text("/tmp/t/a") == "new"
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="neither a file nor a directory"):
        do(up(tmp_path / "fifo", "/tmp/x"))


@pytest.mark.parametrize("path", ["/proc", "/proc/self", "/proc/self/environ", "/proc/self/exe", "/proc/self/cwd"])
def test_proc_is_not_copied(do: Do, tmp_path: Path, path: str) -> None:
    with pytest.raises(FileAccessError):
        do(down(path, tmp_path / "x"))
    assert os.listdir(tmp_path) == []


def test_proc_and_devices_are_skipped_within_a_tree(spec: ImageSpec, tmp_path: Path) -> None:
    with Sandbox.create(ImageSpec("bare", spec.layers, host_usr=False)) as box:
        came = carry_out(box._core, down("/", tmp_path / "root"))
    reasons = dict(came.skipped)
    assert reasons["proc"] == "a file system of the kernel"
    assert reasons["dev/null"] == "a device"
    assert (tmp_path / "root/etc/passwd").is_file()


# --- sparse ----------------------------------------------------------------------------------------------------------


def test_holes_stay_holes(do: Do, box: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    size = 1 << 35  # below Limits.file_size
    with source.open("wb") as out:
        out.write(b"start")
        out.seek(1 << 30)
        out.write(b"middle")
        out.truncate(size)
    assert do(up(source, "/tmp/s")) == Transfer(1, size)
    assert box.exec("stat -c %s /tmp/s; test $(stat -c %b /tmp/s) -lt 1000").ok
    with pytest.raises(FileAccessError, match="larger than 1000 bytes") as caught:
        do(down("/tmp/s", tmp_path / "back", 1000))
    assert caught.value.errno == errno.EFBIG
    assert do(down("/tmp/s", tmp_path / "back", None)) == Transfer(1, size)
    status = (tmp_path / "back").stat()
    assert status.st_size == size
    assert status.st_blocks < 1000
    with (tmp_path / "back").open("rb") as back:
        assert back.read(5) == b"start"
        back.seek(1 << 30)
        assert back.read(6) == b"middle"


def test_the_limit_counts_all_files_together(do: Do, box: Sandbox, tmp_path: Path) -> None:
    box.exec("mkdir /tmp/t; cd /tmp/t; for i in 1 2 3; do truncate -s 400 $i; done").check()
    with pytest.raises(FileAccessError, match="larger than 1000 bytes"):
        do(down("/tmp/t", tmp_path / "back", 1000))
    assert os.listdir(tmp_path) == []
    assert do(down("/tmp/t", tmp_path / "back", 1200)).size == 1200


def test_holes_are_read_as_zeros(box: Sandbox) -> None:
    box.exec("truncate -s 3M /tmp/s; printf x | dd of=/tmp/s bs=1 seek=2000000 conv=notrunc 2>/dev/null").check()
    data = bytearray(3 << 20)
    data[2_000_000] = ord("x")
    assert box.files.read_bytes("/tmp/s") == data


# --- large -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_directory_of_20000_files(do: Do, box: Sandbox, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(20_000):
        (tree / f"{number:05}").touch()
    assert do(up(tree, "/testbed/many")).files == 20_000
    infos = box.files.list("/testbed/many")
    assert [info.path.name for info in infos] == [f"{number:05}" for number in range(20_000)]
    assert do(down("/testbed/many", tmp_path / "back")).files == 20_000
    box.files.move("/testbed/many", "/testbed/few")
    box.files.remove("/testbed/few", recursive=True)
    assert box.exec("ls /testbed").stdout == ""


DEEP = """
import os, sys
os.chdir('/tmp'); os.mkdir('deep'); os.chdir('deep')
for _ in range(int(sys.argv[1])):
    os.mkdir('d' * 200); os.chdir('d' * 200)
open('bottom', 'w').write('down here')
"""
COUNT = """
import os
os.chdir('/tmp/deeper')
n = 0
while os.listdir() != ['bottom']:
    os.chdir('d' * 200); n += 1
print(n)
"""


def test_deeper_than_any_path(do: Do, box: Sandbox, tmp_path: Path) -> None:
    depth = 600  # 120,000 bytes of path
    box.exec(["python3", "-c", DEEP, str(depth)]).check()
    assert do(down("/tmp/deep", tmp_path / "deep")) == Transfer(1, 9)
    assert do(up(tmp_path / "deep", "/testbed/deep")) == Transfer(1, 9)
    box.files.move("/testbed/deep", "/tmp/deeper")
    assert box.exec(["python3", "-c", COUNT]).stdout == f"{depth}\n"
    for path in ("/tmp/deep", "/tmp/deeper"):
        box.files.remove(path, recursive=True)
    assert box.exec("ls /tmp /testbed").stdout == "/testbed:\n\n/tmp:\n"
    remove_tree(tmp_path / "deep")


@pytest.mark.slow
def test_too_deep_to_copy_is_said(do: Do, box: Sandbox, tmp_path: Path) -> None:
    box.exec(["python3", "-c", DEEP.replace("'d' * 200", "'d'"), "4100"]).check()
    with pytest.raises(FileAccessError, match="deep"):
        do(down("/tmp/deep", tmp_path / "deep"))
    assert os.listdir(tmp_path) == []
    box.files.remove("/tmp/deep", recursive=True)


@pytest.mark.parametrize("path", ["/tmp/" + "a/" * 3000, "/tmp/" + "b" * 256, "/tmp/" + "c" * 5000])
def test_paths_that_are_too_long_are_errors(do: Do, box: Sandbox, tmp_path: Path, path: str) -> None:
    for operation in (
        file_operations.stat(path, cwd="/"), file_operations.write(path, cwd="/", mode=None, source=[b""]),
        file_operations.make_directory(path, cwd="/"), file_operations.remove(path, cwd="/"), up(tmp_path, path),
        file_operations.move("/tmp", path, cwd="/"), down(path, tmp_path / "x"),
    ):  # fmt: skip
        with pytest.raises(FileAccessError, match="too long") as caught:
            do(operation)
        assert caught.value.errno == errno.ENAMETOOLONG
    assert box.exec("ls /tmp").stdout == ""


# --- full, forbidden, changing ---------------------------------------------------------------------------------------


def test_a_full_disk_in_the_middle_of_a_tree(spec: ImageSpec, tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}").write_bytes(b"x" * 1_000_000)
    with Sandbox.create(spec, limits=Limits(disk="4M")) as box:
        with pytest.raises(FileAccessError, match="No space left") as caught:
            carry_out(box._core, up(tmp_path, "/testbed/t"))
        assert caught.value.path.startswith("/testbed/t/")
        assert caught.value.errno == errno.ENOSPC
        box.files.remove("/testbed/t", recursive=True)
        assert box.files.read_text("/etc/passwd")
        usage = box.usage()
        assert usage.disk < 1_000_000


def test_the_limit_of_a_files_size(spec: ImageSpec, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 2_000_000)
    with Sandbox.create(spec, limits=Limits(file_size="1M")) as box:
        with pytest.raises(FileAccessError, match="File too large"):
            carry_out(box._core, up(tmp_path, "/testbed/t"))
        assert box.exec("true").ok


def test_places_that_are_read_only(spec: ImageSpec, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub/a").write_text("a")
    with Sandbox.create(spec, mounts=(Mount(source, PurePosixPath("/given")),)) as box:
        for operation in (
            up(source, "/given"), file_operations.remove("/given/sub", cwd="/", recursive=True),
            file_operations.move("/given/sub", "/tmp/x", cwd="/"),
            file_operations.make_directory("/given/new", cwd="/"),
        ):  # fmt: skip
            with pytest.raises(FileAccessError, match="/given") as caught:
                carry_out(box._core, operation)
            assert caught.value.errno == errno.EROFS
        carry_out(box._core, down("/given", tmp_path / "back"))
        assert (tmp_path / "back/sub/a").read_text() == "a"


@pytest.mark.slow
def test_a_tree_that_changes_while_it_is_copied(do: Do, box: Sandbox, tmp_path: Path) -> None:
    """Whatever comes of it, it ends, and nothing half-made stays."""
    box.exec("mkdir /tmp/t; cd /tmp/t; for i in $(seq 300); do mkdir $i; echo $i > $i/f; done").check()
    churn = (
        "cd /tmp/t; while :; do for i in $(seq 300); do mv $i/f $i/g; ln -s /etc/passwd $i/f; rm $i/f; mv $i x; "
        "mkfifo $i; rm $i; mv x $i; mv $i/g $i/f; done; done >/dev/null 2>&1 & disown"
    )
    assert box.exec(churn).left_running
    for number in range(20):
        local = tmp_path / f"{number}"
        try:
            came = do(down("/tmp/t", local))
        except FileAccessError as error:
            assert error.errno == errno.ESTALE  # noqa: PT017 - either outcome is right
            assert os.listdir(tmp_path) == []
        else:
            assert came.files + len(came.skipped) >= 250
            remove_tree(local)


def test_a_host_tree_that_cannot_be_read_is_the_hosts_error(do: Do, box: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        do(up(tmp_path / "none", "/tmp/x"))
    with pytest.raises(FileNotFoundError):
        do(down("/etc", tmp_path / "none/x"))
    with pytest.raises(InvalidValue, match="mode"):
        box.files.upload(tmp_path, "/tmp/x", mode=0o644)
    assert box.exec("ls /tmp").stdout == ""


# --- what is in the way ----------------------------------------------------------------------------------------------


def test_a_tree_is_merged_and_replaces_what_is_in_the_way_of_files(do: Do, box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("plain", "linked", "piped", "hard", "sub/file"):
        (tmp_path / name).write_text("new")
    (tmp_path / "link").symlink_to("plain")
    box.exec(
        "mkdir -p /tmp/t/sub; cd /tmp/t; chmod 711 . sub; echo old > plain; echo kept > other; "
        "echo victim > /tmp/victim; ln -s /tmp/victim linked; mkfifo piped; ln /tmp/victim hard; "
        "ln -s /tmp/victim link; echo old > sub/kept"
    ).check()
    do(up(tmp_path, "/tmp/t"))
    shown = box.exec(
        "cd /tmp/t; cat plain linked piped hard sub/file other sub/kept /tmp/victim; readlink link; stat -c %a . sub"
    )
    assert shown.stdout == "new" * 5 + "kept\nold\nvictim\nplain\n711\n711\n"


@pytest.mark.parametrize("make", ["ln -s /tmp/victim d", "echo x > d", "mkfifo d"])
def test_nothing_is_written_through_a_planted_directory(do: Do, box: Sandbox, tmp_path: Path, make: str) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").write_text("x")
    box.exec(f"mkdir /tmp/victim /tmp/t; cd /tmp/t; {make}").check()
    with pytest.raises(FileAccessError, match="/tmp/t/d"):
        do(up(tmp_path, "/tmp/t"))
    assert box.exec("ls /tmp/victim").stdout == ""


def test_a_directory_in_the_way_of_a_file(do: Do, box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    box.exec("mkdir -p /tmp/t/f/full").check()
    with pytest.raises(FileAccessError, match="/tmp/t/f: Is a directory"):
        do(up(tmp_path, "/tmp/t"))
    with pytest.raises(FileAccessError, match="Is a directory"):
        do(up(tmp_path / "f", "/tmp/t"))
    with pytest.raises(FileAccessError, match="Not a directory"):
        do(up(tmp_path, "/etc/passwd"))


def test_what_is_in_the_way_on_the_host(do: Do, box: Sandbox, tmp_path: Path) -> None:
    box.exec("mkdir /tmp/d; echo new > /tmp/f").check()
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").write_text("old")
    (tmp_path / "other").write_text("other")
    (tmp_path / "link").symlink_to("other")
    for name in ("dir", "file", "link"):
        with pytest.raises(FileExistsError):
            do(down("/tmp/d", tmp_path / name))
    with pytest.raises(IsADirectoryError):
        do(down("/tmp/f", tmp_path / "dir"))
    for name in ("file", "link"):  # a link is replaced, not written through
        do(down("/tmp/f", tmp_path / name))
        assert (tmp_path / name).read_text() == "new\n"
    assert (tmp_path / "other").read_text() == "other"
    assert sorted(os.listdir(tmp_path)) == ["dir", "file", "link", "other"]
