"""Images travel whole, to other owners and other paths; what comes in is not trusted."""

from __future__ import annotations

import io
import json
import os
import random
import re
import stat
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard
from tests.unit.store_tools import add_image, add_layer, end_of, key_of, names_below, python, two_images

from minisandbox.errors import DiskFull, InvalidValue, MiniSandboxError, NotFound, StoreError
from minisandbox.images.travel import export_file, import_directory, import_file
from minisandbox.store import Made, Store, parcels
from minisandbox.store.collect import collect
from minisandbox.store.entries import NAME, Entry, encode, read_entries
from minisandbox.store.exporting import HEAD, export_images
from minisandbox.store.importing import import_stream
from minisandbox.store.members import Members
from minisandbox.store.sizes import StoreSizes
from minisandbox.store.verify import verify


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "here/store")


@pytest.fixture
def other(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "there/another")


@pytest.fixture
def file(store: Store, tmp_path: Path) -> Path:
    two_images(store)
    export_file(store, ["one", "two"], tmp_path / "images.msb")
    return tmp_path / "images.msb"


def odd_layer(store: Store) -> str:
    """A layer with everything that a tree can hold."""

    def make(work: Path) -> Made:
        tree = work / "tree"
        (tree / "closed").mkdir(parents=True)
        (tree / "closed/secret").write_text("secret")
        (tree / "closed/secret").chmod(0o400)
        os.link(tree / "closed/secret", tree / "closed/again")
        (tree / os.fsdecode(b"name \xff")).write_text("latin")
        (tree / "broken").symlink_to("../../../etc/shadow")
        os.mkfifo(tree / "pipe", 0o640)
        (tree / "opaque").mkdir()
        try:
            os.setxattr(tree / "opaque", "user.overlay.opaque", b"y")
            os.setxattr(tree / "closed", "user.overlay.origin", b"of this machine only")
        except OSError:
            pytest.skip("this file system has no extended attributes")
        os.mknod(tree / "deleted", stat.S_IFCHR, 0)
        os.utime(tree / "broken", (5, 5), follow_symlinks=False)
        (tree / "closed").chmod(0o500)
        return Made(tree, {"why": "odd"})

    store.ensure_layer(key_of("odd"), parent=None, step={"kind": "odd"}, make=make)
    return key_of("odd")


def staged(store: Store) -> list[str]:
    """What is half made."""
    return [name for name in os.listdir(store.root / "staging") if name != ".gate"]


def facts(store: Store, key: str) -> list[tuple[object, ...]]:
    """Everything about a layer's files but owners and inodes."""
    return [
        (e.path, e.kind, e.mode, e.mtime, e.size, e.digest, e.same, e.target, e.attributes)
        for e in read_entries(store.layer_directory(key))
    ]


def test_images_travel_in_one_file(store: Store, other: Store, file: Path) -> None:
    done = import_file(other, file)
    assert (done.images, len(done.layers), done.present) == (("one", "two"), 3, 0)
    assert other.image("one") == store.image("one")
    for key in store.layer_keys():
        assert facts(other, key) == facts(store, key)
        assert (other.layer(key).facts, other.layer(key).seconds) == (store.layer(key).facts, store.layer(key).seconds)
        assert other.layer(key).imported
        assert not store.layer(key).imported
    assert verify(other, full=True).damaged == ()
    assert StoreSizes(other, other.images()).total == StoreSizes(store, store.images()).total
    assert os.listdir(other.root / "staging") == [".gate"]


def test_odd_things_travel(store: Store, other: Store, tmp_path: Path) -> None:
    key = odd_layer(store)
    add_image(store, "odd", key)
    export_file(store, ["odd"], tmp_path / "odd.msb")
    import_file(other, tmp_path / "odd.msb")
    assert facts(other, key) == facts(store, key)
    assert "user.overlay.origin" not in str(facts(other, key))
    assert "('user.overlay.opaque', '79')" in str(facts(other, key))
    assert verify(other, full=True).damaged == ()
    tree = other.layer_tree(key)
    assert (tree / "deleted").lstat().st_rdev == 0
    assert (tree / "closed/again").samefile(tree / "closed/secret")


