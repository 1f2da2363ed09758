"""Names that tests import from elsewhere: no submission may come in between."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import cast

import pytest
from tests.unit.store_tools import add_image, add_layer
from tests.unit.test_grade_policy import kind, patch_of

from minisandbox.grade import Policy
from minisandbox.grade.imports import imported_names, protect_imports
from minisandbox.grade.submission import screen
from minisandbox.images import Image, load_image
from minisandbox.patches import FileStatus
from minisandbox.store import Store
from minisandbox.store.blobs.freezing import freeze
from minisandbox.tasks import Form, Task

TEST = b"""\
import json, numpy as np
from comparelib.tools import same
from calc import add
from . import siblings
    import yaml.nodes, helpers
pytest.importorskip("attrs")
# import nothing
"""


class Layers:
    def __init__(self, root: Path) -> None:
        self.root = root

    def hold(self, *keys: str) -> nullcontext[None]:
        return nullcontext()

    def layer_tree(self, key: str) -> Path:
        return self.root / key


def policy(root: Path, *files: str, fix: str = "calc.py") -> Policy:
    """The policy of a task whose image has these files."""
    for path in (*files, "upper/bin/sh"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("")
    hidden = root / "tests/hidden/tests/test_calc.py"
    hidden.parent.mkdir(parents=True)
    hidden.write_bytes(TEST)
    task = Task("a__b-1", "a/b", "c0", "", patch_of(fix), "", ("tests/test_calc.py::t",), (), form=Form.SWESMITH)
    store = cast("Store", Layers(root))
    image = Image("i", "k", ("lower", "upper"), (), PurePosixPath("/testbed"), "tests", "", 0.0, {}, store)
    return protect_imports(Policy.for_task(task), task, image)


def kinds(found: Policy, *paths: str) -> list[str | None]:
    return [kind(path, found, FileStatus.ADDED) for path in paths]


def test_what_a_file_imports() -> None:
    names = {"json", "numpy", "comparelib", "calc", "yaml", "helpers", "attrs"}
    assert imported_names([TEST, b"\xff print 5\n"]) == names


def test_a_new_module_in_the_place_of_what_tests_import(tmp_path: Path) -> None:
    found = policy(tmp_path, "lower/testbed/calc.py", "upper/testbed/src/other.py", "lower/testbed/numpy.txt")
    shadows = ["comparelib.py", "comparelib/__init__.py", "comparelib/tools.py", "src/numpy.py", "numpy/x.py"]
    assert kinds(found, *shadows) == ["shadows_import"] * len(shadows)
    fine = [
        "other.py",
        "pkg/comparelib.py",
        "comparelib",
        "comparelib/data.txt",
        "calc/__init__.py",
        "calc/comparelib.py",
    ]
    assert kinds(found, *fine) == [None] * len(fine)
    assert kind("comparelib.py", found) is None, "the repository has such a file already"


def test_what_the_repository_has_where_it_lies(tmp_path: Path) -> None:
    held = ["lower/testbed/numpy/x.py", "upper/testbed/yaml.cpython-311.so", "lower/testbed/src/comparelib.py"]
    found = policy(tmp_path, *held, fix="src/attrs.py")
    assert kinds(found, "numpy/__init__.py", "yaml/__init__.py", "src/comparelib/__init__.py") == [None] * 3
    assert kinds(found, "attrs/__init__.py", "src/attrs/a.py") == [None] * 2, "so does the reference"
    assert kinds(found, "comparelib.py", "src/yaml.py") == ["shadows_import"] * 2


def test_nothing_is_imported_from_within_a_package(tmp_path: Path) -> None:
    found = policy(tmp_path, "lower/testbed/lib/__init__.py", "lower/testbed/__init__.py")
    assert kinds(found, "lib/numpy.py", "src/numpy.py", "numpy.py") == [None, "shadows_import", "shadows_import"]
    assert kind("lib/__init__.py", found, FileStatus.DELETED) == "shadows_import", "it would be a package no more"
    assert [kind(path, found) for path in ("lib/__init__.py", "__init__.py")] == [None, None]
    assert kind("lib/pkg/__init__.py", found, FileStatus.DELETED) is None


def test_a_frozen_image_has_what_it_had(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    repository = add_layer(store, "repository", {"testbed/calc/core.py": "x", "testbed/comparelib.py": "x"})
    tests = add_layer(store, "tests", {"hidden/tests/test_calc.py": TEST.decode()})
    store.put_image(replace(add_image(store, "one", repository), tests_layer=tests))
    image = load_image(store, "one")
    task = Task(
        "a__b-1", "a/b", "c0", "", patch_of("calc/core.py"), "", ("tests/test_calc.py::t",), (), form=Form.SWESMITH
    )
    found = protect_imports(Policy.for_task(task), task, image)
    assert freeze(store, ["one"]).layers
    assert protect_imports(Policy.for_task(task), task, image) == found
    assert "/yaml" in found.elsewhere
    assert "/comparelib" not in found.elsewhere


def test_links_of_an_image_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lower/testbed").mkdir(parents=True)
    (tmp_path / "lower/testbed/src").symlink_to("/etc")
    assert kinds(policy(tmp_path), "src/numpy.py", "numpy.py") == [None, "shadows_import"]


def test_a_working_directory_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lower").mkdir()
    (tmp_path / "lower/testbed").symlink_to("/etc")
    assert kinds(policy(tmp_path), "comparelib.py") == [None], "nothing is known of what it has"


@pytest.mark.parametrize("path", ["comparelib.py", "comparelib/__init__.py"])
def test_screening_leaves_it_out(tmp_path: Path, path: str) -> None:
    text = patch_of("calc.py") + f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+same = print\n"
    change = screen(text.encode(), policy(tmp_path, "lower/testbed/calc.py"))
    assert (change.leave_out, [flag.kind for flag in change.flags]) == ((path,), ["shadows_import"])


def test_a_rename_out_of_the_repositorys_own_module(tmp_path: Path) -> None:
    found = policy(tmp_path, "lower/testbed/calc.py")
    text = "diff --git a/calc.py b/{0}\nsimilarity index 100%\nrename from calc.py\nrename to {0}\n"
    assert screen(text.format("calc/__init__.py").encode(), found).leave_out == ()
    assert screen(text.format("numpy/__init__.py").encode(), found).leave_out == ("numpy/__init__.py",)
