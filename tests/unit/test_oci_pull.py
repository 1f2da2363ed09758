"""Taking container images in: references, credentials, layouts, archives, and what a killed pull leaves."""

from __future__ import annotations

import base64
import bz2
import gzip
import hashlib
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from tests.unit.oci_tools import END, MadeImage, digest, entry, folder
from tests.unit.store_tools import end_of, python

from minisandbox.errors import DiskFull, ImageRefused, InvalidValue, NotFound
from minisandbox.images import import_images, load_image, pull
from minisandbox.images.oci.auth import Credentials, auth_files, find_credentials
from minisandbox.images.oci.manifest import find_manifest, parse_platform
from minisandbox.images.oci.pull import stored
from minisandbox.images.oci.reference import default_name, locations_of
from minisandbox.spec import Local, Remote, parse_reference
from minisandbox.store import Store
from minisandbox.store.blobs import streams as blobs
from minisandbox.store.verify import verify

FIRST = folder("etc") + entry("etc/passwd", b"root:x:0:0::/root:/bin/sh\n") + folder("d") + entry("d/gone") + END
SECOND = entry("d/.wh.gone") + entry("b", b"second") + END


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store.open(tmp_path / "store")


@pytest.fixture
def image() -> MadeImage:
    """An image of two layers."""
    return MadeImage(
        [FIRST, SECOND], {"Env": ["A=b=c", "PATH=/bin"], "WorkingDir": "w/../x", "User": "1:2", "Cmd": ["sh"]}
    )


# --- references ------------------------------------------------------------------------------------------------------

SHA = digest(b"x")
REFERENCES = {
    "python": Remote("docker.io", "library/python", "latest"),
    "docker.io/python:3.12": Remote("docker.io", "library/python", "3.12"),
    "swebench/sweb.eval.x86_64.a_1776_b-1:v1": Remote("docker.io", "swebench/sweb.eval.x86_64.a_1776_b-1", "v1"),
    "docker://ghcr.io/a/b": Remote("ghcr.io", "a/b", "latest"),
    "localhost/a": Remote("localhost", "a", "latest"),
    "localhost:5000/a/b/c:T_1.-x": Remote("localhost:5000", "a/b/c", "T_1.-x"),
    "[::1]:5000/a": Remote("[::1]:5000", "a", "latest"),
    f"ghcr.io/a/b@{SHA}": Remote("ghcr.io", "a/b", "", SHA),
    f"ghcr.io/a/b:t@{SHA}": Remote("ghcr.io", "a/b", "t", SHA),
    "oci:/some/dir:v1": Local("oci", Path("/some/dir"), "v1"),
    "docker-archive:/x.tar:a/b:c": Local("docker-archive", Path("/x.tar"), "a/b:c"),
}


@pytest.mark.parametrize("text", REFERENCES)
def test_references(text: str) -> None:
    assert parse_reference(text) == REFERENCES[text]


BAD_REFERENCES = (
    "", ":", "python:", "a/b:", "localhost:5000/a:", f"a/b:@{SHA}", "UPPER/case", "a//b", "a/b:-x", "a b", "host.io/",
    "ghcr.io/a@sha256:1", "ghcr.io/a@", "oci:", "../a", "a/../b", "x" * 300, "a:b:c", "http://ghcr.io/a", "a\0b",
    "ghcr.io/a/b@md5:" + "0" * 32,
)  # fmt: skip


@pytest.mark.parametrize("text", BAD_REFERENCES)
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        parse_reference(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "name"),
    [("python:3.12", "python-3.12"), ("ghcr.io/a/b:c", "ghcr.io_a_b-c"),
     ("localhost:5000/x", "localhost_5000_x-latest"),
     ("docker-archive:/d/app.tar.gz", "app"), ("oci-archive:/d/app.tar.xz:1", "app-1"),
     ("oci:/d/lay:v1", "lay-v1"), (f"a/b@{SHA}", f"a_b@{SHA[7:19]}")],
)  # fmt: skip
def test_names(text: str, name: str) -> None:
    assert default_name(text) == name


