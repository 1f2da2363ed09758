"""Styles of training data: SWE-smith's to the letter, and from each to each without a call that changes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.training_tools import DATA, example

from minisandbox.agents import FORMATS
from minisandbox.agents.actions import TOOLS, Bash, Create, Insert, StrReplace, Submit, View, arguments_of, name_of
from minisandbox.agents.prompts import Prompts
from minisandbox.cli.main import main
from minisandbox.models import Message, ToolCall
from minisandbox.models.dialect import for_history
from minisandbox.rollouts.examples import ALL_STYLES, rewritten_prompt
from minisandbox.trajectories.example import Example
from minisandbox.trajectories.sources import read_examples
from minisandbox.trajectories.styles import (
    LEFT,
    STALE,
    CannotSay,
    Converter,
    DecodedCall,
    ParsedAnswer,
    command_line,
    style_of,
)

COLLECT = """
import sys
from pathlib import Path
import swesmith
swesmith.REPO_DIR = Path(sys.argv[3])  # the wheel lacks the prompt that is read from there
from swesmith.train.traj_mgr.collect_trajs import main
for style in ("xml", "tool", "ticks"):
    main(out_dir=Path(sys.argv[3]), traj_dir=Path(sys.argv[1]), eval_dir=Path(sys.argv[2]), style=style, workers=1)