def test_importing_what_is_there_reads_nothing(other: Store, file: Path) -> None:
    import_file(other, file)
    with file.open("r+b") as damaged:
        damaged.truncate(2000)
    done = import_file(other, file)
    assert (done.layers, done.present, done.bytes) == ((), 3, 0)


def test_only_what_is_missing_is_taken(other: Store, file: Path) -> None:
    import_file(other, file)
    other.remove_layer(key_of("two"))
    done = import_file(other, file)
    assert (done.layers, done.present) == ((key_of("two"),), 2)
    assert verify(other, full=True).damaged == ()
    one, two = other.layer_tree(key_of("one")), other.layer_tree(key_of("two"))
    assert (one / "lib/a.py").samefile(two / "lib/a.py")


def test_contents_are_written_once(store: Store, tmp_path: Path) -> None:
    noise = random.Random(1).randbytes(400_000).hex()
    keys = [add_layer(store, str(n), {"lib/noise": noise, "own": str(n)}) for n in range(5)]
    for number, key in enumerate(keys):
        add_image(store, str(number), key)
    done = export_file(store, map(str, range(5)), tmp_path / "f")
    assert done.objects == 6
    assert done.total > 5 * 800_000
    assert (tmp_path / "f").stat().st_size < 500_000


def test_a_store_is_a_source_too(store: Store, other: Store) -> None:
    two_images(store)
    before = names_below(store.root)
    done = import_directory(other, store.root, ["one"])
    assert done.images == ("one",)
    assert len(done.layers) == 2
    assert other.image_names() == ["one"]
    assert import_directory(other, store.root).layers == (key_of("two"),)
    assert verify(other, full=True).damaged == ()
    assert names_below(store.root) == before
    with pytest.raises(NotFound, match="'three'"):
        import_directory(other, store.root, ["three"])
    with pytest.raises(InvalidValue, match="the store itself"):
        import_directory(other, other.root)


def test_a_layer_of_an_earlier_version_travels(store: Store, other: Store) -> None:
    two_images(store)
    want = facts(store, key_of("one"))
    (store.layer_directory(key_of("one")) / NAME).unlink()
    import_directory(other, store.root, ["one"])
    assert facts(other, key_of("one")) == want


def test_another_image_of_that_name_is_not_replaced_unasked(other: Store, file: Path) -> None:
    key = add_layer(other, "mine", {"mine": "mine"})
    add_image(other, "one", key)
    with pytest.raises(InvalidValue, match="another image 'one'") as caught:
        import_file(other, file)
    assert "--replace" in str(caught.value.hint)
    assert other.layer_keys() == [key]
    import_file(other, file, replace=True)
    assert other.image("one").layers[-1] == key_of("one")


@pytest.mark.parametrize("left", [0, 3, 100, 0.3, 0.7, 0.99])
def test_a_truncated_file_is_said_and_leaves_nothing(other: Store, file: Path, left: float) -> None:
    data = file.read_bytes()
    size = int(len(data) * left) if left < 1 else int(left)
    file.write_bytes(data[:size])
    with pytest.raises(StoreError, match=r"truncated|not a file of images|damaged") as caught:
        import_file(other, file)
    assert caught.value.hint
    assert other.layer_keys() == []
    assert other.image_names() == []
    assert [name for name in names_below(other.root) if name != "version"] == []


