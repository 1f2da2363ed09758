"""A model's options on the command line, scripts in files, and the server of scripts as a program."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scripted_model import decode_answer

from minisandbox.cli.common.rollout_options import add_model_arguments, model_options
from minisandbox.errors import BadAnswer, InvalidValue, ModelRefused
from minisandbox.models import (
    Message,
    ModelOptions,
    OpenAIModel,
    Prices,
    Request,
    Sampling,
    Script,
    ScriptedModel,
    ToolCall,
)
from minisandbox.models.scripted import encode_message, encode_prompt

pytestmark = pytest.mark.once
SERVED = ["--model", "qwen", "--api-base", "http://localhost:8000/v1"]


def parsed(*words: str) -> ModelOptions | None:
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    return model_options(parser.parse_args(words))


def ask(session: str = "", asked: int = 0) -> Request:
    history = (Message("user", "?"), Message("assistant", "!")) * asked
    return Request((*history, Message("user", "?")), session=session)


# --- options ---------------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_librarys() -> None:
    assert parsed(*SERVED) == ModelOptions("qwen", "http://localhost:8000/v1")
    assert parsed() is None


def test_every_option_is_read() -> None:
    words = (
        "--api-key-env KEY --tokens yes --temperature 0.5 --top-p 0.9 --top-k 5 --max-tokens 100 --sampling-seed 3 "
        "--model-timeout 10 --model-connect-timeout 2 --model-read-timeout 5 --model-retries 1 --model-concurrency 7 "
        "--requests-per-minute 60 --budget 2.5 --budget-tokens 1000 --price prompt=1 --price completion=2 "
        '--price cached=0.5 --sampling reasoning_effort=low --sampling chat_template_kwargs={"thinking":false}'
    )
    extra = {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False}}
    assert parsed(*SERVED, *words.split()) == ModelOptions(
        "qwen",
        "http://localhost:8000/v1",
        api_key_env="KEY",
        sampling=Sampling(0.5, 0.9, 5, 100, 3, extra=extra),
        tokens="yes",
        timeout=10.0,
        connect_timeout=2.0,
        read_timeout=5.0,
        retries=1,
        concurrency=7,
        requests_per_minute=60.0,
        budget_dollars=2.5,
        budget_tokens=1000,
        prices=Prices(1.0, 2.0, 0.5),
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--max-tokens", "7"],
        ["--api-base", "http://localhost/v1"],
        ["--price", "prompt=1"],
        ["--sampling", "a=1"],
        [*SERVED, "--price", "prompt=x"],
        [*SERVED, "--price", "output=3"],
        [*SERVED, "--budget", "5"],
        [*SERVED, "--sampling", "nothing"],
        [*SERVED, "--temperature", "-1"],
        ["--model", "qwen"],
    ],
    ids=" ".join,
)
def test_options_that_do_not_fit(words: list[str]) -> None:
    with pytest.raises(InvalidValue):
        parsed(*words)


# --- scripts ---------------------------------------------------------------------------------------------------------


def said(script: Script, request: Request) -> str:
    return script(request).content


def test_an_answer_goes_by_the_history() -> None:
    script = Script.of(["one", "two"])
    assert [said(script, ask(asked=n)) for n in (0, 1, 0)] == ["one", "two", "one"]
    with pytest.raises(ModelRefused, match="2 answers"):
        script(ask(asked=2))


def test_answers_go_by_the_instance() -> None:
    script = Script.of({"django-1": ["a"], "django-11": ["b"], "django-1.2": ["c"], "*": ["d"]})
    sessions = {"django-1": "a", "django-1.0": "a", "django-11.0": "b", "django-1.2.0": "c", "django-111": "d", "": "d"}
    assert {session: said(script, ask(session)) for session in sessions} == sessions


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '["x"]'),
        ("a.json", '{"task": ["x"]}'),
        ("a.jsonl", '"x"\n\n'),
        ("a.jsonl", '{"content": "x"}\n'),
        ("a.jsonl", '{"instance_id": "task", "answers": ["x"]}\n{"instance_id": "other", "answers": ["y"]}\n'),
    ],
)
def test_scripts_in_files(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert said(Script.load(path), ask("task.0")) == "x"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", ""),
        ("a.json", '"x"'),
        ("a.json", "[3]"),
        ("a.json", '{"task": "x"}'),
        ("a.json", '[{"fault": "earthquake"}]'),
        ("a.json", '[{"text": "x"}]'),
        ("a.jsonl", '{"instance_id": "a", "answers": []}\n"x"\n'),
        ("a.jsonl", '{"instance_id": "a", "answers": []}\n{"instance_id": "a", "answers": []}\n'),
        ("a.jsonl", '{"instance_id": "a", "answers": [], "more": 1}\n'),
    ],
)
def test_files_that_are_no_scripts(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InvalidValue, match=name):
        Script.load(path)
    with pytest.raises(InvalidValue, match=r"none\.json"):
        Script.load(tmp_path / "none.json")


def test_a_function_answers() -> None:
    def answer(request: Request) -> str:
        if len(request.messages) > 1:
            raise BadAnswer("no more")
        return request.messages[0].content * 2

    model = ScriptedModel(answer)
    assert asyncio.run(model.complete(ask())).message.content == "??"
    with pytest.raises(BadAnswer):
        asyncio.run(model.complete(ask(asked=1)))


# --- the scripted model's tokens -------------------------------------------------------------------------------------

TEXTS = st.text(max_size=30)
CALLS = st.builds(ToolCall, TEXTS, TEXTS, TEXTS)
ANSWERS = st.builds(Message, st.just("assistant"), TEXTS, st.lists(CALLS, max_size=2).map(tuple), st.none(), TEXTS)


@settings(deadline=None, max_examples=60)
@given(ANSWERS)
def test_tokens_stand_for_the_answer(message: Message) -> None:
    tokens = encode_message(message)
    assert decode_answer(tokens) == message


def test_tools_are_read() -> None:
    one = Request((Message("user", "?"),), tools=({"type": "function"},))
    assert len(encode_prompt(one)) > len(encode_prompt(Request(one.messages)))


# --- the server as a program -----------------------------------------------------------------------------------------


def test_the_server_serves_from_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"task": ["fine"]}))
    command = [sys.executable, "-m", "tests.scripted_server", "--script", str(script), "--fault", "server_error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            answer = asyncio.run(asyncio.wait_for(asked(url), 60))
        finally:
            process.kill()
    assert answer == ("fine", 2)


async def asked(url: str) -> tuple[str, int]:
    model = OpenAIModel("any", url)
    try:
        found = await model.complete(ask("task.0"))
    finally:
        await model.close()
    return found.message.content, found.tries
