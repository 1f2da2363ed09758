"""Imports: names that hidden tests import from elsewhere than the repository.

A new module of such a name, where the repository has none, would be imported in the place of the one that the tests
mean: a library's helper that compares, say, which no sentinel shows to be another.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.grade.policy import Policy, top_names
from minisandbox.grade.testfiles import hidden_files
from minisandbox.tasks import Task

if TYPE_CHECKING:
    from minisandbox.images import Image

# In the text, for Python 2 has tests that no newer one can parse.
_IMPORTS = re.compile(
    rb"^[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([\w., \t]+))|\b(?:importorskip|import_module)\(\s*[\"'](\w+)",
    re.MULTILINE,
)
_PACKAGE = "__init__"
_MODULES = (".py", ".so")


def protect_imports(policy: Policy, task: Task, image: Image) -> Policy:
    """Return the policy of a task with the names that its hidden tests import and that its repository does not have.

    Args:
        policy: the policy, as the task alone decides it.
        task: the task. What its reference makes importable, anybody may.
        image: its image, whose layers say what the repository has.

    Raises:
        NotFound: a layer is no longer in the store.
        StoreError: a layer is damaged.
        DiskFull: a layer is frozen, and there is no space for its tree.
        OSError: a layer cannot be read.
    """
    hidden = image.tests_dir()
    names = imported_names(hidden_files(hidden, task.test_files).values())
    allowed = {name for path in policy.allowed for _, name, _ in top_names(path, policy.roots)}
    with image.store.hold(*image.layers, *filter(None, [image.tests_layer])):  # the tree of a frozen layer is empty
        trees = [(image.store.layer_tree(key), str(image.workdir).strip("/")) for key in image.layers]
        trees += [(hidden, "")] if hidden else []
        return replace(policy, elsewhere=frozenset(_elsewhere(names - allowed, policy.roots, trees)))


def imported_names(files: Iterable[bytes]) -> frozenset[str]:
    """Return the top-level names that files of Python import, by their text."""
    return frozenset(name.decode() for content in files for name in _imported(content) if name.isascii())


def _imported(content: bytes) -> Iterator[bytes]:
    for single, several, named in _IMPORTS.findall(content):
        for module in several.split(b",") if several else [single or named]:
            yield module.partition(b".")[0].strip().partition(b" ")[0]


def _elsewhere(names: frozenset[str], roots: Iterable[str], trees: Sequence[tuple[Path, str]]) -> Iterator[str]:
    """Yield those of the names that no tree has below a root, each behind its root.

    Packages are no roots, as long as they are packages: tests in one are imported from above it. Of them it is what
    makes them packages that is yielded. What an upper layer removes counts as had.
    """
    for root in roots:
        had = [_had(tree, f"{folder}/{root}".strip("/")) for tree, folder in trees]
        if root and any(_PACKAGE in found for found in filter(None, had)):
            yield f"{root}/{_PACKAGE}"
        elif None not in had:
            yield from (f"{root}/{name}" for name in names.difference(*filter(None, had)))


def _had(tree: Path, root: str) -> frozenset[str] | None:
    """Return the names that a directory of a tree makes importable; None where a link is in the way."""
    folder = tree / root
    if os.path.realpath(folder) != os.path.join(os.path.realpath(tree), root).rstrip("/"):
        return None
    names = os.listdir(folder) if folder.is_dir() else []
    return frozenset(name.partition(".")[0] for name in names if "." not in name or name.endswith(_MODULES))
