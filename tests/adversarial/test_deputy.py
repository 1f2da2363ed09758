"""The confused deputy: what an agent leaves behind for the host, or for the next sandbox, to stumble over."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from minisandbox.errors import FileAccessError
from minisandbox.sandbox import Sandbox
from minisandbox.store.disk.trees import remove_tree
from minisandbox.types import ImageSpec, Limits

pytestmark = pytest.mark.kernel

VAST = Limits(file_size=None)
CANARY = "a secret of the host"

# Everything at once below the current directory: depth, modes, types, names, links, sizes.
PLANT = r"""
import os, socket
os.umask(0)
os.makedirs("modes/none/inner"); os.chmod("modes/none/inner", 0); os.chmod("modes/none", 0)
os.mkdir("many")
for number in range(2000): open(f"many/{number}", "x").close()
os.mkfifo("fifo")
with socket.socket(socket.AF_UNIX) as door: door.bind("door")
with open("giant", "xb") as giant: giant.truncate(1 << 40)
for name in (b"line\nbreak", b"\xff\xfe", b"\x1b[2J", b"-rf", b"x" * 255, b" ", b"%s", b'"', b"$(reboot)"):
    open(os.open(name, os.O_CREAT | os.O_WRONLY, 0o6777), "wb").write(name)
os.symlink("/", "root"); os.symlink("loop", "loop"); os.symlink("../" * 60 + "etc/passwd", "up")
os.link("-rf", "hard")
for number in range(%(depth)d):
    os.mkdir("d"); os.chdir("d")
"""
DEEP = 10_000


def plant(box: Sandbox, where: str, depth: int) -> None:
    box.exec(["mkdir", "-p", where], cwd="/").check()
    box.exec(["python3", "-c", PLANT % {"depth": depth}], cwd=where, timeout=120).check()


@pytest.mark.slow
def test_an_upper_of_everything_that_is_hard_to_remove(spec: ImageSpec, tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    with Sandbox.create(spec, upper=upper, limits=VAST) as box:
        plant(box, "/testbed/p", DEEP)
    began = time.monotonic()
    remove_tree(upper)
    assert not upper.exists()
    assert time.monotonic() - began < 60  # it ends; shutil.rmtree gives up at a depth of a thousand


@pytest.fixture
def vast(spec: ImageSpec) -> Iterator[Sandbox]:
    """A sandbox in which a file may be of any size."""
    with Sandbox.create(spec, limits=VAST) as box:
        yield box


@pytest.mark.slow
def test_a_download_of_everything_that_is_hard_to_take(vast: Sandbox, tmp_path: Path) -> None:
    box = vast
    plant(box, "/testbed/p", 3)
    with pytest.raises(FileAccessError, match="larger than"):
        box.files.download("/testbed/p", tmp_path / "limited")
    box.files.remove("/testbed/p/giant")
    taken = box.files.download("/testbed/p", tmp_path / "p")
    assert {path for path, _ in taken.skipped} == {"fifo", "door", "root", "up"}
    found = {os.fsencode(path.name): path.lstat() for path in (tmp_path / "p").iterdir()}
    assert {b"line\nbreak", b"\xff\xfe", b"\x1b[2J", b"-rf", b"x" * 255, b"hard", b"loop", b"modes"} <= found.keys()
    assert not any(status.st_mode & 0o6000 for status in found.values() if stat.S_ISREG(status.st_mode))
    assert found[b"hard"].st_nlink == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p"]
    plant(box, "/testbed/deep", DEEP // 2)
    with pytest.raises((FileAccessError, OSError)):
        box.files.download("/testbed/deep", tmp_path / "deep", limit=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p"]


def test_a_sparse_giant_takes_no_memory(vast: Sandbox) -> None:
    box = vast
    box.exec("truncate -s 1T /testbed/out.log; ln -s /dev/zero /testbed/endless", cwd="/").check()
    before = peak()
    for path in ("/testbed/out.log", "/testbed/endless"):
        with pytest.raises(FileAccessError):
            box.files.read_bytes(path)
    with pytest.raises(FileAccessError):
        box.files.read_bytes("/testbed/out.log", limit=1 << 30)
    assert peak() - before < 16 << 20


def peak() -> int:
    """Most bytes that this process ever held (proc_pid_status(5))."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