"""
COMBINE = """
import sys, types
from pathlib import Path
bars = types.ModuleType("sparklines")
bars.sparklines = lambda values: [""]
sys.modules.setdefault("sparklines", bars)  # draws a line in the terminal; swesmith does not install it
from swesmith.train.traj_mgr.combine_trajs import merge_and_shuffle_jsonl
merge_and_shuffle_jsonl(max_per_inst=2, output_file=Path(sys.argv[2]), seed=24, sft_dir=Path(sys.argv[1]))
"""
SYSTEM = "You are a helpful assistant that can interact with a computer to solve tasks."


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Sequence[dict[str, Any]]]:
    """What SWE-smith's own collection makes of the files of SWE-agent, by style."""
    yaml, place = pytest.importorskip("yaml"), tmp_path_factory.mktemp("swesmith")
    pytest.importorskip("swesmith")
    (place / "agent").mkdir()
    prompt = {"agent": {"templates": {"system_template": SYSTEM}}}
    (place / "agent" / "swesmith_infer.yaml").write_text(yaml.safe_dump(prompt))
    command = [
        sys.executable, "-c", COLLECT, str(DATA / "sweagent_run"), str(DATA / "sweagent_evaluation"), str(place),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    files = {style: place / f"sweagent_evaluation.{style}.jsonl" for style in ("xml", "tool", "ticks")}
    return {style: [json.loads(line) for line in file.read_text().splitlines()] for style, file in files.items()}


@pytest.mark.slow
def test_to_the_letter_what_swe_smith_makes(theirs: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    read = {one.instance_id: one for one in read_examples(DATA / "sweagent_run")}
    for style in ("xml", "ticks"):
        converter = Converter(style)
        for row in theirs[style]:
            ours = [message.to_json() for message in converter.convert(read[row["instance_id"]]).messages]
            assert ours[: len(row["messages"])] == row["messages"], "theirs ends before the last answer"
            assert len(ours) == len(row["messages"]) + 1
    for row in theirs["tool"]:
        ours = [message.to_json() for message in read[row["instance_id"]].messages]
        for mine, other in zip(ours, row["messages"], strict=False):
            assert (mine["role"], mine.get("tool_calls")) == (other["role"], other.get("tool_calls"))
            text = other["content"] if isinstance(other["content"], str) else other["content"][0]["text"]
            assert mine["content"] == text


def test_the_fixtures_are_what_swe_smith_makes(theirs: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    for style, rows in theirs.items():
        kept = [json.loads(line) for line in (DATA / f"published_{style}.jsonl").read_text().splitlines()]
        assert {one["instance_id"]: json.loads(one["messages"]) for one in kept} == {
            one["instance_id"]: one["messages"] for one in rows
        }


def test_from_each_published_style_to_each() -> None:
    sets = {style: list(read_examples(DATA / f"published_{style}.jsonl")) for style in ("xml", "tool", "ticks")}
    for source, examples in sets.items():
        for target in ("xml", "tool", "ticks"):
            converter = Converter(target, tools=TOOLS)
            for one, wanted in zip(examples, sets[target], strict=True):
                made = converter.convert(one)
                assert list(map(_told, made.messages)) == list(map(_told, wanted.messages)), (source, target)
                assert bool(made.tools) == (target == "tool")
            assert not converter.notes[LEFT]


def _told(message: Message) -> tuple[object, ...]:
    """A message without the ids of calls, and with their arguments decoded."""
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    return message.role, message.content, calls, message.tool_call_id is None


@pytest.mark.slow
def test_swe_smith_reads_an_export(tmp_path: Path) -> None:
    pytest.importorskip("swesmith")
    (tmp_path / "sft").mkdir()
    for style in ("xml", "ticks"):
        sources = [str(DATA / f"published_{style}.jsonl"), str(DATA / "sweagent_run")]
        assert (
            main(["trajectories", "export", *sources, "--to", style, "-o", str(tmp_path / f"sft/{style}.jsonl")]) == 0
        )
    out = tmp_path / "sft" / "all.jsonl"
    command = [sys.executable, "-c", COMBINE, str(tmp_path / "sft"), str(out)]
    done = subprocess.run(command, input="0-1\n", capture_output=True, text=True, timeout=300, check=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 4, done.stdout + done.stderr
    for row in rows:  # what its ft_unsloth.py takes of them
        assert {message["role"] for message in row["messages"]} == {"system", "user", "assistant"}
        assert all(isinstance(message["content"], str) for message in row["messages"])


# --- calls -----------------------------------------------------------------------------------------------------------

LINES = st.text(st.sampled_from("ab \n\t'\"\\$`-<>=/{}é"), max_size=30)
WORDS = st.text(st.sampled_from("ab/._-é "), min_size=1, max_size=10).filter(str.strip)
ACTIONS = st.one_of(
    st.builds(Bash, LINES.filter(str.strip)),
    st.builds(View, WORDS, st.none() | st.tuples(st.integers(0, 99), st.integers(-1, 99))),
    st.builds(Create, WORDS, LINES),
    st.builds(StrReplace, WORDS, LINES.filter(bool), LINES),
    st.builds(Insert, WORDS, st.integers(0, 99), LINES),
    st.just(Submit()),
)
THOUGHTS = st.text(st.sampled_from("ab. \né"), max_size=20).map(str.strip)


@given(st.sampled_from(tuple(ALL_STYLES)), ACTIONS, THOUGHTS)
def test_what_a_style_writes_it_reads(style: str, action: Any, thought: str) -> None:
    said = ParsedAnswer(thought, (DecodedCall(name_of(action), arguments_of(action)),))
    try:
        message = ALL_STYLES[style].write(said)
    except CannotSay:
        return  # nothing wrong is written
    again = ALL_STYLES[style].read(message)
    assert again.thought == thought
    assert [(call.name, dict(call.arguments)) for call in again.calls] == [
        (said.calls[0].name, said.calls[0].arguments)
    ]


@given(ACTIONS)
def test_what_is_written_our_own_agent_reads(action: Any) -> None:
    for style in ("text", "tool", "xml"):
        try:
            message = ALL_STYLES[style].write(ParsedAnswer("", (DecodedCall(name_of(action), arguments_of(action)),)))
        except CannotSay:
            continue
        assert FORMATS[style].parse(message) == (action,)


@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        ("bash", {"command": "ls -l\npwd"}, "ls -l\npwd"),
        ("submit", {}, "submit"),
        ("str_replace_editor", {"command": "view", "path": "/a b"}, "str_replace_editor view '/a b'"),
        ("str_replace_editor", {"command": "view", "path": "/a", "view_range": [1, -1]},
         "str_replace_editor view /a  --view_range 1 -1"),
        ("str_replace_editor", {"command": "insert", "path": "/a", "insert_line": 3, "new_str": "x\n"},
         "str_replace_editor insert /a    --new_str 'x\n' --insert_line 3"),
    ],
)  # fmt: skip
def test_command_lines_are_swe_agents(name: str, arguments: dict[str, object], line: str) -> None:
    assert command_line(DecodedCall(name, arguments)) == line


@pytest.mark.parametrize(
    "call",
    [
        DecodedCall("bash", {"command": "submit"}),
        DecodedCall("bash", {"command": "str_replace_editor view /x"}),
        DecodedCall("bash", {"command": ""}),
        DecodedCall("python", {"code": "1"}),
        DecodedCall("str_replace_editor", {"command": "view", "path": "/x", "depth": 2}),
    ],
)
def test_ticks_have_no_words_for_it(call: DecodedCall) -> None:
    with pytest.raises(CannotSay):
        command_line(call)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("xml", "no call"),
        ("xml", "<function=bash>\n<parameter=command>ls"),
        ("xml", "<function=bash>\n<parameter=command>ls</parameter>\nand more</function>"),
        ("xml", "<function=" + "x" * 200),
        ("xml", "<function=str_replace_editor>\n<parameter=view_range>one</parameter>\n</function>"),
        ("ticks", "no block"),
        ("ticks", "```\nls"),
        ("ticks", "```\n\n```"),
        ("text", "```python\n1\n```"),
        ("tool", "no call"),
    ],
)
def test_answers_without_a_call(style: str, text: str) -> None:
    with pytest.raises(CannotSay):
        ALL_STYLES[style].read(Message("assistant", text))


