"""Pulling from registries: retries, resuming, mirrors, and what each misbehaviour leads to."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import json
import os
import random
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path

import pytest
from tests.unit.oci_registry import Fault, Handler, Registry, answer, cut_after, hang_up, serve
from tests.unit.oci_tools import END, MadeImage, digest, entry

from minisandbox.errors import DiskFull, ImageRefused, InvalidValue, MiniSandboxError, NotFound, RegistryError
from minisandbox.images import Image, load_image, pull
from minisandbox.images.oci import http
from minisandbox.images.oci.manifest import choose, container, own_platform, parse_platform
from minisandbox.images.oci.pull import stored
from minisandbox.images.oci.registry import open_registry
from minisandbox.spec import Remote, parse_reference
from minisandbox.store import Store
from minisandbox.store.blobs import streams as blob_module
from minisandbox.store.verify import verify
from minisandbox.values import JSONValue

FIRST = entry("a", os.urandom(300_000)) + END
SECOND = entry("b", b"second") + END
SHA = digest(b"another")


@pytest.fixture
def image() -> MadeImage:
    """An image of two layers."""
    return MadeImage([FIRST, SECOND], {"Env": ["A=b"], "WorkingDir": "/w"})


def is_whole(taken: Image) -> bool:
    """Whether an image has all that was put into it, and its pull left nothing."""
    trees = taken.spec().layers
    here = sorted(path.name for path in (taken.store.root / "downloads").iterdir())
    staging = [path for path in (taken.store.root / "staging").iterdir() if path.name[0] != "."]
    return (trees[0] / "a").stat().st_size == 300_000 and (trees[1] / "b").is_file() and not here and not staging


def is_empty(store: Store) -> bool:
    """Whether a store has no layer, image or download."""
    return not store.layer_keys() and not store.images() and not os.listdir(store.root / "downloads")


# --- what works ------------------------------------------------------------------------------------------------------


def test_an_image_is_pulled_once(server: Registry, store: Store, image: MadeImage) -> None:
    reference = server.add(image, "1")
    taken = pull(reference, store=store)
    assert is_whole(taken)
    assert (dict(taken.environment)["A"], str(taken.workdir)) == ("b", "/w")
    assert taken.notes["digest"] == digest(image.manifest)
    fetched = len(server.paths("/blobs/"))
    assert fetched == 3
    assert pull(reference, store=store, name="again").layers == taken.layers
    assert len(server.paths("/blobs/")) == fetched + 1, "the configuration only"


def test_images_that_share_layers_share_them_here(server: Registry, store: Store, image: MadeImage) -> None:
    one = pull(server.add(image, "1"), store=store)
    other = MadeImage([FIRST, entry("c", b"third") + END])
    two = pull(server.add(other, "2"), store=store)
    assert one.layers[0] == two.layers[0]
    assert one.layers[1] != two.layers[1]


def test_a_digest_is_checked(server: Registry, store: Store, image: MadeImage) -> None:
    server.add(image, "1")
    wanted = digest(image.manifest)
    taken = pull(f"127.0.0.1:{server.port}/team/app@{wanted}", store=store)
    assert taken.name.endswith(f"app@{wanted[7:19]}")
    sha512 = f"sha512:{hashlib.sha512(image.manifest).hexdigest()}"
    server.manifests[sha512] = image.manifest
    assert pull(f"127.0.0.1:{server.port}/team/app@{sha512}", store=store).layers == taken.layers
    for wrong in (digest(b"other"), f"sha512:{'0' * 128}"):
        server.manifests[wrong] = image.manifest
        with pytest.raises(ImageRefused, match=f"does not have the digest {wrong}"):
            pull(f"127.0.0.1:{server.port}/team/app@{wrong}", store=store)


def test_a_child_of_an_index_is_checked_by_its_own_digest(server: Registry, store: Store, image: MadeImage) -> None:
    server.add(image, "1")
    row = {**image.row(), "digest": f"sha512:{'0' * 128}"}
    server.manifests |= {"all": json.dumps({"manifests": [row]}).encode(), f"sha512:{'0' * 128}": image.manifest}
    with pytest.raises(ImageRefused, match="does not have the digest sha512:"):
        pull(f"127.0.0.1:{server.port}/team/app:all", store=store)
    assert is_empty(store)


def test_an_image_of_another_platform_without_an_index_is_refused(server: Registry, store: Store) -> None:
    reference = server.add(MadeImage([SECOND], architecture="s390x"), "1")
    with pytest.raises(NotFound, match=r"no image for linux/.*it has: linux/s390x"):
        pull(reference, store=store)
    assert is_empty(store)
    assert pull(reference, store=store, platform="linux/s390x/z15").notes["platform"] == "linux/s390x"


def test_a_foreign_layer_is_fetched_where_the_registry_holds_it(server: Registry, store: Store) -> None:
    foreign = MadeImage([FIRST, SECOND], kinds=["application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"] * 2)
    reference = server.add(foreign, "1")
    server.faults[f"blobs/{digest(gzip.compress(SECOND, 1, mtime=0))}"] = [answer(404)]
    with pytest.raises(NotFound, match="nondistributable"):
        pull(reference, store=store)
    assert is_whole(pull(reference, store=store))


def test_an_image_is_only_found_by_its_own_reference(server: Registry, store: Store, image: MadeImage) -> None:
    reference = server.add(image, "1")
    with pytest.raises(NotFound) as caught:
        load_image(store, reference)
    assert f"image pull {reference}" in str(caught.value)
    taken = pull(reference, store=store)
    assert load_image(store, f"{reference}@{digest(image.manifest)}") == taken
    assert load_image(store, taken.name) == taken
    for other in (f"{reference}@{SHA}", reference.replace("team/app", "team_app")):
        with pytest.raises(NotFound, match="is not in the store"):
            load_image(store, other)
    with pytest.raises(InvalidValue, match=r"would replace the image .*team/app:1"):
        pull(reference.replace("team/app", "team_app"), store=store)
    assert load_image(store, reference) == taken
    server.add(MadeImage([SECOND]), "1")
    newer = pull(reference, store=store)
    assert newer.layers != taken.layers
    with pytest.raises(NotFound, match="is not in the store"):
        load_image(store, f"{reference}@{digest(image.manifest)}")


def test_an_index_is_selected_by_platform(server: Registry, store: Store, image: MadeImage) -> None:
    arm = MadeImage([entry("arm") + END], architecture="arm64")
    server.add(arm, "arm")
    server.add(image, "amd")
    attestation = {**arm.row(), "platform": {"os": "unknown", "architecture": "unknown"}}
    rows = [attestation, arm.row(), image.row()]
    server.manifests["all"] = json.dumps({"schemaVersion": 2, "manifests": rows}).encode()
    reference = f"127.0.0.1:{server.port}/team/app:all"
    assert is_whole(pull(reference, store=store, platform="linux/amd64"))
    assert pull(reference, store=store, platform="linux/arm64", name="arm").notes["platform"] == "linux/arm64"
    with pytest.raises(NotFound, match=r"no image for linux/s390x.*linux/amd64, linux/arm64"):
        pull(reference, store=store, platform="linux/s390x")
    taken = pull(reference, store=store, platform="linux/aarch64")
    assert taken.name.endswith("app-all-arm64"), "each platform has its own name"
    here = {text: stored(store, reference, text) for text in ("", "linux/arm64", "linux/arm64/v8", "linux/s390x")}
    assert [one and one.notes["platform"] for one in here.values()] == ["linux/amd64", *["linux/arm64"] * 2, None]


VARIANTS = {
    "linux/amd64": "plain", "linux/amd64/v3": "v3", "linux/arm64/v8": "arm", "linux/arm64": "arm", "linux/arm": "seven",
    "linux/arm/v6": "six", "linux/x86_64": "plain",
}  # fmt: skip


@pytest.mark.parametrize("text", VARIANTS)
def test_variants_are_selected(text: str) -> None:
    places = {
        "v3": "amd64/v3", "plain": "amd64/", "arm": "arm64/", "six": "arm/v6", "seven": "arm/v7",
    }  # fmt: skip
    rows = list[JSONValue]()
    for name, place in places.items():
        machine, _, variant = place.partition("/")
        platform: JSONValue = {"os": "linux", "architecture": machine, "variant": variant}
        rows.append({"digest": digest(name.encode()), "size": 1, "platform": platform})
    chosen = choose({"manifests": rows}, parse_platform(text), "the index")
    assert chosen.digest == digest(VARIANTS[text].encode())


def test_blobs_come_in_parallel(server: Registry, store: Store, image: MadeImage) -> None:
    together = threading.Barrier(2, timeout=10)

    def wait(_: Handler) -> bool:
        together.wait()
        return False

    config = digest(next(blob for blob in image.blobs.values() if b"rootfs" in blob))
    server.faults[f"/blobs/(?!{config})"] = [wait, wait]
    assert is_whole(pull(server.add(image, "1"), store=store))


# --- what is retried and resumed -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [answer(429, Retry_After="0"), answer(503), answer(500, b"<html>oops</html>"), hang_up,
     answer(429, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"), answer(502, Retry_After="soon")],
)  # fmt: skip
@pytest.mark.parametrize("where", ["/manifests/", "/blobs/"])
def test_trouble_that_passes(server: Registry, store: Store, image: MadeImage, where: str, fault: Fault) -> None:
    server.faults[where] = [fault, fault]
    assert is_whole(pull(server.add(image, "1"), store=store))


def test_retry_after_is_obeyed(server: Registry, store: Store, image: MadeImage) -> None:
    server.faults["/manifests/"] = [answer(429, Retry_After="1")]
    began = time.monotonic()
    assert is_whole(pull(server.add(image, "1"), store=store))
    assert time.monotonic() - began >= 1


def first_blob(image: MadeImage) -> str:
    """The digest of the large layer's blob."""
    return max(image.blobs, key=lambda name: len(image.blobs[name]))


