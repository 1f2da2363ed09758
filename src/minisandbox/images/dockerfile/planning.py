"""Plan the steps of a Dockerfile: their keys, the layers that they need, and the functions that build them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from minisandbox.errors import MiniSandboxError
from minisandbox.images.dockerfile.copying import copy_layer
from minisandbox.images.dockerfile.running import run_layer
from minisandbox.images.dockerfile.sources import CopySource, content_digest, definition, list_sources
from minisandbox.images.dockerfile.trees import ContextTree
from minisandbox.images.oci.pull import keeps_owners, owner_mode
from minisandbox.images.runner import BuildStep, StepContext
from minisandbox.images.tree import FileTree
from minisandbox.spec import Context, CopyFiles, OciBase, ResolvedMount, RunCommand, StageBase
from minisandbox.store import Made, Store
from minisandbox.store.blobs.lower_layers import LowerLayers
from minisandbox.values import JSONValue


@dataclass(frozen=True, slots=True)
class _Origin:
    """The files that a COPY or a bind mount reads.

    Attributes:
        key: a hash that identifies the content of the files.
        layers: the keys of the layers that contain the files; empty for a build context.
        read: returns the list of files and the tree that contains them; called after the layers are built.
    """

    key: str
    layers: tuple[str, ...]
    read: Callable[[], tuple[tuple[CopySource, ...], FileTree]]


class StepChain(Protocol):
    """Interface of :class:`minisandbox.images.plan.Chain`: the steps that are planned so far, below the next step."""

    @property
    def store(self) -> Store:
        """The store of the layers."""

    @property
    def layers(self) -> tuple[str, ...]:
        """The keys of the layers below, bottom first."""

    def files(self, context: Context) -> ContextTree:
        """Return the files of a build context."""

    def origin(self, base: OciBase | StageBase) -> tuple[str, tuple[str, ...]]:
        """Return the key and the layers of another image or stage."""


def plan_step(step: RunCommand | CopyFiles, chain: StepChain) -> BuildStep:
    """Plan a step of a Dockerfile.

    Args:
        step: the step.
        chain: the steps below; it also plans the stages that the step copies from.

    Raises:
        DockerfileError: a file to be copied does not exist.
        MiniSandboxError: an image that the step copies from cannot be pulled or planned.
    """
    try:
        return _plan_copy(step, chain) if isinstance(step, CopyFiles) else _plan_run(step, chain)
    except MiniSandboxError as error:
        raise error.about(f"line {step.line}")  # noqa: B904 - it is the same error


def _plan_copy(copy: CopyFiles, chain: StepChain) -> BuildStep:
    origin = _origin(copy, chain)

    def make(context: StepContext) -> Made:
        tree, below = context.staging / "tree", LowerLayers(tuple(reversed(context.layers)))
        unpacked = copy_layer(copy, *origin.read(), tree, below, keep_owners=keeps_owners())
        return Made(tree, digests=unpacked.digests, plain=unpacked.plain)

    fields = {**definition(copy, origin.key), "owners": owner_mode()}
    return BuildStep(f"line {copy.line}", fields, make, _label(copy), origin.layers)


def _plan_run(run: RunCommand, chain: StepChain) -> BuildStep:
    binds = {mount: _bind(run, mount) for mount in run.mounts if mount.wanted.kind == "bind"}
    origins = {mount: _origin(copy, chain) for mount, copy in binds.items()}
    mounts: list[JSONValue] = [
        [repr(mount.wanted), origins[mount].key if mount in origins else ""] for mount in run.mounts
    ]
    fields: dict[str, JSONValue] = {
        "kind": "run",
        "argv": list(run.argv),
        "variables": [list(row) for row in run.variables],
        "workdir": run.workdir,
        "user": run.user,
        "script": "" if run.script is None else hashlib.sha256(run.script.content).hexdigest(),
        "mounts": mounts,
        "owners": owner_mode(),
    }

    def write_bind(mount: ResolvedMount, directory: Path) -> None:
        copy_layer(binds[mount], *origins[mount].read(), directory, LowerLayers(), keep_owners=keeps_owners())

    needs = tuple(dict.fromkeys(key for origin in origins.values() for key in origin.layers))
    return BuildStep(
        f"line {run.line}", fields, lambda context: run_layer(run, context, write_bind), _label(run), needs
    )


def _bind(run: RunCommand, mount: ResolvedMount) -> CopyFiles:
    """Return a COPY instruction for the files of a bind mount."""
    return CopyFiles(run.line, run.text, mount.origin, (mount.wanted.source or ".",), (), "/m")


def _origin(copy: CopyFiles, chain: StepChain) -> _Origin:
    if isinstance(copy.origin, Context):
        files = chain.files(copy.origin)
        sources = list_sources(copy, files)
        return _Origin(content_digest(sources, files), (), lambda: (sources, files))
    store, (key, layers) = chain.store, chain.origin(copy.origin)

    def read() -> tuple[tuple[CopySource, ...], FileTree]:
        tree = LowerLayers(tuple(map(store.layer_tree, reversed(layers))))
        return list_sources(copy, tree), tree

    return _Origin(key, layers, read)


def _label(step: RunCommand | CopyFiles) -> str:
    return step.text.splitlines()[0][:100]
