"""The indexes of images and layers show what the records say, whatever happens to either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.store_tools import add_image, add_layer, two_images

from minisandbox.store import Store, index
from minisandbox.store.blobs.freezing import freeze
from minisandbox.store.collect import remove_images
from minisandbox.store.overview import ImageStatus, image_rows
from minisandbox.store.records import StoreRecord
from minisandbox.store.sizes import StoreSizes


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(index, "_FEW", 1)
    monkeypatch.setattr(index, "_SETTLED", -(10**18))  # also files of this moment
    store = Store.open(tmp_path / "store")
    two_images(store)
    image_rows(store)
    assert {path.name for path in store.root.glob("*.index")} == {"images.index", "layers.index"}
    return store


def without_index(store: Store) -> list[object]:
    """What is listed if all records are read."""
    for path in store.root.glob("*.index"):
        path.unlink()
    return [*image_rows(store)]


def test_unchanged_records_are_not_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = image_rows(store)
    monkeypatch.setattr(StoreRecord, "read", lambda *_: pytest.fail("a record was read"))
    assert image_rows(store) == rows


def _publish(store: Store) -> None:
    add_image(store, "three", add_layer(store, "three", {"x": "x" * 9000}))


def _freeze(store: Store) -> None:
    freeze(store, ["one"])


def _replace(store: Store) -> None:
    store.put_image(replace(store.image("one"), base_commit="c" * 40))


@pytest.mark.parametrize("change", [_publish, _freeze, _replace, lambda store: remove_images(store, ["one"])])
def test_a_change_is_listed(store: Store, change: Callable[[Store], object]) -> None:
    before = image_rows(store)
    change(store)
    rows = image_rows(store)
    assert rows != before
    assert rows == without_index(store)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99}', '{"format": 1, "rows": {"one.json": 7}}'])
def test_a_damaged_index_is_ignored(store: Store, text: str) -> None:
    rows, total = image_rows(store), StoreSizes(store, store.images()).total
    for path in store.root.glob("*.index"):
        path.write_text(text)
    assert image_rows(store) == rows
    assert StoreSizes(store, store.images()).total == total


def test_a_damaged_record_is_broken(store: Store) -> None:
    (store.root / "images/one.json").write_text("{")
    assert {row.name: row.status for row in image_rows(store)}["one"] is ImageStatus.BROKEN
