"""The bash agent's loop, with a scripted model in a fake sandbox (which isolates nothing: paths are relative)."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.agent_tools import TASK, Scripted, completion, in_session, said, work

from minisandbox.agents import (
    EXIT_FORMAT,
    FORMATS,
    AgentLimits,
    AgentOptions,
    Bash,
    BashAgent,
    Create,
    Ending,
    LimitReached,
    Record,
    ReplayAgent,
    Session,
    StrReplace,
    Submit,
    View,
)
from minisandbox.agents.actions import MAX_TEXT
from minisandbox.agents.bash import warning
from minisandbox.errors import ModelRefused, ModelUnavailable
from minisandbox.models import Completion, Message, Request, ScriptedModel, Tokens, ToolCall

SUBMISSION = "```submit\n```"
NOTHING = "I do not know."


def bash(command: str) -> str:
    return said("text", Bash(command)).content


def observed(record: Record) -> list[str]:
    """What the model was told, after the prompts."""
    return [one.content for one in record.messages[2:] if one.role in ("user", "tool")]


# --- the way of an agent ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_an_agent_works_and_submits(name: str) -> None:
    options = AgentOptions(action_format=name)
    ending, record, model = work(
        said(name, Bash("echo out; echo err >&2; exit 3")),
        said(name, Create("new.py", "x = 1")),
        said(name, StrReplace("new.py", "1", "2")),
        said(name, View("new.py")),
        said(name, Bash("cat new.py")),
        said(name, Submit()),
        options=options,
    )
    assert ending.exit_status == "submitted"
    first, second, third, fourth, fifth = observed(record)
    assert first == "[exit status 3]\n<stdout>\nout\n</stdout>\n<stderr>\nerr\n</stderr>"
    assert second == "new.py was created, with 1 lines"
    assert third == "new.py was changed:\n     1\tx = 2"
    assert fourth == "     1\tx = 2"
    assert fifth == "[exit status 0]\n<stdout>\nx = 2\n</stdout>"
    assert len(record.turns) == 6
    assert [step.turn for step in record.steps] == [1, 2, 3, 4, 5]
    assert all(request.tools == FORMATS[name].tools for request in model.requests)


def test_the_history_only_grows() -> None:
    _, record, model = work(bash("true"), NOTHING, bash("true"), SUBMISSION)
    asked = [request.messages for request in model.requests]
    for before, after in itertools.pairwise(asked):
        assert after[: len(before)] == before
    assert tuple(record.messages[:-1]) == asked[-1]
    for turn in record.turns:
        assert record.messages[turn.message] == turn.completion.message


def test_what_the_model_reads_of_a_task() -> None:
    for name in FORMATS:
        _, record, _ = work(said(name, Submit()), options=AgentOptions(action_format=name))
        read = "\n".join(one.content for one in record.messages)
        assert TASK.problem_statement in read
        for secret in ("PATCH_LINE", "FIX_LINE", "TEST_LINE", "test_hidden", "test_secret", TASK.instance_id):
            assert secret not in read


def test_several_calls_in_one_answer() -> None:
    answer = said("tool", Bash("echo 1"), Bash("exit 1"), Bash("echo 3"))
    last = said("tool", Bash("echo 4"), Submit(), Bash("echo never"))
    ending, record, _ = work(answer, last, options=AgentOptions(action_format="tool"))
    assert ending.exit_status == "submitted"
    assert [step.command for step in record.steps] == ["echo 1", "exit 1", "echo 3", "echo 4"]
    answers = [one for one in record.messages if one.role == "tool"]
    assert [one.tool_call_id for one in answers] == ["call_0", "call_1", "call_2", "call_0"]


def test_commands_do_not_share_a_shell_unless_asked_to() -> None:
    replies = (bash("mkdir d; cd d; x=3"), bash('echo "$x" "${PWD##*/}"'), SUBMISSION)
    _, record, _ = work(*replies)
    assert "3" not in observed(record)[1].splitlines()[2].split()[:1]
    assert not record.steps[1].stateful
    _, record, _ = work(*replies, options=AgentOptions(shell="stateful"))
    assert observed(record)[1] == "[exit status 0]\n<stdout>\n3 d\n</stdout>"
    assert all(step.stateful for step in record.steps)


def test_the_agent_of_the_documentation() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "write-an-agent.md"
    code = page.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    agent = names["OneCommand"](timeout="30")

    async def body(session: Session) -> tuple[Ending, Record]:
        return await agent.run(TASK, session), session.record

    ending, record = in_session(body, Scripted("echo solved"))
    assert ending.exit_status == "submitted"
    assert record.steps[0].result.stdout == "solved\n"


# --- format errors ---------------------------------------------------------------------------------------------------


def test_a_format_error_stays_in_the_history_and_is_corrected() -> None:
    ending, record, _ = work(NOTHING, bash("true"), SUBMISSION)
    assert ending.exit_status == "submitted"
    assert record.messages[2].content == NOTHING
    assert record.messages[3].role == "user"
    assert record.messages[3].content.startswith("[nothing was done] Your answer has no blocks")
    assert "```submit" in record.messages[3].content
    assert len(record.turns) == 3


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_format_errors_in_a_row_end_it(name: str) -> None:
    options = AgentOptions(action_format=name, format_errors=2)
    ending, record, model = work(NOTHING, said(name, Bash("true")), NOTHING, NOTHING, SUBMISSION, options=options)
    assert ending.exit_status == EXIT_FORMAT
    assert "2 responses" in ending.detail
    assert len(record.turns) == 4
    assert len(model.replies) == 1
    assert len(record.steps) == 1


def test_one_wrong_call_keeps_the_others_from_being_done() -> None:
    calls = (ToolCall("a", "bash", '{"command": "touch done"}'), ToolCall("b", "bash", "{"))
    options = AgentOptions(action_format="tool")
    _, record, _ = work(Message("assistant", "", calls), said("tool", Submit()), options=options)
    assert record.steps == []
    assert [one.tool_call_id for one in record.messages if one.role == "tool"] == ["a", "b"]
    assert all("not JSON" in told for told in observed(record))


@pytest.mark.parametrize("arguments", ['{"command": "ls', "ls", "[1]", '{"command": NaN}', "[" * 100_000, ""])
def test_an_engine_that_reads_the_calls_of_the_history_gets_some_that_it_can_read(arguments: str) -> None:
    bad = ToolCall("a", "multi_tool_use.parallel" if arguments == "" else "bash", arguments)
    answers = [Message("assistant", "Hm.", (bad,)), said("tool", Bash("echo 1")), said("tool", Submit())]
    read: list[Tokens] = []

    def engine(request: Request) -> Message:
        for call in (call for one in request.messages for call in one.tool_calls):
            # as vLLM does before it fills in the template, and OpenAI with names
            if not isinstance(json.loads(call.arguments), dict) or not call.name.replace("_", "").isalnum():
                raise ModelRefused("400")
        return answers[sum(one.role == "assistant" for one in request.messages)]

    model = ScriptedModel(engine)

    async def body(session: Session) -> tuple[Ending, Record]:
        ask = session.ask

        async def asked(tools: Sequence[Mapping[str, object]] = ()) -> Completion:
            done = await ask(tools)
            assert done.tokens is not None
            read.append(done.tokens)
            return done

        session.ask = asked  # type: ignore[method-assign] # it only looks
        return await BashAgent(AgentOptions(action_format="tool")).run(TASK, session), session.record

    ending, record = in_session(body, model)
    assert ending.exit_status == "submitted"
    assert record.turns[0].completion.message == record.messages[2]
    assert arguments in (json.loads(record.messages[2].tool_calls[0].arguments).get("INVALID_JSON", ""), "")
    assert [step.command for step in record.steps] == ["echo 1"]
    # the rows are what was read and sampled, whatever the history says: each sampled token carries loss once
    pairs = [pair for row in record.rows() for pair in zip(row.ids, row.mask, strict=True)]
    assert [one for one, carries in pairs if carries] == [token for tokens in read for token in tokens.sampled]
    for row in record.rows():
        last = read[row.turns[-1]]
        assert row.ids == last.prompt + last.sampled


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_nothing_of_an_answer_that_was_cut_off_is_done(name: str) -> None:
    cut = completion(said(name, Bash("touch done")), finish="length")
    _, record, _ = work(cut, said(name, Submit()), options=AgentOptions(action_format=name))
    assert record.steps == []
    assert "was cut off" in observed(record)[0]


def test_odd_texts_reach_bash_as_they_are() -> None:
    command = "printf %s '\u00e4\u20ac\U0001f600 $x `y` {z}' | od -An -c | head -1; echo \"\u2028\""
    _, record, _ = work(bash(command), bash("printf 'a\\0b\\377'"), SUBMISSION)
    assert record.steps[0].command == command
    assert "303 244" in observed(record)[0]
    assert observed(record)[1] == "[exit status 0]\n<stdout>\na\ufffdb\ufffd\n</stdout>"
    json.dumps(observed(record), ensure_ascii=False).encode()


def test_the_longest_command_runs() -> None:
    command = "cat > a <<E\n" + "\U0001f600" * (MAX_TEXT - 30) + "\nE\nwc -m < a"
    _, record, _ = work(bash(command), bash("x" * (MAX_TEXT + 1)), SUBMISSION)
    assert record.steps[0].result.stdout
    assert record.steps[0].result.ok
    assert "Do it in parts" in observed(record)[1]


# --- observations ----------------------------------------------------------------------------------------------------


def test_a_long_output_keeps_its_ends() -> None:
    options = AgentOptions(observation_chars=100)
    _, record, _ = work(bash("seq 1000"), bash("seq 1000 >&2; echo x"), SUBMISSION, options=options)
    lines = observed(record)[0].splitlines()
    assert lines[:3] == ["[exit status 0]", "<stdout>", "1"]
    assert lines[-2:] == ["1000", "</stdout>"]
    assert "[... 3793 characters left out, 968 line ends among them ...]" in lines
    assert "<stdout>\nx\n</stdout>\n<stderr>\n1\n" in observed(record)[1]


def test_ten_megabytes_of_output() -> None:
    _, record, _ = work(bash("head -c 10000000 /dev/zero | tr '\\0' x"), bash("yes | head -c 10000000 >&2"), SUBMISSION)
    for told in observed(record):
        assert len(told) < 10_500
        assert "bytes of output were too many to be kept" in told


def test_a_command_that_takes_too_long() -> None:
    options = AgentOptions(command_timeout=0.5)
    _, record, _ = work(bash("echo begun; sleep 600"), bash("true"), SUBMISSION, options=options)
    assert observed(record) == [
        "[no answer within 0.5 s: killed]\n<stdout>\nbegun\n</stdout>",
        "[exit status 0, no output]",
    ]


def test_what_else_is_told_of_a_command() -> None:
    _, record, _ = work(bash("kill -9 $$"), bash("sleep 600 > /dev/null 2>&1 & exit 0"), SUBMISSION)
    assert observed(record)[0] == "[killed by SIGKILL, no output]"
    assert observed(record)[1] == "[exit status 0, no output; background processes left running: 1]"


def test_a_restarted_shell_is_reported() -> None:
    options = AgentOptions(shell="stateful", command_timeout=0.5)
    replies = (bash("mkdir sub; cd sub; x=1"), bash("sleep 600"), bash("pwd; echo [$x]"), bash("exit 3"), SUBMISSION)
    _, record, _ = work(*replies, options=options)
    told = observed(record)
    lost = "its variables, functions and options are lost"
    assert [lost in one for one in told] == [False, True, False, True]
    directory = told[2].splitlines()[2]
    assert directory.endswith("/sub")
    assert told[2].endswith("\n[]\n</stdout>")
    assert told[1].startswith("[no answer within 0.5 s: killed, no output")
    assert f"the shell was restarted in {directory}; " in told[1]


def test_a_directory_that_is_gone_is_the_agents_business() -> None:
    _, record, _ = work(bash('rmdir "$PWD"'), bash("ls"), SUBMISSION)
    assert "cannot enter" in observed(record)[1]
    assert record.steps[1].result.exit_code == 126


def test_an_edit_that_cannot_be_made() -> None:
    _, record, _ = work(said("text", View("none")), SUBMISSION)
    assert observed(record)[0].startswith("[not done] cannot")


# --- limits ----------------------------------------------------------------------------------------------------------


def reached(*replies: str | Message, limits: AgentLimits, options: AgentOptions | None = None) -> tuple[str, Record]:
    async def body(session: Session) -> tuple[str, Record]:
        with pytest.raises(LimitReached) as caught:
            await BashAgent(options).run(TASK, session)
        return caught.value.exit_status, session.record

    return in_session(body, Scripted(*replies), limits=limits)


def test_steps() -> None:
    status, record = reached(*[bash("true")] * 9, limits=AgentLimits(steps=5))
    assert status == "exit_steps"
    assert len(record.turns) == 5
    warnings = [told.partition("\n")[2] for told in observed(record)]
    assert warnings[:2] == ["", "[only 3 steps left: submit before that]"]
    assert warnings[3] == "[only 1 step left: submit before that]"


def test_warnings_stand_in_corrections_too() -> None:
    _, record = reached(NOTHING, NOTHING, limits=AgentLimits(steps=2))
    assert observed(record)[0].endswith("\n[only 1 step left: submit before that]")


def test_no_clock_is_read_into_the_policy() -> None:
    """How much time is left depends on this machine's load."""
    assert warning({"seconds": 1.0}, AgentLimits(seconds=100.0)) == ""
    told = warning({"seconds": 1.0, "steps": 2.0}, AgentLimits(seconds=100.0, steps=75))
    assert told == "[only 2 steps left: submit before that]"


