"""Releases and contributions: the release script on a clone, the pre-commit hooks, the issue templates."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.index
@pytest.mark.kernel
def test_a_release_is_built_and_tried(tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone")], check=True)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("VIRTUAL_ENV", None)
    version = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
    command = [str(tmp_path / "clone/tools/release"), version]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "clone/dist").iterdir()}
    assert {f"swe_minisandbox-{version}.tar.gz", f"swe_minisandbox-{version}-py3-none-any.whl", "NOTES.md"} <= names
    assert f"## [{version}]" in (tmp_path / "clone/dist/NOTES.md").read_text()


def test_another_version_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([str(ROOT / "tools/release"), "0.0.0"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "release: pyproject.toml has another version than 0.0.0\n")


def test_hooks_and_tests_use_the_same_ruff() -> None:
    locked = re.findall(r"^ruff==(\S+)", (ROOT / "requirements-dev.lock").read_text(), re.MULTILINE)
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    pinned = {pin for hook in repository["hooks"] for pin in hook.get("additional_dependencies", ())}
    assert pinned == {f"ruff=={version}" for version in locked}


def test_issue_templates_have_what_forms_need() -> None:
    templates = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    assert [path.stem for path in templates] == ["bug", "feature"]
    for path in templates:
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= form.keys()
        assert all(item["attributes"]["label"] for item in form["body"])


def test_changelog_files_are_named_by_kind() -> None:
    kinds = re.findall(r'^directory = "(\w+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for path in (ROOT / "changelog.d").iterdir():
        assert path.name == "README.md" or re.fullmatch(rf"\+[\w-]+\.({'|'.join(kinds)})\.md", path.name), path


def test_packages_are_not_ignored(tmp_path: Path) -> None:
    """Wheels leave out what git ignores, also if it is tracked."""
    shutil.copy(ROOT / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    paths = [str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("*") if path.suffix != ".pyc"]
    command = ["git", "-C", str(tmp_path), "check-ignore", "--no-index", "--stdin"]
    done = subprocess.run(command, input="\n".join(paths), capture_output=True, text=True, check=False)
    ignored = {path for path in done.stdout.splitlines() if not path.endswith("__pycache__")}
    assert (len(paths) > 400, ignored) == (True, set())
