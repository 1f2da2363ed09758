"""Images go out as OCI images that anybody reads, or as copies that another store takes for its own."""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
from pathlib import Path

import pytest
from tests.faults import fill_disk_at
from tests.unit.oci_tools import END, MadeImage, entry, folder, link
from tests.unit.store_tools import add_image, add_layer, end_of, frozen_keys, key_of, python, two_images

from minisandbox.errors import DiskFull, ImageRefused, InvalidValue, NotFound, StoreError
from minisandbox.images import Image, export_images, host_image, import_images, pull
from minisandbox.images.image import image_of
from minisandbox.images.oci.copies import MEDIA_TYPE
from minisandbox.images.oci.export import repository_of
from minisandbox.images.oci.pull import tag_name
from minisandbox.store import ImageRecord, Made, Store
from minisandbox.store.blobs.freezing import freeze
from minisandbox.store.entries import read_entries
from minisandbox.store.sizes import StoreSizes
from minisandbox.store.verify import verify

FIRST = b"".join((folder("srv", mtime=5), entry("srv/a", b"first", mtime=7), entry("etc/passwd", b"root:x:0:0::/:\n")))
SECOND = b"".join((entry("srv/.wh.a"), entry("bin/tool", b"#!/bin/sh\n", mode=0o755), link("srv/link", "../bin/tool")))
CONFIG = {"Env": ["PATH=/bin", "A=b"], "WorkingDir": "/srv", "Entrypoint": ["/bin/tool"], "Labels": {"x": "y"}}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "here/store")


@pytest.fixture
def other(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "there/another")


@pytest.fixture
def image(store: Store, tmp_path: Path) -> Image:
    """A container image."""
    made = MadeImage([FIRST + END, SECOND + END], CONFIG)
    return pull(f"oci:{made.write_layout(tmp_path / 'layout')}", store=store, name="tool")


@pytest.fixture
def copy(store: Store, tmp_path: Path) -> Path:
    """A private copy of two images over the host's /usr."""
    two_images(store)
    export_images(store, ["one", "two"], tmp_path / "copy.tar", private=True)
    return tmp_path / "copy.tar"


def facts(store: Store, key: str) -> list[tuple[object, ...]]:
    """Everything about a layer's files but owners and inodes."""
    return [
        (e.path, e.kind, e.mode, e.mtime, e.size, e.digest, e.same, e.target, e.attributes)
        for e in read_entries(store.layer_directory(key))
    ]


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {one.name: archive.extractfile(one).read() for one in archive}  # type: ignore[union-attr] # all are files


def documents(path: Path) -> tuple[dict[str, object], dict[str, object]]:
    """The manifest and the configuration of the only image of an archive."""
    files = members(path)
    row = json.loads(files["index.json"])["manifests"][0]
    manifest = json.loads(files["blobs/" + row["digest"].replace(":", "/")])
    return manifest, json.loads(files["blobs/" + manifest["config"]["digest"].replace(":", "/")])


def clean(store: Store) -> bool:
    report = verify(Store.open(store.root), full=True)
    return not report.damaged and not report.images and os.listdir(store.root / "staging") == [".gate"]


# --- for everybody ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
@pytest.mark.parametrize("name", ["tool.tar", "tool"])
def test_an_image_goes_out_and_comes_back(
    store: Store, other: Store, image: Image, tmp_path: Path, name: str, compression: str
) -> None:
    done = export_images(store, ["tool"], tmp_path / name, compression=compression)
    assert (done.images, done.layers) == (("tool",), 2)
    (back,) = import_images(tmp_path / name, store=other)
    assert (back.name, back.environment, back.workdir) == ("tool", image.environment, image.workdir)
    assert (back.own_root, back.config) == (True, image.config)
    for mine, its in zip(image.layers[:-1], back.layers[:-1], strict=True):  # the last one is made where it is
        assert facts(store, mine) == facts(other, its)
    assert clean(other)


