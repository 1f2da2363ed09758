"""Layers are unpacked one after the other, while those below are published."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from tests.unit.oci_tools import END, MadeImage, entry

from minisandbox.errors import ImageRefused
from minisandbox.images.oci.pull import pull
from minisandbox.store import Store
from minisandbox.store.blobs.streams import Blob


@pytest.fixture
def reference(tmp_path: Path) -> str:
    """An image of four layers in a layout."""
    MadeImage([entry(name, name.encode()) + END for name in "abcd"]).write_layout(tmp_path / "layout")
    return f"oci:{tmp_path / 'layout'}"


def test_a_layer_is_published_while_the_next_is_unpacked(
    reference: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, published, publish = threading.Event(), list[str | None](), Store._publish

    def slow(self: Store, *arguments: object) -> object:
        layer = arguments[2]
        assert published or second.wait(20), "the second layer waits until the first is published"
        record = publish(self, *arguments)  # type: ignore[arg-type]
        published.append(layer.parent)  # type: ignore[attr-defined]
        return record

    monkeypatch.setattr(Store, "_publish", slow)
    image = pull(
        reference, store=store, name="one", progress=lambda text: second.set() if "layer 2 of" in text else None
    )
    below = [None, *image.layers[:3]]
    assert published[:4] == below, "from the lowest to the highest"
    assert [path.name for layer in image.layers[:4] for path in store.layer_tree(layer).iterdir()] == [*"abcd"]


def test_an_interrupted_pull_reads_no_further_and_keeps_what_is_published(
    reference: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, given_up, begun = Blob.read, list[bool](), threading.Event()

    def interrupted(self: Blob, size: int) -> bytes:
        if begun.is_set():
            if not self.given_up.is_set():
                os.kill(os.getpid(), signal.SIGINT)
            given_up.append(self.given_up.wait(20))
        return read(self, size)

    monkeypatch.setattr(Blob, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pull(reference, store=store, name="one", progress=lambda text: begun.set() if "layer 3 of" in text else None)
    assert given_up
    assert all(given_up)
    assert {path.name for path in (store.root / "staging").iterdir()} <= {".gate"}
    assert len([*(store.root / "layers").glob("*/tree")]) == 2
    begun.clear()
    assert len(pull(reference, store=store, name="one").layers) == 5


def test_a_damaged_layer_ends_a_pull_whose_next_layer_waits(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [entry("a", b"a") + END, entry("../b", b"b") + END, entry("c", b"c") + END]
    MadeImage(layers).write_layout(tmp_path / "layout")
    with pytest.raises(ImageRefused, match=r"\.\./b"):
        pull(f"oci:{tmp_path / 'layout'}", store=store, name="one")
    assert not store.images()
    assert len([*(store.root / "layers").glob("*/tree")]) == 1
