"""Find the names that hidden tests import from outside of the repository.

If a submission adds a module with such a name, tests would import it instead of the intended one, e.g. instead of a
library's helper for comparisons. A confirming run with changed tests would not reveal the replacement.
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

# Search the text instead of parsing it, because Python 3 cannot parse tests that were written for Python 2.
_IMPORTS = re.compile(
    rb"^[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([\w., \t]+))|\b(?:importorskip|import_module)\(\s*[\"'](\w+)",
    re.MULTILINE,
)
_PACKAGE = "__init__"
_MODULES = (".py", ".so")


def protect_imports(policy: Policy, task: Task, image: Image) -> Policy:
    """Extend a policy by the modules that hidden tests import and that the repository does not contain.

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
    with image.store.hold(*image.layers, *filter(None, [image.tests_layer])):  # unpacks frozen layers
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
    """Yield ``ROOT/NAME`` for each root and each name that no layer contains as a module in this root.

    A root that is a package yields only ``ROOT/__init__``, because its tests are imported from the directory above it.
    Files that an upper layer removes count as present.
    """
    for root in roots:
        names_by_tree = [_module_names(tree, f"{folder}/{root}".strip("/")) for tree, folder in trees]
        if root and any(_PACKAGE in tree_names for tree_names in filter(None, names_by_tree)):
            yield f"{root}/{_PACKAGE}"
        elif None not in names_by_tree:
            yield from (f"{root}/{name}" for name in names.difference(*filter(None, names_by_tree)))


def _module_names(tree: Path, root: str) -> frozenset[str] | None:
    """Return the names of the modules in a directory of a layer, or None if its path contains a symbolic link."""
    folder = tree / root
    if os.path.realpath(folder) != os.path.join(os.path.realpath(tree), root).rstrip("/"):
        return None
    names = os.listdir(folder) if folder.is_dir() else []
    return frozenset(name.partition(".")[0] for name in names if "." not in name or name.endswith(_MODULES))
