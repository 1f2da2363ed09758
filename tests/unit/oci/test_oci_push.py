"""Images are pushed to registries: what they have is not sent, what breaks off goes on, and nothing secret is told."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from tests.unit.oci_registry import Handler, Registry, answer, hang_up
from tests.unit.oci_tools import END, MadeImage, entry, folder
from tests.unit.store_tools import add_image, add_layer, end_of, python, two_images

from minisandbox.cli.image.listing import chosen
from minisandbox.errors import InvalidValue, NotFound, RegistryError
from minisandbox.images import Image, host_image, pull, push
from minisandbox.store import Store
from minisandbox.store.blobs.freezing import freeze
from minisandbox.store.verify import verify

FIRST = b"".join((folder("srv", mtime=5), entry("srv/a", b"first" * 1000, mtime=7)))
SECOND = entry("bin/tool", os.urandom(100_000), mode=0o755)


@pytest.fixture
def image(store: Store, tmp_path: Path) -> Image:
    made = MadeImage([FIRST + END, SECOND + END], {"Cmd": ["/bin/tool"]})
    return pull(f"oci:{made.write_layout(tmp_path / 'layout')}", store=store, name="tool")


def place(server: Registry, tag: str = "1", repository: str = "team/app") -> str:
    return f"127.0.0.1:{server.port}/{repository}:{tag}"


def sent(server: Registry) -> int:
    """How many blobs were begun to be sent, the configuration left out."""
    return sum(row.startswith("PUT") and "/uploads/" in row for row in server.methods) - 1


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_what_is_pushed_can_be_pulled(
    server: Registry, store: Store, image: Image, tmp_path: Path, compression: str
) -> None:
    done = push("tool", place(server), store=store, compression=compression)
    assert (done.layers, done.sent, done.reference) == (2, 2, place(server))
    other = Store.open(tmp_path / "other")
    back = pull(done.reference, store=other)
    assert (back.environment, back.config["Cmd"]) == (image.environment, image.config["Cmd"])
    assert back.notes["digest"] == done.digest
    assert verify(other, full=True).damaged == ()
    assert list((store.root / "blobs").iterdir()) == [], "copies go once they are there"


@pytest.mark.usefixtures("image")
def test_what_the_registry_has_is_not_sent(server: Registry, store: Store, tmp_path: Path) -> None:
    push("tool", place(server), store=store)
    before = len(server.methods)
    again = push("tool", place(server, "2"), store=store)
    assert (again.sent, again.bytes) == (0, 0)
    assert not [row for row in server.methods[before:] if row.startswith("POST")]
    made = MadeImage([FIRST + END, entry("new", b"new") + END])
    pull(f"oci:{made.write_layout(tmp_path / 'more')}", store=store, name="more")
    assert push("more", place(server, "3"), store=store).sent == 1


@pytest.mark.usefixtures("image")
def test_the_reference_of_a_pull_names_the_image(server: Registry, store: Store) -> None:
    first = push("tool", place(server), store=store).reference
    name = pull(first, store=store).name
    assert chosen(store, [first, "tool"]) == [name, "tool"]
    done = push(first, place(server, "2"), store=store)
    assert (done.sent, done.lost) == (0, "")
    with pytest.raises(NotFound):
        chosen(store, [place(server, "9")])


@pytest.mark.usefixtures("image")
def test_a_layer_of_another_repository_is_mounted(server: Registry, store: Store) -> None:
    """A registry shows the blobs of one repository only; those of another can be taken over."""
    push("tool", place(server), store=store)

    def hidden(handler: Handler) -> bool:
        if handler.command == "HEAD":
            handler.send(404, b"")
        return handler.command == "HEAD"

    server.faults["/v2/team/new/blobs/sha256"] = [hidden] * 20
    before = len(server.methods)
    push("tool", place(server, "1", "team/new"), store=store)
    mounts = [path for path in server.paths("mount=") if "from=team%2Fapp" in path]
    assert len(mounts) == 2
    assert sum("/uploads/upload" in row for row in server.methods[before:]) == 1, "only the configuration is sent"


def test_a_layer_that_was_pulled_is_not_sent_back(server: Registry, store: Store, tmp_path: Path) -> None:
    tars = [FIRST + END, SECOND + END]
    image = pull(server.add(MadeImage(tars), "base"), store=store, name="base")
    server.faults["/v2/team/new/blobs/sha256"] = [answer(404)] * 2  # so that it takes them from the other repository
    done = push("base", place(server, "1", "team/new"), store=store)
    assert (done.layers, done.sent) == (2, 0)
    assert len([path for path in server.paths("mount=") if "from=team%2Fapp" in path]) == 2
    back = pull(done.reference, store=Store.open(tmp_path / "other"))
    assert back.layers == image.layers
    assert push("base", place(server, "copy"), store=store, private=True).sent == 3, "its list of files is another"
    assert pull(place(server, "copy"), store=Store.open(tmp_path / "third"), private=True).layers == image.layers


def test_a_copy_comes_back_as_the_same_image(server: Registry, store: Store, tmp_path: Path) -> None:
    two_images(store)
    freeze(store, ["two"])
    for name in ("one", "two"):
        push(name, place(server, name), store=store, private=True)
    other = Store.open(tmp_path / "other")
    with pytest.raises(InvalidValue, match="is a private copy"):
        pull(place(server, "one"), store=other, name="one")
    assert other.layer_keys() == []
    for name in ("one", "two"):
        pull(place(server, name), store=other, private=True)
        assert other.image(name) == store.image(name)
    assert verify(other, full=True).damaged == ()
    assert os.listdir(other.root / "downloads") == []


@pytest.mark.usefixtures("image")
def test_what_cannot_be_pushed(server: Registry, store: Store) -> None:
    host_image(store)
    with pytest.raises(InvalidValue, match="has no /usr of its own"):
        push("host", place(server), store=store)
    for wrong in (f"oci:{store.root}/x", f"{place(server)}@sha256:{'0' * 64}"):
        with pytest.raises(InvalidValue, match="cannot push to"):
            push("tool", wrong, store=store)
    with pytest.raises(NotFound, match="'nothing'"):
        push("nothing", place(server), store=store)
    assert server.requests == []


@pytest.mark.usefixtures("image")
def test_it_logs_in_and_asks_for_the_right_to_push(
    server: Registry, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.token = "T0KEN"
    server.basic = "user:pass"
    with pytest.raises(RegistryError, match=r"does not take team/app: access denied") as caught:
        push("tool", place(server), store=store)
    assert "log in" in str(caught.value.hint)
    table = {"auths": {f"127.0.0.1:{server.port}": {"auth": server.basic_header.removeprefix("Basic ")}}}
    (tmp_path / "auth.json").write_text(json.dumps(table))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    assert push("tool", place(server), store=store).sent == 2


# --- what goes wrong -------------------------------------------------------------------------------------------------


def half(handler: Handler) -> bool:
    """Take half of a blob, and break off."""
    if handler.command != "PUT":
        return False
    name = handler.path.rpartition("/")[2].partition("?")[0]
    handler.server.registry.uploads[name] += handler.read_body(30_000)
    return hang_up(handler)


def forget(handler: Handler) -> bool:
    """Break off, and know nothing of what came before."""
    if handler.command != "PUT":
        return False
    handler.server.registry.uploads.clear()
    return hang_up(handler)


def refuse(status: int) -> object:
    def fault(handler: Handler) -> bool:
        handler.read_body()
        handler.send(status, b'{"errors": [{"code": "DENIED", "message": "no"}]}')
        return True

    return fault


def test_an_interrupted_blob_goes_on_where_it_was(server: Registry, store: Store) -> None:
    add_image(store, "big", add_layer(store, "big", {"noise": os.urandom(100_000).hex()}))
    server.faults["/uploads/upload"] = [half]
    done = push("big", place(server), store=store, private=True)
    ranges = [headers["content-range"] for _, headers in server.requests if "content-range" in headers]
    assert len(ranges) == 1
    assert re.fullmatch(r"30000-\d+", ranges[0])
    assert done.sent == 1


@pytest.mark.usefixtures("image")
def test_a_forgotten_upload_begins_again(server: Registry, store: Store) -> None:
    server.faults["/uploads/upload"] = [forget]
    assert push("tool", place(server), store=store).sent == 2


@pytest.mark.usefixtures("image")
@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_registry_in_trouble_is_tried_again(server: Registry, store: Store, status: int) -> None:
    server.faults["/uploads/"] = [refuse(status)] * 2  # type: ignore[list-item] # it is a fault
    server.faults["/manifests/"] = [refuse(status)]  # type: ignore[list-item]
    assert push("tool", place(server), store=store).layers == 2


@pytest.mark.usefixtures("image")
@pytest.mark.parametrize(("where", "status"), [("/uploads/", 403), ("/uploads/", 413), ("/manifests/", 400)])
def test_a_refusal_is_said_and_the_next_push_sends_the_rest(
    server: Registry, store: Store, where: str, status: int
) -> None:
    server.faults[where] = [refuse(status)] * 40  # type: ignore[list-item]
    with pytest.raises(RegistryError, match="does not take team/app") as caught:
        push("tool", place(server), store=store)
    assert f"{status}" in str(caught.value.reason)
    assert "1" not in server.manifests
    server.faults.clear()
    assert push("tool", place(server), store=store).layers == 2
    assert list((store.root / "blobs").iterdir()) == [] or status == 400


@pytest.mark.usefixtures("image")
def test_an_upload_is_not_led_elsewhere(server: Registry, store: Store) -> None:
    def lead(handler: Handler) -> bool:
        handler.send(202, b"", {"Location": "file:///etc/passwd"})
        return True

    server.faults["/uploads/"] = [lead] * 40
    with pytest.raises(RegistryError):
        push("tool", place(server), store=store)


@pytest.mark.usefixtures("image")
def test_a_server_that_is_no_registry(server: Registry, store: Store) -> None:
    def page(handler: Handler) -> bool:
        handler.read_body()
        handler.send(404 if handler.command == "HEAD" else 200, b"<html>", {"Content-Type": "text/html"})
        return True

    server.faults["/"] = [page] * 100
    with pytest.raises(RegistryError, match="does not say where to send a blob"):
        push("tool", place(server), store=store)


PUSH = """
    import sys
    from minisandbox.images import push
    from minisandbox.store import Store
    push("tool", sys.argv[2], store=Store.open(sys.argv[1]))
"""


@pytest.mark.usefixtures("image")
@pytest.mark.parametrize("point", ["blob-written", "blob-there", "blob-sent", "blobs-pushed"])
def test_a_push_may_die_anywhere(server: Registry, store: Store, point: str) -> None:
    assert end_of(python(PUSH, store.root, place(server), killed_at=point)) == -9
    assert "1" not in server.manifests
    assert verify(Store.open(store.root), full=True).damaged == ()
    push("tool", place(server), store=store)
    assert "1" in server.manifests
