"""``minisandbox model`` as typed: a server's address is its only line on stdout, a signal is its usual end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.scripted_server import ScriptedServer, serving

pytestmark = pytest.mark.once
PATIENCE = 120.0


@contextmanager
def command(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A serving command, and the address that it prints."""
    with subprocess.Popen(
        [sys.executable, "-m", "minisandbox", "model", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            if process.poll() is None:
                process.kill()


def ask(base_url: str, key: str = "none", **body: object) -> Any:
    data = json.dumps({"model": "any", "messages": [{"role": "user", "content": "x"}], **body}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return json.load(response)


def ended(process: subprocess.Popen[str], number: signal.Signals) -> str:
    process.send_signal(number)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    return said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_proxy_writes_its_rows_at_the_end(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "rows.jsonl"
    with (
        serving(ScriptedServer(["one", "two"])) as server,
        command("proxy", "--api-base", server.url, "--out", str(out)) as (process, base_url),
    ):
        for name in ("ms-a", "ms-b"):
            assert ask(base_url, name)["choices"][0]["message"]["content"] == "one"
        assert not out.exists()
        assert "2 rows of 2 sessions" in ended(process, number)
    assert [json.loads(line)["session"] for line in out.read_text().splitlines()] == ["a", "b"]


def test_serve_a_directory(tmp_path: Path) -> None:
    from tests.unit.tiny_model import save_tiny_model  # noqa: PLC0415 - skips where the extra is missing

    save_tiny_model(tmp_path / "tiny")
    with command("serve", "--model", str(tmp_path / "tiny"), "--threads", "1") as (process, base_url):
        answer = ask(base_url, model="tiny", max_tokens=5, return_token_ids=True, logprobs=True)
        assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"]
        ended(process, signal.SIGINT)


def test_what_cannot_be_served(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "minisandbox", "model", "serve", "--model", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 3
    assert f"{tmp_path} has no model" in done.stderr