def test_the_longest_prefix_decides(tmp_path: Path) -> None:
    file = tmp_path / "r.conf"
    file.write_text(
        """
        [[registry]]
        prefix = "docker.io"
        location = "hub.example"
        [[registry]]
        prefix = "docker.io/library"
        location = "mirror.example:5000/lib"
        insecure = true
        [[registry]]
        prefix = "*.corp.example"
        location = "gate.example"
        [[registry.mirror]]
        location = "near.example/x"
        """
    )

    def places(text: str) -> list[str]:
        remote = parse_reference(text)
        assert isinstance(remote, Remote)
        return [f"{place}{' insecure' if place.insecure else ''}" for place in locations_of(remote, [file])]

    assert places("python:3") == ["mirror.example:5000/lib/python:3 insecure"]
    assert places("a/b") == ["hub.example/a/b:latest"]
    assert places("libraryish/b") == ["hub.example/libraryish/b:latest"]
    assert places("one.corp.example/a") == ["near.example/x/a:latest", "gate.example/a:latest"]
    assert places("ghcr.io/a") == ["ghcr.io/a:latest"]


def test_mirrors_for_digests_or_tags_only(tmp_path: Path) -> None:
    mirrors = '[[registry.mirror]]\nlocation = "{}.example"\npull-from-mirror = "{}"\n'
    rows = "".join(mirrors.format(kind.replace("-", ""), kind) for kind in ("all", "digest-only", "tag-only"))
    (tmp_path / "r.conf").write_text(f'[[registry]]\nprefix = "ghcr.io"\n{rows}')
    by_tag, by_digest = Remote("ghcr.io", "a", "1"), Remote("ghcr.io", "a", "", SHA)

    def hosts(reference: Remote) -> list[str]:
        return [place.host for place in locations_of(reference, [tmp_path / "r.conf"])]

    assert hosts(by_tag) == ["all.example", "tagonly.example", "ghcr.io"]
    assert hosts(by_digest) == ["all.example", "digestonly.example", "ghcr.io"]
    (tmp_path / "r.conf").write_text(
        '[[registry]]\nprefix = "ghcr.io"\nmirror-by-digest-only = true\n[[registry.mirror]]\nlocation = "near.example"'
    )
    assert hosts(by_tag) == ["ghcr.io"]
    assert hosts(by_digest) == ["near.example", "ghcr.io"]


@pytest.mark.parametrize(
    "text",
    ["registry = 1", "[[registry", '[[registry]]\nprefix = "docker.io"\nlocation = "A b"',
     '[[registry]]\nprefix = "docker.io"\n[[registry.mirror]]\ninsecure = true',
     '[[registry]]\nprefix = "docker.io"\nmirror = 5'],
)  # fmt: skip
def test_a_malformed_registries_conf_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.conf").write_text(text)
    with pytest.raises(InvalidValue, match=r"r\.conf"):
        locations_of(Remote("docker.io", "a/b", "latest"), [tmp_path / "r.conf"])


# --- credentials -----------------------------------------------------------------------------------------------------


def row(text: str) -> dict[str, str]:
    """An entry of an auth file."""
    return {"auth": base64.b64encode(text.encode()).decode()}


@pytest.mark.parametrize(
    ("auths", "host", "user"),
    [
        ({"ghcr.io": row("a:b:c")}, "ghcr.io", "a"),
        ({"ghcr.io": row("a:b"), "ghcr.io/team": row("t:b"), "ghcr.io/team/app": row("app:b")}, "ghcr.io", "app"),
        ({"https://index.docker.io/v1/": row("hub:b")}, "docker.io", "hub"),
        ({"ghcr.io/other": row("o:b")}, "ghcr.io", None),
        ({"https://ghcr.io": row("s:b")}, "ghcr.io", "s"),
        ({"ghcr.io": {}}, "ghcr.io", None),
    ],
)
def test_the_nearest_entry_decides(tmp_path: Path, auths: object, host: str, user: str | None) -> None:
    (tmp_path / "auth.json").write_text(json.dumps({"auths": auths}))
    found = find_credentials(host, "team/app", [tmp_path / "missing", tmp_path / "auth.json"])
    assert (found and found.user) == user


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"auths": {"ghcr.io": {"auth": "%%%"}}}', '{"auths": {"ghcr.io": {"auth": "YQ=="}}}']
)
def test_a_malformed_auth_file_is_named_and_not_repeated(tmp_path: Path, text: str) -> None:
    (tmp_path / "auth.json").write_text(text)
    with pytest.raises(InvalidValue, match=r"auth\.json") as caught:
        find_credentials("ghcr.io", "a/b", [tmp_path / "auth.json"])
    assert "%%%" not in str(caught.value)