@pytest.mark.slow
def test_a_name_that_changes_between_file_and_link_while_the_host_reads(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(CANARY, encoding="ascii")
    swap = f"while :; do ln -sfn {secret} f; ln -sfn /proc/1/environ f; rm -f f; echo inside > f; done"
    with box.start(swap, cwd="/testbed"):
        seen = set()
        for _ in range(1000):
            try:
                seen.add(box.files.read_text("/testbed/f"))
            except FileAccessError:
                seen.add("refused")
    assert seen <= {"inside\n", "", "refused"}
    assert "inside\n" in seen


def test_writing_through_a_link_stays_inside(box: Sandbox, tmp_path: Path) -> None:
    box.exec(["ln", "-s", str(tmp_path), "/testbed/logs"], cwd="/").check()
    with contextlib.suppress(FileAccessError):  # there is no such directory inside
        box.files.write_text("/testbed/logs/x", "x")
    assert list(tmp_path.iterdir()) == []


def test_a_workdir_and_a_shell_that_the_agent_has_replaced(spec: ImageSpec) -> None:
    with Sandbox.create(ImageSpec("replaced", spec.layers, workdir=PurePosixPath("/testbed"))) as box:
        box.exec("cd /; rm -rf /testbed; ln -s / /testbed; ln -sf /bin/false /tmp/bash", cwd="/").check()
        assert box.exec("pwd -P; readlink /proc/self/cwd", env={"PATH": "/tmp:/usr/bin:/bin"}).stdout in ("/\n/\n", "")
        assert box.exec(["readlink", "/proc/self/cwd"]).stdout == "/\n"
        assert box.exec(["cat", "/proc/self/uid_map"]).ok
        box.exec("rm /testbed; ln -s /nowhere /testbed", cwd="/").check()
        with pytest.raises(FileAccessError, match="cannot enter /testbed"):
            box.exec("true")
        assert box.exec("echo alive", cwd="/").stdout == "alive\n"


# --- the marks of overlayfs ------------------------------------------------------------------------------------------

# What overlayfs writes into an upper to say "deleted", "opaque", "it lies elsewhere" (kernel documentation, overlayfs).
MARK = r"""
import os, stat
planted = []
os.makedirs("/testbed/lies", exist_ok=True)
for space in ("user.overlay.", "trusted.overlay.", "user.", "security."):
    for name, value in (("opaque", b"y"), ("opaque", b"x"), ("redirect", b"/etc"), ("redirect", b"../../.."),
                        ("metacopy", b""), ("whiteout", b""), ("origin", b"\0" * 24), ("impure", b"y"),
                        ("protattr", b"i"), ("uuid", b"\0" * 16), ("capability", b"\1\0\0\2" + b"\xff" * 16)):
        for path in ("/etc", "/etc/passwd", "/testbed", "/testbed/lies", "/"):
            try:
                os.setxattr(path, space + name, value)
                planted.append(space + name)
            except OSError: pass
for path in ("/etc/group", "/testbed/whiteout"):
    try:
        os.path.exists(path) and os.rename(path, path + ".away")
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(0, 0))
        planted.append("whiteout")
    except OSError: pass
    finally:
        os.path.exists(path + ".away") and os.rename(path + ".away", path)
print(*planted)
"""
LIST = "cd /; find /etc /testbed -printf '%p %y %m %s\\n' | sort; sha256sum /etc/passwd /etc/group"


def mark(box: Sandbox) -> None:
    """Plant the marks; the kernel may refuse those of overlayfs's own names."""
    planted = box.exec(["python3", "-c", MARK], cwd="/").check().stdout.split()
    assert {"user.opaque", "user.redirect", "user.metacopy", "user.whiteout"} <= set(planted)


def test_marks_that_an_agent_plants_mean_nothing_in_a_fork(box: Sandbox) -> None:
    mark(box)
    before = box.exec(LIST, cwd="/").stdout
    changed = [change for change in box.changes() if not str(change.path).startswith(("/testbed", "/etc"))]
    (kid,) = box.fork(1)
    with kid:
        assert kid.exec(LIST, cwd="/").stdout == before
    assert box.exec(LIST, cwd="/").stdout == before
    assert all(str(change.path) == "/" for change in changed)


def test_marks_that_a_build_plants_mean_nothing_in_a_layer(spec: ImageSpec, tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    with Sandbox.create(spec, upper=upper) as box:
        mark(box)
        before = box.exec(LIST, cwd="/").stdout
    with Sandbox.create(ImageSpec("marked", (*spec.layers, upper / "tree"))) as box:
        assert box.exec(LIST, cwd="/").stdout == before


def test_a_program_of_the_image_that_the_agent_replaces_is_its_own(spec: ImageSpec, tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    (layer / "testbed/bin").mkdir(parents=True)
    program = layer / "testbed/bin/python"
    program.write_text("#!/bin/sh\necho ours\n", encoding="ascii")
    program.chmod(0o755)
    before = (program.read_bytes(), program.stat().st_mode, program.stat().st_mtime_ns)
    image = ImageSpec("programs", (*spec.layers, layer))
    with Sandbox.create(image) as box:
        box.exec("printf '#!/bin/sh\\necho theirs\\n' > /testbed/bin/python; chmod 6777 /testbed/bin/python").check()
        assert box.exec("/testbed/bin/python").stdout == "theirs\n"
    assert (program.read_bytes(), program.stat().st_mode, program.stat().st_mtime_ns) == before
    with Sandbox.create(image, limits=Limits(processes=64)) as box:
        assert box.exec("/testbed/bin/python").stdout == "ours\n"
        assert sys.executable not in box.exec("cat /proc/*/cmdline").stdout
