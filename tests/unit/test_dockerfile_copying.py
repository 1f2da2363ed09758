"""COPY, ADD and WORKDIR: what lands where, with which owner and mode, and what decides the layer."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from tests.unit.dockerfile_tools import copies, digest, files, make, stage
from tests.unit.oci_tools import END, entry, folder, hard_link, link

from minisandbox.errors import DockerfileError, ImageRefused
from minisandbox.images.dockerfile.copying import changed_mode
from minisandbox.store.blobs.unpack import OPAQUE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A context."""
    place = tmp_path / "context"
    for name in ("a.txt", "b.txt", "c.md", ".hidden", "d/e.txt", "d/f/g.txt", "sp ace/h.txt", "x[1].txt"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(name)
    os.symlink("a.txt", place / "link")
    os.symlink("d", place / "dlink")
    os.symlink("nowhere", place / "d/broken")
    (place / "d/e.txt").chmod(0o4755)
    (place / "d/f").chmod(0o700)
    return place


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The layer below."""
    place = tmp_path / "image"
    (place / "usr/lib").mkdir(parents=True)
    (place / "etc").mkdir()
    (place / "etc/passwd").write_text("root:x:0:0:::\nme:x:1000:1001:::\n")
    (place / "etc/group").write_text("root:x:0:\nus:x:1002:\n")
    os.symlink("usr/lib", place / "lib")
    os.symlink("/etc/real", place / "etc/conf")
    (place / "usr/lib/old").write_text("old")
    (place / "usr/lib/olddir").mkdir(mode=0o711)
    return place


CASES: dict[str, tuple[str, dict[str, str]]] = {
    "to a name": ("COPY a.txt /x/y", {"x/": "", "x/y": "a.txt"}),
    "to a directory by its slash": ("COPY a.txt /x/y/", {"x/": "", "x/y/": "", "x/y/a.txt": "a.txt"}),
    "to one that is there": ("COPY a.txt /usr", {"usr/": "", "usr/a.txt": "a.txt"}),
    "through a link": ("COPY a.txt /lib", {"usr/": "", "usr/lib/": "", "usr/lib/a.txt": "a.txt"}),
    "through a link to nothing": ("COPY a.txt /etc/conf/", {"etc/": "", "etc/real/": "", "etc/real/a.txt": "a.txt"}),
    "several": ("COPY a.txt b.txt /x/", {"x/": "", "x/a.txt": "a.txt", "x/b.txt": "b.txt"}),
    "a directory's content": (
        "COPY d /x",
        {"x/": "", "x/broken": "-> nowhere", "x/e.txt": "d/e.txt", "x/f/": "", "x/f/g.txt": "d/f/g.txt"},
    ),
    "a link as what it leads to": ("COPY link /x/", {"x/": "", "x/link": "a.txt"}),
    "a link to a directory": (
        "COPY dlink/f /x",
        {"x/": "", "x/g.txt": "d/f/g.txt"},
    ),
    "wildcards": ("COPY *.txt /x/", {"x/": "", **{f"x/{name}": name for name in ("a.txt", "b.txt", "x[1].txt")}}),
    "a wildcard of one sign": ("COPY ?.md /x/", {"x/": "", "x/c.md": "c.md"}),
    "a class": ("COPY [^a].txt /x/", {"x/": "", "x/b.txt": "b.txt"}),
    "an escaped wildcard": ("COPY x[[]1].txt /y/", {"y/": "", "y/x[1].txt": "x[1].txt"}),
    "wildcards in directories": ("COPY */*.txt /x/", {"x/": "", "x/e.txt": "d/e.txt", "x/h.txt": "sp ace/h.txt"}),
    "no match of a wildcard": ("COPY a.txt *.none /x/", {"x/": "", "x/a.txt": "a.txt"}),
    "blanks": ('COPY ["sp ace/h.txt", "/x y/"]', {"x y/": "", "x y/h.txt": "sp ace/h.txt"}),
    "documents": ("COPY <<a <<b /x/\n1\na\n2\nb", {"x/": "", "x/a": "1\n", "x/b": "2\n"}),
    "a document to a name": ("COPY <<a /x\n1\na", {"x": "1\n"}),
    "exclude": ("COPY --exclude=*.txt --exclude=d . /x/", {"x/": "", "x/.hidden": ".hidden", "x/c.md": "c.md",
                "x/dlink": "-> d", "x/link": "-> a.txt", "x/sp ace/": "", "x/sp ace/h.txt": "sp ace/h.txt"}),
    "parents": ("COPY --parents d/f/g.txt /x/", {"x/": "", "x/d/": "", "x/d/f/": "", "x/d/f/g.txt": "d/f/g.txt"}),
    "parents from a pivot": ("COPY --parents d/./f/g.txt /x", {"x/": "", "x/f/": "", "x/f/g.txt": "d/f/g.txt"}),
    "workdir": ("WORKDIR /x/y", {"x/": "", "x/y/": ""}),
    "workdir that is there": ("WORKDIR /usr/lib", {}),
    "relative to the root": ("COPY a.txt x", {"x": "a.txt"}),
    "over a file": ("COPY a.txt /usr/lib/old", {"usr/": "", "usr/lib/": "", "usr/lib/old": "a.txt"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_lands_where(case: str, root: Path, image: Path, tmp_path: Path) -> None:
    text, expected = CASES[case]
    assert files(make(text, root, tmp_path / "layer", image)) == expected


def test_modes_and_times(root: Path, image: Path, tmp_path: Path) -> None:
    os.utime(root / "d/e.txt", (10, 10))
    made = make("COPY d /usr/lib/olddir", root, tmp_path / "layer", image) / "usr/lib/olddir"
    assert stat.S_IMODE(made.stat().st_mode) == 0o711  # the destination was there
    assert stat.S_IMODE((made / "e.txt").stat().st_mode) == 0o4755
    assert stat.S_IMODE((made / "f").stat().st_mode) == 0o700
    assert (made / "e.txt").stat().st_mtime == 10


def test_chmod(root: Path, image: Path, tmp_path: Path) -> None:
    made = make("COPY --chmod=640 d /x/y", root, tmp_path / "layer", image)
    modes = {name: stat.S_IMODE((made / name).stat().st_mode) for name in ("x", "x/y", "x/y/e.txt", "x/y/f")}
    assert modes == {"x": 0o755, "x/y": 0o755, "x/y/e.txt": 0o640, "x/y/f": 0o640}


@pytest.mark.parametrize(
    ("text", "mode", "is_folder", "expected"),
    [
        ("755", 0o600, False, 0o755), ("u=rwX,go=rX", 0o600, False, 0o644), ("u=rwX,go=rX", 0o600, True, 0o755),
        ("a+x", 0o640, False, 0o751), ("+x", 0o640, False, 0o751), ("o-rwx,u+s", 0o755, False, 0o4750),
        ("g=", 0o777, False, 0o707), ("+t", 0o755, True, 0o1755),
    ],
)  # fmt: skip
def test_symbolic_modes(text: str, mode: int, is_folder: bool, expected: int) -> None:
    assert changed_mode(text, mode, is_folder=is_folder) == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize(
    ("owner", "ids"),
    [
        ("me", (1000, 1001)),
        ("me:us", (1000, 1002)),
        ("5", (5, 5)),
        ("5:us", (5, 1002)),
        ("root", (0, 0)),
        ("me:", (1000, 1001)),
        ("5:", (5, 5)),
        (":5", (0, 5)),
        (":us", (0, 1002)),
        (":root", (0, 0)),
        (":", (0, 0)),
        ("me:65536", (1000, 65536)),
        ("2147483647", (2147483647, 2147483647)),
    ],
)
def test_owners(owner: str, ids: tuple[int, int], root: Path, image: Path, tmp_path: Path) -> None:
    made = make(f"COPY --chown={owner} d /x/y", root, tmp_path / "layer", image)
    assert {(info.st_uid, info.st_gid) for info in map(os.lstat, (made / "x", made / "x/y/f/g.txt"))} == {ids}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_workdir_belongs_to_its_user(root: Path, image: Path, tmp_path: Path) -> None:
    (_, copy) = copies(stage("FROM x\nUSER me\nWORKDIR /a\nWORKDIR b"))
    assert (copy.owner, copy.destination) == ("me", "/a/b/")
    made = make("USER nobody-here\nWORKDIR /x", root, tmp_path / "layer", image)
    assert (made / "x").stat().st_uid == 0, "as engines have it; a RUN of that user fails"


@pytest.mark.skipif(os.geteuid() == 0, reason="root gives files away")
def test_owners_of_an_ordinary_user(root: Path, image: Path, tmp_path: Path) -> None:
    made = make("COPY --chown=me:us a.txt /x", root, tmp_path / "layer", image)
    assert (made / "x").stat().st_uid == os.geteuid()


# --- archives ---------------------------------------------------------------------------------------------------------

TAR = (
    folder("p/", mode=0o750)
    + entry("p/q", b"1")
    + hard_link("p/r", "p/q")
    + link("p/s", "q")
    + entry("lib/t", b"2")
    + END
)


PACKERS = pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, bz2.compress, lzma.compress, zstandard.ZstdCompressor().compress],
    ids=["plain", "gzip", "bzip2", "xz", "zstd"],
)  # fmt: skip


@PACKERS
@pytest.mark.parametrize("tail", [b"", bytes(1), bytes(513), bytes(600_000), b"junk" * 200], ids=len)
def test_add_unpacks_archives(
    pack: Callable[[bytes], bytes], tail: bytes, root: Path, image: Path, tmp_path: Path
) -> None:
    (root / "archive").write_bytes(pack(TAR[:1500]) + pack(TAR[1500:]) + tail)  # several streams, as of pbzip2
    made = make("ADD archive /", root, tmp_path / "layer", image)
    assert files(made) == {
        "p/": "", "p/q": "1", "p/r": "1", "p/s": "-> q", "usr/": "", "usr/lib/": "", "usr/lib/t": "2",
    }  # fmt: skip
    assert (made / "p/q").stat().st_ino == (made / "p/r").stat().st_ino


def test_what_add_does_not_unpack(root: Path, image: Path, tmp_path: Path) -> None:
    (root / "d/archive.tar").write_bytes(TAR)
    (root / "a.gz").write_bytes(gzip.compress(b"no archive"))
    (root / "text.tar.gz").write_bytes(b"no archive")
    (root / "zeros.tar").write_bytes(END)
    assert "x/archive.tar" in files(make("ADD d /x", root, tmp_path / "one", image))
    assert "x/archive.tar" in files(make("ADD --unpack=false d/archive.tar /x/", root, tmp_path / "two", image))
    assert "x/archive.tar" in files(make("COPY d/archive.tar /x/", root, tmp_path / "three", image))
    made = make("ADD a.gz text.tar.gz zeros.tar /x/", root, tmp_path / "four", image)
    assert files(made).keys() == {"x/", "x/a.gz", "x/text.tar.gz", "x/zeros.tar"}


@PACKERS
def test_add_of_a_damaged_archive(pack: Callable[[bytes], bytes], root: Path, image: Path, tmp_path: Path) -> None:
    large = b"".join(entry(f"f{number}", os.urandom(90_000)) for number in range(30)) + END
    (root / "archive").write_bytes(pack(large)[:-200_000])
    with pytest.raises(ImageRefused, match="line 2: archive"):
        make("ADD archive /", root, tmp_path / "layer", image)


@pytest.mark.parametrize(
    ("tar", "reason"),
    [
        (entry("../x", b"1"), "leads out"), (link("l", "../..") + entry("l/x", b"1"), "."),
        (entry("a", b"1")[:700], "ends in the middle"), (entry(".wh.a", b""), "begin with .wh."),
        (hard_link("a", "../../etc/passwd"), "leads out"),
    ],
)  # fmt: skip
def test_hostile_archives(tar: bytes, reason: str, root: Path, image: Path, tmp_path: Path) -> None:
    (root / "archive").write_bytes(tar)
    outside = tmp_path / "x"
    try:
        made = make("ADD archive /deep/er", root, tmp_path / "layer", image)
    except (ImageRefused, DockerfileError) as error:
        assert "line 2" in str(error)  # noqa: PT017
        assert reason in str(error)  # noqa: PT017
    else:
        assert reason == "."
        assert files(made)["x"] == "1"  # the root is its own parent
    assert not outside.exists()


# --- what decides a layer ---------------------------------------------------------------------------------------------


def test_content_decides_and_times_do_not(root: Path) -> None:
    (copy,) = copies(stage("FROM x\nCOPY . /"))
    before = digest(copy, root)
    os.utime(root / "a.txt", (1, 1))
    os.utime(root / "d", (1, 1))
    assert digest(copy, root) == before
    (root / "d/f/g.txt").write_text("d/f/G.txt")
    changed = digest(copy, root)
    assert changed != before
    (root / "d/f/g.txt").chmod(0o600)
    assert digest(copy, root) != changed


def test_what_is_left_out_does_not_count(root: Path) -> None:
    (root / ".dockerignore").write_text("# comment\nd\n!d/f\n*.md\n**/h.txt\n.dockerignore\nDockerfile\n")
    (copy,) = copies(stage("FROM x\nCOPY . /"))
    before = digest(copy, root)
    (root / "d/e.txt").write_text("other")
    (root / "c.md").unlink()
    (root / "sp ace/h.txt").unlink()
    assert digest(copy, root) == before
    (root / "d/f/g.txt").write_text("other")
    assert digest(copy, root) != before


def test_ignored(root: Path, image: Path, tmp_path: Path) -> None:
    (root / ".dockerignore").write_text("*\n!d/f\n!*.md\n")
    found = files(make("COPY . /x/", root, tmp_path / "layer", image))
    assert found == {"x/": "", "x/c.md": "c.md", "x/d/": "", "x/d/f/": "", "x/d/f/g.txt": "d/f/g.txt"}


def test_the_dockerfiles_own_ignore_file_wins(root: Path, image: Path, tmp_path: Path) -> None:
    (root / ".dockerignore").write_text("*\n")
    (root / "Dockerfile.dockerignore").write_text("d\n")
    assert "x/a.txt" in files(make("COPY . /x/", root, tmp_path / "layer", image))


# --- what is refused --------------------------------------------------------------------------------------------------

BAD = {
    "missing": ("COPY none /x", "there is no 'none' in the context"),
    "outside": ("COPY ../outside /x", "outside of the context"),
    "outside in the middle": ("COPY d/../../outside /x", "outside of the context"),
    "a link out": ("COPY out /x", "leads out of the context"),
    "an absolute link out": (
        "COPY absolute /x",
        "'absolute' is a link to '{outside}/secret', which is not in the context",
    ),
    "behind an absolute link out": ("COPY absolutedir/secret /x", "'absolutedir' is a link to '{outside}', which"),
    "a link to nothing": ("COPY d/broken /x", "'d/broken' is a link to 'nowhere', which is not in the context"),
    "behind a link out": ("COPY outdir/secret /x", "leads out of the context"),
    "several to a name": ("COPY a.txt b.txt /x", "end the destination with a slash"),
    "a file over a directory": ("COPY d /replaced", "a directory cannot replace something else"),
    "below a file": ("COPY a.txt /usr/lib/old/x", "is not a directory"),
    "an unknown user": ("COPY --chown=nobody-here a.txt /x", "no 'nobody-here'"),
    "an unknown group": ("COPY --chown=me:none a.txt /x", "no 'none'"),
    "a number too large": ("COPY --chown=5:2147483648 a.txt /x", "2147483648 is no user or group"),
    "a mode": ("COPY --chmod=u=q a.txt /x", "not a mode"),
    "a pattern": ("COPY [ /x", "syntax error"),
    "a whiteout": ("COPY w /x", "begin with .wh."),
    "a circle": ("COPY circle /x", "more than 40 links"),
    "left out": ("COPY ignored.txt /x", "left out by .dockerignore"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_with_the_line(case: str, root: Path, image: Path, tmp_path: Path) -> None:
    text, reason = BAD[case]
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("secret")
    os.symlink("../outside/secret", root / "out")
    os.symlink("../outside", root / "outdir")
    os.symlink(str(tmp_path / "outside/secret"), root / "absolute")
    os.symlink(str(tmp_path / "outside"), root / "absolutedir")
    os.symlink("circle", root / "circle")
    (root / "w").mkdir()
    (root / "w/.wh.a").write_text("")
    (root / "ignored.txt").write_text("")
    (root / ".dockerignore").write_text("ignored.txt\n")
    (image / "replaced").mkdir()
    (image / "replaced/f").write_text("a file where the context has a directory")
    with pytest.raises(DockerfileError, match="line 2") as caught:
        make(text, root, tmp_path / "layer", image)
    assert reason.format(outside=tmp_path / "outside") in str(caught.value)


def test_layers_below_are_merged(root: Path, image: Path, tmp_path: Path) -> None:
    """A destination is looked for in what the image shows, not in what a lower layer has."""
    upper = tmp_path / "upper"
    (upper / "usr/lib").mkdir(parents=True)
    os.setxattr(upper / "usr/lib", OPAQUE, b"y")
    (upper / "etc").mkdir()
    os.symlink("/usr/new", upper / "etc/passwd")
    made = make("COPY d /usr/lib/old", root, tmp_path / "layer", upper, image)  # the file below is hidden
    assert "usr/lib/old/e.txt" in files(made)


def test_a_large_context_is_listed_quickly(tmp_path: Path) -> None:
    place = tmp_path / "many"
    for number in range(2000):
        (place / f"d{number % 20}").mkdir(parents=True, exist_ok=True)
        (place / f"d{number % 20}/f{number}").write_text(str(number))
    (place / ".dockerignore").write_text("*.pyc\n**/node_modules\n.git\n")
    (copy,) = copies(stage("FROM x\nCOPY . /"))
    start = time.monotonic()
    digest(copy, place)
    assert time.monotonic() - start < 5
