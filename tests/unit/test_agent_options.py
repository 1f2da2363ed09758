"""Agents by name, their options, and prompts."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.agent_tools import work

from minisandbox.agents import (
    AGENTS,
    FORMATS,
    AgentLimits,
    AgentOptions,
    BashAgent,
    EmptyAgent,
    FormatError,
    OracleAgent,
    ReplayAgent,
    open_agent,
)
from minisandbox.agents.prompts import PLACEHOLDERS, Prompts, Template
from minisandbox.cli.common.rollout_options import (
    AGENT_OPTIONS,
    LIMIT_OPTIONS,
    add_agent_arguments,
    agent_limits,
    agent_options,
)
from minisandbox.errors import InvalidValue, NotFound
from minisandbox.models import Message

ROOT = Path(__file__).resolve().parents[2]
VALUES = dict.fromkeys(PLACEHOLDERS, "")


# --- by name ---------------------------------------------------------------------------------------------------------


def test_agents_by_name(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('["ls"]')
    made = [
        open_agent(name, AgentOptions(recording=tmp_path / "r.json") if name == "replay" else None) for name in AGENTS
    ]
    assert [type(one) for one in made] == [BashAgent, OracleAgent, EmptyAgent, ReplayAgent]
    assert [one.name for one in made] == list(AGENTS)
    assert [one.needs_model for one in made] == [True, False, False, False]


OWN = """
from minisandbox.agents import Ending
class Mine:
    name = "mine"
    needs_model = False
    def __init__(self, word="none"):
        self.word = word
    async def run(self, task, session):
        return Ending()
class Half:
    name = "half"
class Number(Mine):
    def __init__(self, count):
        self.count = int(count)