def test_what_comes_back_goes_out_as_the_same_bytes(store: Store, other: Store, image: Image, tmp_path: Path) -> None:
    export_images(store, ["tool"], tmp_path / "first.tar")
    (back,) = import_images(tmp_path / "first.tar", store=other)
    export_images(other, ["tool"], tmp_path / "second.tar")
    third = Store.open(tmp_path / "third")
    (again,) = import_images(tmp_path / "second.tar", store=third)
    assert again.key == back.key
    assert documents(tmp_path / "first.tar")[0]["layers"] == documents(tmp_path / "second.tar")[0]["layers"]
    export_images(other, ["tool"], tmp_path / "copy.tar")
    assert (tmp_path / "copy.tar").read_bytes() == (tmp_path / "second.tar").read_bytes()
    assert import_images(tmp_path / "copy.tar", store=third, replace=True)[0].key == again.key


def test_an_export_says_what_an_engine_needs(store: Store, image: Image, tmp_path: Path) -> None:
    export_images(store, ["tool"], tmp_path / "tool.tar")
    manifest, config = documents(tmp_path / "tool.tar")
    assert {row["mediaType"] for row in manifest["layers"]} == {  # type: ignore[attr-defined] # a list of objects
        "application/vnd.oci.image.layer.v1.tar+gzip"
    }
    assert config["config"] == {**CONFIG, "Env": ["PATH=/bin", "A=b"]}
    assert (config["os"], config["architecture"]) == ("linux", "amd64")
    table = json.loads(members(tmp_path / "tool.tar")["manifest.json"])
    assert table[0]["RepoTags"] == ["tool:latest"]
    back = pull(f"docker-archive:{tmp_path / 'tool.tar'}", store=store, name="docker")
    assert [facts(store, key) for key in back.layers] == [facts(store, key) for key in image.layers]


def test_hidden_tests_stay_here(store: Store, image: Image, tmp_path: Path) -> None:
    hidden = add_layer(store, "hidden", {"hidden/test_it.py": "assert answer == 42\n"})
    record = store.image("tool")
    values = {name: getattr(record, name) for name in ImageRecord.__slots__}
    store.put_image(ImageRecord(**{**values, "tests_layer": hidden}))
    export_images(store, ["tool"], tmp_path / "all.tar")
    assert len(documents(tmp_path / "all.tar")[0]["layers"]) == 2  # type: ignore[arg-type] # a list
    other = Store.open(tmp_path / "other")
    assert import_images(tmp_path / "all.tar", store=other)[0].tests_layer is None
    export_images(store, ["tool"], tmp_path / "private.tar", private=True)
    (back,) = import_images(tmp_path / "private.tar", store=other, private=True, replace=True)
    assert back.tests_layer == hidden
    assert (other.layer_tree(hidden) / "hidden/test_it.py").read_text() == "assert answer == 42\n"


def test_an_image_over_the_hosts_usr_is_refused(store: Store, tmp_path: Path) -> None:
    host_image(store)
    with pytest.raises(InvalidValue, match="has no /usr of its own") as caught:
        export_images(store, ["host"], tmp_path / "host.tar")
    assert "--private" in str(caught.value.hint)
    assert os.listdir(tmp_path) == ["here"]


