"""File verbs: carried out inside, honest about what is not a regular file."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import pytest

from minisandbox.errors import FileAccessError, InvalidValue
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.controller import current_controller
from minisandbox.types import FileType, ImageSpec, Limits

pytestmark = pytest.mark.kernel

ODD_NAMES = (
    b"with space", b"quote'\"", b"new\nline", b"-rf", b"caf\xe9", b"\xff\xfe", "ünïcode".encode(), b"x" * 255,
    b"\xff" * 255, b"...", b"\\", b"*", b"\x01",
)  # fmt: skip


def test_text_and_bytes_round_trip(box: Sandbox) -> None:
    box.files.write_text("/testbed/deep/er/a.txt", "héllo\n")
    assert box.files.read_text("/testbed/deep/er/a.txt") == "héllo\n"
    data = bytes(range(256)) * 20_000
    box.files.write_bytes("/testbed/b.bin", data, mode=0o755)
    assert box.files.read_bytes("/testbed/b.bin") == data
    assert box.exec("stat -c '%a %U %s' /testbed/b.bin").stdout == f"755 root {len(data)}\n"


def test_relative_paths_are_below_the_workdir(spec: ImageSpec) -> None:
    image = ImageSpec("w", spec.layers, workdir=PurePosixPath("/testbed"))
    with Sandbox.create(image) as box:
        box.files.write_text("x", "1")
        assert box.exec("pwd; cat /testbed/x").stdout == "/testbed\n1"


def test_an_existing_file_is_replaced_and_keeps_its_mode(box: Sandbox) -> None:
    box.exec("echo a long old content > /tmp/f; chmod 600 /tmp/f")
    box.files.write_text("/tmp/f", "new")
    assert box.exec("cat /tmp/f; stat -c %a /tmp/f").stdout == "new600\n"


def test_upload_and_download(box: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"\0\xff" * 3_000_000)
    box.files.upload(source, "/tmp/up")
    box.files.download("/tmp/up", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "source"]


def test_a_failed_download_leaves_nothing(box: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match="No such file"):
        box.files.download("/no/such", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "make", ["mkfifo /tmp/odd", "mkdir /tmp/odd", "ln -s odd /tmp/odd", "ln -s /dev/zero /tmp/odd"]
)
def test_odd_files_are_errors_and_never_hang(box: Sandbox, make: str) -> None:
    box.exec(make).check()
    for verb in (box.files.read_bytes, lambda path: box.files.write_bytes(path, b"x")):
        with pytest.raises(FileAccessError, match="/tmp/odd"):
            verb("/tmp/odd")


def test_links_are_followed_inside_and_lead_nowhere_else(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    box.exec(["ln", "-s", str(secret), "/tmp/link"]).check()
    with pytest.raises(FileAccessError):
        box.files.read_bytes("/tmp/link")
    box.exec("echo in > /testbed/target; ln -s /testbed/target /tmp/inner").check()
    assert box.files.read_text("/tmp/inner") == "in\n"


def test_a_size_limit(box: Sandbox) -> None:
    box.exec("truncate -s 5G /tmp/sparse").check()
    with pytest.raises(FileAccessError, match="larger than 1000 bytes"):
        box.files.read_bytes("/tmp/sparse", limit=1000)


def test_a_full_disk_is_said(spec: ImageSpec) -> None:
    with Sandbox.create(spec, limits=Limits(disk="4M")) as box:
        with pytest.raises(FileAccessError, match="No space left"):
            box.files.write_bytes("/testbed/big", b"x" * 8_000_000)
        assert box.exec("echo ok").stdout == "ok\n"


@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_that_are_odd(box: Sandbox, name: bytes) -> None:
    path = f"/tmp/{os.fsdecode(name)}"
    box.files.write_bytes(path, name)
    assert box.files.read_bytes(path) == name
    assert box.exec("shopt -s dotglob; cat ./*", cwd="/tmp").stdout_bytes == name


# --- moving and removing ---------------------------------------------------------------------------------------------


@pytest.fixture
def layered(spec: ImageSpec, tmp_path: Path) -> ImageSpec:
    """An image whose own layer has a directory: overlayfs cannot rename it."""
    tree = tmp_path / "layer/testbed/pkg"
    (tree / "sub").mkdir(parents=True)
    (tree / "a.py").write_text("a")
    (tree / "run").write_text("run")
    (tree / "run").chmod(0o755)
    (tree / "sub/link").symlink_to("../a.py")
    (tree / "sub/b.py").write_text("b")
    os.utime(tree / "a.py", (1, 1_000_000_000))
    return ImageSpec("layered", (*spec.layers, tmp_path / "layer"))


def test_a_directory_of_the_image_is_moved(layered: ImageSpec) -> None:
    show = "cd /testbed/moved; cat a.py run sub/link sub/b.py; stat -c '%a %Y' a.py; stat -c %a run; readlink sub/link"
    with Sandbox.create(layered) as box:
        box.exec("mkfifo /testbed/pkg/fifo; truncate -s 1G /testbed/pkg/hole").check()
        box.files.move("/testbed/pkg", "/testbed/moved")
        assert box.exec(f"{show}; ls /testbed").stdout == "arunab644 1000000000\n755\n../a.py\nmoved\n"
        assert box.exec("test -p /testbed/moved/fifo; test $(stat -c %b /testbed/moved/hole) -lt 100").ok
        box.files.move("/testbed/moved", "/dev/shm/far/away")  # another mount
        assert box.exec("cat /dev/shm/far/away/sub/link; ls /testbed").stdout == "a"


def test_an_image_directory_with_changes_can_be_removed(layered: ImageSpec) -> None:
    with Sandbox.create(layered) as box:
        box.exec("cd /testbed/pkg; rm a.py; mkdir -p sub/new/er; echo x > sub/new/er/f").check()
        with pytest.raises(FileAccessError, match="not empty"):
            box.files.remove("/testbed/pkg")
        box.files.remove("/testbed/pkg", recursive=True)
        assert box.exec("ls -A /testbed").stdout == ""


def test_a_move_that_cannot_be_leaves_everything(layered: ImageSpec) -> None:
    with Sandbox.create(layered, limits=Limits(disk="4M")) as box:
        box.exec(
            "mkdir -p /testbed/full/x; echo f > /testbed/file; head -c 3000000 /dev/zero > /testbed/pkg/big"
        ).check()
        in_memory = current_controller().launcher.memory_upper  # else /dev/shm has room of its own
        cases = (
            ("/testbed/pkg", "/testbed/pkg/sub/inner", "Invalid argument|below the source"),
            ("/testbed/pkg", "/testbed/full", "not empty|No space"),
            ("/testbed/pkg", "/testbed/file", "Not a directory"),
            ("/testbed/file", "/testbed/pkg", "Is a directory"),
            ("/testbed/none", "/testbed/new/x", "No such file"),
            *([("/testbed/pkg", "/dev/shm/pkg", "No space left")] if in_memory else []),
            ("/", "/tmp/root", "not the name"),
        )
        before = box.exec("ls -R /testbed /dev/shm; ls -A /tmp").stdout
        for source, target, text in cases:
            with pytest.raises(FileAccessError, match=text):
                box.files.move(source, target)
            assert box.exec("ls -R /testbed /dev/shm; ls -A /tmp").stdout == before, (source, target)


def test_moving_links_files_and_over_what_is_there(box: Sandbox) -> None:
    box.exec("cd /tmp; echo a > a; echo b > b; ln -s a link; mkdir d e; echo x > d/x").check()
    box.files.move("/tmp/link", "/testbed/link")
    box.files.move("/tmp/a", "/tmp/b")
    box.files.move("/tmp/d", "/tmp/e")
    assert box.exec("readlink /testbed/link; cat /tmp/b /tmp/e/x; ls /tmp").stdout == "a\na\nx\nb\ne\n"


def test_removal_does_not_follow_links(box: Sandbox) -> None:
    box.exec(
        "mkdir -p /tmp/t/sub /tmp/victim; echo keep > /tmp/victim/f; cd /tmp/t; ln -s /tmp/victim out; "
        "ln -s ../../victim sub/out; ln -s . loop; mkfifo sub/fifo; mkdir -m 000 shut; ln -s t /tmp/link"
    ).check()
    box.files.remove("/tmp/link", recursive=True)
    assert box.exec("ls /tmp").stdout == "t\nvictim\n"
    with pytest.raises(FileAccessError, match="not empty"):
        box.files.remove("/tmp/t")
    box.files.remove("/tmp/t", recursive=True)
    assert box.exec("ls /tmp; cat /tmp/victim/f").stdout == "victim\nkeep\n"


def test_removing_what_is_not_there(box: Sandbox) -> None:
    with pytest.raises(FileAccessError, match="No such file") as caught:
        box.files.remove("/tmp/none")
    assert caught.value.path == "/tmp/none"
    box.files.remove("/tmp/none", missing_ok=True)
    for path in ("/", "/tmp/..", "."):
        with pytest.raises(FileAccessError):
            box.files.remove(path, recursive=True)
    assert box.exec("ls /etc/passwd").ok


# --- lists, facts, directories ---------------------------------------------------------------------------------------


def test_a_list_says_what_everything_is(box: Sandbox) -> None:
    box.exec(
        "cd /tmp; mkdir d; echo abc > f; chmod 4640 f; mkfifo p; ln -s f l; touch -d @1.5 f; ln -s /dev/null n"
    ).check()
    infos = {info.path.name: info for info in box.files.list("/tmp")}
    types = {name: info.type for name, info in infos.items()}
    assert types == {
        "d": FileType.DIRECTORY, "f": FileType.FILE, "l": FileType.SYMLINK, "n": FileType.SYMLINK, "p": FileType.FIFO,
    }  # fmt: skip
    f = infos["f"]
    assert (f.path, f.size, f.mode, f.mtime, f.uid, f.gid) == (PurePosixPath("/tmp/f"), 4, 0o4640, 1.5, 0, 0)
    assert infos["l"].target == "f"
    assert box.files.stat("/tmp/l").type is FileType.FILE
    assert box.files.stat("/tmp/l", follow=False) == infos["l"]
    assert box.files.stat("/tmp/n").type is FileType.DEVICE


def test_odd_names_are_listed(box: Sandbox) -> None:
    for name in ODD_NAMES:
        box.files.write_bytes(f"/tmp/{os.fsdecode(name)}", name)
    infos = box.files.list("/tmp")
    assert [os.fsencode(info.path.name) for info in infos] == sorted(ODD_NAMES)
    for info in infos:
        assert box.files.exists(info.path)


def test_long_targets_fit_into_pages(box: Sandbox) -> None:
    script = "import os\nos.chdir('/tmp')\nfor n in range(1200): os.symlink(b'\\xff' * 4000, str(n))"
    box.exec(["python3", "-c", script]).check()
    infos = box.files.list("/tmp")
    assert len(infos) == 1200
    assert all(info.target == "\udcff" * 4000 for info in infos)


@pytest.mark.parametrize(
    ("path", "there"),
    [
        ("/etc/passwd", True), ("/etc/passwd/x", False), ("/none", False), ("/tmp/loop", False), ("/tmp/fifo", True),
        ("/tmp/dangling", False), ("/proc", True), ("/proc/1", True), ("/", True), (".", True),
    ],
)  # fmt: skip
def test_whether_something_exists(box: Sandbox, path: str, there: bool) -> None:
    box.exec("ln -s loop /tmp/loop; ln -s none /tmp/dangling; mkfifo /tmp/fifo")
    assert box.files.exists(path) is there


def test_the_workers_own_links_are_not_told(box: Sandbox) -> None:
    for path in ("/proc/self/exe", "/proc/self/cwd", "/proc/self"):
        with pytest.raises(FileAccessError):
            box.files.stat(path, follow=False)
    for path in ("/proc", "/proc/self/fd", "/proc/self/map_files"):
        with pytest.raises(FileAccessError):
            box.files.list(path)


def test_making_directories(box: Sandbox) -> None:
    box.files.mkdir("/tmp/a/b/c", mode=0o1771)
    assert box.exec("stat -c %a /tmp/a/b/c").stdout == "1771\n"
    box.files.mkdir("/tmp/a/b/c", mode=0o700)
    assert box.exec("stat -c %a /tmp/a/b/c").stdout == "1771\n"
    box.exec("ln -s a /tmp/link; ln -s none /tmp/dangling; touch /tmp/file").check()
    box.files.mkdir("/tmp/link")
    box.files.mkdir("/")
    for path, options in (
        ("a", {"exist_ok": False}), ("x/y", {"parents": False}), ("file", {}), ("file/x", {}), ("dangling", {}),
        ("dangling/x", {}), ("/proc/x", {}),
    ):  # fmt: skip
        with pytest.raises(FileAccessError, match=path):
            box.files.mkdir(PurePosixPath("/tmp", path), **options)
    assert box.exec("ls /tmp").stdout == "a\ndangling\nfile\nlink\n"


def test_paths_that_are_none(box: Sandbox, tmp_path: Path) -> None:
    for path in ("a\0b", "\ud800"):
        with pytest.raises(InvalidValue, match="not a path"):
            box.files.stat(path)
        with pytest.raises(InvalidValue, match="not a path"):
            box.files.move("/tmp", path)
        with pytest.raises(InvalidValue, match="not a path"):
            box.files.download(path, tmp_path / "x")
    with pytest.raises(InvalidValue, match="mode"):
        box.files.mkdir("/tmp/x", mode=-1)


# --- usage -----------------------------------------------------------------------------------------------------------


BURN = "import time\nwhile time.process_time() < 0.5: pass"


def test_usage(box: Sandbox) -> None:
    before = box.usage()
    assert before.processes == 0
    box.exec(["python3", "-c", BURN]).check()
    box.exec("head -c 20000000 /dev/zero > /tmp/x; sleep 60 & sleep 60 &")
    after = box.usage()
    assert after.processes == 2
    assert after.disk - before.disk >= 20_000_000
    assert 0.4 < after.cpu - before.cpu < 10
    assert after.memory > before.memory


def test_the_hosts_disk_is_not_told(spec: ImageSpec, tmp_path: Path) -> None:
    (tmp_path / "upper").mkdir()
    with Sandbox.create(spec, upper=tmp_path / "upper") as box:
        box.exec("head -c 20000000 /dev/zero > /dev/shm/x").check()
        assert 20_000_000 <= box.usage().disk < 30_000_000
