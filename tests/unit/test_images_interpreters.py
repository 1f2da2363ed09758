"""Interpreters: found where they are, asked with a deadline, chosen by rule, copied so that they start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from minisandbox.errors import InterpreterNotFound, StoreError
from minisandbox.images import Interpreter, find_interpreter, installed_interpreters
from minisandbox.images.python import interpreters
from minisandbox.images.python.interpreters import candidates, choose, probe
from minisandbox.images.python.prefix import copy_prefix
from minisandbox.index_settings import host_settings
from minisandbox.spec import PythonRequest
from minisandbox.store import default_root

RUNNING = ".".join(map(str, sys.version_info[:3]))


def _one(version: str, prefix: str = "/somewhere") -> Interpreter:
    return Interpreter(Path(prefix) / "bin/python", version, Path(prefix), "abi", version, "1:1")


def _program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_running_interpreter_is_found() -> None:
    found = find_interpreter(RUNNING)
    assert found.version == RUNNING
    everything = installed_interpreters()
    assert Path(sys.base_prefix).resolve() in [one.prefix for one in everything]
    assert len({one.executable for one in everything}) == len(everything)


def test_a_range_prefers_the_running_interpreter() -> None:
    assert find_interpreter(">=3.11").prefix == Path(sys.base_prefix).resolve()


def test_choice() -> None:
    ours, system = _one("3.9.2", "/opt/py"), _one("3.9.7", "/usr")
    assert choose(PythonRequest.parse("3.9"), [system, ours, _one("3.9.1", "/opt/old")]) == ours
    assert choose(PythonRequest.parse("3.9"), [system]) == system
    request = PythonRequest.parse(">=2.7,<3.0")
    assert choose(request, [_one("2.8.1", "/a"), _one("2.7.3", "/b"), _one("2.7.18", "/c")]).prefix == Path("/c")


def test_a_build_from_cpythons_repository_is_one_like_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = probe(Path(sys.executable).resolve())
    assert answer is not None
    facts = {**asdict(answer), "version": "3.98.0+", "implementation": "CPython", "debug": False}
    text = json.dumps(facts, default=str)
    _program(tmp_path / "bin/python3.98", f"echo '{text}'")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    assert find_interpreter("3.98").version == "3.98.0+"
    assert find_interpreter(RUNNING).version == RUNNING, "it must not stand in the way of the others"


def test_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(Path, "home", nobody)
    assert find_interpreter(RUNNING).version == RUNNING
    assert host_settings({}).timeout == 60.0
    assert default_root({"MINISANDBOX_STORE": str(tmp_path)}) == tmp_path
    with pytest.raises(StoreError) as caught:
        default_root({})
    assert "MINISANDBOX_STORE" in str(caught.value)


def test_not_found_says_what_was_found() -> None:
    with pytest.raises(InterpreterNotFound) as caught:
        find_interpreter("3.99")
    text = str(caught.value)
    assert RUNNING in text
    assert "uv python install 3.99" in text
    assert "PATH" in text


def test_places_that_are_searched(tmp_path: Path) -> None:
    places = [
        "pyenv/versions/3.1.4/bin/python3.1",
        "data/uv/python/cpython-3.2-linux/bin/python3.2",
        "home/miniconda3/envs/x/bin/python",
        "conda/bin/python3",
        "path/python3",
    ]
    programs = {_program(tmp_path / place, "exit 1") for place in places}
    _program(tmp_path / "path/pythonw", "exit 1")
    _program(tmp_path / "path/python3.1-config", "exit 1")
    _program(tmp_path / "pyenv/shims/python3", "exit 1")
    (tmp_path / "path/python").symlink_to("python3")
    environment = {
        "HOME": str(tmp_path / "home"),
        "PYENV_ROOT": str(tmp_path / "pyenv"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "CONDA_EXE": str(tmp_path / "conda/bin/conda"),
        "PATH": f"{tmp_path}/path:{tmp_path}/pyenv/shims:{tmp_path}/nothing:",
    }
    found = [path for path in candidates(environment) if tmp_path in path.parents]
    assert set(found) == programs
    assert len(found) == len(programs)


def test_an_interpreter_runs_once_until_it_changes(tmp_path: Path) -> None:
    answer = probe(Path(sys.executable).resolve())
    assert answer is not None
    facts = json.dumps({**asdict(answer), "implementation": "CPython", "debug": False}, default=str)
    program = _program(tmp_path / "python3", f"echo >> {tmp_path}/runs; [ -e {tmp_path}/ready ] && echo '{facts}'")
    assert probe(program) is None, "failures are not remembered"
    (tmp_path / "ready").touch()
    assert probe(program) is not None
    assert probe(program) == probe(program)
    assert len((tmp_path / "runs").read_text()) == 2
    os.utime(program, ns=(1, 1))
    assert probe(program) is not None
    assert len((tmp_path / "runs").read_text()) == 3


@pytest.mark.parametrize(
    "text",
    [
        "exit 3",
        "echo not json",
        "sleep 60",
        'echo \'{"version":"3.9.1","implementation":"PyPy","prefix":"/","abi":"","build":"","debug":false}\'',
        'echo \'{"version":"3.9.1"}\'',
    ],
)
def test_what_is_no_interpreter_of_use(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreters, "PROBE_TIMEOUT", 0.5)
    assert probe(_program(tmp_path / "python3", text)) is None


def test_an_interpreter_that_cannot_be_run(tmp_path: Path) -> None:
    (tmp_path / "python3").write_bytes(b"\x7fELF junk")
    (tmp_path / "python3").chmod(0o755)
    assert probe(tmp_path / "python3") is None
    assert probe(tmp_path / "nothing") is None


def test_interpreters_of_other_versions_are_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("python3", "python3.98", "python3.99"):
        _program(tmp_path / "bin" / name, f"echo {name} >> {tmp_path}/log; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    assert find_interpreter(RUNNING).version == RUNNING
    assert (tmp_path / "log").read_text() == "python3\n"
    with pytest.raises(InterpreterNotFound):
        find_interpreter("3.99")
    assert (tmp_path / "log").read_text().startswith("python3\npython3\npython3.99\n")


def test_a_copied_prefix_starts_and_is_clean(tmp_path: Path) -> None:
    own = [one for one in installed_interpreters() if one.own_prefix]
    if not own:
        pytest.skip("no interpreter with a prefix of its own on this machine")
    copy = tmp_path / "copy"
    copy_prefix(own[0], copy, "/home/inside")
    question = "import sys, os, zlib, pip; print(sys.prefix, len(sys.path))"
    done = subprocess.run(
        [copy / "bin/python", "-I", "-B", "-c", question], capture_output=True, text=True, env={}, check=False
    )
    assert done.stdout.startswith(f"{copy} "), done.stderr
    site = copy / f"lib/python{own[0].minor}/site-packages"
    assert {name.split("-")[0].lower() for name in os.listdir(site)} <= {
        "pip", "setuptools", "wheel", "pkg_resources", "_distutils_hack", "distutils", "readme.txt", "easy_install.py",
    }  # fmt: skip
    assert not list(copy.rglob("*.pyc"))
    assert not (site.parent / "test" / "test_os.py").exists()
    grep = subprocess.run(["grep", "-rlIF", str(own[0].prefix), copy], capture_output=True, text=True, check=False)
    assert grep.stdout == ""
    shebang = (copy / "bin/pip3").read_text().splitlines()[0] if (copy / "bin/pip3").exists() else "#!/home/inside"
    assert shebang.startswith("#!/home/inside")