@pytest.mark.usefixtures("image")
def test_a_directory_that_is_there_is_left_alone(store: Store, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(InvalidValue, match="is there already"):
        export_images(store, ["tool"], tmp_path / "mine")
    with pytest.raises(NotFound, match="'nothing'"):
        export_images(store, ["nothing"], tmp_path / "out.tar")
    with pytest.raises(StoreError, match="write"):
        export_images(store, ["tool"], tmp_path / "nowhere/out.tar")
    assert os.listdir(tmp_path / "mine") == []


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("django__django-11099", "django__django-11099"),
        ("Pandas@1", "pandas-1"),
        ("a___b", "a-b"),
        ("ghcr.io_a_b-c", "ghcr.io_a_b-c"),
        ("x-._", "x"),
        ("+", "image"),
    ],
)
def test_names_of_repositories(name: str, repository: str) -> None:
    assert repository_of(name) == repository


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("localhost/app:latest", "app"),
        ("python:3.12", "python-3.12"),
        ("docker.io/library/python:3.12", "python-3.12"),
        ("ghcr.io/a/b:latest", "ghcr.io_a_b"),
        ("django__django-11099:latest", "django__django-11099"),
        ("", "file"),
    ],
)
def test_names_of_imported_images(tag: str, name: str) -> None:
    assert tag_name(tag, Path("/some/file.tar")) == name


def test_every_image_of_an_archive_is_imported(store: Store, tmp_path: Path) -> None:
    one, two = MadeImage([FIRST + END]), MadeImage([FIRST + END, SECOND + END])
    one.write_layout(tmp_path / "both", two, tags=["one:latest", "two:1"])
    assert [image.name for image in import_images(tmp_path / "both", store=store)] == ["one", "two-1"]
    with pytest.raises(InvalidValue, match="has 2 images"):
        import_images(tmp_path / "both", store=store, name="x")
    (tmp_path / "saved.tar").write_bytes(one.docker_archive("old:2", "old:latest"))
    (saved,) = import_images(tmp_path / "saved.tar", store=store)
    assert saved.name == "old-2"
    assert import_images(tmp_path / "saved.tar", store=store, name="new")[0].layers == saved.layers


def test_another_image_is_not_replaced_unasked(store: Store, image: Image, tmp_path: Path) -> None:
    MadeImage([SECOND + END]).write_layout(tmp_path / "other", tags=["tool:latest"])
    with pytest.raises(InvalidValue, match=r"would replace the image tool; .*it was taken from oci:") as caught:
        import_images(tmp_path / "other", store=store)
    assert "--replace" in str(caught.value)
    assert len(import_images(tmp_path / "other", store=store, replace=True)[0].layers) == 2


def test_what_is_no_image_is_said(store: Store, other: Store, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ImageRefused):
        import_images(tmp_path / "text", store=store)
    with pytest.raises(NotFound, match="is not a file"):
        import_images(tmp_path / "nothing", store=store)
    with pytest.raises(InvalidValue, match="is a store") as caught:
        import_images(other.root, store=store)
    assert "image export" in str(caught.value.hint)


# --- for another store -----------------------------------------------------------------------------------------------


def odd_layer(store: Store) -> str:
    """A layer with everything that a tree can hold."""

    def make(work: Path) -> Made:
        tree = work / "tree"
        (tree / "closed").mkdir(parents=True)
        (tree / "closed/secret").write_text("secret")
        (tree / "closed/secret").chmod(0o400)
        os.link(tree / "closed/secret", tree / "closed/again")
        (tree / "unreadable").write_text("nobody")
        (tree / "unreadable").chmod(0)
        (tree / os.fsdecode(b"name \xff")).write_text("latin")
        (tree / ("long" * 40)).mkdir()
        (tree / ("long" * 40) / ("name" * 40)).write_text("both")
        (tree / "broken").symlink_to("../../../etc/shadow")
        os.mkfifo(tree / "pipe", 0o640)
        (tree / "setuid").write_text("#!/bin/sh\n")
        (tree / "setuid").chmod(0o4755)
        (tree / "opaque").mkdir()
        try:
            os.setxattr(tree / "opaque", "user.overlay.opaque", b"y")
            os.setxattr(tree / "setuid", "user.note", b"kept\xff")
        except OSError:
            pytest.skip("this file system has no extended attributes")
        os.mknod(tree / "deleted", stat.S_IFCHR, 0)
        os.utime(tree / "broken", (5, 5), follow_symlinks=False)
        os.utime(tree / "setuid", ns=(1, -1))
        (tree / "closed").chmod(0o500)
        return Made(tree, {"why": "odd"})

    store.ensure_layer(key_of("odd"), parent=None, step={"kind": "odd"}, make=make)
    return key_of("odd")


