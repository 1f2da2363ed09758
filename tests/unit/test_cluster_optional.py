"""Ray is for those who ask for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minisandbox.cli.main import main
from minisandbox.errors import HostError, MissingExtra


def without_ray(tmp_path: Path) -> dict[str, str]:
    """An environment in which Ray is not installed."""
    (tmp_path / "ray.py").write_text("raise ImportError('no ray here')\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_nothing_imports_ray_unasked(tmp_path: Path) -> None:
    modules = (
        "rollouts", "rollouts.cluster", "rollouts.cluster.joining", "train.sandboxes", "cli.rollout", "cli.validate",
        "cli.train", "cli.cluster", "cli.main",
    )  # fmt: skip
    code = "".join(f"import minisandbox.{name}\n" for name in modules) + "import sys; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=without_ray(tmp_path), timeout=120)


@pytest.mark.parametrize(
    "words",
    [
        ("rollout", "quickstart", "--agent", "oracle", "--cluster", "auto", "-o", "run"),
        ("validate", "quickstart", "--cluster", "auto", "-o", "run"),
        ("evaluate", "quickstart", "-p", "gold", "--cluster", "auto", "-o", "run"),
        ("cluster", "status"),
        ("cluster", "head"),
        ("cluster", "worker", "--address", "10.0.0.1:6379"),
        ("cluster", "stop"),
    ],
)
def test_without_ray_one_line_says_how_to_have_it(
    tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    assert main(words) == MissingExtra.exit_code
    assert "pip install 'swe-minisandbox[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "run" / "rollouts.sqlite").exists()


RAY = """
import threading
def init(**_):
    telling = threading.Thread(target=print, args=["a node has died"], name="ray_listen_error_messages")
    telling.start()
    telling.join()
    if {fails}: raise ConnectionError("no such cluster")
def is_initialized(): return False
def nodes(): return []
class exceptions: RayError = OSError
class util:
    def list_named_actors(all_namespaces): return []
"""


@pytest.mark.parametrize(
    ("words", "fails", "out"),
    [
        (("cluster", "status", "--json"), False, "[]\n"),
        (("rollout", "quickstart", "--agent", "oracle", "--cluster", "auto", "-o", "run", "--json"), True, ""),
    ],
)
def test_what_ray_tells_of_nodes_is_no_output_of_ours(
    tmp_path: Path, words: tuple[str, ...], fails: bool, out: str
) -> None:
    environment = without_ray(tmp_path)
    (tmp_path / "ray.py").write_text(RAY.format(fails=fails))
    done = subprocess.run(
        [sys.executable, "-m", "minisandbox", *words],
        capture_output=True, text=True, check=False, env=environment, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert "a node has died" in done.stderr
    assert done.stdout == out, done.stderr
    assert (done.returncode != 0) == fails


def fake_ray(tmp_path: Path, body: str) -> dict[str, str]:
    """Return the environment of a command that finds a package ray whose command line does this with its ``words``."""
    place = tmp_path / "ray" / "scripts"
    place.mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").write_text("class exceptions:\n    class RayError(Exception): ...\n")
    (place / "__init__.py").touch()
    (place / "scripts.py").write_text(f"class cli:\n    def main(words, prog_name):\n        {body}\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    return {**clean, "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}


JOIN = [sys.executable, "-m", "minisandbox", "cluster", "worker", "--address", "h:1"]


@pytest.mark.parametrize(
    ("variables", "token", "mode"),
    [
        ({}, False, None),
        ({}, True, "token"),
        ({"RAY_AUTH_MODE": "disabled"}, True, "disabled"),
        ({"RAY_AUTH_TOKEN": "x"}, False, "token"),
        ({"RAY_AUTH_TOKEN_PATH": "/dev/null/none"}, True, None),
    ],
)
def test_nodes_send_the_token_that_a_head_would_ask_for(
    tmp_path: Path, variables: dict[str, str], token: bool, mode: str | None
) -> None:
    environment = fake_ray(tmp_path, "import os; print(os.environ.get('RAY_AUTH_MODE'))")
    if token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("x")
    done = subprocess.run(
        JOIN, capture_output=True, text=True, check=True, env=environment | variables, timeout=120
    )  # fmt: skip
    assert done.stdout == f"{mode}\n"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("Failed to connect.\\nAuthenticationError: InvalidAuthToken: Authentication token is missing", "auth_token"),
        ("no route", "likely reason: no route"),
    ],
)
def test_why_a_node_cannot_join_is_no_traceback(tmp_path: Path, message: str, words: str) -> None:
    environment = fake_ray(tmp_path, f"raise RuntimeError('{message}')")
    done = subprocess.run(JOIN, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == HostError.exit_code
    assert "cannot join a cluster at h:1" in done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_what_follows_two_dashes_is_for_ray(tmp_path: Path) -> None:
    said = tmp_path / "said"
    environment = fake_ray(tmp_path, f"open({str(said)!r}, 'w').write('\\n'.join(words))")
    subprocess.run(
        [
            *JOIN, "--sandboxes", "3", "--build-slots", "2", "--node-ip", "10.0.0.2",
            "--", "--num-gpus", "0",
        ],
        check=True, env=environment, timeout=120,
    )  # fmt: skip
    words = said.read_text().splitlines()
    assert words[:3] == ["start", "--address", "h:1"]
    assert words[-2:] == ["--num-gpus", "0"]
    assert '{"build_slots": 2, "sandboxes": 3}' in words
    assert "10.0.0.2" in words
