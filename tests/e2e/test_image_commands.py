"""`minisandbox image` as typed: builds of recipes and sets, locks, interpreters, repair by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.oci_tools import END, MadeImage, entry

from minisandbox.images import read_pins

pytestmark = pytest.mark.kernel

RECIPE = '[source.local]\npath = "project"\n'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/a.py").write_text("x = 1\n")
    (tmp_path / "good.toml").write_text(f"install = ['echo made > made']\n{RECIPE}")
    (tmp_path / "bad.toml").write_text(f"install = ['echo what went wrong; cat by-hand > made']\n{RECIPE}")
    return tmp_path


def image(place: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return minisandbox(place, "image", *words, stdin=stdin)


def minisandbox(place: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MINISANDBOX_STORE": str(place / "store")}
    return subprocess.run(
        [sys.executable, "-m", "minisandbox", *words],
        capture_output=True, text=True, timeout=300, check=False, env=environment, cwd=place, input=stdin,
    )  # fmt: skip


@pytest.mark.slow
def test_locks(place: Path) -> None:
    assert image(place, "build", "good.toml").returncode == 0
    shown = image(place, "pins", "good", "--lock")
    assert shown.returncode == 0
    assert shown.stdout.startswith('format = 1\nimage = "good"\nbase = "')
    (place / "good.lock.toml").write_text(shown.stdout)
    (place / "other.toml").write_text(shown.stdout.replace("[installed]", '[installed]\n"six" = "1.0"'))
    locked = image(place, "build", "good.toml", "--locked", "other.toml")
    assert locked.returncode == 24
    assert "six: 1.0 in the lock, not there now" in locked.stderr
    assert image(place, "build", "good.toml", "--locked", "good.lock.toml").returncode == 0
    assert image(place, "build", "good.toml", "--locked", "nothing.toml").returncode == 6


@pytest.mark.slow
def test_pins_of_a_container_image(place: Path) -> None:
    """It is pulled first; what is printed is read by --pins and by requirements_file."""
    site = "opt/venv/lib/python3.9/site-packages"
    made = {"opt/venv/pyvenv.cfg": b"version = 3.9.20", f"{site}/six-1.16.0.dist-info/METADATA": SIX, "x/lib": b""}
    tar = b"".join(entry(name, data) for name, data in made.items())
    layout = MadeImage([tar + END], {"Env": ["PATH=/bin"]}).write_layout(place / "layout")
    shown = image(place, "pins", f"oci:{layout}")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == "# /opt/venv\ndependencies:\n  - python=3.9.20\n  - pip:\n    - six==1.16.0\n"
    (place / "environment.yml").write_text(shown.stdout)
    assert read_pins(place / "environment.yml").requirements == ("six==1.16.0",)
    facts = json.loads(image(place, "pins", "layout", "--json", "--environment", "venv").stdout)
    assert (facts["python"], facts["pins"]) == ("3.9.20", ["six==1.16.0"])
    for words, status in ((("--environment", "/x"), 6), (("--lock",), 3)):
        assert image(place, "pins", "layout", *words).returncode == status
    assert image(place, "pins", "nothing").returncode == 6


SIX = b"Metadata-Version: 2.1\nName: six\nVersion: 1.16.0\n"


@pytest.mark.slow
def test_a_failed_build_is_repaired(place: Path) -> None:
    failed = image(place, "build", "bad.toml")
    assert failed.returncode == 24
    assert "what went wrong" in failed.stderr
    assert "/logs/" in failed.stderr
    dropped = image(place, "build", "bad.toml", "--shell", stdin="echo by hand > by-hand; exit 5\n")
    assert dropped.returncode == 24
    assert "its changes were dropped" in dropped.stderr
    assert image(place, "build", "bad.toml", "--shell", stdin="echo nothing > other\n").returncode == 24
    kept = image(place, "build", "bad.toml", "--shell", stdin="ls; echo by hand > by-hand\n")
    assert kept.returncode == 0, kept.stderr
    assert kept.stdout.startswith("a.py\nother\n")
    assert "kept as layer" in kept.stderr
    shown = json.loads(image(place, "show", "bad", "--json").stdout)
    assert "by_hand" in [layer["step"]["kind"] for layer in shown["layers"]]
    assert image(place, "build", "bad.toml", "--shell").returncode == 0, "nothing fails"
    assert "changes made by hand for bad" in image(place, "rm", "bad").stdout
    assert image(place, "build", "bad.toml").returncode == 24


@pytest.mark.slow
def test_a_set_whose_failures_are_remembered(place: Path) -> None:
    def row(name: str, *install: str) -> str:
        build = {"source": {"local": {"path": "project"}}, "install": list(install)}
        patch = "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
        return json.dumps({
            "instance_id": name, "repo": "o/n", "form": "swebench", "problem_statement": "x", "patch": patch,
            "FAIL_TO_PASS": ["t.py::t"], "PASS_TO_PASS": [], "build": build, "test": {"command": "true"},
        })  # fmt: skip

    (place / "set.jsonl").write_text("\n".join([row("good", "true"), row("bad", "exit 3"), row("last", "true")]))
    first = image(place, "build", "set.jsonl", "--jobs", "2")
    assert first.returncode == 24
    assert "good" in first.stdout
    assert "last" in first.stdout
    again = image(place, "build", "set.jsonl")
    assert "was not tried again" in again.stderr
    assert "was not tried again" not in image(place, "build", "set.jsonl", "--retry-failed").stderr
    for one in (("--locked", "x.toml"), ("--shell",)):
        assert image(place, "build", "set.jsonl", *one).returncode == 3


def test_interpreters(place: Path) -> None:
    listed = minisandbox(place, "doctor", "--pythons", "--json")
    assert listed.returncode == 0
    rows = json.loads(listed.stdout)
    assert rows, "not even the one that runs this"
    shown = minisandbox(place, "doctor", "--pythons").stdout
    assert f"{rows[0]['version']} *" in shown
    assert rows[0]["executable"] in shown