def test_a_copy_is_the_same_image(store: Store, other: Store, copy: Path) -> None:
    images = import_images(copy, store=other, private=True)
    assert [image.name for image in images] == ["one", "two"]
    assert other.images() == store.images()
    for key in store.layer_keys():
        mine, its = store.layer(key), other.layer(key)
        assert facts(other, key) == facts(store, key)
        assert (its.facts, its.seconds, its.step, its.parent) == (mine.facts, mine.seconds, mine.step, mine.parent)
        assert (its.imported, mine.imported) == (True, False)
    assert StoreSizes(other, other.images()).total == StoreSizes(store, store.images()).total
    assert clean(other)


def test_odd_things_travel(store: Store, other: Store, tmp_path: Path) -> None:
    key = odd_layer(store)
    add_image(store, "odd", key)
    export_images(store, ["odd"], tmp_path / "odd.tar", private=True)
    freeze(store, ["odd"])
    export_images(store, ["odd"], tmp_path / "frozen.tar", private=True)
    assert frozen_keys(store) == [key], "an export leaves it frozen"
    assert (tmp_path / "odd.tar").read_bytes() == (tmp_path / "frozen.tar").read_bytes()
    import_images(tmp_path / "odd.tar", store=other, private=True)
    assert facts(other, key) == facts(store, key)
    tree = other.layer_tree(key)
    assert (tree / "closed/again").samefile(tree / "closed/secret")
    assert clean(other)


def test_a_copy_is_taken_only_from_somebody_who_is_trusted(other: Store, copy: Path) -> None:
    with pytest.raises(InvalidValue, match="is a private copy") as caught:
        import_images(copy, store=other)
    assert "--private if you trust" in str(caught.value.hint)
    assert other.layer_keys() == []


def test_an_engine_cannot_take_a_copy_for_an_image(copy: Path) -> None:
    manifest, _ = documents(copy)
    assert manifest["config"]["mediaType"] == MEDIA_TYPE  # type: ignore[index] # an object
    assert "manifest.json" not in members(copy)


def test_only_what_is_missing_is_taken(other: Store, copy: Path) -> None:
    import_images(copy, store=other, private=True)
    other.remove_unused_layer(key_of("two"))
    before = {key: other.layer(key).created for key in other.layer_keys()}
    import_images(copy, store=other, private=True)
    assert {key: other.layer(key).created for key in before} == before
    one, two = other.layer_tree(key_of("one")), other.layer_tree(key_of("two"))
    assert (one / "lib/a.py").samefile(two / "lib/a.py")
    assert clean(other)


def test_a_copy_of_another_name_or_another_image_of_its_name(store: Store, other: Store, tmp_path: Path) -> None:
    two_images(store)
    export_images(store, ["one"], tmp_path / "one.tar", private=True)
    add_image(other, "one", add_layer(other, "mine", {"mine": "mine"}))
    with pytest.raises(InvalidValue, match="another image 'one'") as caught:
        import_images(tmp_path / "one.tar", store=other, private=True)
    assert "--replace" in str(caught.value.hint)
    assert other.layer_keys() == [key_of("mine")]
    assert import_images(tmp_path / "one.tar", store=other, private=True, name="new")[0].key == store.image("one").key
    import_images(tmp_path / "one.tar", store=other, private=True, replace=True)
    assert other.image("one") == store.image("one")


