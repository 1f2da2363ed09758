"""What only builds ask of a sandbox: mounts with an upper of their own, and owners that seem to be set."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from minisandbox.errors import InvalidValue
from minisandbox.images.runner import build_limits, build_sandbox
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.core import Core
from minisandbox.types import ImageSpec, Mount, Network

pytestmark = pytest.mark.kernel

IMAGE = PurePosixPath("/image")
EDITS = """
set -e
cd "$1"
echo more >> kept/deep/file
chmod 750 kept
echo new > made; chmod 4711 made
rm -r gone
rm -r swapped; mkdir -p swapped/new; echo other > swapped/new/file
mv moved renamed
ln made linked; ln -s made pointing
rm etc/issue
"""


@pytest.fixture
def layers(tmp_path: Path) -> tuple[Path, ...]:
    """The layers of an image with a root of its own, bottom first."""
    below, above = tmp_path / "below", tmp_path / "above"
    for name in ("kept/deep", "gone/deep", "swapped/deep", "moved"):
        (below / name).mkdir(parents=True)
        (below / name / "file").write_text(name)
    (below / "etc").mkdir()
    (below / "etc/issue").write_text("below")
    (above / "kept").mkdir(parents=True)
    (above / "kept/file").write_text("above")
    return below, above


def upper_of(tmp_path: Path, name: str) -> Path:
    upper = tmp_path / name
    upper.mkdir()
    return upper


def writing_to_mounts(spec: ImageSpec, *mounts: Mount) -> Sandbox:
    return Sandbox(Core.create(spec, limits=build_limits(None), mounts=mounts))


def written(upper: Path) -> dict[str, tuple[object, ...]]:
    """What a layer holds: type, mode, owner, content and the attributes that overlayfs marks it with."""
    found: dict[str, tuple[object, ...]] = {}
    tree = upper / "tree"
    for path in sorted(tree.rglob("*")):
        info = path.lstat()
        marks = {name: os.getxattr(path, name, follow_symlinks=False) for name in _marks(path)}
        content = path.read_bytes() if stat.S_ISREG(info.st_mode) else b""
        found[str(path.relative_to(tree))] = (info.st_mode, info.st_uid, info.st_gid, info.st_rdev, content, marks)
    return found


def _marks(path: Path) -> list[str]:
    names = [] if path.is_symlink() else os.listxattr(path, follow_symlinks=False)
    return [name for name in names if name.startswith("user.overlay.") and not name.endswith(("origin", "impure"))]


def test_a_mount_with_an_upper_makes_the_layer_that_a_main_upper_makes(
    spec: ImageSpec, layers: tuple[Path, ...], tmp_path: Path
) -> None:
    beside, main = upper_of(tmp_path, "beside"), upper_of(tmp_path, "main")
    mount = Mount(layers[1], IMAGE, below=layers[:1], upper=beside)
    with writing_to_mounts(spec, mount) as box:
        box.exec(["sh", "-c", EDITS, "edits", str(IMAGE)]).check()
        assert box.exec("cat /image/kept/file /image/renamed/file; ls /image/swapped").stdout == "abovemovednew\n"
        assert str(tmp_path) not in box.exec("cat /proc/self/mountinfo").stdout
        with pytest.raises(InvalidValue, match="upper="):
            box.snapshot()
    image = ImageSpec("same", (*spec.layers, *layers))
    with build_sandbox(image, build_limits(None), Network.off(), (), main) as box:
        box.exec(["sh", "-c", EDITS, "edits", "/"]).check()
    assert written(beside) == written(main)
    assert os.listdir(beside) == ["tree"]
    entries = written(beside)
    assert entries["gone"][0] == stat.S_IFCHR  # a whiteout
    assert entries["swapped"][5] == {"user.overlay.opaque": b"y"}
    assert {entry[1] for entry in entries.values()} == {os.geteuid()}
    assert (layers[0] / "kept/deep/file").read_text() == "kept/deep"


def test_several_mounts_have_uppers_of_their_own(spec: ImageSpec, layers: tuple[Path, ...], tmp_path: Path) -> None:
    one, two = upper_of(tmp_path, "one"), upper_of(tmp_path, "two")
    mounts = (
        Mount(layers[0], PurePosixPath("/one"), upper=one),
        Mount(layers[0], PurePosixPath("/two"), upper=two),
        Mount(layers[0], PurePosixPath("/shown")),
    )
    with writing_to_mounts(spec, *mounts) as box:
        box.exec("echo 1 > /one/new; echo 2 > /two/new").check()
        assert "Read-only" in box.exec("echo 3 > /shown/new").stderr
    assert [(upper / "tree/new").read_text() for upper in (one, two)] == ["1\n", "2\n"]


def test_only_builds_may_have_mounts_with_an_upper(spec: ImageSpec, layers: tuple[Path, ...], tmp_path: Path) -> None:
    upper = upper_of(tmp_path, "upper")
    with pytest.raises(InvalidValue, match="writable mounts are not supported"):
        Sandbox.create(spec, mounts=[Mount(layers[0], IMAGE, upper=upper)])
    with pytest.raises(InvalidValue, match="not an absolute path of an empty directory"):
        writing_to_mounts(spec, Mount(layers[0], IMAGE, upper=layers[1]))
    with pytest.raises(InvalidValue, match="is not a directory"):
        writing_to_mounts(spec, Mount(layers[0] / "etc/issue", IMAGE, upper=upper))
    with pytest.raises(InvalidValue, match="upper is of type str"):
        Mount(layers[0], IMAGE, upper=str(upper))  # type: ignore[arg-type]


CALLS = """
import ctypes, os, socket, stat, sys
os.chdir("/build")
open("f", "w").close()
os.chown("f", 0, 8); os.lchown("f", 1000, 1000)
with open("f") as held: os.fchown(held.fileno(), 33, 33)
os.setgroups([8, 12]); os.setgid(8); os.setuid(1000)
os.setresgid(8, 8, 8); os.setresuid(1000, 1000, 1000)
os.setregid(8, 8); os.setreuid(1000, 1000)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.setfsuid(1000) == libc.setfsgid(1000) == 0
os.mknod("device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
os.mknod("disk", stat.S_IFBLK | 0o600, os.makedev(8, 0), dir_fd=os.open(".", os.O_RDONLY))
os.mkfifo("pipe")
assert sorted(os.listdir(".")) == ["f", "pipe"], os.listdir(".")
assert os.getuid() == os.stat("f").st_uid == 0
for refused in (lambda: os.chroot("/"), lambda: socket.sethostname("other")):
    try:
        refused()
    except PermissionError:
        continue
    sys.exit("the filter refuses less than it should")
"""


def test_with_one_id_owners_seem_to_be_set(spec: ImageSpec, tmp_path: Path) -> None:
    upper = upper_of(tmp_path, "upper")
    with build_sandbox(spec, build_limits(None), Network.off(), (), upper, pretend_owners=True) as box:
        box.exec("mkdir /build; touch /build/f; chown root:mail /build/f").check()
        assert box.exec("stat -c %g /build/f").stdout == "0\n"
        box.exec(["python3", "-c", CALLS]).check()
        box.exec("groupadd staff2 && useradd -m -g staff2 somebody && id somebody").check()
    with Sandbox.create(spec) as box:  # which the filter that pretends is not in force for
        box.exec("touch /f; chown 0:8 /f; test $(stat -c %g /f) = 8 || ! chown 0:8 /f").check()


def test_a_debian_package_with_owners_can_be_installed(spec: ImageSpec, tmp_path: Path) -> None:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("there is no dpkg-deb here")
    tree = tmp_path / "package"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "opt/owned").mkdir(parents=True)
    (tree / "opt/owned/file").write_text("content\n")
    (tree / "DEBIAN/control").write_text(
        "Package: owned\nVersion: 1\nArchitecture: all\nMaintainer: nobody <nobody@example.org>\nDescription: owned\n"
    )
    script = tree / "DEBIAN/postinst"
    script.write_text("#!/bin/sh\nset -e\nchown -R 8:8 /opt/owned\nchgrp 4 /opt/owned/file\n")
    script.chmod(0o755)
    given = tmp_path / "given"
    given.mkdir()
    subprocess.run(["dpkg-deb", "--build", tree, given / "owned.deb"], check=True, capture_output=True)
    mounts = (Mount(given, PurePosixPath("/given")),)
    upper = upper_of(tmp_path, "upper")
    with build_sandbox(spec, build_limits(None), Network.off(), mounts, upper, pretend_owners=True) as box:
        box.exec("mkdir -p /db/info /db/updates /db/triggers; touch /db/status /db/available").check()
        box.exec("dpkg --admindir=/db --log=/db/log --force-depends -i /given/owned.deb").check()
        assert box.exec("cat /opt/owned/file").stdout == "content\n"
    assert (upper / "tree/opt/owned/file").read_text() == "content\n"