def test_credentials_are_not_shown() -> None:
    assert "secret" not in repr(Credentials("me", "secret"))


def test_a_credential_helper_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = tmp_path / "docker-credential-try"
    helper.write_text(
        '#!/bin/sh\nread host\n[ "$host" = ghcr.io ] || exit 1\necho \'{"Username": "h", "Secret": "s"}\'\n'
    )
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"credHelpers": {"ghcr.io": "try", "quay.io": "try"}}))
    assert find_credentials("ghcr.io", "a", [file]) == Credentials("h", "s")
    assert find_credentials("quay.io", "a", [file]) is None
    file.write_text(json.dumps({"credsStore": "../../bin/sh"}))
    with pytest.raises(InvalidValue, match="credential helper"):
        find_credentials("ghcr.io", "a", [file])


def test_auth_files_are_podmans_and_dockers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/5")
    monkeypatch.setenv("HOME", "/me")
    assert [str(path) for path in auth_files()] == [
        "/run/user/5/containers/auth.json", "/me/.config/containers/auth.json", "/me/.docker/config.json",
    ]  # fmt: skip
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(auth_files()[0]) == f"/run/containers/{os.geteuid()}/auth.json", "where podman writes then"


# --- layouts and archives --------------------------------------------------------------------------------------------


def test_the_same_image_from_everywhere(store: Store, image: MadeImage, tmp_path: Path) -> None:
    layout = image.write_layout(tmp_path / "layout", tags=["v1"])
    subprocess.run(["tar", "-C", layout, "-cf", tmp_path / "layout.tar", "."], check=True)
    (tmp_path / "saved.tar").write_bytes(image.docker_archive("docker.io/library/app:1", "app:2"))
    (tmp_path / "saved.tar.gz").write_bytes(gzip.compress((tmp_path / "saved.tar").read_bytes()))
    texts = (
        f"oci:{layout}", f"oci:{layout}:v1", f"oci-archive:{tmp_path}/layout.tar",
        f"oci-archive:{tmp_path}/layout.tar:v1",
        f"docker-archive:{tmp_path}/saved.tar", f"docker-archive:{tmp_path}/saved.tar:app:1",
        f"docker-archive:{tmp_path}/saved.tar.gz:app:2",
    )  # fmt: skip
    taken = [pull(text, store=store, name=f"image{number}") for number, text in enumerate(texts)]
    assert len({one.layers for one in taken}) == 1
    one = taken[0]
    assert one.environment == (("A", "b=c"), ("PATH", "/bin"))
    assert str(one.workdir) == "/x"
    spec = one.spec()
    assert (spec.host_usr, spec.user) == (False, "1:2" if os.geteuid() == 0 else "")
    assert load_image(store, "image0").config["User"] == "1:2"
    assert not verify(store).damaged


def test_an_image_is_found_by_its_reference(store: Store, image: MadeImage, tmp_path: Path) -> None:
    layout = image.write_layout(tmp_path / "layout", tags=["v1"])
    assert load_image(store, pull(f"oci:{layout}:v1", store=store).name) == load_image(store, f"oci:{layout}:v1")