def rewritten(path: Path, change: object) -> None:
    """Change the records of a copy, and the digests that lead to them."""
    files = members(path)
    index = json.loads(files["index.json"])
    for row in index["manifests"]:
        manifest = json.loads(files.pop("blobs/" + row["digest"].replace(":", "/")))
        values = json.loads(files["blobs/" + manifest["config"]["digest"].replace(":", "/")])
        change(values)  # type: ignore[operator]
        for place, text in ((manifest["config"], json.dumps(values)), (row, "")):
            data = (text or json.dumps(manifest)).encode()
            place.update(MadeImage([FIRST]).describe(data, place["mediaType"]))
            files["blobs/" + place["digest"].replace(":", "/")] = data
    files["index.json"] = json.dumps(index).encode()
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


WRONG = {
    "no records": lambda values: values.clear(),
    "a layer less": lambda values: values["layers"].pop(),
    "another layer": lambda values: values["layers"][0].update(key="0" * 64),
    "a key that is none": lambda values: values["layers"][0].update(key="../../x"),
    "a name that is none": lambda values: values["image"].update(name="../x"),
    "no list": lambda values: values["layers"][0].pop("list"),
    "a list that is none": lambda values: values["layers"][0].update(list=""),
    "layers that are none": lambda values: values.update(layers=3),
    "a later format": lambda values: values["image"].update(format=9),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_a_forged_file_is_refused(other: Store, copy: Path, change: object) -> None:
    rewritten(copy, change)
    with pytest.raises(ImageRefused, match=r"malformed|has 2 layers"):
        import_images(copy, store=other, private=True)
    assert (other.image_names(), other.layer_keys()) == ([], [])


def test_a_layer_with_other_files_than_its_record_says_is_refused(other: Store, copy: Path) -> None:
    rewritten(copy, lambda values: values["layers"][0].update(list="0" * 64))
    with pytest.raises(StoreError, match="are not those of its list"):
        import_images(copy, store=other, private=True)
    assert (other.image_names(), other.layer_keys()) == ([], [])


# --- damage, a process that dies, a disk that is full ----------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 3, 600, 0.2, 0.4])
def test_a_truncated_archive_leaves_no_image(other: Store, copy: Path, left: float) -> None:
    data = copy.read_bytes()
    copy.write_bytes(data[: int(len(data) * left) if left < 1 else int(left)])
    with pytest.raises(ImageRefused):
        import_images(copy, store=other, private=True)
    assert other.image_names() == []
    assert clean(other)


def test_a_flipped_byte_is_found(other: Store, copy: Path) -> None:
    data = copy.read_bytes()
    with tarfile.open(copy) as archive:
        blobs = [(one.offset_data, one.size) for one in archive if "blobs/" in one.name]
    for start, size in blobs:
        for place in (0, size // 3, size // 2, size - 1):
            flipped = bytearray(data)
            flipped[start + place] ^= 16
            copy.write_bytes(flipped)
            with pytest.raises(ImageRefused):
                import_images(copy, store=other, private=True)
    assert other.image_names() in ([], ["one"]), "the second one has damaged layers"
    assert clean(other)


def test_a_damaged_layer_is_not_exported(store: Store, tmp_path: Path) -> None:
    two_images(store)
    path = store.layer_tree(key_of("one")) / "lib/a.py"
    path.write_text(path.read_text().replace("1", "2"))
    for name in ("f.tar", "f"):
        with pytest.raises(StoreError, match=r"lib/a\.py has other content"):
            export_images(store, ["one"], tmp_path / name, private=True)
    assert os.listdir(tmp_path) == ["here"]
    assert os.listdir(store.root / "staging") == [".gate"]


TRANSFER = """
    import sys
    from pathlib import Path
    from minisandbox.images import export_images, import_images
    from minisandbox.store import Store
    store, path = Store.open(sys.argv[1]), Path(sys.argv[2])
    if path.exists():
        import_images(path, store=store, private=True)
    else:
        export_images(store, store.image_names(), path, private=True)
"""


@pytest.mark.parametrize("point", ["layer-received", "taken", "renamed", "imported", "before-image"])
def test_an_import_may_die_anywhere(other: Store, copy: Path, point: str) -> None:
    assert end_of(python(TRANSFER, other.root, copy, killed_at=point)) == -9
    again = Store.open(other.root)
    assert again.image_names() == []
    assert clean(again)
    assert end_of(python(TRANSFER, other.root, copy)) == 0
    assert again.image_names() == ["one", "two"]
    assert clean(again)


@pytest.mark.parametrize("name", ["out.tar", "out"])
def test_an_export_may_die_anywhere(store: Store, tmp_path: Path, name: str) -> None:
    two_images(store)
    path = tmp_path / name
    assert end_of(python(TRANSFER, store.root, path, killed_at="blob-written")) == -9
    assert not path.exists()
    assert clean(store)
    assert list((store.root / "blobs").iterdir()) == []


@pytest.mark.parametrize("point", ["layer-received", "recorded", "before-image"])
def test_an_import_may_find_the_disk_full(
    other: Store, copy: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk_at(point, monkeypatch.setattr)
    with pytest.raises(DiskFull):
        import_images(copy, store=other, private=True)
    monkeypatch.undo()
    assert other.image_names() == []
    assert clean(other)
    assert len(import_images(copy, store=other, private=True)) == 2


def test_a_store_that_is_only_read_is_exported(store: Store, tmp_path: Path) -> None:
    two_images(store)
    theirs = Store.open(store.root, read_only=True)
    export_images(theirs, ["one"], tmp_path / "one.tar", private=True)
    assert sorted(os.listdir(tmp_path)) == ["here", "one.tar"]
    assert image_of(theirs.image("one"), theirs).layers


AS_A_USER = """
    import os, sys
    from pathlib import Path
    import encodings.ascii, isal.igzip_lib, zstandard
    from minisandbox.images.oci.export import export_images
    from minisandbox.images.oci.pull import import_images
    from minisandbox.store import Store
    from minisandbox.store.verify import verify
    os.setgroups([]); os.setgid(12345); os.setuid(12345)  # now: the interpreter may be in root's home
    source, place = Path(sys.argv[1]), Path(sys.argv[2])
    theirs, mine = Store.open(source), Store.open(place / "mine")
    print(theirs.writable, [image.name for image in theirs.images()])
    export_images(theirs, ["owned"], place / "theirs.tar", private=True)
    import_images(place / "theirs.tar", store=mine, private=True)
    print(verify(mine, full=True).damaged, {path.lstat().st_uid for path in (place / "mine").rglob("*")})
    export_images(mine, ["owned"], place / "back.tar", private=True)
"""


def test_another_users_images_become_ones_own(store: Store, other: Store, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be two users")

    def make(work: Path) -> Made:
        (work / "tree/of").mkdir(parents=True)
        for name, owner in (("daemon", 1), ("root", 0)):
            (work / "tree/of" / name).write_text(name * 100)
            os.chown(work / "tree/of" / name, owner, owner)
        return Made(work / "tree")

    store.ensure_layer(key_of("owned"), parent=None, step={"kind": "test"}, make=make)
    add_image(store, "owned", key_of("owned"))
    closed = [path for path in tmp_path.parents if path.stat().st_mode & 0o005 != 0o005]
    for path in (*closed, tmp_path, *tmp_path.rglob("*")):
        path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o044))
    (tmp_path / "user").mkdir()
    os.chown(tmp_path / "user", 12345, 12345)
    settings = {"HOME": str(tmp_path / "user"), "TMPDIR": str(tmp_path / "user")}
    running = python(AS_A_USER, store.root, tmp_path / "user", environment=settings)
    out, err = running.communicate(timeout=60)
    assert out.splitlines() == ["False ['owned']", "() {12345}"], err
    import_images(tmp_path / "user/back.tar", store=other, private=True)
    owners = {entry.uid for entry in read_entries(other.layer_directory(key_of("owned")))}
    assert owners == {0}, "what was the user's own is root's own"
