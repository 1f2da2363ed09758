"""What other packages lack or raise is not called a bug in MiniSandbox: the cause and the remedy are named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from minisandbox.cli import doctor
from minisandbox.cli.common import exits
from minisandbox.cli.common.foreign_errors import EXTRAS, REQUIRED, raised_by, translate
from minisandbox.cli.main import main
from minisandbox.errors import HostError, MissingExtra, PackageError

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "e2b-dockerfile-utils": "e2b_dockerfile_utils",
    "inspect-ai": "inspect_ai",
    "mini-swe-agent": "minisweagent",
    "pyyaml": "yaml",
    "swe-rex": "swerex",
}
"""Distributions whose module is called otherwise."""
SFT = "model: {tmp}\ndata: [rows.jsonl]\nout: {tmp}/run\n"
RL = "model: {tmp}\ntasks: [quickstart]\nout: {tmp}/run\n"


def raised_in(module: str, code: str) -> Exception:
    """The error that code of a module raises, called from ours."""
    space: dict[str, Any] = {"__name__": module}
    exec(code, space)
    ours = {"__name__": "minisandbox.train.rl", "call": space["call"]}
    exec("def train():\n    call()", ours)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        ours["train"]()
    error = caught.value
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)  # without the test's own frame


# --- packages that are not installed ---------------------------------------------------------------------------------


def modules_of(requirements: Sequence[str]) -> set[str]:
    names = [re.split(r"[<>=,]", one)[0] for one in requirements]
    return {MODULES.get(name, name) for name in names}


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tools = {"dev", "docs"}  # nothing of the package imports them
    extras = {name: modules_of(found) for name, found in project["optional-dependencies"].items() if name not in tools}
    assert modules_of(project["dependencies"]) == REQUIRED
    assert set(EXTRAS) == set().union(*extras.values())
    for module, named in EXTRAS.items():
        assert set(named) == {extra for extra, modules in extras.items() if module in modules}


def without(tmp_path: Path, *packages: str) -> dict[str, str]:
    """An environment in which packages are not installed."""
    hidden = "".join(f"sys.modules[{name!r}] = None\n" for name in packages)
    (tmp_path / "sitecustomize.py").write_text(f"import sys\n{hidden}")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize(
    ("package", "words", "extra"),
    [
        ("pyarrow", ["tasks", "ls", "rows.parquet"], "data"),
        ("datasets", ["tasks", "ls", "folder"], "data"),
        ("torch", ["model", "serve", "--model", "."], "local"),
        ("gguf", ["model", "fetch", "--cache", "cache"], "local"),
        ("swerex", ["sweagent", "--", "run"], "swerex"),
        ("ray", ["cluster", "status"], "ray"),
        ("transformers", ["train", "sft", "sft.yaml", "--show-mask", "1"], "train"),
        ("peft", ["train", "sft", "sft.yaml"], "train"),
        ("peft", ["train", "rl", "rl.yaml"], "train"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(package: str, words: list[str], extra: str, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").touch()
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "state.json").touch()
    for name, text in (("sft.yaml", SFT), ("rl.yaml", RL)):
        (tmp_path / name).write_text(text.format(tmp=tmp_path))
    hidden = ["torch", "transformers"] if extra == "local" else [package]
    done = subprocess.run(
        [sys.executable, "-m", "minisandbox", *words],
        capture_output=True, text=True, check=False, env=without(tmp_path, *hidden), cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.returncode == MissingExtra.exit_code, done.stderr
    assert "not installed" in done.stderr
    assert f"pip install 'swe-minisandbox[{extra}]'" in done.stderr
    assert "a bug in MiniSandbox" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_module_without_its_package_names_the_extra(tmp_path: Path) -> None:
    script = "import minisandbox.integrations.mini_swe_agent"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, check=False, env=without(tmp_path, "minisweagent"), timeout=120,
    )  # fmt: skip
    assert "pip install 'swe-minisandbox[mini]'" in done.stderr


def test_a_missing_skyrl_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minisandbox.integrations.skyrl"],
        capture_output=True, text=True, check=False, env=without(tmp_path, "skyrl"), timeout=120,
    )  # fmt: skip
    assert "SkyRL is not installed in this environment" in done.stderr
    assert "pip install 'skyrl[fsdp]==0.4.0'" in done.stderr


def missing(name: str, by: str = "minisandbox.models") -> MissingExtra | HostError | PackageError | None:
    code = f"def call():\n    raise ModuleNotFoundError('No module named {name}', name={name!r})"
    found = translate(raised_in(by, code))
    assert found is None or isinstance(found, MissingExtra | HostError | PackageError)
    return found


def test_what_is_missing_where(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("peft", "zstandard", "nothing_of_that_name"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("transformers", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    trained = missing("transformers.utils")
    assert isinstance(trained, MissingExtra)
    assert trained.hint == "pip install 'swe-minisandbox[train]'"  # the caller is minisandbox.train
    foreign = missing("peft", by="trl.trainer")
    assert isinstance(foreign, MissingExtra)
    assert foreign.reason == "trl needs it"
    unknown = missing("nothing_of_that_name.part", by="trl.trainer")
    assert isinstance(unknown, MissingExtra)
    assert unknown.what == "the module nothing_of_that_name, which trl needs, is not installed"
    damaged = missing("zstandard")
    assert isinstance(damaged, MissingExtra)
    assert damaged.hint == "pip install --force-reinstall swe-minisandbox"
    poor = missing("sqlite3")
    assert isinstance(poor, HostError)
    assert "python3-full" in str(poor)
    assert missing("nothing_of_that_name") is None
    assert missing("minisandbox.nothing") is None


# --- what other packages raise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("NotImplementedError('Weight synchronization needs a CUDA device')", "needs a CUDA device"),
        ("RuntimeError('start the server with VLLM_SERVER_DEV_MODE=1')", "VLLM_SERVER_DEV_MODE=1"),
        ("ImportError('vLLM is not available')", "vLLM is not available"),
        ("ConnectionError('the vLLM server cannot be reached')", "the vLLM server cannot be reached"),
    ],
)
def test_an_error_of_another_package_is_passed_on(
    error: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = raised_in("trl.generation.vllm", f"def call():\n    raise {error}")

    def run(_args: object) -> int:
        raise failed

    monkeypatch.setattr(doctor, "configure", lambda parser: parser.set_defaults(run=run))
    assert main(["doctor"]) == PackageError.exit_code
    said = capsys.readouterr().err
    assert re.match(r"minisandbox: trl( [\d.]+)? failed: \w+Error\n", said)
    assert text in said
    assert "what to do: follow the message of trl" in said


def test_errors_of_our_own_code_are_ours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(_args: object) -> int:
        raise failed

    monkeypatch.setattr(doctor, "configure", lambda parser: parser.set_defaults(run=run))
    for module, code in (
        ("minisandbox.agents", "def call():\n    raise RuntimeError('ours')"),
        ("minisandbox.agents", "import json\ndef call():\n    json.loads('{')"),  # Python's own frames count as ours
        ("yaml.reader", "def call():\n    raise RuntimeError('what we always need')"),
    ):
        failed = raised_in(module, code)
        assert translate(failed) is None
        assert main(["doctor"]) == exits.INTERNAL
        assert "a bug in MiniSandbox" in capsys.readouterr().err


def test_compiled_code_is_known_by_its_errors() -> None:
    kind = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})
    assert raised_by(kind("out of memory")) == "torch"
    assert raised_by(raised_in("minisandbox.models", "def call():\n    raise RuntimeError")) is None


def test_a_long_message_is_cut() -> None:
    found = translate(raised_in("ray.worker", "def call():\n    raise RuntimeError('x' * 100_000 + 'the cause')"))
    assert isinstance(found, PackageError)
    assert found.reason is not None
    assert len(found.reason) == 2000
    assert found.reason.endswith("the cause")