def test_tokens_context_and_cost() -> None:
    replies = [bash("true")] * 30
    for limits, status in [
        (AgentLimits(tokens=52), "exit_tokens"),
        (AgentLimits(context=15), "exit_context"),
        (AgentLimits(cost=2.6), "exit_cost"),
    ]:
        assert reached(*replies, limits=limits)[0] == status
    _, record = reached(*replies, limits=AgentLimits(cost=2.6, steps=None))
    assert len(record.turns) == 11
    assert observed(record)[9].endswith("[only 0.10 dollars left: submit before that]")


def test_the_time_is_over_while_a_command_runs() -> None:
    status, record = reached(bash("echo begun; sleep 600"), limits=AgentLimits(seconds=1.0))
    assert status == "exit_total_execution_time"
    assert record.steps[0].result.stdout == "begun\n"
    assert record.messages[-1].role == "assistant"


# --- what breaks -----------------------------------------------------------------------------------------------------


def test_a_model_that_breaks_leaves_a_whole_record() -> None:
    async def body(session: Session) -> Record:
        with pytest.raises(ModelUnavailable):
            await BashAgent().run(TASK, session)
        return session.record

    record = in_session(body, Scripted(bash("echo 1"), ModelUnavailable("gone")))
    assert len(record.turns) == len(record.steps) == 1
    assert [one.role for one in record.messages] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize("shell", ["stateless", "stateful"])
