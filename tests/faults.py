"""Faults from outside: at a named point of the store's work, the process dies or the disk is full.

A point is a function that the work calls there; what is raised or killed happens before or after that call.
"""

from __future__ import annotations

import errno
import functools
import importlib
import itertools
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_PUBLISHING = "minisandbox.store.publishing"
_FREEZING = "minisandbox.store.blobs.freezing"
_THAWING = "minisandbox.store.blobs.thawing"
_KEPT = "minisandbox.store.blobs.layer_blobs"


@dataclass(frozen=True, slots=True)
class Point:
    """A call at which a fault happens.

    Attributes:
        module: the module that calls the function by this name.
        name: the function, qualified by its class.
        after: whether the call is done when the fault happens.
        number: which call it is, from 1; all later ones fail too.
    """

    module: str
    name: str
    after: bool = False
    number: int = 1


POINTS: Mapping[str, Point] = {
    "moved": Point(_PUBLISHING, "rename_directory", after=True),
    "scanned": Point("minisandbox.store.objects", "Pool.using"),
    "object-taken": Point("minisandbox.store.objects", "Pool.take", after=True),
    "taken": Point("minisandbox.store.entries", "write_entries"),
    "recorded": Point(_PUBLISHING, "sync_filesystem"),
    "object-given": Point("minisandbox.store.objects", "Pool.share", after=True),
    "before-rename": Point("minisandbox.store.store", "make_visible"),
    "renamed": Point(_PUBLISHING, "sync_directory"),
    "before-image": Point("minisandbox.store.catalogue", "write_atomic"),
    "layer-removed": Point("minisandbox.store.store", "remove_tree"),
    "blob-written": Point(_KEPT, "pack", after=True),
    "blob-there": Point(_KEPT, "sync_directory", after=True),
    "tree-taken": Point(_FREEZING, "remove_tree"),
    "thaw-unpacked": Point(_THAWING, "unpack", after=True),
    "thaw-listed": Point(_THAWING, "rename_directory"),
    "thaw-renamed": Point(_THAWING, "sync_directory"),
    "layer-received": Point("minisandbox.images.oci.copies", "unpack", after=True),
    "imported": Point("minisandbox.images.oci.copies", "put_if_new"),
    "blob-sent": Point("minisandbox.images.oci.push", "_Registry._put"),
    "blobs-pushed": Point("minisandbox.images.oci.push", "_Registry.manifest"),
    "downloaded": Point("minisandbox.images.python.web", "_receive", after=True),
}


def kill_at(point: str) -> None:
    """Let this process be killed at a point."""
    _patch(POINTS[point], lambda: os.kill(os.getpid(), signal.SIGKILL), setattr)


def fill_disk_at(point: str, patch: Callable[[Any, str, object], None]) -> None:
    """Let the disk be full from a point on.

    Args:
        point: a name in :data:`POINTS`.
        patch: sets an attribute, and can undo it: `MonkeyPatch.setattr`.
    """

    def refuse() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), point)

    _patch(POINTS[point], refuse, patch)


def _patch(point: Point, fault: Callable[[], None], patch: Callable[[Any, str, object], None]) -> None:
    *owners, name = point.name.split(".")
    owner: Any = functools.reduce(getattr, owners, importlib.import_module(point.module))
    original, calls = getattr(owner, name), itertools.count(1)

    @functools.wraps(original)
    def call(*args: object, **options: object) -> object:
        due = next(calls) >= point.number
        if due and not point.after:
            fault()
        result = original(*args, **options)
        if due and point.after:
            fault()
        return result

    patch(owner, name, call)
