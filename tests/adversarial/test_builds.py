"""Attacks by what a build leaves behind: the agent's repository must be ours, and in the image."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisandbox.errors import BuildError
from minisandbox.images import build
from minisandbox.sandbox import Sandbox
from minisandbox.spec import LocalSource, PythonRecipe
from minisandbox.store import Store

pytestmark = pytest.mark.kernel


REPOSITORY = """\
git init -q .
git config core.pager 'touch /tmp/ran'
git -c user.name=a -c user.email=a@b commit -q --allow-empty -m 'the fix'
git tag later
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def recipe(tmp_path: Path, *install: str) -> PythonRecipe:
    source = tmp_path / "source"
    source.mkdir()
    (source / "code.py").write_text("x = 1\n")
    return PythonRecipe(python=None, requirements=(), source=LocalSource(source), install=install)


@pytest.mark.parametrize(
    "left",
    [
        "ln -s /tmp .git",
        "echo 'gitdir: /tmp/elsewhere' > .git",
        REPOSITORY,
    ],
    ids=["link", "file", "repository"],
)
def test_a_git_directory_that_a_build_leaves_is_replaced(tmp_path: Path, store: Store, left: str) -> None:
    image = build(recipe(tmp_path, left), store=store, name="attacked")
    with Sandbox.create(image.spec()) as box:
        assert box.exec("git log --format=%s --all; git config core.pager; git status --short").stdout == (
            "Initial commit\n"
        )
        box.files.write_text("/testbed/code.py", "x = 2\n")
        assert b"+x = 2" in box.patch()


def test_a_link_in_the_place_of_the_workdir_fails_the_build(tmp_path: Path, store: Store) -> None:
    with pytest.raises(BuildError, match="is a link"):
        build(recipe(tmp_path, "cd /; rm -r /testbed; ln -s /tmp /testbed"), store=store, name="attacked")
