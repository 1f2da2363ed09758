"""Unpacking layers of container images: what archives hold, and what hostile ones try."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import random
import stat
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from tests.unit.oci_tools import (
    END,
    digest,
    entry,
    folder,
    hard_link,
    header,
    link,
    long_name,
    pax,
    record,
    unpack_bytes,
)

from minisandbox.errors import ImageRefused, MiniSandboxError
from minisandbox.launch.kernel.identity import last_id
from minisandbox.store.blobs.streams import Blob, LayerStream
from minisandbox.store.blobs.tarstream import TarReader
from minisandbox.store.blobs.unpack import Bounds

SECRET = "what lies outside of the tree"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A private directory beside a file that no archive may touch."""
    (tmp_path / "outside").write_text(SECRET)
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def listed(root: Path) -> list[str]:
    """Everything below a directory."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


# --- what archives hold ----------------------------------------------------------------------------------------------


def test_files_directories_and_links(place: Path) -> None:
    tree = place / "tree"
    done = unpack_bytes(
        folder("./") + folder("usr/", mode=0o750) + entry("usr/a", b"hello", mode=0o4755) + link("b", "/usr/a")
        + hard_link("c", "usr/a") + entry("fifo", kind=b"6", mode=0o600) + END, tree,
    )  # fmt: skip
    assert listed(tree) == ["b", "c", "fifo", "usr", "usr/a"]
    info = (tree / "usr/a").stat()
    assert (tree / "usr/a").read_text() == "hello"
    assert (stat.S_IMODE(info.st_mode), info.st_nlink, info.st_mtime) == (0o4755, 2, 1_700_000_000)
    assert os.readlink(tree / "b") == "/usr/a"
    assert stat.S_IMODE((tree / "usr").stat().st_mode) == 0o750
    assert (tree / "usr").stat().st_mtime == 1_700_000_000
    assert stat.S_ISFIFO((tree / "fifo").stat().st_mode)
    assert done.digests == {info.st_ino: digest(b"hello")[7:]}


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_the_standard_library_writes(place: Path, form: int) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name in ("a", "d/" + "n" * 90 + "/" + "f" * 99, "\N{LATIN SMALL LETTER E WITH ACUTE}"):
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.mode = len(name), 1_600_000_000, 0o640
            tar.addfile(info, io.BytesIO(name.encode()[: len(name)]))
    unpack_bytes(out.getvalue(), place / "tree")
    for path in ("a", "d/" + "n" * 90 + "/" + "f" * 99, "\N{LATIN SMALL LETTER E WITH ACUTE}"):
        assert (place / "tree" / path).read_bytes() == path.encode()[: len(path)]


def test_what_gnu_tar_writes_of_a_tree(place: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / ("d" * 120) / ("e" * 120)).mkdir(parents=True)
    (source / "deep" / ("d" * 120) / ("e" * 120) / "file").write_bytes(os.urandom(100_000))
    (source / "empty").touch()
    (source / "link").symlink_to("x" * 150)
    os.link(source / "empty", source / "same")
    if os.geteuid() == 0:
        os.setxattr(source / "empty", "user.note", b"a\0b\nc=d")
    for number, options in enumerate((["--format=gnu"], ["--format=pax"], ["--format=pax", "--xattrs"])):
        data = subprocess.run(["tar", *options, "-C", source, "-c", "."], capture_output=True, check=True).stdout
        tree = place / f"tree{number}"
        unpack_bytes(data, tree)
        subprocess.run(["diff", "-r", "--no-dereference", source, tree], check=True)
        assert (tree / "same").stat().st_nlink == 2
        if "--xattrs" in options and os.geteuid() == 0:
            assert os.getxattr(tree / "empty", "user.note") == b"a\0b\nc=d"


SKIPPABLE = b"\x50\x2a\x4d\x18\x03\0\0\0abc"  # RFC 8878, section 3.1.2
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "two gzip members": lambda tar: gzip.compress(tar[:512]) + gzip.compress(tar[512:]),
    "zstd": zstandard.compress,
    "a skippable frame first": lambda tar: SKIPPABLE + zstandard.compress(tar),
    "three zstd frames": lambda tar: zstandard.compress(tar[:700]) + SKIPPABLE + zstandard.compress(tar[700:]),
}


@pytest.mark.parametrize("pack", PACKED.values(), ids=list(PACKED))
def test_each_compression_and_several_members(place: Path, pack: Callable[[bytes], bytes]) -> None:
    tar = entry("a", b"x" * 5000) + END
    stream = LayerStream(Blob(io.BytesIO(pack(tar)), digest(pack(tar)), "layer"), 1 << 20)
    assert [member.name for member in TarReader(stream)] == [b"a"]
    stream.finish()
    assert stream.diff_id == digest(tar)


def test_owners_and_devices(place: Path) -> None:
    data = (
        entry("a", uid=1000, gid=7)
        + entry("b", uid=70000)
        + pax(record("uid", b"2147483648"))
        + entry("c")
        + entry("dev/null", kind=b"3")
        + entry("d/null", kind=b"4")
        + END
    )
    done = unpack_bytes(data, place / "tree", keep_owners=os.geteuid() == 0)
    assert listed(place / "tree") == ["a", "b", "c", "d", "dev"]
    assert done.notes["device files are left out"] == 1
    if os.geteuid() == 0:
        assert ((place / "tree/a").stat().st_uid, (place / "tree/a").stat().st_gid) == (1000, 7)
        assert (place / "tree/b").stat().st_uid == (70000 if last_id() > 70000 else 65534)
        assert (place / "tree/c").stat().st_uid == 65534
        assert done.notes[f"files of ids above {last_id()} belong to nobody"] >= 1
    else:
        assert done.notes["files of other owners belong to root"] == 3


def test_extended_attributes_that_overlayfs_would_obey_are_left_out(place: Path) -> None:
    names = ("user.overlay.opaque", "user.overlay.redirect", "trusted.overlay.opaque", "user.note")
    done = unpack_bytes(
        pax(*(record(f"SCHILY.xattr.{name}", b"/etc") for name in names)) + entry("a") + END, place / "tree"
    )
    assert os.listxattr(place / "tree/a") == ["user.note"]
    assert sum(done.notes.values()) == 3


def test_hard_links_into_the_directory_of_aufs(place: Path) -> None:
    data = (
        folder(".wh..wh.plnk") + entry(".wh..wh.plnk/9.8", b"shared", mode=0o755) + entry(".wh..wh.plnk/9.9")
        + folder("bin") + hard_link("bin/a", ".wh..wh.plnk/9.8") + hard_link("bin/b", "/.wh..wh.plnk/9.8")
    )  # fmt: skip
    unpack_bytes(data + END, place / "tree")
    assert listed(place / "tree") == ["bin", "bin/a", "bin/b"]
    a, b = ((place / "tree/bin" / name).stat() for name in "ab")
    assert (a.st_ino, a.st_nlink, a.st_mode & 0o777, a.st_size) == (b.st_ino, 2, 0o755, 6)
    with pytest.raises(ImageRefused, match="nothing of this layer"):
        unpack_bytes(hard_link("a", ".wh..wh.plnk/1.1") + END, place / "other")


def test_later_entries_replace_earlier_ones(place: Path) -> None:
    unpack_bytes(
        entry("a", b"1") + entry("a", b"2") + folder("d") + entry("d/x/y", b"1") + entry("d", b"a file") + entry("e")
        + folder("e") + entry("e/f") + folder("g", mode=0o700) + entry("g/h") + folder("g", mode=0o711) + END,
        place / "tree",
    )  # fmt: skip
    assert listed(place / "tree") == ["a", "d", "e", "e/f", "g", "g/h"]
    assert (place / "tree/a").read_text() == "2"
    assert (place / "tree/d").read_text() == "a file"
    assert stat.S_IMODE((place / "tree/g").stat().st_mode) == 0o711


def test_entries_behind_a_link_of_the_layer_lie_where_it_leads(place: Path) -> None:
    unpack_bytes(folder("usr/lib") + link("lib", "usr/lib") + link("l2", "/lib") + entry("l2/a") + END, place / "tree")
    assert listed(place / "tree") == ["l2", "lib", "usr", "usr/lib", "usr/lib/a"]


# --- whiteouts -------------------------------------------------------------------------------------------------------


@pytest.fixture
def lower(tmp_path: Path) -> Path:
    """A layer below."""
    unpack_bytes(
        folder("d", mode=0o750) + entry("d/gone") + entry("d/kept") + entry("e/f") + entry("file") + END,
        tmp_path / "lower",
    )
    return tmp_path / "lower"


def is_whiteout(path: Path) -> bool:
    """Whether overlayfs takes this for a deleted file."""
    info = path.lstat()
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def test_whiteouts_hide_what_is_below(place: Path, lower: Path) -> None:
    unpack_bytes(entry("d/.wh.gone") + entry(".wh.e") + entry("d/.wh.never") + END, place / "tree", lower)
    assert is_whiteout(place / "tree/d/gone")
    assert is_whiteout(place / "tree/e")
    assert listed(place / "tree") == ["d", "d/gone", "e"], "what is not below needs none"
    assert stat.S_IMODE((place / "tree/d").stat().st_mode) == 0o750, "a directory without an entry is as below"


def test_a_whiteout_spares_what_the_same_layer_has(place: Path, lower: Path) -> None:
    unpack_bytes(
        entry("d/new") + entry(".wh.d") + entry(".wh.file") + entry("file", b"new") + END, place / "tree", lower
    )
    assert os.getxattr(place / "tree/d", "user.overlay.opaque") == b"y"
    assert (place / "tree/file").read_text() == "new"


def test_opaque_directories(place: Path, lower: Path) -> None:
    done = unpack_bytes(entry("d/.wh.gone") + entry("d/.wh..wh..opq") + entry("d/x") + END, place / "tree", lower)
    assert os.getxattr(place / "tree/d", "user.overlay.opaque") == b"y"
    assert listed(place / "tree/d") == ["x"]
    assert not done.hides_all


def test_a_whiteout_above_another_hides_it(place: Path, lower: Path) -> None:
    """What hides a directory as a whole comes first, whatever the archive's order is."""
    unpack_bytes(entry("d/.wh.gone") + entry("d/x") + entry(".wh.d") + END, place / "tree", lower)
    assert os.getxattr(place / "tree/d", "user.overlay.opaque") == b"y"
    assert listed(place / "tree") == ["d", "d/x"]