def test_a_run_that_is_cancelled_leaves_a_whole_record(shell: str) -> None:
    async def body(session: Session) -> Record:
        agent = BashAgent(AgentOptions(shell=shell))
        task = asyncio.create_task(agent.run(TASK, session))
        async with asyncio.timeout(60):
            while not await session.box.files.exists("begun"):
                await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await session.box.exec("echo alive")).stdout == "alive\n"
        return session.record

    record = in_session(body, Scripted(bash("echo 1"), bash("touch begun; sleep 600")))
    assert len(record.turns) == 2
    assert len(record.steps) == 1
    assert record.messages[-1] == record.turns[-1].completion.message


def test_one_agent_serves_many_rollouts_at_once() -> None:
    agent = BashAgent()

    async def body(session: Session) -> list[list[str]]:
        sessions = [
            Session(session.box, model=Scripted(bash(f"sleep 0.0{9 - n}; echo {n}"), 0.01, SUBMISSION))
            for n in range(8)
        ]
        await asyncio.gather(*(agent.run(TASK, one) for one in sessions))
        return [observed(one.record) for one in sessions]

    told = in_session(body)
    assert [one[0].splitlines()[2] for one in told] == [str(n) for n in range(8)]


# --- replay ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["stateless", "stateful"])
def test_what_an_agent_did_can_be_replayed(tmp_path: Path, shell: str) -> None:
    actions = (Bash("z=kept; echo x > a"), StrReplace("a", "x", "y"), Bash("echo ${z-gone} > b"))
    _, record, _ = work(*(said("text", one) for one in actions), SUBMISSION, options=AgentOptions(shell=shell))
    steps = [{"command": step.command, "stateful": step.stateful} for step in record.steps]
    recording = {"instance_id": TASK.instance_id, "steps": steps}
    (tmp_path / "t.json").write_text(json.dumps(recording))

    async def body(session: Session) -> tuple[Record, str]:
        await ReplayAgent.load(tmp_path / "t.json").run(TASK, session)
        return session.record, (await session.box.exec("cat a b")).stdout

    replayed, text = in_session(body)
    for again, before in zip(replayed.steps, record.steps, strict=True):
        assert (again.command, again.stateful) == (before.command, before.stateful)
    assert text == {"stateless": "y\ngone\n", "stateful": "y\nkept\n"}[shell]
