"""For each interpreter a real project of its time is built from the package index, and its own tests pass.

Slow, and so run on request: `make test-interpreters`. MINISANDBOX_TEST_PYTHONS, a directory in the form of pyenv's
(VERSION/bin/python), names interpreters for users who may not read those of the machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from minisandbox.errors import InterpreterNotFound
from minisandbox.images import build, find_interpreter, lock_of
from minisandbox.sandbox import Sandbox
from minisandbox.spec import PythonRecipe, SdistSource
from minisandbox.store import Store

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.index,
    pytest.mark.skipif(os.environ.get("MINISANDBOX_TEST_INTERPRETERS") != "1", reason="slow: make test-interpreters"),
]

PROJECTS = [
    ("2.7", SdistSource("six", "1.10.0", "105f8d68616f8248e24bf0e9372ef04d3cc10104f1980f54d57b2ce73a5ad56a"),
     ("pytest==3.10.1", "setuptools==44.1.1", "wheel==0.37.1"), "test_six.py", 180),
    ("3.6", SdistSource("click", "7.1.2", "d2b5255c7c6349bc1bd1e59e08cd12acbbd63ce649f2588755783aa94dfb6b1a"),
     ("pytest==6.2.5", "setuptools==59.6.0", "wheel==0.37.1"), "tests", 250),
    ("3.9", SdistSource("cachetools", "4.2.4", "89ea6f1b638d5a73a4f9226be57ac5e4f399d22770b92355f92dcb0f7f001693"),
     ("pytest==7.4.4", "setuptools==68.2.2", "wheel==0.41.2"), "tests", 150),
    ("3.11", SdistSource("sqlparse", "0.4.4", "d446183e84b8349fa3061f0fe7f06ca94ba65b426946ffebe6e3e8295332420c"),
     ("pytest==8.3.4", "flit-core==3.9.0"), "tests", 400),
    ("3.13",
     SdistSource("more-itertools", "10.5.0", "5482bfef7849c25dc3c6dd53a6173ae4795da2a41a80faea6700d9f5846c5da6"),
     ("pytest==8.3.4", "flit-core==3.9.0"), "tests", 600),
]  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.open(tmp_path_factory.mktemp("interpreters") / "store")


@pytest.fixture(autouse=True)
def given_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    if given := os.environ.get("MINISANDBOX_TEST_PYTHONS"):
        bins = ":".join(str(path) for path in sorted(Path(given).glob("*/bin")))
        monkeypatch.setenv("PATH", f"{bins}:{os.environ['PATH']}")


@pytest.mark.parametrize(("python", "source", "pins", "tests", "least"), PROJECTS, ids=[row[0] for row in PROJECTS])
def test_a_project_of_its_time(
    store: Store, python: str, source: SdistSource, pins: Sequence[str], tests: str, least: int
) -> None:
    try:
        interpreter = find_interpreter(python)
    except InterpreterNotFound as error:
        pytest.skip(str(error))
    how = "." if python in ("2.7", "3.6") else "--editable ."
    install = (f"python -m pip install --no-deps --no-build-isolation {how}",)
    recipe = PythonRecipe(python=python, requirements=tuple(pins), source=source, install=install)
    image = build(recipe, store=store, name=f"{source.name}-{python}")
    with Sandbox.create(image.spec()) as box:
        result = box.exec(f"python -m pytest -q -p no:cacheprovider {tests}", timeout=600)
        assert box.exec("git status --porcelain").check().stdout == ""
    passed = re.search(r"(\d+) passed", result.stdout)
    assert result.exit_code == 0, result.stdout[-3000:]
    assert passed is not None
    assert int(passed[1]) >= least
    lock = lock_of(image.name, image.records())
    assert lock.python["version"] == interpreter.version
    assert lock.installed[source.name] == source.version