NAMES = {  # what an archive calls its image: references that lead to it, and some that do not
    "localhost/base:1": (
        ["localhost/base:1", "base:1"], ["localhost/base", "docker.io/base:1", "ghcr.io/base:1", "a/base:1"]),
    "localhost/team/base:latest": (["localhost/team/base", "team/base", "team/base:latest"], ["base", "team/base:1"]),
    "base:1": (["base:1", "docker.io/library/base:1", "library/base:1"], ["localhost/base:1", "base"]),
    "docker.io/library/base:1": (["base:1", "index.docker.io/base:1"], ["localhost/base:1"]),
    "ghcr.io/a/b:c": (["ghcr.io/a/b:c"], ["a/b:c", "b:c"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["docker-archive", "ref.name", "io.containerd.image.name"])
@pytest.mark.parametrize("name", NAMES)
def test_an_image_of_an_archive_is_found_by_its_own_name(
    store: Store, image: MadeImage, tmp_path: Path, name: str, kind: str
) -> None:
    if kind == "docker-archive":
        (tmp_path / "some.tar").write_bytes(image.docker_archive("other:1", name))
        taken = pull(f"docker-archive:{tmp_path}/some.tar", store=store)
    else:
        layout = image.write_layout(tmp_path / "layout", tags=[name if kind == "ref.name" else "1"])
        if kind != "ref.name":
            index = json.loads((layout / "index.json").read_text())
            index["manifests"][0]["annotations"][kind] = name
            (layout / "index.json").write_text(json.dumps(index))
        taken = pull(f"oci:{layout}", store=store, name="whatever")
    found, missing = NAMES[name]
    for reference in found:
        assert stored(store, reference) == taken
        assert load_image(store, reference) == taken
    for reference in missing:
        assert stored(store, reference) is None
    assert stored(store, found[0], "linux/s390x") is None


def test_an_import_records_a_reference_that_can_be_pulled(store: Store, image: MadeImage, tmp_path: Path) -> None:
    layout = image.write_layout(tmp_path / "layout", tags=["v1"])
    subprocess.run(["tar", "-C", layout, "-cJf", tmp_path / "layout.tar.xz", "."], check=True)
    (tmp_path / "saved.tar").write_bytes(image.docker_archive("app:1"))
    for name in ("layout", "layout.tar.xz", "saved.tar"):
        [taken] = import_images(tmp_path / name, store=store, replace=True)
        assert pull(taken.notes["reference"], store=store, name="again").layers == taken.layers


def test_of_several_archives_of_one_name_the_newest_counts(store: Store, image: MadeImage, tmp_path: Path) -> None:
    (tmp_path / "one.tar").write_bytes(image.docker_archive("localhost/base:1"))
    (tmp_path / "two.tar").write_bytes(MadeImage([FIRST]).docker_archive("localhost/base:1"))
    for name in ("two", "one"):
        taken = pull(f"docker-archive:{tmp_path}/{name}.tar", store=store)
        assert stored(store, "localhost/base:1") == taken


def test_several_images_of_a_layout_have_to_be_told_apart(store: Store, image: MadeImage, tmp_path: Path) -> None:
    other = MadeImage([entry("o") + END])
    layout = image.write_layout(tmp_path / "layout", other, tags=["v1", "v2"])
    assert (pull(f"oci:{layout}:v2", store=store).spec().layers[0] / "o").is_file()
    with pytest.raises(NotFound, match=r"2 images.*v1, v2"):
        pull(f"oci:{layout}", store=store)
    with pytest.raises(NotFound, match=r"0 images of this tag") as caught:
        pull(f"oci:{layout}:v3", store=store)
    assert str(caught.value).endswith(f"{layout}:v2")


def test_an_opaque_root_cuts_off_what_is_below(store: Store, tmp_path: Path) -> None:
    image = MadeImage([FIRST, entry(".wh..wh..opq") + entry("only") + END])
    taken = pull(f"oci:{image.write_layout(tmp_path / 'layout')}", store=store)
    assert len(taken.layers) == 2
    assert (taken.spec().layers[0] / "only").is_file()


def test_nothing_shows_through_an_opaque_root(store: Store, tmp_path: Path) -> None:
    old = folder("p", mode=0o700, uid=7) + entry("p/old") + END
    image = MadeImage([old, entry(".wh..wh..opq") + END, entry("p/new") + entry("p/.wh.old") + END])
    taken = pull(f"oci:{image.write_layout(tmp_path / 'layout')}", store=store)
    place = taken.spec().layers[1] / "p"
    assert [path.name for path in place.iterdir()] == ["new"]
    assert (place.stat().st_mode & 0o777, place.stat().st_uid) == (0o755, os.geteuid())


def test_a_layer_may_have_a_sha512_digest_of_its_tar(store: Store, tmp_path: Path) -> None:
    def image(tar: bytes) -> MadeImage:
        made = MadeImage([FIRST])
        config = next(blob for blob in made.blobs.values() if b"rootfs" in blob)
        other = config.replace(digest(FIRST).encode(), f"sha512:{hashlib.sha512(tar).hexdigest()}".encode())
        manifest = json.loads(made.manifest)
        manifest["config"] = made.describe(other, "")
        made.manifest = json.dumps(manifest).encode()
        made.describe(made.manifest, "")
        return made

    assert pull(f"oci:{image(FIRST).write_layout(tmp_path / 'right')}", store=store).layers
    with pytest.raises(ImageRefused, match="does not unpack to what its image says"):
        pull(f"oci:{image(SECOND).write_layout(tmp_path / 'wrong')}", store=store)


@pytest.mark.parametrize("user", ["0:0", "root:root", "root", "0:root"])
def test_root_is_no_lost_user(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str) -> None:
    monkeypatch.setattr("minisandbox.images.oci.pull.keeps_owners", lambda: False)
    taken = pull(f"oci:{MadeImage([FIRST], {'User': user}).write_layout(tmp_path / 'layout')}", store=store)
    assert (taken.user, taken.notes.get("not as in the image")) == ("", None)


def test_a_compressed_archive_does_not_fill_the_disk(
    store: Store, image: MadeImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(image.docker_archive()))
    monkeypatch.setattr(blobs, "SPARE", 1 << 62)
    with pytest.raises(DiskFull, match=r"cannot unpack .*x\.tar\.gz"):
        pull(f"docker-archive:{tmp_path}/x.tar.gz", store=store)


def test_layers_of_other_parents_are_other_layers(store: Store, tmp_path: Path) -> None:
    """What a layer hides, and how its directories look, depends on what is below it."""
    one = pull(f"oci:{MadeImage([FIRST, SECOND]).write_layout(tmp_path / 'one')}", store=store)
    two = pull(f"oci:{MadeImage([END, SECOND]).write_layout(tmp_path / 'two')}", store=store)
    assert (one.spec().layers[1] / "d/gone").is_char_device()
    assert not os.path.lexists(two.spec().layers[1] / "d/gone")


DAMAGED = {
    "no index": ("index.json", None, "no file 'index.json'"),
    "an index that is no JSON": ("index.json", b"<html>", "not JSON"),
    "an index that is a list": ("index.json", b"[]", "no JSON object"),
    "an index without manifests": ("index.json", b"{}", "'manifests' is no list"),
    "a manifest that is missing": ("manifest", None, "no file 'blobs/"),
    "a manifest that was changed": ("manifest", b"{}", "does not have the digest"),
    "a configuration that was changed": ("config", b"{}", "does not have the digest"),
    "a layer that was changed": ("layer", gzip.compress(SECOND), "does not (have the digest|unpack)"),
    "a layer that is missing": ("layer", None, "no file 'blobs/"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_layout_is_named(store: Store, image: MadeImage, tmp_path: Path, case: str) -> None:
    which, content, message = DAMAGED[case]
    layout = image.write_layout(tmp_path / "layout")
    manifest = json.loads(image.manifest)
    names = {
        "manifest": digest(image.manifest),
        "config": manifest["config"]["digest"],
        "layer": manifest["layers"][0]["digest"],
    }
    path = layout / (f"blobs/sha256/{names[which][7:]}" if which in names else which)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ImageRefused, match=message) as caught:
        pull(f"oci:{layout}", store=store)
    assert str(layout) in str(caught.value)
    assert not store.layer_keys()
    assert not store.images()


def test_files_of_a_layout_are_not_reached_through_links(store: Store, image: MadeImage, tmp_path: Path) -> None:
    layout = image.write_layout(tmp_path / "layout")
    (layout / "index.json").rename(tmp_path / "index.json")
    (layout / "index.json").symlink_to(tmp_path / "index.json")
    with pytest.raises(ImageRefused, match="link"):
        pull(f"oci:{layout}", store=store)
    (layout / "index.json").unlink()
    os.mkfifo(layout / "index.json")
    with pytest.raises(ImageRefused, match="pipe"):
        pull(f"oci:{layout}", store=store)


NO_ARCHIVES = {
    "empty": (b"", "no file 'manifest.json'"),
    "no tar": (b"x" * 600, "checksum"),
    "no JSON": (entry("manifest.json", b"{") + END, "malformed"),
    "no images": (entry("manifest.json", b"[]") + END, "no list of images"),
    "a number for a name": (entry("manifest.json", b'[{"Config": 5}]') + END, "Config"),
    "no configuration": (entry("manifest.json", b'[{"Config": "a", "Layers": []}]') + END, "no file 'a'"),
    "a path outside": (entry("manifest.json", b'[{"Config": "../../etc/passwd", "Layers": []}]') + END, "no file"),
    "cut": (gzip.compress(entry("a") + END)[:-9], "damaged or ends early"),
}


@pytest.mark.parametrize("case", NO_ARCHIVES)
def test_what_is_no_archive_is_named(store: Store, tmp_path: Path, case: str) -> None:
    data, message = NO_ARCHIVES[case]
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(ImageRefused, match=message) as caught:
        pull(f"docker-archive:{tmp_path}/x.tar", store=store)
    assert "x.tar" in str(caught.value)
    assert not [path for path in (store.root / "staging").iterdir() if path.name[0] != "."]


DEEP: list[object] = []
for _ in range(300):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("config", "message"),
    [({"WorkingDir": "\ud800"}, "surrogates"), ({"X": float("nan")}, "JSON"), ({"X": float("inf")}, "JSON"),
     ({"X": DEEP}, "100 levels")],
)  # fmt: skip
def test_a_configuration_that_is_no_json_is_refused(
    store: Store, tmp_path: Path, config: dict[str, object], message: str
) -> None:
    layout = MadeImage([FIRST], config).write_layout(tmp_path / "layout")
    with pytest.raises(ImageRefused, match=message):
        pull(f"oci:{layout}", store=store)
    assert not store.layer_keys()


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstandard.compress])
def test_archives_and_layers_of_every_compression(store: Store, tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    image = MadeImage([FIRST, SECOND], pack=pack)
    (tmp_path / "saved.tar").write_bytes(pack(image.docker_archive("app:1")))
    saved = pull(f"docker-archive:{tmp_path}/saved.tar", store=store)
    layers = pull(f"oci:{image.write_layout(tmp_path / 'layout')}", store=Store.open(tmp_path / "other"))
    assert saved.layers == layers.layers


def test_another_platform_is_refused_unless_it_is_asked_for(store: Store, tmp_path: Path) -> None:
    image = MadeImage([FIRST], architecture="riscv64")
    (tmp_path / "x.tar").write_bytes(image.docker_archive())
    with pytest.raises(NotFound, match=r"no image for linux/.*riscv64"):
        pull(f"docker-archive:{tmp_path}/x.tar", store=store)
    taken = pull(f"docker-archive:{tmp_path}/x.tar", store=store, platform="linux/riscv64")
    assert taken.notes["platform"] == "linux/riscv64"


# --- killed pulls ----------------------------------------------------------------------------------------------------

PULL = (
    "import sys; from minisandbox.images import pull; from minisandbox.store import Store; "
    "pull(sys.argv[1], store=Store.open(sys.argv[2]))"
)


@pytest.mark.parametrize("point", ["scanned", "moved", "recorded", "before-rename", "renamed"])
def test_a_pull_killed_at_a_point_resumes(tmp_path: Path, image: MadeImage, point: str) -> None:
    layout = image.write_layout(tmp_path / "layout")
    assert end_of(python(PULL, f"oci:{layout}", tmp_path / "store", killed_at=point)) == -signal.SIGKILL
    _resumes(tmp_path, f"oci:{layout}")


def _resumes(tmp_path: Path, reference: str) -> None:
    store = Store.open(tmp_path / "store")
    assert not [path for path in (store.root / "staging").iterdir() if path.name[0] != "."], "opening it removes them"
    taken = pull(reference, store=store)
    whole = pull(reference, store=Store.open(tmp_path / "fresh"))
    assert taken.layers == whole.layers
    assert store.layer_keys() == whole.store.layer_keys()
    assert not verify(store).damaged
    assert not os.listdir(store.root / "downloads")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_pull_killed_at_a_random_moment_resumes(tmp_path: Path, seed: int) -> None:
    files = [
        b"".join(entry(f"{layer}/{number}", os.urandom(3000)) for number in range(300)) + END for layer in range(4)
    ]
    layout = MadeImage(files).write_layout(tmp_path / "layout")
    process = subprocess.Popen([sys.executable, "-c", PULL, f"oci:{layout}", str(tmp_path / "store")])
    time.sleep(0.15 + random.Random(seed).random() * 0.8)
    process.kill()
    process.wait()
    _resumes(tmp_path, f"oci:{layout}")


def test_indexes_that_lead_to_each_other_end() -> None:
    row = {"digest": f"sha256:{'0' * 64}", "size": 1, "platform": {"os": "linux", "architecture": "amd64"}}
    text = json.dumps({"manifests": [row]}).encode()
    asked: list[str] = []

    def read(version: str) -> tuple[str, bytes]:
        asked.append(version)
        return f"sha256:{'0' * 64}", text

    with pytest.raises(ImageRefused, match="behind more than 3 indexes"):
        find_manifest("latest", read, parse_platform("linux/amd64"), "image")
    assert len(asked) == 4