"""


def test_agents_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agents_of_a_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "agents_of_a_test", raising=False)
    assert getattr(open_agent("agents_of_a_test:Mine"), "word", "") == "none"
    assert getattr(open_agent("agents_of_a_test:Mine", AgentOptions(extra={"word": "x"})), "word", "") == "x"
    with pytest.raises(InvalidValue, match="cannot be created"):
        open_agent("agents_of_a_test:Mine", AgentOptions(extra={"wrong": "x"}))
    with pytest.raises(InvalidValue, match="has no 'needs_model'"):
        open_agent("agents_of_a_test:Half")
    with pytest.raises(InvalidValue, match="has no option 'action_format'"):
        open_agent("agents_of_a_test:Mine", AgentOptions(action_format="tool"))
    with pytest.raises(NotFound, match="cannot be imported"):
        open_agent("agents_of_a_test:Nobody")
    with pytest.raises(InvalidValue, match=r"cannot be created: ValueError\("):
        open_agent("agents_of_a_test:Number", AgentOptions(extra={"count": "many"}))
    (tmp_path / "broken_agents.py").write_text("class Mine(:\n")
    with pytest.raises(NotFound, match=r"cannot be imported: SyntaxError\("):
        open_agent("broken_agents:Mine")


@pytest.mark.parametrize("name", ["none", "no.such.module:Class", ":Class", "..x:Class", "json:nothing", ""])
def test_agents_that_are_not_there(name: str) -> None:
    with pytest.raises(NotFound):
        open_agent(name)


def test_options_of_other_agents_are_refused(tmp_path: Path) -> None:
    for name, options in [
        ("oracle", AgentOptions(action_format="xml")),
        ("bash", AgentOptions(recording=tmp_path)),
        ("bash", AgentOptions(extra={"a": "b"})),
        ("empty", AgentOptions(command_timeout=3)),
    ]:
        with pytest.raises(InvalidValue, match="has no option"):
            open_agent(name, options)
    with pytest.raises(InvalidValue, match="needs a recording"):
        open_agent("replay")


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"action_format": "json"}, {"shell": "zsh"}, {"command_timeout": 0}, {"command_timeout": float("nan")},
        {"observation_chars": 99}, {"format_errors": 0}, {"observation_chars": 1e4}, {"shell": None},
        {"format_errors": True},
    ],
)  # fmt: skip
def test_options_that_cannot_be_used(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue):
        AgentOptions(**values)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_agent_arguments(parser)
    return parser.parse_args(["--agent", "bash", *words])


def test_the_command_line_has_every_option() -> None:
    assert (agent_options(parsed()), agent_limits(parsed())) == (AgentOptions(), AgentLimits())
    args = parsed(
        "--action-format", "tool", "--prompt", "p.md", "--shell", "stateful", "--command-timeout", "3",
        "--observation-chars", "200", "--format-errors", "1", "--recording", "r", "--agent-option", "a=b=c",
        "--step-limit", "none", "--time-limit", "1.5", "--token-limit", "5", "--context-limit", "6",
        "--cost-limit", ".5",
    )  # fmt: skip
    assert args.agent == "bash"
    assert agent_options(args) == AgentOptions("tool", Path("p.md"), "stateful", 3.0, 200, 1, Path("r"), {"a": "b=c"})
    assert agent_limits(args) == AgentLimits(None, 1.5, 5, 6, 0.5)


@pytest.mark.parametrize("words", [("--step-limit", "many"), ("--action-format", "json"), ("--observation-chars", "x")])
def test_words_that_are_no_values(words: tuple[str, ...]) -> None:
    with pytest.raises(argparse.ArgumentError):
        parsed(*words)


def test_the_page_has_every_option() -> None:
    page = (ROOT / "docs" / "reference" / "action-formats.md").read_text(encoding="utf-8")
    for option in (*AGENT_OPTIONS, *LIMIT_OPTIONS):
        assert f"| `{option.flag}`" in page
        assert option.help in page
    for name in PLACEHOLDERS:
        assert f"`{{{name}}}`" in page


# --- prompts ---------------------------------------------------------------------------------------------------------


def examples(text: str, name: str) -> list[str]:
    """The actions that a text shows."""
    if name == "xml":
        return re.findall(r"^<function=.*?^</function>", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"^```\w+\n.*?^```$", text, re.MULTILINE | re.DOTALL) if name == "text" else []


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_prompts_show_actions_as_they_are_read(name: str) -> None:
    system, _ = Prompts.load(name).render({**VALUES, "workdir": "/testbed"})
    assert "/testbed" in system
    shown = examples(system, name)
    assert len(shown) == {"text": 6, "xml": 6, "tool": 0}[name]
    for one in shown:
        FORMATS[name].parse(Message("assistant", one))


@pytest.mark.parametrize("name", ["text", "xml"])
def test_the_page_shows_actions_as_they_are_read(name: str) -> None:
    page = (ROOT / "docs" / "reference" / "action-formats.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^````text\n(.*?)^````$", page, re.MULTILINE | re.DOTALL)
    read = 0
    for block in blocks:
        try:
            read += bool(FORMATS[name].parse(Message("assistant", block)))
        except FormatError:
            continue
    assert read >= (6 if name == "text" else 2)


@given(st.text())
def test_what_is_filled_in_is_not_looked_at(text: str) -> None:
    template = Template("<{problem_statement}>{{workdir}} {} { a } {1} $x \\1 {'k': {'v': 1}}{workdir}", "x")
    rendered = template.render({**VALUES, "problem_statement": text, "workdir": "{actions}"})
    assert rendered == f"<{text}>{{workdir}} {{}} {{ a }} {{1}} $x \\1 {{'k': {{'v': 1}}}}{{actions}}"


def test_unknown_placeholders_are_refused_where_they_stand(tmp_path: Path) -> None:
    (tmp_path / "own.md").write_text("{problem_statement}\n\n{isue}\n")
    text = f"{tmp_path}/own.md:3: {{isue}} is not a known placeholder"
    with pytest.raises(InvalidValue, match=re.escape(text)) as caught:
        Prompts.load("text", tmp_path / "own.md")
    assert "{{isue}}" in str(caught.value)


def test_prompts_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.md").write_text("Do: {problem_statement}")
    assert Prompts.load("text", tmp_path / "own.md").render({**VALUES, "problem_statement": "x"})[1] == "Do: x"
    place = tmp_path / "place"
    place.mkdir()
    (place / "system.md").write_text("")
    (place / "actions-tool.md").write_text("act in {workdir}\n")
    (place / "task.md").write_text("{problem_statement} {actions} {{actions}}")
    rendered = Prompts.load("tool", place).render({**VALUES, "problem_statement": "x", "workdir": "w"})
    assert rendered == ("", "x act in w {actions}")
    assert (
        "An action is one fenced block" in Prompts.load("text", place).render({**VALUES, "problem_statement": "x"})[1]
    )


def test_an_empty_system_prompt_is_no_message(tmp_path: Path) -> None:
    (tmp_path / "system.md").write_text("\n")
    _, record, _ = work("```submit\n```", options=AgentOptions(prompt=tmp_path))
    assert [one.role for one in record.messages] == ["user", "assistant"]


def test_prompts_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="cannot be read"):
        Prompts.load("text", tmp_path / "none.md")
    with pytest.raises(InvalidValue, match="has no prompt"):
        Prompts.load("text", tmp_path)
    (tmp_path / "task.md").write_text("Do something.")
    with pytest.raises(InvalidValue, match="does not contain the issue"):
        Prompts.load("text", tmp_path)
    (tmp_path / "task.md").write_bytes(b"\xff{problem_statement}")
    with pytest.raises(InvalidValue, match="not UTF-8"):
        Prompts.load("text", tmp_path)
