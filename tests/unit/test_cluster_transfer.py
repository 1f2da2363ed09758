"""Images go from node to node: only what is missing, as blobs, checked, within a budget."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.store_tools import frozen_keys, two_images

from minisandbox.errors import ImageRefused, NotFound, StoreError
from minisandbox.rollouts.cluster import transfer
from minisandbox.rollouts.cluster.transfer import Peer, Throttle, blob_of, copy_of, fetch_image, read_part
from minisandbox.store import Store
from minisandbox.store.blobs.freezing import freeze
from minisandbox.store.blobs.kept import LayerBlob
from minisandbox.store.verify import verify

FREE = Throttle(None)


class Neighbour:
    """Another node's worker."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.blobs: list[str] = []
        self.harm = self.cut = False

    async def copy(self, name: str) -> bytes:
        return copy_of(self.store, name)

    async def blob(self, key: str) -> LayerBlob:
        self.blobs.append(key)
        return blob_of(self.store, key)

    async def read(self, digest: str, offset: int) -> bytes:
        part = read_part(self.store, digest, offset, FREE)
        if self.cut:
            return b""
        return part[:-1] + bytes([part[-1] ^ 1]) if self.harm and part else part


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own, as a worker's is."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def near(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "near")


@pytest.fixture
def far(tmp_path: Path) -> Neighbour:
    store = Store.open(tmp_path / "far")
    two_images(store)
    return Neighbour(store)


@pytest.fixture
def peer(far: Neighbour, loop: asyncio.AbstractEventLoop) -> Peer:
    return Peer("node next door", far, FREE, loop)


def test_each_layer_goes_over_once(near: Store, far: Neighbour, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_CHUNK", 64)
    first, second = fetch_image(near, "one", peer), fetch_image(near, "two", peer)
    keys = [record.key for record in (*first, *second)]
    assert keys == far.blobs
    assert sorted(keys) == far.store.layer_keys() == near.layer_keys()
    assert near.images() == far.store.images()
    assert not verify(near, full=True).damaged
    before = peer.wire
    assert before == sum(path.stat().st_size for path in (far.store.root / "blobs").iterdir())
    assert fetch_image(near, "two", peer) == []
    assert peer.wire == before


def test_what_is_frozen_is_sent_as_it_is(near: Store, far: Neighbour, peer: Peer) -> None:
    freeze(far.store, ["one", "two"])
    fetch_image(near, "one", peer)
    assert len(frozen_keys(far.store)) == 3
    assert not verify(near, full=True).damaged


@pytest.mark.parametrize("fault", ["harm", "cut"])
def test_what_is_damaged_or_cut_off_leaves_nothing(near: Store, far: Neighbour, peer: Peer, fault: str) -> None:
    setattr(far, fault, True)
    with pytest.raises(ImageRefused):
        fetch_image(near, "one", peer)
    assert (near.image_names(), near.layer_keys()) == ([], [])
    setattr(far, fault, False)
    assert fetch_image(near, "one", peer)


def test_what_is_not_there_is_said(near: Store, far: Neighbour, peer: Peer) -> None:
    with pytest.raises(NotFound):
        fetch_image(near, "three", peer)
    blob = blob_of(far.store, far.store.layer_keys()[0])
    blob.path.unlink()
    with pytest.raises(StoreError, match="read blob"):
        read_part(far.store, blob.digest, 0, FREE)
    with pytest.raises(ImageRefused, match="is not a digest"):
        read_part(far.store, "sha256:../../version", 0, FREE)


def test_a_budget_is_kept_to() -> None:
    throttle, began = Throttle(1_000_000), time.monotonic()
    for _ in range(5):
        throttle(100_000)
    assert time.monotonic() - began >= 0.45
