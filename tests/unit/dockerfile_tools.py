"""Dockerfiles for tests: evaluated, and their COPYs made over layers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from minisandbox.images.dockerfile.copying import copy_layer
from minisandbox.images.dockerfile.evaluation import BuildOptions, evaluate
from minisandbox.images.dockerfile.parsing import parse_dockerfile
from minisandbox.images.dockerfile.sources import content_digest, list_sources
from minisandbox.images.dockerfile.trees import ContextTree, open_context
from minisandbox.spec import Context, CopyFiles, Recipe, RunCommand
from minisandbox.store.blobs.lower_layers import LowerLayers

BASE: Mapping[str, object] = {"Env": ["PATH=/usr/bin", "LANG=C"], "Cmd": ["bash"], "WorkingDir": "/srv"}
NOWHERE = Context(Path("/nonexistent"), Path("/nonexistent/Dockerfile"))


def stage(text: str, base: Mapping[str, object] = BASE, **wanted: object) -> Recipe:
    """Evaluate a Dockerfile over a base image of this configuration."""
    return evaluate(parse_dockerfile(text), BuildOptions(**wanted), lambda _: base, NOWHERE)  # type: ignore[arg-type,return-value]


def runs(found: Recipe) -> list[RunCommand]:
    """The RUNs of a stage."""
    return [one for one in found.steps if isinstance(one, RunCommand)]


def copies(found: Recipe) -> list[CopyFiles]:
    """The COPYs of a stage."""
    return [one for one in found.steps if isinstance(one, CopyFiles)]


def context(root: Path) -> ContextTree:
    """The context in a directory."""
    return open_context(root, root / "Dockerfile")


def digest(copy: CopyFiles, root: Path) -> str:
    """What decides a COPY of a context."""
    tree = context(root)
    return content_digest(list_sources(copy, tree), tree)


def make(text: str, root: Path, place: Path, *below: Path) -> Path:
    """Make the layer of one COPY, ADD or WORKDIR over layers, topmost first."""
    (copy,) = copies(stage(f"FROM base\n{text}\n", {}))
    tree = context(root)
    copy_layer(copy, list_sources(copy, tree), tree, place, LowerLayers(below), keep_owners=os.geteuid() == 0)
    return place


def files(root: Path) -> dict[str, str]:
    """The files below a directory with their contents; directories end with a slash, links with their targets."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_dir():
            found[f"{name}/"] = ""
        else:
            found[name] = path.read_text("utf-8", "backslashreplace")
    return found
