"""tools/make-venv: what it says where it cannot make an environment, and the other ways in that it knows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "make-venv"

# An interpreter from which parts are missing, as distributions package it: the parts are Python's own elsewhere.
POOR = """#!/bin/sh
case "$*" in
    {refused}) exit 1 ;;
    *) exec {python} "$@" ;;
esac
"""


def make_venv(venv: Path, path: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHON"}
    return subprocess.run(
        [str(SCRIPT), str(venv), "run"],
        capture_output=True, text=True, timeout=300, check=False, env={**environment, "PATH": path, **variables},
    )  # fmt: skip


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH with the core utilities and no Python and no uv on it."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("bash", "dirname", "mkdir", "rm", "touch", "sh", "cat"):
        found = next(Path(part, name) for part in ("/usr/bin", "/bin") if Path(part, name).exists())
        (directory / name).symlink_to(found)
    return directory


def put_python(tools: Path, refused: str) -> None:
    script = tools / "python3"
    script.write_text(POOR.format(refused=refused, python=sys.executable), encoding="utf-8")
    script.chmod(0o755)


def test_no_python_at_all(tools: Path, tmp_path: Path) -> None:
    done = make_venv(tmp_path / "venv", str(tools))
    assert done.returncode == 1
    assert "no Python >= 3.11 was found" in done.stderr
    assert "make PYTHON=" in done.stderr


def test_a_named_python_that_is_none(tools: Path, tmp_path: Path) -> None:
    done = make_venv(tmp_path / "venv", str(tools), PYTHON="/bin/false")
    assert done.returncode == 1
    assert "PYTHON=/bin/false is not a Python >= 3.11" in done.stderr


def test_a_python_that_can_make_none(tools: Path, tmp_path: Path) -> None:
    put_python(tools, "*ensurepip*|'-m virtualenv'*|'-m pip'*|-m\\ virtualenv*|-m\\ pip*")
    done = make_venv(tmp_path / "venv", str(tools))
    assert done.returncode == 1
    assert "apt install python3-venv" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_directory_of_somebody_else(tools: Path, tmp_path: Path) -> None:
    put_python(tools, "nothing")
    (tmp_path / "file").write_text("", encoding="ascii")
    done = make_venv(tmp_path / "file" / "venv", str(tools))
    assert done.returncode == 1
    assert "make VENV=" in done.stderr


@pytest.mark.slow
@pytest.mark.index
def test_pip_serves_where_a_part_is_missing(tools: Path, tmp_path: Path) -> None:
    pip = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if pip.returncode != 0:
        pytest.skip("the running Python has no pip to serve with")
    put_python(tools, "*ensurepip*|-m\\ virtualenv*")
    done = make_venv(tmp_path / "venv", str(tools))
    assert done.returncode == 0, done.stderr
    shown = subprocess.run([tmp_path / "venv/bin/minisandbox", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("minisandbox ")