def test_a_flipped_byte_is_found(other: Store, file: Path) -> None:
    data = file.read_bytes()
    content = unpacked(data)
    tried = 0
    for position in (*range(5, len(data), max(1, len(data) // 30)), *range(len(data) - 4, len(data))):
        flipped = bytearray(data)
        flipped[position] ^= 16
        if unpacked(bytes(flipped)) == content:  # a bit that says nothing, or the same in another way
            continue
        file.write_bytes(flipped)
        with pytest.raises(StoreError):
            import_file(other, file)
        assert (other.layer_keys(), other.image_names()) == ([], [])
        tried += 1
    assert tried > 20


def unpacked(data: bytes) -> bytes | None:
    try:
        return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()
    except zstandard.ZstdError:
        return None


def test_what_is_no_export_is_said(other: Store, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(StoreError, match="is not a file of images"):
        import_file(other, tmp_path / "text")
    with pytest.raises(StoreError, match="nothing"):
        import_file(other, tmp_path / "nothing")
    with pytest.raises(NotFound, match="no store at"):
        import_directory(other, tmp_path)


def test_a_damaged_layer_is_not_exported(store: Store, tmp_path: Path) -> None:
    two_images(store)
    path = store.layer_tree(key_of("one")) / "lib/a.py"
    path.write_text(path.read_text().replace("1", "2"))
    with pytest.raises(StoreError, match=r"lib/a\.py has other content"):
        export_file(store, ["one"], tmp_path / "f")
    assert sorted(os.listdir(tmp_path)) == ["here"]
    with pytest.raises(NotFound, match="'three'"):
        export_file(store, ["three"], tmp_path / "f")


IMPORT = """
    import sys
    from pathlib import Path
    from minisandbox.images.travel import import_file
    from minisandbox.store import Store
    import_file(Store.open(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.parametrize("point", ["content-received", "taken", "renamed", "imported", "before-image"])
def test_an_import_may_die_anywhere(other: Store, file: Path, point: str) -> None:
    assert end_of(python(IMPORT, other.root, file, environment={"MINISANDBOX_STORE_FAULT": f"{point}:kill"})) == -9
    again = Store.open(other.root)
    assert again.image_names() == []
    assert os.listdir(again.root / "staging") == [".gate"]
    assert verify(again, full=True).damaged == ()
    import_file(again, file)
    assert verify(again, full=True) == verify(again, full=True)
    assert again.image_names() == ["one", "two"]
    collect(again, grace=0)
    assert os.listdir(again.root / "locks") == []


@pytest.mark.parametrize("point", ["content-received", "taken", "recorded", "before-image"])
def test_an_import_may_find_the_disk_full(
    other: Store, file: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISANDBOX_STORE_FAULT", f"{point}:ENOSPC")
    with pytest.raises(DiskFull, match="the disk is full"):
        import_file(other, file)
    monkeypatch.delenv("MINISANDBOX_STORE_FAULT")
    assert other.image_names() == []
    assert os.listdir(other.root / "staging") == [".gate"]
    assert import_file(other, file).images == ("one", "two")


def test_more_than_the_disk_holds_is_refused_before_it_is_read(
    store: Store, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_images(store)
    free = os.statvfs_result((4096, 4096, 1000, 2, 2, 1000, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: free)
    with pytest.raises(DiskFull, match="import"):
        import_directory(other, store.root)
    assert other.layer_keys() == []


# --- what is not trusted ---------------------------------------------------------------------------------------------


def forged(store: Store, change: Callable[[str, bytes], Iterator[tuple[str, bytes]]]) -> io.BytesIO:
    """An export in which members are changed."""
    plain, out = io.BytesIO(), io.BytesIO()
    export_images(store, ["one"], plain)
    plain.seek(0)
    with tarfile.open(fileobj=plain) as source, tarfile.open(fileobj=out, mode="w") as target:
        for member in source:
            data = source.extractfile(member)
            assert data is not None
            for name, content in change(member.name, data.read()):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                target.addfile(info, io.BytesIO(content))
    out.seek(0)
    return out


def header(kind: bytes, size: int, **fields: object) -> bytes:
    """A header of a tar archive, of any type."""
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    for name, value in fields.items():
        setattr(info, name, value)
    return info.tobuf(tarfile.USTAR_FORMAT)


def extended(kind: bytes, *records: str) -> bytes:
    data = b"".join(
        next(line for size in range(9999) if len(line := f"{size} {record}\n".encode()) == size) for record in records
    )
    return header(kind, len(data)) + data + bytes(-len(data) % 512)


ODD = {
    "a name of megabytes": tarfile.TarInfo("x" * 2_000_000).tobuf(tarfile.PAX_FORMAT),
    "a name of megabytes, as GNU's": tarfile.TarInfo("x" * 2_000_000).tobuf(tarfile.GNU_FORMAT),
    "a long name": tarfile.TarInfo("/".join(["x" * 60] * 3)).tobuf(tarfile.USTAR_FORMAT),
    "a sparse file, as GNU's": header(tarfile.GNUTYPE_SPARSE, 512),
    "a sparse file": extended(b"x", "GNU.sparse.major=1", "GNU.sparse.minor=0", "GNU.sparse.realsize=9"),
    "a sparse file beside a size": extended(b"x", "size=1", "GNU.sparse.map=" + "1," * 40 + "1"),
    "a number of thousands of digits": extended(b"x", "size=" + "1" * 480),
    "a longer one": extended(b"x", "size=" + "1" * 5000),
    "a negative number": extended(b"x", "size=-512"),
    "settings for all": extended(b"g", "size=1"),
    "headers of headers": extended(b"x", "size=1") * 2,
    "a link": header(tarfile.SYMTYPE, 0, linkname="/etc/passwd"),
    "a directory": header(tarfile.DIRTYPE, 0),
    "a size in another base": header(tarfile.REGTYPE, 0)[:124] + b"\x80" + bytes(11) + header(b"0", 0)[136:],
    "a negative size": header(tarfile.REGTYPE, 0)[:124] + b"-0000000512\0" + header(b"0", 0)[136:],
    "no archive": b"x" * 512,
}


@pytest.mark.parametrize("archive", ODD.values(), ids=ODD.keys())
def test_a_header_that_no_export_writes_is_not_read(other: Store, archive: bytes) -> None:
    """Of tarfile a file of 8 KB took gigabytes or hours: it does what headers say before anybody sees them."""
    with pytest.raises(StoreError) as caught:
        import_stream(other, io.BytesIO(archive + header(b"0", 0) + bytes(1024)), where="the file")
    assert "its head cannot be read" in str(caught.value.reason)
    assert len(str(caught.value.reason)) < 300


def test_the_size_of_a_large_file_is_read() -> None:
    size = (8 << 30) + 5
    info = tarfile.TarInfo("x")
    info.size = size
    member = Members(io.BytesIO(info.tobuf(tarfile.PAX_FORMAT) + b"12345")).next()
    assert member is not None
    assert (member.name, member.size, member.read(3), member.read(2)) == ("x", size, b"123", b"45")
    with pytest.raises(EOFError):
        member.read(1)


def test_a_head_of_megabytes_is_not_read(store: Store, other: Store) -> None:
    two_images(store)
    head = b"[" + b"[]," * (6 << 20) + b"[]]"
    changed = forged(store, lambda name, data: iter([(name, head if name == HEAD else data)]))
    with pytest.raises(StoreError) as caught:
        import_stream(other, changed, where="the file")
    assert f"has {len(head)} bytes" in str(caught.value.reason)


def with_entry(text: str, **changes: object) -> Callable[[str, bytes], Iterator[tuple[str, bytes]]]:
    """Change the line of one file in every list of files."""

    def change(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
        if name.endswith(".files"):
            lines = []
            for line in data.splitlines(keepends=True):
                values = json.loads(line)
                if isinstance(values, list) and values[0] == text:
                    fields = dict(zip(Entry.__slots__, values, strict=True)) | changes
                    values = [fields[slot] for slot in Entry.__slots__]
                lines.append(json.dumps(values).encode() + b"\n")
            data = b"".join(lines)
        yield name, data

    return change


def with_line(**fields: object) -> Callable[[str, bytes], Iterator[tuple[str, bytes]]]:
    """Add a line to every list of files."""
    entry = Entry(**{"path": "x", "kind": "l", "mode": 0o777, "uid": 0, "gid": 0, "mtime": 0, **fields})  # type: ignore[arg-type] # as tests give them

    def change(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
        yield name, data + encode(entry) if name.endswith(".files") else data

    return change


def with_number(of: str, field: str, text: str) -> Callable[[str, bytes], Iterator[tuple[str, bytes]]]:
    """Change a number in every record."""

    def change(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
        if of in name and name.endswith(".json"):
            data = re.sub(rf'"{field}": [0-9.e+-]+'.encode(), f'"{field}": {text}'.encode(), data)
        yield name, data

    return change


FILE = "lib/one.py"
FORGERIES: list[tuple[str, Callable[[str, bytes], Iterator[tuple[str, bytes]]], str]] = [
    ("absolute", with_entry(FILE, path="/etc/cron.d/x"), "no path in a tree"),
    ("upwards", with_entry(FILE, path="lib/../../../x"), "no path in a tree"),
    ("dots", with_entry(FILE, path=".."), "no path in a tree"),
    ("nul", with_entry(FILE, path="lib/a\0b"), "no path in a tree"),
    ("long", with_entry(FILE, path="lib/" + "x" * 300), "no path in a tree"),
    ("deep", with_entry(FILE, path="lib/" + "x/" * 2000 + "x"), "no path in a tree"),
    ("through a link", with_entry(FILE, path="link/x"), "is in no directory"),
    ("through a file", with_entry(FILE, path="lib/a.py/x"), "is in no directory"),
    ("nowhere", with_entry(FILE, path="nowhere/x"), "is in no directory"),
    ("twice", with_entry(FILE, path="lib/a.py"), "is there twice"),
    ("root again", with_line(path="", kind="d"), "no path in a tree"),
    ("device", with_line(kind="b"), "a value that it cannot have"),
    ("link to nothing", with_line(target=""), "points nowhere"),
    ("link of nul", with_line(target="a\0"), "points nowhere"),
    ("hard link out", with_line(kind="f", same="/etc/passwd", digest="0" * 64), "a name of nothing"),
    ("hard link to a link", with_line(kind="f", same="link", digest="0" * 64), "a name of nothing"),
    ("capability", with_entry(FILE, attributes=[["security.capability", "00"]]), "not taken from elsewhere"),
    ("trusted", with_entry(FILE, attributes=[["trusted.overlay.redirect", "00"]]), "not taken from elsewhere"),
    ("redirect", with_entry("lib", attributes=[["user.overlay.redirect", "2f"]]), "not taken from elsewhere"),
    ("no bytes", with_entry(FILE, attributes=[["user.x", "zz"]]), "no bytes"),
    ("many attributes", with_entry(FILE, attributes=[["user.x", ""]] * 200), "has 200 attributes"),
    ("attribute's name", with_entry(FILE, attributes=[["user." + "x" * 300, ""]]), "is too long"),
    ("attribute's value", with_entry(FILE, attributes=[["user.x", "00" * 70000]]), "is too long"),
    ("owner", with_entry(FILE, uid=1 << 20), "has owner"),
    ("negative owner", with_entry(FILE, gid=-1), "has owner"),
    ("mode", with_entry(FILE, mode=0o170644), "has mode"),
    ("size", with_entry(FILE, size=10), "not what its hash says"),
    ("large", with_entry(FILE, size=1 << 60), "has size"),
    ("two sizes", with_line(kind="f", size=1, digest="0" * 64), "not in it"),
    ("no hash", with_entry(FILE, digest="../../x"), "has no hash"),
    ("other hash", with_entry(FILE, digest="0" * 64), "not in it"),
    ("type", with_entry(FILE, size="10"), "the wrong type"),
    ("fields", lambda n, d: iter([(n, d + b"[1]\n" if n.endswith(".files") else d)]), "wrong number"),
    ("content", lambda n, d: iter([(n, d[:-1] + b"?" if n.startswith("objects/") and d else d)]), "not what its hash"),
    ("member", lambda n, d: iter([(f"../{n}" if n.startswith("objects/") else n, d)]), "it holds '../objects"),
    ("head", lambda n, d: iter([(n, b"[]" if n.endswith("images.json") else d)]), "its head"),
    ("order", lambda n, d: iter([] if n.endswith(".files") else [(n, d)]), "in place of"),
    ("no end", lambda n, d: iter([] if n == "end" else [(n, d)]), "ends too early"),
    ("image name", lambda n, d: iter([(n, d.replace(b'"name": "one"', b'"name": "../x"'))]), "not a usable name"),
    ("workdir", lambda n, d: iter([(n, d.replace(b'"/testbed"', b'"../../x"'))]), "a value that it cannot have"),
    ("workdir, NUL", lambda n, d: iter([(n, d.replace(b'"/testbed"', b'"/x\\u0000"'))]), "cannot have"),
    ("workdir, long", lambda n, d: iter([(n, d.replace(b'"/testbed"', b'"/' + b"x/" * 1501 + b'"'))]), "cannot have"),
    ("variable", lambda n, d: iter([(n, d.replace(b'"PATH"', b'"A=B"'))]), "a value that it cannot have"),
    ("created in no number", with_number("images.json", "created", "1" + "0" * 400), "created is 1000"),
    ("created never", with_number("images.json", "created", "NaN"), "created is nan"),
    ("created at no moment", with_number("images.json", "created", "Infinity"), "created is inf"),
    ("no seconds", with_number("layers/", "seconds", "Infinity"), "seconds is inf"),
    ("seconds in no number", with_number("layers/", "seconds", "1" + "0" * 400), "seconds is 1000"),
    ("negative bytes", with_number("layers/", "bytes", "-5"), "bytes is -5"),
    ("disk in no number", with_entry(FILE, disk=10**400), "too large"),
    ("negative size", with_entry(FILE, size=-1), "has size -1"),
    ("layer key", lambda n, d: iter([(n, d.replace(key_of("one").encode(), b"../../../x"))]), "not a layer key"),
    ("other key", lambda n, d: iter([(n, d.replace(b'"key": "' + key_of("one").encode(), b'"key": "' + b"0" * 64)
                                      if n.endswith(".json") and n.startswith("layers") else d)]), "another key"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "said"), FORGERIES, ids=[row[0] for row in FORGERIES])
def test_a_forged_file_is_refused(
    store: Store, other: Store, name: str, change: Callable[[str, bytes], Iterator[tuple[str, bytes]]], said: str
) -> None:
    two_images(store)
    with pytest.raises(MiniSandboxError) as caught:
        import_stream(other, forged(store, change), where="the file")
    assert said in str(caught.value), name
    assert isinstance(caught.value, StoreError)
    assert other.image_names() == []
    assert not (other.root.parent.parent / "x").exists()
    assert staged(other) == []


def test_the_lists_of_all_layers_have_a_limit(
    store: Store, other: Store, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer's list was within its limit, and six of them took 3.7 GB of the importer's memory."""
    monkeypatch.setattr(parcels, "MOST_MEMORY", 30_000)  # one of the two images has less
    for copy in (
        lambda: import_file(other, file),
        lambda: import_directory(other, store.root),
        lambda: export_file(store, ["one", "two"], tmp_path / "again.msb"),
    ):
        with pytest.raises(StoreError, match="has too many files in its layers") as caught:
            copy()
        assert "by name" in str(caught.value.hint)
    assert other.layer_keys() == []
    assert import_directory(other, store.root, ["one"]).images == ("one",)
    assert import_directory(other, store.root).images == ("one", "two")  # what is there already does not count


def test_records_of_layers_count_too(store: Store, other: Store, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "MOST_MEMORY", 26 * len(store.layer(key_of("base")).to_json()))
    with pytest.raises(StoreError, match="has too many files"):
        import_file(other, file)


def test_a_list_is_checked_as_it_is_read(store: Store, other: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows the first entry that cannot be used is not even decoded."""
    two_images(store)
    bad = encode(Entry("../x", "l", 0o777, 0, 0, 0, target="x"))
    changed = forged(store, lambda n, d: iter([(n, d + bad + b"no line\n" if n.endswith(".files") else d)]))
    with pytest.raises(StoreError) as caught:
        import_stream(other, changed, where="the file")
    assert "'../x' is no path in a tree" in str(caught.value.reason)


def test_a_line_of_megabytes_is_not_decoded(store: Store, other: Store) -> None:
    two_images(store)
    line = b"[" + b"[]," * (2 << 20) + b"[]]\n"
    changed = forged(store, lambda n, d: iter([(n, d + line if n.endswith(".files") else d)]))
    with pytest.raises(StoreError) as caught:
        import_stream(other, changed, where="the file")
    assert "more than a list can have" in str(caught.value.reason)


def test_setuid_is_not_taken_along(store: Store, other: Store) -> None:
    two_images(store)
    done = import_stream(other, forged(store, with_entry(FILE, mode=0o6755)), where="the file")
    assert done.privileges == 1
    assert stat.S_IMODE((other.layer_tree(key_of("one")) / FILE).stat().st_mode) == 0o755
    assert verify(other, full=True).damaged == ()


# --- to another user -------------------------------------------------------------------------------------------------

AS_A_USER = """
    import os, sys
    from pathlib import Path
    import encodings.ascii, zstandard
    from minisandbox.errors import MiniSandboxError
    from minisandbox.images.travel import export_file, import_directory, import_file
    from minisandbox.store import Store
    from minisandbox.store.verify import verify
    os.setgroups([]); os.setgid(12345); os.setuid(12345)  # now: the interpreter may be in root's home
    source, place = Path(sys.argv[1]), Path(sys.argv[2])
    read = Store.open(source)
    print(read.writable, [image.name for image in read.images()])
    mine = Store.open(place / "mine")
    done = import_file(mine, Path(sys.argv[3]))
    print(len(done.layers), done.owners, verify(mine, full=True).damaged)
    print({path.lstat().st_uid for path in (place / "mine").rglob("*")})
    direct = Store.open(place / "direct")
    print(import_directory(direct, source).owners, verify(direct, full=True).damaged)
    export_file(mine, ["odd"], place / "back")
"""


def test_another_users_images_become_ones_own(store: Store, other: Store, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be two users")
    key = add_layer(store, "owned", {"of/daemon": "x", "of/root": "y"})
    os.chown(store.layer_tree(key) / "of/daemon", 1, 1)
    store.remove_layer(key)

    def make(work: Path) -> Made:
        (work / "tree/of").mkdir(parents=True)
        for name, owner in (("daemon", 1), ("root", 0)):
            (work / "tree/of" / name).write_text(name * 100)
            os.chown(work / "tree/of" / name, owner, owner)
        return Made(work / "tree")

    store.ensure_layer(key, parent=None, step={"kind": "test"}, make=make)
    add_image(store, "odd", odd_layer(store), key)
    export_file(store, ["odd"], tmp_path / "file")
    closed = [path for path in tmp_path.parents if path.stat().st_mode & 0o005 != 0o005]
    for path in (*closed, tmp_path, *tmp_path.rglob("*")):
        if path.is_dir() or path.is_file():
            path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o044))
    (tmp_path / "user").mkdir()
    os.chown(tmp_path / "user", 12345, 12345)
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(AS_A_USER),
        *map(str, (store.root, tmp_path / "user", tmp_path / "file")),
    ]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "user")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.stdout.splitlines() == ["False ['odd']", "2 1 ()", "{12345}", "1 ()"], done.stderr
    import_file(other, tmp_path / "user/back")
    owners = {entry.uid for entry in read_entries(other.layer_directory(key))}
    assert owners == {0}, "what was the user's own is root's own"
    assert (other.layer_tree(key) / "of/daemon").read_text() == "daemon" * 100