def ranges(server: Registry, name: str) -> list[str]:
    """The ranges in which a blob was asked for."""
    return [headers.get("range", "") for path, headers in server.requests if name in path]


def test_a_blob_that_breaks_off_is_resumed(server: Registry, store: Store, image: MadeImage) -> None:
    name = first_blob(image)
    server.faults[name] = [cut_after(100_000), cut_after(50_000)]
    assert is_whole(pull(server.add(image, "1"), store=store))
    assert ranges(server, name) == ["", "bytes=100000-", "bytes=150000-"]


def test_a_registry_that_cannot_resume_starts_anew(server: Registry, store: Store, image: MadeImage) -> None:
    server.resumes = False
    server.faults[first_blob(image)] = [cut_after(100_000)]
    assert is_whole(pull(server.add(image, "1"), store=store))


def test_the_next_pull_resumes(server: Registry, store: Store, image: MadeImage) -> None:
    name = first_blob(image)
    server.faults[name] = [cut_after(100_000), *[cut_after(0)] * 9]
    with pytest.raises(RegistryError, match=r"breaks off.*100000 of .*run the same command again"):
        pull(server.add(image, "1"), store=store)
    del server.faults[name]
    server.requests.clear()
    assert is_whole(pull(server.add(image, "1"), store=store))
    assert ranges(server, name) == ["bytes=100000-"]


