"""Images cross from store to store: only what is missing, in chunks, checked, within a budget."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from tests.unit.store_tools import add_image, add_layer, two_images

from minisandbox.errors import StoreError
from minisandbox.images.crossing import CHUNK, Outgoing, Throttle, take_over
from minisandbox.store import ImageRecord, Store
from minisandbox.store.verify import verify

FREE = Throttle(None)
NOTHING = hashlib.sha256().hexdigest()


class Neighbour:
    """Another store, as if it were on another node."""

    where = "node next door"

    def __init__(self, store: Store) -> None:
        self.store = store
        self.layers: list[str] = []
        self.contents: list[str] = []
        self.chunks = 0
        self.harm = False
        self.cut = False

    def record(self, name: str) -> ImageRecord:
        return self.store.image(name)

    def stream(self, name: str, keys: Collection[str], contents: Collection[str] | None) -> Iterator[bytes]:
        if contents is None:
            self.layers += keys
        else:
            self.contents += contents
        outgoing = Outgoing(self.store, name, keys, contents, FREE)
        while chunk := outgoing.read():
            assert len(chunk) <= CHUNK
            self.chunks += 1
            if contents is not None and self.cut:
                return
            yield chunk[:-9] + bytes([chunk[-9] ^ 1]) + chunk[-8:] if self.harm else chunk


@pytest.fixture
def near(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "near")


@pytest.fixture
def far(tmp_path: Path) -> Neighbour:
    store = Store.open(tmp_path / "far")
    two_images(store)
    return Neighbour(store)


def test_each_layer_and_each_content_crosses_once(near: Store, far: Neighbour) -> None:
    first = take_over(near, "one", far, FREE)
    second = take_over(near, "two", far, FREE)
    assert set(far.layers) == {*first.layers, *second.layers}
    assert len(far.layers) == len(set(far.layers))
    crossed = [digest for digest in far.contents if digest != NOTHING]  # it takes nothing
    assert len(crossed) == len(set(crossed))
    assert near.image("two").layers == far.store.image("two").layers
    assert not verify(near, full=True).damaged
    before = far.chunks
    again = take_over(near, "two", far, FREE)
    assert (again.layers, again.bytes, far.chunks) == ((), 0, before)


def test_what_files_here_have_is_not_sent(near: Store, far: Neighbour) -> None:
    big = {"same.txt": "x" * 100_000, "other.txt": "far"}
    key = add_layer(far.store, "big", big)
    add_image(far.store, "big", key)
    add_layer(near, "small", {"copy.txt": "x" * 100_000})
    done = take_over(near, "big", far, FREE)
    assert done.bytes < 1000
    assert (near.layer_tree(key) / "same.txt").read_text() == big["same.txt"]
    assert not verify(near, full=True).damaged


@pytest.mark.parametrize("fault", ["harm", "cut"])
def test_what_is_damaged_or_cut_off_leaves_nothing(near: Store, far: Neighbour, fault: str) -> None:
    setattr(far, fault, True)
    with pytest.raises(StoreError):
        take_over(near, "one", far, FREE)
    assert not list(near.image_names())
    setattr(far, fault, False)
    assert take_over(near, "one", far, FREE).layers


def test_a_budget_is_kept_to() -> None:
    throttle, began = Throttle(1_000_000), time.monotonic()
    for _ in range(5):
        throttle(100_000)
    assert time.monotonic() - began >= 0.45
