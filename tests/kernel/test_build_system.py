"""What is installed below /usr: kept where it can be written, a clear error where it cannot."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from minisandbox.errors import BuildError, HostError, InvalidValue
from minisandbox.images import build, lock_of
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.controller import current_controller
from minisandbox.spec import LocalSource, PythonRecipe
from minisandbox.store import Store

pytestmark = pytest.mark.kernel

PACKAGE = "hello"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


@pytest.fixture
def source(tmp_path: Path) -> LocalSource:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a.py").write_text("x = 1\n")
    return LocalSource(tmp_path / "source")


@pytest.mark.slow
@pytest.mark.index
def test_system_packages_are_a_layer_at_the_bottom(store: Store, source: LocalSource) -> None:
    if shutil.which("apt-get") is None or not current_controller().launcher.writable_usr:
        pytest.skip("no apt-get, or this user's sandboxes cannot write below /usr")
    try:
        image = build(PythonRecipe(system=(PACKAGE,), source=source), store=store, name="hello")
    except BuildError as error:
        if "package index cannot be reached" in str(error) or "Unable to fetch" in str(error):
            pytest.skip(f"the distribution's packages cannot be reached: {error.what}")
        raise
    with Sandbox.create(image.spec()) as box:
        assert box.exec(PACKAGE).check().stdout == "Hello, world!\n"
        assert box.exec("ls -A /var/cache /var/lib /etc/apt").stdout == "/var/cache:\n\n/var/lib:\n"
    assert list(lock_of("hello", image.records()).system) == [PACKAGE]
    assert image.layers[1] == image.records()[1].key
    assert image.records()[1].step["kind"] == "system"


def test_where_they_cannot_be_installed_the_error_says_what_else_to_do(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if current_controller().launcher.writable_usr:
        git = shutil.which("git")
        assert git is not None
        monkeypatch.setenv("PATH", str(tmp_path))  # no apt-get here either
    with pytest.raises(HostError, match="system packages") as caught:
        build(PythonRecipe(system=(PACKAGE,)), store=store, name="hello")
    assert "the machine itself" in (caught.value.hint or "")


def test_what_install_commands_write_below_usr_is_kept_or_refused(store: Store, source: LocalSource) -> None:
    recipe = PythonRecipe(source=source, install=("echo made > /usr/local/made",))
    if not current_controller().launcher.writable_usr:
        with pytest.raises(BuildError) as caught:
            build(recipe, store=store, name="usr")
        assert "read-only" in (caught.value.reason or "")
        return
    image = build(recipe, store=store, name="usr")
    with Sandbox.create(image.spec()) as box:
        assert box.exec("cat /usr/local/made; command -v env").check().stdout == "made\n/usr/bin/env\n"


@pytest.mark.parametrize("name", ["gcc; rm -rf /", "-y", "Gcc", "a b", ""])
def test_names_that_are_no_packages(name: str) -> None:
    with pytest.raises(InvalidValue, match="not a system package"):
        PythonRecipe(system=(name,)).recipe()
