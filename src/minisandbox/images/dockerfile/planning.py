"""The steps of a Dockerfile at their places in a chain: keys, dependencies and makers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from minisandbox.images.dockerfile.copying import copy_layer
from minisandbox.images.dockerfile.running import Bind, run_layer
from minisandbox.images.dockerfile.sources import Source, content_digest, definition, list_sources
from minisandbox.images.dockerfile.stages import Context, CopyFiles, Mount, RunCommand
from minisandbox.images.dockerfile.trees import ContextTree
from minisandbox.images.oci.pull import keeps_owners
from minisandbox.images.recipe import OciBase, StageBase
from minisandbox.images.runner import BuildStep, Place
from minisandbox.images.tree import Tree
from minisandbox.store import Made, Store
from minisandbox.store.blobs.below import Below
from minisandbox.store.keys import JSONValue


class Lookup(Protocol):
    """What knows the other stages and images of a build."""

    def files(self, context: Context) -> ContextTree:
        """Return the files of a context."""

    def origin(self, base: OciBase | StageBase) -> tuple[str, tuple[str, ...]]:
        """Return what identifies an image or a stage, and the keys of its layers, bottom first."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a COPY or a bind takes files from.

    Attributes:
        known: what decides them.
        layers: keys of the layers that they lie in; none of a context.
        read: lists them, once those layers are there.
    """

    known: str
    layers: tuple[str, ...]
    read: Callable[[], tuple[tuple[Source, ...], Tree]]


def plan_step(
    step: RunCommand | CopyFiles, below: tuple[str, ...], store: Store, lookup: Lookup
) -> tuple[BuildStep, tuple[str, ...]]:
    """Plan a step of a Dockerfile.

    Args:
        step: it.
        below: keys of the layers below it, bottom first.
        store: where the layers are or will be.
        lookup: knows the other stages.

    Returns:
        The step, and the keys of further layers that have to be there before it is made.

    Raises:
        DockerfileError: a file that is copied is not there.
    """
    if isinstance(step, CopyFiles):
        return _plan_copy(step, below, store, lookup)
    return _plan_run(step, store, lookup)


def _plan_copy(
    copy: CopyFiles, below: tuple[str, ...], store: Store, lookup: Lookup
) -> tuple[BuildStep, tuple[str, ...]]:
    origin = _origin(copy, store, lookup)
    owners = "kept" if keeps_owners() else "one"

    def prepare(staging: Path) -> Made:
        sources, tree = origin.read()
        done = copy_layer(copy, sources, tree, staging / "tree", _below(store, below), keep_owners=owners == "kept")
        return Made(staging / "tree", digests=done.digests)

    values = {**definition(copy, origin.known), "owners": owners}
    return BuildStep(f"line {copy.line}", values, prepare, _shown(copy)), origin.layers


def _plan_run(run: RunCommand, store: Store, lookup: Lookup) -> tuple[BuildStep, tuple[str, ...]]:
    binds = {mount: _bind(run, mount) for mount in run.mounts if mount.wanted.kind == "bind"}
    origins = {mount: _origin(copy, store, lookup) for mount, copy in binds.items()}
    owners = "kept" if keeps_owners() else "one"
    mounts: list[JSONValue] = [
        [repr(mount.wanted), origins[mount].known if mount in origins else ""] for mount in run.mounts
    ]
    values: dict[str, JSONValue] = {
        "kind": "run",
        "argv": list(run.argv),
        "variables": [list(row) for row in run.variables],
        "workdir": run.workdir,
        "user": run.user,
        "script": "" if run.script is None else hashlib.sha256(run.script.content).hexdigest(),
        "mounts": mounts,
        "owners": owners,
    }

    def make(place: Place) -> Made:
        read = {mount: Bind(binds[mount], *origins[mount].read()) for mount in binds}
        return run_layer(run, place, read)

    needs = tuple(dict.fromkeys(key for origin in origins.values() for key in origin.layers))
    return BuildStep(f"line {run.line}", values, lambda _: make, _shown(run)), needs


def _bind(run: RunCommand, mount: Mount) -> CopyFiles:
    """A bind as the COPY that shows it."""
    return CopyFiles(run.line, run.text, mount.origin, (mount.wanted.source or ".",), (), "/m")


def _origin(copy: CopyFiles, store: Store, lookup: Lookup) -> _Origin:
    if isinstance(copy.origin, Context):
        files = lookup.files(copy.origin)
        found = list_sources(copy, files)
        return _Origin(content_digest(found, files), (), lambda: (found, files))
    known, layers = lookup.origin(copy.origin)

    def read() -> tuple[tuple[Source, ...], Tree]:
        tree = _below(store, layers)
        return list_sources(copy, tree), tree

    return _Origin(known, layers, read)


def _below(store: Store, layers: tuple[str, ...]) -> Below:
    return Below(tuple(map(store.layer_tree, reversed(layers))))


def _shown(step: RunCommand | CopyFiles) -> str:
    return step.text.splitlines()[0][:100]