@pytest.mark.parametrize("fault", [OSError(errno.EHOSTUNREACH, "no route"), ssl.SSLEOFError(8, "EOF in violation")])
def test_a_network_that_breaks_while_a_blob_comes(
    server: Registry, store: Store, image: MadeImage, monkeypatch: pytest.MonkeyPatch, fault: OSError
) -> None:
    faults, read1 = [fault], HTTPResponse.read1

    def failing(response: HTTPResponse, count: int = -1) -> bytes:
        if faults:
            raise faults.pop()
        return read1(response, count)

    monkeypatch.setattr(HTTPResponse, "read1", failing)
    assert is_whole(pull(server.add(image, "1"), store=store))


def test_a_damaged_part_is_fetched_again(server: Registry, store: Store, image: MadeImage) -> None:
    name = first_blob(image)
    store.download_path(name[7:]).with_suffix(".part").write_bytes(b"x" * 1000)
    assert is_whole(pull(server.add(image, "1"), store=store))
    assert ranges(server, name) == ["bytes=1000-", ""]


# --- what is refused -------------------------------------------------------------------------------------------------


def lie(handler: Handler) -> bool:
    """Send other content of the same size."""
    blob = handler.server.registry.blobs[handler.path.rpartition("/")[2]]
    handler.send(200, bytes(len(blob)))
    return True


def document(config: str, *layers: str) -> bytes:
    """A manifest of a configuration and of layers of these media types."""
    rows = [{"digest": digest(b""), "size": 0, "mediaType": kind} for kind in layers]
    return json.dumps({"schemaVersion": 2, "layers": rows, "config": {"digest": config, "size": 1}}).encode()