def test_the_last_block_is_the_action() -> None:
    said = ALL_STYLES["ticks"].read(Message("assistant", "See\n```python\n1\n```\nso\n```\nls\n```\n"))
    assert said.calls[0].arguments == {"command": "ls"}
    assert said.thought == "See\n```python\n1\n```\nso"


@pytest.mark.parametrize(
    ("text", "style"),
    [("```bash\nls\n```", "text"), ("```\nls\n```", "ticks"), ("<function=bash>", "xml"), ("hello", "")],
)
def test_styles_by_their_looks(text: str, style: str) -> None:
    assert style_of([Message("assistant", text)]) == style


# --- conversations ---------------------------------------------------------------------------------------------------


def convert(one: Example, style: str, **more: Any) -> Example:
    return Converter(style, styles=ALL_STYLES, rewrite=rewritten_prompt, **more).convert(one)


def test_a_conversation_of_ours_becomes_tool_calls_and_comes_back() -> None:
    one = example()
    tools = convert(one, "tool", tools=TOOLS)
    assert [message.role for message in tools.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert tools.messages[2] == Message("assistant", "I look.", (ToolCall("call_0", "bash", '{"command": "ls"}'),))
    assert tools.messages[3] == Message("tool", "[exited 0]", tool_call_id="call_0")
    assert [call.name for call in tools.messages[4].tool_calls] == ["submit"]
    assert tools.tools == TOOLS
    assert convert(tools, "text") == one


@pytest.mark.parametrize("kept", [lambda one: one, for_history], ids=["as it came", "as our histories have it"])
def test_a_call_that_was_none_becomes_no_action(kept: Callable[[Message], Message]) -> None:
    bad = kept(Message("assistant", "I look.", (ToolCall("a", "bash", '{"command": "l'),)))
    answer = Message("tool", "[nothing was done]", tool_call_id="a")
    one = example(messages=(Message("user", "x"), bad, answer), style="tool")
    assert convert(one, "xml").messages[1:] == (
        Message("assistant", "I look."),
        Message("user", "[nothing was done]"),
    )


def test_the_same_style_stays_to_the_letter() -> None:
    odd = example(messages=(Message("user", "x"), Message("assistant", "```bash\nls\n```  \n\nafter, and no action")))
    assert convert(odd, "text") == odd


def test_prompts_tell_of_the_new_style() -> None:
    prompts = {
        name: Prompts.load(name).render(
            {"problem_statement": "p", "workdir": "/w", "shell": "s", "command_timeout": "1"}
        )
        for name in FORMATS
    }
    one = example(messages=(Message("system", prompts["text"][0]), Message("user", prompts["text"][1])))
    for name in ("tool", "xml"):
        converter = Converter(name, styles=ALL_STYLES, rewrite=rewritten_prompt)
        made = converter.convert(one)
        assert [message.content for message in made.messages] == list(prompts[name])
        assert not converter.notes
    converter = Converter("ticks", styles=ALL_STYLES, rewrite=rewritten_prompt)
    assert converter.convert(one).messages == one.messages
    assert converter.notes[STALE] == 1, "there is no such prompt: that is told"
    converter = Converter("ticks", styles=ALL_STYLES, system="S", rewrite=rewritten_prompt)
    assert converter.convert(one).messages == (Message("system", "S"), one.messages[1])
    assert not converter.notes
    assert convert(example(messages=one.messages[1:]), "text", system="S").messages[0] == Message("system", "S")


def test_answers_without_an_action_stay_and_are_counted() -> None:
    one = example(
        messages=(
            Message("user", "x"), Message("assistant", "hm"), Message("user", "no action"),
            Message("assistant", "```bash\nls\n```"), Message("user", "out"), Message("user", "only 1 step left"),
        )
    )  # fmt: skip
    converter = Converter("tool", styles=ALL_STYLES)
    roles = [message.role for message in converter.convert(one).messages]
    assert roles == ["user", "assistant", "user", "assistant", "tool", "user"]
    assert converter.notes[LEFT] == 1


def test_several_calls() -> None:
    calls = (ToolCall("a", "bash", '{"command": "ls"}'), ToolCall("b", "bash", '{"command": "pwd"}'))
    told = (Message("tool", "1", tool_call_id="a"), Message("tool", "2", tool_call_id="b"))
    one = example(style="tool", messages=(Message("assistant", "", calls), *told))
    made = convert(one, "xml")
    assert [message.role for message in made.messages] == ["assistant", "user", "user"]
    assert made.messages[0].content.count("<function=bash>") == 2
    assert [message.tool_call_id for message in convert(made, "tool").messages[1:]] == ["call_0", "call_1"]
    for style in ("ticks", "text"):
        with pytest.raises(CannotSay):
            convert(one, style)
    joined = example(style="xml", messages=(made.messages[0], Message("user", "12")))
    with pytest.raises(CannotSay, match="2 calls"):
        convert(joined, "tool")


def test_a_style_that_nobody_knows() -> None:
    with pytest.raises(CannotSay, match="not known"):
        convert(example(style=""), "xml")