def test_a_device_hides_what_the_layers_below_have(place: Path, lower: Path) -> None:
    unpack_bytes(entry("file", kind=b"3") + entry("new", kind=b"3") + END, place / "tree", lower)
    assert is_whiteout(place / "tree/file")
    assert listed(place / "tree") == ["file"]


def test_a_directory_as_below_changes_no_owner(place: Path, tmp_path: Path) -> None:
    (tmp_path / "lower/d").mkdir(parents=True)
    if os.geteuid() == 0:
        os.chown(tmp_path / "lower/d", 7, 7)
    assert not unpack_bytes(entry("d/x") + END, place / "tree", tmp_path / "lower").notes


def test_an_opaque_root_hides_every_layer(place: Path, lower: Path) -> None:
    assert unpack_bytes(entry(".wh..wh..opq") + entry("x") + END, place / "tree", lower).hides_all


# --- hostile archives ------------------------------------------------------------------------------------------------

BIG = b"\x80" + (1 << 62).to_bytes(11)
NEGATIVE = b"\xff" * 12
REFUSED: dict[str, tuple[bytes, str]] = {
    "traversal": (entry("../outside", b"x"), r"'\.\./outside'.*'\.\.'"),
    "traversal in the middle": (folder("a") + entry("a/../../outside", b"x"), r"'\.\.'"),
    "traversal by pax": (pax(record("path", b"../outside")) + entry("a", b"x"), r"'\.\.'"),
    "traversal by a long name": (long_name(b"../outside") + entry("a", b"x"), r"'\.\.'"),
    "traversal by a prefix": (header("outside", prefix=b"../.."), r"'\.\.'"),
    "a link out, then through it": (link("a", "../..") + entry("a/outside", b"x"), "leads out of the image"),
    "two links out": (link("a", "b/..") + link("b", "..") + entry("a/outside", b"x"), "leads out of the image"),
    "a link out below": (folder("d") + link("d/a", "../../..") + entry("d/a/outside", b"x"), "leads out"),
    "a directory through a link out": (link("a", "../..") + folder("a/made"), "leads out of the image"),
    "a whiteout through a link out": (link("a", "../..") + entry("a/.wh.outside"), "leads out of the image"),
    "links in a circle": (link("a", "b") + link("b", "a") + entry("a/x"), "more than 40 links"),
    "a link to itself": (link("a", "a") + entry("a/x"), "more than 40 links"),
    "a hard link out": (hard_link("a", "../outside"), r"'\.\.'"),
    "a hard link to the host": (hard_link("a", "/etc/passwd"), "nothing of this layer"),
    "a hard link through a link out": (link("l", "../..") + hard_link("a", "l/outside"), "leads out of the image"),
    "a hard link to a directory": (folder("d") + hard_link("a", "d"), "which is a directory"),
    "a hard link to the root": (hard_link("a", "/"), "hard link to a directory"),
    "a hard link to a file that it removes": (folder("d/e") + entry("d/e/x") + hard_link("d", "d/e/x"), "it replaces"),
    "a hard link to what comes later": (hard_link("a", "b") + entry("b"), "nothing of this layer"),
    "a file in a file": (entry("a") + entry("a/b"), "'a', which is a file"),
    "a file in a FIFO": (entry("a", kind=b"6") + entry("a/b"), "which is a FIFO"),
    "a file in a whiteout": (entry(".wh.a/b"), "is a whiteout"),
    "the root as a link": (link("/", "/etc"), "root of an image"),
    "the root as a file": (entry(".", b"x"), "root of an image"),
    "a whiteout of the parent": (entry("d/.wh..."), "whiteout of no file"),
    "a whiteout of the directory": (entry(".wh.."), "whiteout of no file"),
    "a whiteout of nothing": (entry("d/.wh."), "whiteout of no file"),
    "a NUL in a name": (pax(record("path", b"a\0../outside")) + entry("a"), "NUL"),
    "a NUL in the name of an attribute": (pax(record("SCHILY.xattr.user.a\0b", b"x")) + entry("a"), "malformed"),
    "attributes that are too large": (pax(record("SCHILY.xattr.user.a", bytes(70_000))) + entry("a"), "65536 bytes"),
    "too many directories in each other": (long_name(b"d/" * 257 + b"a") + entry("a"), "more than 256 directories"),
    "a hard link that replaces its target's directory": (entry("d/f") + hard_link("d", "d/f"), "it replaces"),
    "a NUL in a target": (pax(record("linkpath", b"a\0b")) + entry("a", kind=b"2"), "NUL"),
    "a name that is too long": (long_name(b"n" * 256) + entry("a"), "more than 255 bytes"),
    "a path that is too long": (long_name(b"d/" * 2000) + entry("a"), "more than 3500"),
    "a target that is too long": (long_name(b"t" * 5000, b"K") + entry("a", kind=b"2"), "too long"),
    "a name of a megabyte": (long_name(b"a/" * 500_000 + b"b") + entry("a"), "too long"),
    "a link to nothing": (entry("a", kind=b"2"), "empty or too long"),
    "a size that lies": (header("a", size=1 << 20) + bytes(512), "in the middle of its content"),
    "a size beyond the archive": (header("a", raw_size=BIG), "more than .* bytes"),
    "a negative size": (header("a", raw_size=NEGATIVE), "negative"),
    "a size that is no number": (header("a", raw_size=b"99999999999\0"), "number"),
    "a negative owner": (pax(record("uid", b"-1")) + entry("a"), "negative"),
    "a size by pax that lies": (pax(record("size", b"999999")) + entry("a", b"x"), "in the middle of"),
    "a pax header that is cut": (header("p", b"x", 5000) + b"10 a=b\n", "in the middle of an extended header"),
    "a pax header without end": (header("p", b"x", raw_size=b"77777777777\0"), "extended header has"),
    "a pax header of nonsense": (entry("p", os.urandom(64), b"x") + entry("a"), "pax header is malformed"),
    "a pax header of digits": (entry("p", b"1" * (1 << 19), b"x") + entry("a"), "pax header is malformed"),
    "a pax record that is too long": (entry("p", b"99 a=b\n", b"x") + entry("a"), "pax header is malformed"),
    "a pax record without a length": (entry("p", b"0 a=b\n", b"x") + entry("a"), "pax header is malformed"),
    "pax headers without a member": (pax(record("path", b"a")), "ends after an extended header"),
    "pax headers without end": (pax(record("path", b"a")) * 100 + entry("a"), "more than 64 extended headers"),
    "a time that is no number": (pax(record("mtime", b"1e999")) + entry("a"), "the time"),
    "a damaged header": (entry("a") + b"x" + entry("b")[1:] + entry("c"), "checksum is wrong"),
    "a header that is cut": (entry("a") + entry("b")[:100], "checksum is wrong"),
    "no archive": (b"<html>not found</html>".ljust(512), "checksum is wrong"),
    "an unknown type": (entry("a", kind=b"D"), "type"),
    "a sparse file of GNU tar": (entry("a", kind=b"S"), "sparse file"),
    "a sparse file of pax": (
        pax(record("GNU.sparse.map", b"0,4"), record("GNU.sparse.size", b"8")) + entry("a", b"1234"), "sparse file"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_hostile_archives_are_refused_and_leave_nothing_outside(place: Path, case: str) -> None:
    data, message = REFUSED[case]
    with pytest.raises(ImageRefused, match=message) as caught:
        unpack_bytes(data + END, place / "tree")
    assert caught.value.hint
    assert caught.value.exit_code == 28
    assert listed(place.parent)[:1] == ["outside"]
    assert {path.split("/")[0] for path in listed(place)} <= {"tree"}
    assert (place.parent / "outside").read_text() == SECRET
    assert (place.parent / "outside").stat().st_nlink == 1


INSIDE: dict[str, tuple[bytes, list[str]]] = {
    "an absolute name": (entry("/outside", b"x"), ["outside"]),
    "an absolute name with dots": (entry("//./outside", b"x"), ["outside"]),
    "an absolute link and a file behind it": (link("a", "/b") + entry("a/outside"), ["a", "b", "b/outside"]),
    "a link out that nothing uses": (link("a", "../../outside"), ["a"]),
    "a link replaced by a directory": (link("a", "../..") + folder("a") + entry("a/outside"), ["a", "a/outside"]),
    "a link replaced by a file": (link("a", "../outside") + entry("a", b"x"), ["a"]),
    "a directory replaced by a link": (folder("a") + entry("a/b") + link("a", "../.."), ["a"]),
    "a hard link to a link out": (link("a", "../outside") + hard_link("b", "a"), ["a", "b"]),
    "a hard link to itself": (entry("a") + hard_link("a", "a"), ["a"]),
    "a device that is a whiteout": (entry("a", kind=b"3"), []),
    "a name with a newline": (entry("a\nb"), ["a\nb"]),
    "a name that is no UTF-8": (entry(b"\xff\xfe"), ["\udcff\udcfe"]),
    "a time of long ago and one of the future": (
        pax(record("mtime", b"-9999999999.5")) + entry("a") + pax(record("mtime", b"999999999999")) + entry("b"),
        ["a", "b"]),
    "aufs's own notes": (
        folder(".wh..wh.plnk") + entry(".wh..wh.plnk/12.34") + entry("d/.wh..wh.orph/x") + entry(".wh..wh.aufs"), []),
    "256 directories in each other": (
        long_name(b"d/" * 256 + b"a") + entry("a"), [*("/".join("d" * n) for n in range(1, 257)), "d/" * 256 + "a"]),
    "a directory of a size": (header("d", b"5", 4096, mode=0o755) + entry("d/a"), ["d", "d/a"]),
}  # fmt: skip


@pytest.mark.parametrize("case", INSIDE)
def test_odd_archives_stay_inside(place: Path, case: str) -> None:
    data, expected = INSIDE[case]
    unpack_bytes(data + END, place / "tree")
    assert listed(place / "tree") == expected
    assert (place.parent / "outside").read_text() == SECRET
    assert (place.parent / "outside").stat().st_nlink == 1


def test_bombs(place: Path) -> None:
    many = b"".join(entry(f"f{number}") for number in range(200)) + END
    with pytest.raises(ImageRefused, match="more than 100 entries"):
        unpack_bytes(many, place / "many", bounds=Bounds(entries=100))
    deep = b"".join(entry(f"{name}/" * 40 + "f") for name in "abcd") + END
    with pytest.raises(ImageRefused, match="more than 100 entries"):
        unpack_bytes(deep, place / "deep", bounds=Bounds(entries=100))
    paths = b"".join(entry(f"{'d' * 90}/.wh.{number}") for number in range(20)) + END
    with pytest.raises(ImageRefused, match="paths, links and extended attributes have more than 1000 bytes"):
        unpack_bytes(paths, place / "paths", bounds=Bounds(text=1000))
    with pytest.raises(ImageRefused, match="more than 1000 bytes"):
        unpack_bytes(entry("a", bytes(600)) + entry("b", bytes(600)) + END, place / "content", bounds=Bounds(1000))
    stream = LayerStream(Blob(io.BytesIO(gzip.compress(bytes(50 << 20))), "", "layer"), 1 << 20)
    with pytest.raises(ImageRefused, match="unpacks to too much"):
        stream.finish()


def test_names_of_attributes_are_not_repeated_in_notes(place: Path) -> None:
    headers = (pax(record(f"SCHILY.xattr.x{number}.y", b"v")) + entry(f"f{number}") for number in range(50))
    done = unpack_bytes(b"".join(headers) + END, place / "tree")
    assert done.notes == {"other extended attributes are left out": 50}


def test_a_disk_without_room_is_not_filled(place: Path) -> None:
    with pytest.raises(MiniSandboxError, match="disk is full"):
        unpack_bytes(entry("a", b"x") + END, place / "tree", bounds=Bounds(spare=1 << 62))


def test_replacing_the_same_directory_many_times_takes_no_longer_each_time(place: Path) -> None:
    files = b"".join(entry(f"keep/{number}") for number in range(3000))
    began = time.monotonic()
    unpack_bytes(files + (folder("a") + entry("a/b") + entry("a")) * 3000 + END, place / "tree")
    assert time.monotonic() - began < 60


def test_compressed_streams_that_end_early_or_are_damaged(place: Path) -> None:
    tar = b"".join(entry(f"f{number}", os.urandom(600)) for number in range(50)) + END
    packed = gzip.compress(tar)
    damaged = packed[:2000] + b"\xff" * 50 + packed[2050:]
    for number, data in enumerate((packed[:-4], packed[:-100], packed[: len(packed) // 2], damaged)):
        with pytest.raises(ImageRefused, match="damaged or ends early"):
            unpack_bytes(data, place / f"tree{number}")
    for data in (zstandard.compress(tar)[:-100], zstandard.compress(tar)[:9000]):  # only the tar's hash shows it
        stream = LayerStream(Blob(io.BytesIO(data), "", "layer"), 1 << 20)
        with contextlib.suppress(ImageRefused):
            stream.finish()
        assert stream.diff_id != digest(tar)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_every_compression_of_engines(place: Path, pack: Callable[[bytes], bytes]) -> None:
    tar = b"".join(entry(f"f{number}", os.urandom(600) + bytes(200_000)) for number in range(50)) + END
    for number, data in enumerate(
        (pack(tar), pack(tar) + bytes(600_000), pack(tar[:5000]) + bytes(4) + pack(tar[5000:]))
    ):
        unpack_bytes(data, place / f"tree{number}")
        assert len(list((place / f"tree{number}").iterdir())) == 50
    for number, data in enumerate((pack(tar)[:-4], pack(tar)[:9000])):
        with pytest.raises(ImageRefused, match="damaged or ends early"):
            unpack_bytes(data, place / f"damaged{number}")


def test_the_limit_of_zstd_windows_is_named(place: Path) -> None:
    tar = entry("a", bytes(10_000)) + END
    for window, fits in ((29, True), (30, False)):
        parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=window)
        packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        data = packer.compress(tar) + packer.flush()
        if fits:
            unpack_bytes(data, place / "tree")
        else:
            with pytest.raises(ImageRefused, match="its zstd window is larger than 512 MiB") as caught:
                unpack_bytes(data, place / "other")
            assert "--long=27" in str(caught.value)


def test_a_sparse_member_is_called_by_its_name(place: Path) -> None:
    sparse = pax(record("GNU.sparse.major", b"1"), record("GNU.sparse.name", b"d/real"))
    with pytest.raises(ImageRefused, match=r"'d/real'.*sparse") as caught:
        unpack_bytes(sparse + entry("d/GNUSparseFile.0/real", b"0\n") + END, place / "tree")
    assert "--sparse" in str(caught.value)


def test_a_blob_of_another_digest_is_refused(place: Path) -> None:
    stream = LayerStream(Blob(io.BytesIO(entry("a") + END), digest(b"other"), "layer"), 1 << 20)
    assert list(TarReader(stream))
    with pytest.raises(ImageRefused, match="does not have the digest"):
        stream.finish()


@pytest.mark.parametrize("seed", range(8))
def test_archives_with_flipped_bytes_do_no_harm(place: Path, seed: int) -> None:
    """Whatever is flipped, nothing but a refusal comes of it, and nothing lies outside."""
    draw = random.Random(seed)
    whole = bytearray(
        pax(record("path", b"long/" + b"p" * 120), record("SCHILY.xattr.user.a", b"v")) + entry("a", b"x" * 700)
        + folder("d") + link("d/l", "../a") + hard_link("h", "a") + entry("d/.wh.x")
        + long_name(b"q" * 150) + entry("b") + END
    )  # fmt: skip
    for number in range(60):
        data = bytearray(whole)
        at = draw.randrange(len(data) // 512) * 512
        for _ in range(draw.randint(1, 4)):
            data[at + draw.randrange(512)] = draw.randrange(256)
        block = data[at : at + 512]
        block[148:156] = b" " * 8
        data[at + 148 : at + 156] = b"%06o\0 " % sum(block)  # what a writer of hostile archives gets right
        with contextlib.suppress(ImageRefused):
            unpack_bytes(bytes(data), place / f"tree{number}")
    assert (place.parent / "outside").read_text() == SECRET
    assert listed(place.parent)[0] == "outside"
    assert {name.split("/")[0][:4] for name in listed(place)} == {"tree"}
