"""Inspect over sandboxes: an eval from its command to its score, configurations, and errors in Inspect's words."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.conftest import TASK
from tests.integrations.extras import needs_inspect
from tests.waiting import PATIENCE

from minisandbox.sandbox import live_sandboxes

with contextlib.suppress(ImportError):  # then all of this is skipped
    from inspect_ai import Task, eval  # noqa: A004 - Inspect's name
    from inspect_ai._util.error import PrerequisiteError
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ChatMessageTool, Model, ModelOutput, ModelUsage, get_model
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import bash
    from inspect_ai.util import (
        OutputLimitExceededError,
        SandboxEnvironmentSpec,
        SandboxUnavailableError,
        SandboxUserUnsupportedError,
        override_sandbox_output_limit,
    )

    from minisandbox.integrations.inspect import LABELS, MiniSandboxConfig, MiniSandboxProvider

# those of Inspect itself: a deprecated argument of tenacity, streams that it leaves open
pytestmark = [pytest.mark.kernel, needs_inspect, pytest.mark.filterwarnings("ignore")]

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "use-inspect.md"


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 2 * PATIENCE))


@contextlib.asynccontextmanager
async def environment(config: str | MiniSandboxConfig | None = None) -> AsyncIterator[MiniSandboxProvider]:
    made = await MiniSandboxProvider.sample_init("test", config, {})
    yield made["default"].as_type(MiniSandboxProvider)
    await MiniSandboxProvider.sample_cleanup("test", config, made, interrupted=False)


# --- an eval ---------------------------------------------------------------------------------------------------------


def scripted(*commands: str) -> Model:
    """A model that calls the bash tool with these commands, and then stops."""
    outputs = [ModelOutput.for_tool_call("mockllm/model", "bash", {"command": command}) for command in commands]
    outputs.append(ModelOutput.from_content("mockllm/model", "done"))
    for output in outputs:
        output.usage = ModelUsage()  # Inspect would fetch a tokenizer to count
    return get_model("mockllm/model", custom_outputs=outputs, memoize=False)


def guide() -> Task:
    """The task of docs/how-to/use-inspect.md."""
    found = re.search(r"```py\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {}
    exec(compile(found[1], str(GUIDE), "exec"), names)
    task: Task = names["calc"]()
    return task


@pytest.mark.slow
def test_the_guides_eval_from_its_start_to_its_score(tmp_path: Path) -> None:
    config = tmp_path / "minisandbox.yaml"
    config.write_text("limits: {memory: 1G, processes: 100}\nenv: {WHO: inspect}\n")
    task = guide()
    task.dataset[0].setup = "echo ready > prepared"
    model = scripted(
        "echo $WHO; ls; cat prepared; ls /proc/sys/net/ipv4/conf",
        "sed -i 's/a - b/a + b/' calc.py",
        "sleep 1000",
        "printf '\\377'; exit 3",
    )
    sandbox = ("minisandbox", str(config))
    [log] = eval(
        task,
        model=model,
        sandbox=sandbox,
        solver=[use_tools(bash(timeout=1)), generate()],
        log_dir=str(tmp_path / "logs"),
        display="none",
    )
    assert log.status == "success", log.error
    assert log.samples is not None
    [done] = log.samples
    answers = [message for message in done.messages if isinstance(message, ChatMessageTool)]
    assert answers[0].text.split()[:4] == ["inspect", "calc.py", "prepared", "ready"]
    assert answers[0].text.split()[-3:] == ["all", "default", "lo"]  # of interfaces, there is loopback
    assert answers[2].error is not None
    assert answers[2].error.type == "timeout"
    assert "\ufffd" in answers[3].text
    assert log.results is not None
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    assert live_sandboxes(labels=LABELS) == ()


def test_an_image_that_cannot_be_had_ends_the_eval_before_a_model_is_asked(tmp_path: Path) -> None:
    task = Task(dataset=[Sample(input="?")], sandbox=("minisandbox", "no-such-image"))
    with pytest.raises(PrerequisiteError) as caught:
        eval(task, model=scripted(), log_dir=str(tmp_path), display="none")
    assert "no image 'no-such-image' in the store" in str(caught.value.message)


def test_another_event_loop_is_refused() -> None:
    with pytest.raises(PrerequisiteError) as caught:
        MiniSandboxConfig().ready().send(None)
    assert "needs asyncio" in str(caught.value.message)


# --- configurations --------------------------------------------------------------------------------------------------


def test_what_a_configuration_can_be(tasks: str, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text('environment = {NOTE = "built"}\n')
    keys = tmp_path / "keys.yml"
    keys.write_text(f"image: {TASK}\ntasks: {tasks}\n")

    async def body() -> None:
        cases: tuple[tuple[str | MiniSandboxConfig | None, str, str], ...] = (
            (None, "ls /testbed", ""),
            ("host", "ls /testbed", ""),
            (str(keys), "head -c 7 calc.py", "def add"),
            (TASK, "head -c 7 calc.py", "def add"),  # it is in the store now
            ("/tasks/" + TASK, "head -c 7 calc.py", "def add"),  # a task's, as Inspect passes it on
            (str(tmp_path / "small.toml"), "echo $NOTE", "built\n"),
            (MiniSandboxConfig(workdir="/opt/work", env={"A": "1"}), "echo $A $PWD", "1 /opt/work\n"),
        )
        for config, command, output in cases:
            async with environment(config) as env:
                done = await env.exec(["sh", "-c", command])
                assert (done.stdout, done.stderr, done.returncode) == (output, "", 0), config

    run(body())


def test_what_a_configuration_cannot_be(tmp_path: Path) -> None:
    odd = tmp_path / "odd.yaml"
    odd.write_text("imagine: host\n")
    cases: tuple[tuple[str | MiniSandboxConfig, str], ...] = (
        (str(odd), "imagine"),
        (str(tmp_path / "none.yaml"), "No such file"),
        (str(tmp_path / "none.toml"), "No such file"),
        (MiniSandboxConfig(limits={"memmory": "1G"}), "memmory"),
        (MiniSandboxConfig(network="host", allow=["example.org"]), "leave out one"),
    )
    for config, said in cases:
        with pytest.raises(PrerequisiteError) as caught:
            asyncio.run(MiniSandboxProvider.task_init("test", config))
        assert said in str(caught.value.message)


def test_a_configuration_survives_a_log() -> None:
    config = MiniSandboxConfig(image="x", user="1000", limits={"memory": "8G"}, allow=["example.org"])
    spec = SandboxEnvironmentSpec("minisandbox", config)
    assert SandboxEnvironmentSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert {spec} == {SandboxEnvironmentSpec("minisandbox", config.model_copy())}
    assert MiniSandboxProvider.config_files() == ["minisandbox.yaml"]
    assert not MiniSandboxProvider.is_docker_compatible()


# --- errors ----------------------------------------------------------------------------------------------------------


def test_errors_of_commands() -> None:
    async def body() -> None:
        async with environment(MiniSandboxConfig(limits={"output": 4096})) as env:
            missing = await env.exec(["no-such-program"])
            assert (missing.success, missing.returncode) == (False, 127)
            assert (await env.exec(["sh", "-c", "/etc/passwd"])).returncode == 126  # sh says it, and not the sandbox
            assert (await env.exec(["sh", "-c", "kill -9 $$"])).returncode == 137
            with pytest.raises(FileNotFoundError, match="nowhere"):
                await env.exec(["true"], cwd="/nowhere")
            with pytest.raises(SandboxUserUnsupportedError, match="stranger"):
                await env.exec(["true"], user="stranger")
            with pytest.raises(TimeoutError) as late:
                await env.exec(["sh", "-c", "echo begun; sleep 1000"], timeout=1)
            assert vars(late.value)["truncated_output"] == "begun\n"
            with pytest.raises(OutputLimitExceededError) as much:
                await env.exec(["sh", "-c", "seq 100000"])
            assert much.value.truncated_output is not None
            assert much.value.truncated_output.endswith("99999\n100000\n")
            with override_sandbox_output_limit(10), pytest.raises(OutputLimitExceededError, match="10 bytes"):
                await env.exec(["sh", "-c", "seq 10 >&2"])

    run(body())


def test_a_sandbox_that_has_ended() -> None:
    async def body() -> None:
        async with environment() as env:
            await env.sandbox.stop()
            with pytest.raises(SandboxUnavailableError):
                await env.exec(["true"])
            with pytest.raises(SandboxUnavailableError):
                await env.read_file("/etc/passwd")
            with pytest.raises(SandboxUnavailableError):
                await env.write_file("x", "y")
            with pytest.raises(ConnectionError):
                await env.connection()

    run(body())


# --- from outside ----------------------------------------------------------------------------------------------------


def test_people_can_look_into_it_and_end_it() -> None:
    async def body() -> None:
        async with environment() as env, environment() as other:
            await env.write_file("note", "seen\n")
            command = (await env.connection(user="0")).command
            shell = await asyncio.create_subprocess_exec(
                *shlex.split(command), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            assert (await shell.communicate(b"cat note\n"))[0] == b"seen\n"
            await MiniSandboxProvider.cli_cleanup(env.sandbox.id)
            assert not env.sandbox.alive
            assert other.sandbox.alive
            await MiniSandboxProvider.cli_cleanup(None)
            assert not other.sandbox.alive

    run(body())
