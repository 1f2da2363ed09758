"""Layers that were made by hand, and where in an image's chain they belong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import BuildError, StoreError
from minisandbox.images.runner import BuildStep, Work
from minisandbox.store import Store
from minisandbox.store.disk.durable import write_atomic
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.disk.reading import read_below
from minisandbox.store.records import MOST
from minisandbox.store.store import check_name

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Kept:
    """The layers made by hand for one image.

    Attributes:
        image: its name.
        layers: by the key of the layer below, the key of the layer made over it.
    """

    image: str
    layers: dict[str, str]


def read_kept(store: Store, image: str) -> Kept:
    """Return what was made by hand for an image.

    Raises:
        StoreError: the record is damaged.
    """
    path = _path(store, image)
    try:
        values = json.loads(read_below(store.root, f"{path.parent.name}/{path.name}", MOST))
        if values["format"] != _FORMAT:
            raise ValueError(f"format {values['format']!r}")
        return Kept(image, {str(below): str(layer) for below, layer in values["layers"].items()})
    except FileNotFoundError:
        return Kept(image, {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(
            f"record {path} is damaged",
            reason=str(error),
            hint=f"`minisandbox image rm {image}` removes it",
        ) from error


def write_kept(store: Store, kept: Kept) -> None:
    """Record what was made by hand for an image, in place of what was recorded before.

    Raises:
        StoreError: the store refuses.
    """
    path = _path(store, kept.image)
    with store_faults(f"record what was made by hand for {kept.image}"):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomic(path, json.dumps({"format": _FORMAT, "layers": kept.layers}).encode())


def forget_kept(store: Store, image: str) -> bool:
    """Forget what was made by hand for an image; return whether there was anything."""
    path = _path(store, image)
    with store_faults(f"forget what was made by hand for {image}"):
        there = path.exists()
        path.unlink(missing_ok=True)
    return there


def images_by_hand(store: Store) -> list[str]:
    """Return the names of the images for which something was made by hand."""
    return sorted(path.stem for path in (store.root / "by-hand").glob("[!.]*.json"))


def kept_step(image: str, layer: str) -> BuildStep:
    """The step that stands for a layer made by hand; it cannot be made again."""

    def prepare(_: Path) -> Work:
        raise BuildError(
            f"layer {layer[:16]}, made by hand for image {image!r}, is no longer in the store",
            step="by_hand",
            hint=f"`minisandbox image rm {image}` forgets it, and the next build does without",
        )

    return BuildStep("by_hand", {"kind": "by_hand", "layer": layer}, prepare)


def _path(store: Store, image: str) -> Path:
    return store.root / "by-hand" / f"{check_name(image)}.json"
