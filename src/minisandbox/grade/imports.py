"""Find the names that hidden tests import from outside of the repository.

If a submission adds a module with such a name, tests would import it instead of the intended one, e.g. instead of a
library's helper for comparisons. No changed test would reveal that.
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

# Search the text: newer Pythons cannot parse tests for Python 2.
_IMPORTS = re.compile(
    rb"^[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([\w., \t]+))|\b(?:importorskip|import_module)\(\s*[\"'](\w+)",
    re.MULTILINE,
)
_PACKAGE = "__init__"
_MODULES = (".py", ".so")


def protect_imports(policy: Policy, task: Task, image: Image) -> Policy:
    """Extend a policy by the names that hidden tests import and that the repository lacks.

    Args:
        policy: the task's policy.
        task: the task. Names that its reference makes importable are allowed.
        image: the task's image, whose layers show what the repository contains.

    Raises:
        NotFound: a layer is no longer in the store.
        StoreError: a layer is damaged.
        DiskFull: there is no space for the tree of a frozen layer.
        OSError: a layer cannot be read.
    """
    hidden = image.tests_dir()
    names = imported_names(hidden_files(hidden, task.test_files).values())
    allowed = {name for path in policy.allowed for _, name, _ in top_names(path, policy.roots)}
    with image.store.hold(*image.layers, *filter(None, [image.tests_layer])):  # restores the trees of frozen layers
        trees = [(image.store.layer_tree(layer), str(image.workdir).strip("/")) for layer in image.layers]
        trees += [(hidden, "")] if hidden else []
        return replace(policy, elsewhere=frozenset(_elsewhere(names - allowed, policy.roots, trees)))


def imported_names(files: Iterable[bytes]) -> frozenset[str]:
    """Return the top-level names that Python files import, found by a text search."""
    return frozenset(name.decode() for content in files for name in _imported(content) if name.isascii())


def _imported(content: bytes) -> Iterator[bytes]:
    for from_module, import_list, literal_module in _IMPORTS.findall(content):
        for module in import_list.split(b",") if import_list else [from_module or literal_module]:
            yield module.partition(b".")[0].strip().partition(b" ")[0]


def _elsewhere(names: frozenset[str], roots: Iterable[str], trees: Sequence[tuple[Path, str]]) -> Iterator[str]:
    """Yield the names that no tree contains below a root, as ``ROOT/NAME``.

    A package is not a root, because its tests are imported from the directory above it; its ``__init__`` is yielded
    instead. Files that an upper layer removes count as present.
    """
    for root in roots:
        names_by_tree = [_module_names(tree, f"{folder}/{root}".strip("/")) for tree, folder in trees]
        if root and any(_PACKAGE in tree_names for tree_names in filter(None, names_by_tree)):
            yield f"{root}/{_PACKAGE}"
        elif None not in names_by_tree:
            yield from (f"{root}/{name}" for name in names.difference(*filter(None, names_by_tree)))


def _module_names(tree: Path, root: str) -> frozenset[str] | None:
    """Return the names that modules in a directory of a tree have, or None if the path contains a link."""
    folder = tree / root
    if os.path.realpath(folder) != os.path.join(os.path.realpath(tree), root).rstrip("/"):
        return None
    names = os.listdir(folder) if folder.is_dir() else []
    return frozenset(name.partition(".")[0] for name in names if "." not in name or name.endswith(_MODULES))
