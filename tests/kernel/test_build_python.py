"""Building images with an interpreter and packages: the environment that the benchmarks' own images have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from minisandbox.errors import BuildError, InterpreterNotFound, SourceError
from minisandbox.images import BuildEvent, Interpreter, StepState, build
from minisandbox.images.image import Image
from minisandbox.images.python.interpreters import find_interpreter, installed_interpreters
from minisandbox.sandbox import Sandbox
from minisandbox.spec import LocalSource, PythonRecipe, SdistSource
from minisandbox.store import Store

pytestmark = [pytest.mark.kernel, pytest.mark.index]

HOME = "/opt/miniconda3/envs/testbed"
PINS = ("pytest==8.3.4", "hatchling==1.27.0", "hatch-vcs==0.4.0", "editables==0.5")
INICONFIG = SdistSource("iniconfig", "2.0.0", "2d91e135bf72d31a410b17c16da610a82cb55f6b0477d1a902134b24a455b8b3")


@pytest.fixture(scope="module")
def store(shared_store: Store) -> Store:
    return shared_store


@pytest.fixture(scope="module")
def image(store: Store) -> Image:
    """A real project, built as a task would be: pinned packages, source archive, editable install."""
    recipe = PythonRecipe(
        python=">=3.11",
        requirements=PINS,
        source=INICONFIG,
        install=("pip install --no-deps --no-build-isolation -e .",),
    )
    return build(recipe, store=store, name="iniconfig")


def _run(image: Image, command: str) -> str:
    with Sandbox.create(image.spec()) as box:
        return box.exec(command, timeout=120).check().stdout


def test_the_environment_is_at_its_place(image: Image) -> None:
    output = _run(
        image,
        "command -v python pip pytest; python -c 'import sys; print(sys.prefix)'; head -1 $(command -v pytest);"
        'echo "$PATH"; echo "$CONDA_PREFIX $CONDA_DEFAULT_ENV";'
        'python -c "import iniconfig; print(iniconfig.__file__)"',
    )
    assert output.splitlines() == [
        f"{HOME}/bin/python",
        f"{HOME}/bin/pip",
        f"{HOME}/bin/pytest",
        HOME,
        f"#!{HOME}/bin/python",
        f"{HOME}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        f"{HOME} testbed",
        "/testbed/src/iniconfig/__init__.py",
    ]


def test_byte_code_is_there_and_valid(image: Image) -> None:
    """An import must neither write nor recompile: python -v says what it matched."""
    output = _run(image, "python -B -v -c 'import pytest, json' 2>&1 | grep -cE '(wrote|stale|bytecode is)' || true")
    assert output == "0\n"
    assert int(_run(image, "python -B -v -c 'import pytest, json' 2>&1 | grep -c 'matches'")) > 50


def test_mtimes_are_constant(image: Image) -> None:
    assert _run(image, f"find {HOME} /testbed -name .git -prune -o -type f -newermt 2001-01-01 -print | head") == ""


def test_the_repository_is_clean_after_its_tests_ran(image: Image) -> None:
    with Sandbox.create(image.spec()) as box:
        assert box.exec("python -c 'import iniconfig, pytest' && git status --porcelain").check().stdout == ""
        assert box.patch() == b""


def test_the_lock_is_recorded(image: Image) -> None:
    lock = next(record.facts["lock"] for record in image.records() if "lock" in record.facts)
    assert "pytest==8.3.4" in lock.splitlines()


def test_no_host_path_in_text_files(image: Image, store: Store) -> None:
    prefix = str(Path(sys.base_prefix).resolve())
    if prefix in ("/usr", "/usr/local"):
        pytest.skip("the running interpreter is the system's")
    trees = [store.layer_tree(key) for key in image.layers]
    done = subprocess.run(["grep", "-rlIF", prefix, *trees], capture_output=True, text=True, check=False)
    assert done.stdout == ""


def test_images_share_what_they_have_in_common(image: Image, store: Store, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    events: list[BuildEvent] = []
    recipe = PythonRecipe(python=">=3.11", requirements=PINS, source=LocalSource(tmp_path))
    other = build(recipe, store=store, name="other", progress=events.append)
    assert other.layers[:3] == image.layers[:3]
    assert [event.step for event in events if event.state is StepState.CACHED] == ["base", "python", "requirements"]


def test_a_package_that_does_not_exist(store: Store) -> None:
    recipe = PythonRecipe(python=">=3.11", requirements=("minisandbox-no-such-package==1.0",))
    with pytest.raises(BuildError, match="requirements") as caught:
        build(recipe, store=store, name="bad")
    assert "no such version" in (caught.value.reason or "")
    assert "minisandbox-no-such-package" in (caught.value.reason or "")


def test_sdists_that_are_not_there(store: Store) -> None:
    with pytest.raises(SourceError, match="does not have the sha256"):
        build(PythonRecipe(source=SdistSource("iniconfig", "2.0.0", "0" * 64)), store=store, name="bad")
    with pytest.raises(SourceError, match=r"no source archive of iniconfig 99") as caught:
        build(PythonRecipe(source=SdistSource("iniconfig", "99", "0" * 64)), store=store, name="bad")
    assert "2.0.0" in (caught.value.reason or "")
    with pytest.raises(SourceError, match="no index has"):
        build(PythonRecipe(source=SdistSource("minisandbox-no-such-project", "1", "0" * 64)), store=store, name="bad")


def test_an_interpreter_that_is_not_there(store: Store) -> None:
    with pytest.raises(InterpreterNotFound, match=r"no Python 3\.99"):
        build(PythonRecipe(python="3.99"), store=store, name="bad")


def _one_of(own_prefix: bool) -> Interpreter:
    """The oldest interpreter with a prefix of its own, or the system's."""
    found = [one for one in installed_interpreters() if one.own_prefix == own_prefix]
    if not found:
        pytest.skip("there is no such interpreter here")
    return found[-1] if own_prefix else found[0]


@pytest.mark.slow
@pytest.mark.parametrize("own_prefix", [True, False], ids=["of its own", "the system's"])
def test_other_interpreters_work(store: Store, own_prefix: bool) -> None:
    interpreter = _one_of(own_prefix)
    if find_interpreter(interpreter.version).executable != interpreter.executable:
        pytest.skip("another interpreter of the same version comes first")
    image = build(PythonRecipe(python=interpreter.version), store=store, name=f"python-{interpreter.version}")
    question = "import sys, ssl, zlib; print(sys.prefix); print('%d.%d.%d' % sys.version_info[:3])"
    output = _run(image, f'python -c "{question}"; pip --version')
    assert output.splitlines()[:2] == [HOME, interpreter.version]
    assert f"from {HOME}" in output
