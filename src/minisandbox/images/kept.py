"""Records of layers that a user made by hand, and of the layer that each lies on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import BuildError, StoreError
from minisandbox.images.runner import BuildStep, Work
from minisandbox.store import Store
from minisandbox.store.disk.durable import write_atomic
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.records import StoreRecord
from minisandbox.store.store import check_name


@dataclass(frozen=True, slots=True)
class _Kept(StoreRecord):
    layers: Mapping[str, str]


def read_kept(store: Store, image: str) -> Mapping[str, str]:
    """Return the keys of the layers made by hand for an image, by the key of the layer below.

    Raises:
        StoreError: the record is damaged.
    """
    path = _path(store, image)
    with store_faults(f"read what was made by hand for {image}"):
        try:
            return _Kept.read(store.root, str(path.relative_to(store.root))).layers
        except FileNotFoundError:
            return {}
        except StoreError as error:
            error.hint = f"`minisandbox image rm {image}` removes it"
            raise


def write_kept(store: Store, image: str, layers: Mapping[str, str]) -> None:
    """Record the layers made by hand for an image, replacing the earlier record. See :func:`read_kept`.

    Raises:
        StoreError: the record cannot be written.
    """
    path = _path(store, image)
    with store_faults(f"record what was made by hand for {image}"):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomic(path, _Kept(layers).to_json())


def forget_kept(store: Store, image: str) -> bool:
    """Remove the record of the layers made by hand for an image; return whether there was a record."""
    path = _path(store, image)
    with store_faults(f"forget what was made by hand for {image}"):
        there = path.exists()
        path.unlink(missing_ok=True)
    return there


def images_by_hand(store: Store) -> list[str]:
    """Return the names of the images that have layers made by hand."""
    return sorted(path.stem for path in (store.root / "by-hand").glob("[!.]*.json"))


def kept_step(image: str, layer: str) -> BuildStep:
    """Return the build step of a layer made by hand; building the step fails, because the store must have the layer."""

    def prepare(_: Path) -> Work:
        raise BuildError(
            f"layer {layer[:16]}, made by hand for image {image!r}, is no longer in the store",
            step="by_hand",
            hint=f"`minisandbox image rm {image}` forgets it, and the next build does without",
        )

    return BuildStep("by_hand", {"kind": "by_hand", "layer": layer}, prepare)


def _path(store: Store, image: str) -> Path:
    return store.root / "by-hand" / f"{check_name(image)}.json"