def flood(handler: Handler) -> bool:
    """Send a megabyte."""
    handler.send(200, bytes(1 << 20))
    return True


MANIFEST, BLOB = "/manifests/", "/blobs/"
PAGE = b"<html>Log in</html>"
BAD: dict[str, tuple[str, Fault, type[MiniSandboxError], str]] = {
    "no such image": (MANIFEST, answer(404), NotFound, r"is not in its registry.*404"),
    "no such blob": (BLOB, answer(404), NotFound, r"lacks the blob sha256:"),
    "private": (MANIFEST, answer(401), RegistryError, r"access denied.*401.*podman login"),
    "forbidden": (MANIFEST, answer(403), RegistryError, r"access denied.*403"),
    "too many requests": (
        MANIFEST, answer(429, RateLimit_Limit="100;w=21600", Retry_After="0"), RegistryError,
        r"too many requests.*allows 100 in 6 hours.*mirror"),
    "too many requests for a day": (
        MANIFEST, answer(429, Retry_After="86400"), RegistryError, r"too many requests.*try again in 1440 min"),
    "leads nowhere": (MANIFEST, answer(302, Location="http://[x"), RegistryError, r"Invalid IPv6 URL"),
    "a pause that is no number": (MANIFEST, answer(503, Retry_After="\u00b2"), RegistryError, r"503"),
    "a pause until the end of time": (
        MANIFEST, answer(503, Retry_After="Fri, 01 Jan 0001 00:00:00 +2359"), RegistryError, r"503"),
    "leads elsewhere": (MANIFEST, answer(302, Location="ftp://127.0.0.1/x"), RegistryError, r"redirects .*'ftp'"),
    "in trouble": (MANIFEST, answer(503), RegistryError, r"503.*try again later"),
    "hangs up": (MANIFEST, hang_up, RegistryError, r"cannot be reached.*no HTTP"),
    "a page": (MANIFEST, answer(200, PAGE, Content_Type="text/html"), RegistryError, r"text/html.*login page"),
    "a page that says JSON": (
        MANIFEST, answer(200, PAGE, Content_Type="application/json"), RegistryError, r"not with a manifest"),
    "a manifest that breaks off": (MANIFEST, answer(200, b'{"a', length=500), RegistryError, r"breaks off"),
    "a manifest that is no JSON": (MANIFEST, answer(200, b"{nonsense"), ImageRefused, r"not JSON"),
    "a manifest without end": (MANIFEST, answer(200, b"{" + b" " * (5 << 20)), RegistryError, r"not with a manifest"),
    "a manifest of schema 1": (MANIFEST, answer(200, b'{"schemaVersion": 1}'), ImageRefused, r"schema 1"),
    "an artifact": (
        MANIFEST, answer(200, document(digest(b""), "application/x-chart")), ImageRefused, r"no container image"),
    "an encrypted image": (
        MANIFEST, answer(200, document(digest(b""), "application/vnd.oci.image.layer.v1.tar+gzip+encrypted")),
        ImageRefused, r"is encrypted"),
    "a hostile digest": (
        MANIFEST, answer(200, document("sha256:../../etc/passwd")), ImageRefused, r"is not a digest"),
    "a lying blob": (BLOB, lie, ImageRefused, r"configuration of .* that .* sends does not have the digest"),
    "a blob that is too long": (BLOB, flood, ImageRefused, r"does not have the digest|sends more"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named_and_nothing_is_published(
    server: Registry, store: Store, image: MadeImage, case: str
) -> None:
    where, fault, kind, message = BAD[case]
    server.faults[where] = [fault] * 20
    with pytest.raises(kind, match=message) as caught:
        pull(server.add(image, "1"), store=store)
    assert caught.value.exit_code in (6, 27, 28)
    assert caught.value.hint
    assert is_empty(store)


def test_a_layer_that_lies_leaves_nothing(server: Registry, store: Store, image: MadeImage) -> None:
    server.faults[first_blob(image)] = [lie] * 20
    message = f"127.0.0.1:{server.port} sends does not have the digest {first_blob(image)}"
    with pytest.raises(ImageRefused, match=message):
        pull(server.add(image, "1"), store=store)
    assert not store.images()
    assert not store.download_path(first_blob(image)[7:]).with_suffix(".part").exists()


def test_a_page_in_the_place_of_a_layer_is_named_and_not_kept(server: Registry, store: Store, image: MadeImage) -> None:
    name = first_blob(image)
    server.faults[name] = [answer(200, PAGE, Content_Type="text/html; charset=utf-8")] * 20
    with pytest.raises(RegistryError, match=f"while it sends {name}.*login page") as caught:
        pull(server.add(image, "1"), store=store)
    assert caught.value.exit_code == 27
    assert store.download_path(name[7:]).with_suffix(".part").stat().st_size == 0
    assert not store.images()
    server.faults.clear()
    assert is_whole(pull(server.add(image, "1"), store=store))


def test_a_hostile_layer_is_refused_and_not_kept(server: Registry, store: Store) -> None:
    image = MadeImage([entry("../../outside", b"x") + END])
    with pytest.raises(ImageRefused, match=r"entry '../../outside' is refused"):
        pull(server.add(image, "1"), store=store)
    assert is_empty(store)


def test_a_blob_that_is_too_large_is_not_fetched(server: Registry, store: Store, image: MadeImage) -> None:
    name = first_blob(image)
    image.manifest = image.manifest.replace(b'"size": %d' % len(image.blobs[name]), b'"size": %d' % (1 << 40))
    with pytest.raises(ImageRefused, match=f"layer {name} of {1 << 40} bytes"):
        pull(server.add(image, "1"), store=store)
    assert not ranges(server, name)


def test_a_download_without_room_leaves_nothing(
    server: Registry, store: Store, image: MadeImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = first_blob(image)
    store.download_path(name[7:]).with_suffix(".part").write_bytes(image.blobs[name][:1000])
    monkeypatch.setattr(blob_module, "SPARE", 1 << 62)
    with pytest.raises(DiskFull, match="cannot download"):
        pull(server.add(image, "1"), store=store)
    assert is_empty(store)


def test_a_layer_that_another_pull_publishes_leaves_nothing_half(
    server: Registry, store: Store, image: MadeImage
) -> None:
    name = first_blob(image)
    began, over = threading.Event(), threading.Event()

    def half(handler: Handler) -> bool:
        blob = handler.server.registry.blobs[name]
        handler.send(200, blob[: len(blob) // 2], length=len(blob))
        handler.wfile.flush()
        began.set()
        over.wait(20)
        return True

    server.faults[name] = [half]
    remote = parse_reference(server.add(image, "1"))
    assert isinstance(remote, Remote)
    with open_registry(remote, store, lambda _: None) as source:
        layers = container(source.manifest(own_platform()), "image", own_platform()).layers
        source.prefetch(layers)
        began.wait(20)
        source.published(layers[0])
        over.set()
    assert not [path for path in (store.root / "downloads").iterdir() if path.name.startswith(name[7:])]


def test_a_layer_of_another_diff_id_is_refused(server: Registry, store: Store, image: MadeImage) -> None:
    config = next(blob for blob in image.blobs.values() if b"rootfs" in blob)
    other = config.replace(digest(SECOND).encode(), digest(b"other").encode())
    image.describe(other, "")
    image.manifest = image.manifest.replace(digest(config).encode(), digest(other).encode())
    image.manifest = image.manifest.replace(b'"size": %d' % len(config), b'"size": %d' % len(other))
    with pytest.raises(ImageRefused, match="does not unpack to what its image says"):
        pull(server.add(image, "1"), store=store)
    assert len(store.layer_keys()) == 1, "the first layer is what it should be"
    assert not store.images()
    assert not os.listdir(store.root / "downloads")


def test_a_registry_that_hangs_has_a_deadline(
    server: Registry, store: Store, image: MadeImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "TIMEOUT", 0.2)
    monkeypatch.setattr(http, "ATTEMPTS", 2)
    over = threading.Event()

    def hang(_: Handler) -> bool:
        over.wait(20)
        return True

    server.faults["/manifests/"] = [hang, hang]
    with pytest.raises(RegistryError, match="did not answer within"):
        pull(server.add(image, "1"), store=store)
    over.set()


def test_pulls_at_the_same_time(server: Registry, store: Store, image: MadeImage) -> None:
    """The same blob in another place is another layer: one pull must not take it away from the other."""
    texts = [server.add(MadeImage([FIRST, SECOND]), "1"), server.add(MadeImage([SECOND, FIRST]), "2")]
    with ThreadPoolExecutor(6) as pool:
        coming = [pool.submit(pull, text, store=store, name=f"i{n}") for n, text in enumerate(texts * 3)]
        taken = [one.result() for one in coming]
    assert len({one.layers for one in taken}) == 2
    assert len(store.layer_keys()) == 5
    pull(server.add(image, "3"), store=store)
    assert not os.listdir(store.root / "downloads")


def test_a_failure_does_not_wait_for_what_else_is_coming(server: Registry, store: Store, image: MadeImage) -> None:
    name = first_blob(image)
    server.faults[name] = [answer(429, Retry_After="100")] * 9
    config = digest(next(blob for blob in image.blobs.values() if b"rootfs" in blob))
    server.faults[f"/blobs/(?!{config}|{name})"] = [answer(404)]
    image = MadeImage([SECOND, FIRST], image.config)
    began = time.monotonic()
    with pytest.raises(NotFound):
        pull(server.add(image, "1"), store=store)
    assert time.monotonic() - began < 30


# --- mirrors ---------------------------------------------------------------------------------------------------------


def configure(tmp_path: Path, text: str) -> None:
    """Write registries.conf."""
    (tmp_path / "registries.conf").write_text(text)


def test_mirrors_come_first_and_may_fail(server: Registry, store: Store, image: MadeImage, tmp_path: Path) -> None:
    server.add(image, "1")
    with serve() as mirror:
        configure(
            tmp_path,
            f"""
            [[registry]]
            prefix = "docker.io/swe"
            location = "127.0.0.1:{server.port}/team"
            [[registry.mirror]]
            location = "127.0.0.1:{mirror.port}/cache"
            """,
        )
        assert is_whole(pull("swe/app:1", store=store))
        assert mirror.paths("/cache/app/manifests/1")
        mirror.add(image, "1")
        server.requests.clear()
        assert is_whole(pull("swe/app:1", store=Store.open(tmp_path / "other")))
        assert not server.requests


def test_a_blocked_prefix_is_not_asked(store: Store, tmp_path: Path) -> None:
    configure(tmp_path, '[[registry]]\nprefix = "docker.io"\nblocked = true\n')
    with pytest.raises(InvalidValue, match=r"blocked.*registries.conf"):
        pull("python:3.12", store=store)


def test_gzip_and_plain_layers_make_the_same_tree(server: Registry, store: Store, tmp_path: Path) -> None:
    one = pull(server.add(MadeImage([FIRST], pack=bytes), "plain"), store=store)
    two = pull(server.add(MadeImage([FIRST], pack=lambda tar: gzip.compress(tar, 9)), "gzip"), store=store)
    assert one.layers == two.layers


# --- killed pulls ----------------------------------------------------------------------------------------------------

PULL = (
    "import sys; from minisandbox.images import pull; from minisandbox.store import Store; "
    "pull(sys.argv[1], store=Store.open(sys.argv[2]))"
)


def slowly(handler: Handler) -> bool:
    """Send a blob in pieces, with pauses."""
    blob = handler.server.registry.blobs[handler.path.rpartition("/")[2]]
    start = int((handler.headers.get("Range") or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
    handler.send(206 if start else 200, b"", length=len(blob) - start)
    with contextlib.suppress(OSError):
        for at in range(start, len(blob), 1 << 15):
            handler.wfile.write(blob[at : at + (1 << 15)])
            time.sleep(0.01)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_pull_killed_at_a_random_moment_resumes(server: Registry, tmp_path: Path, seed: int) -> None:
    layers = [
        b"".join(entry(f"{layer}/{number}", os.urandom(4000)) for number in range(200)) + END for layer in range(4)
    ]
    reference = server.add(MadeImage(layers), "1")
    server.faults["/blobs/"] = [slowly] * 100
    process = subprocess.Popen([sys.executable, "-c", PULL, reference, str(tmp_path / "store")])
    time.sleep(0.2 + random.Random(seed).random() * 1.2)
    process.kill()
    process.wait()
    store = Store.open(tmp_path / "store")
    taken = pull(reference, store=store)
    whole = pull(reference, store=Store.open(tmp_path / "fresh"))
    assert taken.layers == whole.layers
    assert store.layer_keys() == whole.store.layer_keys()
    assert not os.listdir(store.root / "downloads")
    assert not [path for path in (store.root / "staging").iterdir() if path.name[0] != "."]
    assert not verify(store).damaged
