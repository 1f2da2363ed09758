"""Rollouts of agents that ask a model: what goes wrong with the model, limits, budgets, and what is kept of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.scripted_model import ENDS_WITH, FAULTS, Fault, SimulatedModel
from tests.scripted_server import ScriptedServer, serving

from minisandbox.agents import AgentLimits, AgentOptions, BashAgent, Ending, Session
from minisandbox.errors import BudgetExceeded, DiskFull, ModelRefused
from minisandbox.grade import Verdict
from minisandbox.images import Image
from minisandbox.models import Budget, Completion, Meter, OpenAIModel, Prices, Request, Timeouts
from minisandbox.rollouts import Batch, Budgets, RunReader, Setup, Summary, rollout_async, run_batch
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import Task
from minisandbox.trajectories import Trajectory

pytestmark = [pytest.mark.kernel, pytest.mark.once]

FIX = "The operator is wrong.\n\n```bash\nsed -i 's/a - b/a + b/' calc/core.py\n```"
LOOK = "```bash\ncat calc/core.py\n```"
SUBMIT = "Done.\n\n```submit\n```"


def roll_out(task: Task, image: Image, setup: Setup) -> Trajectory:
    return asyncio.run(rollout_async(task, image, setup))


def scripted(answers: Sequence[object], limits: AgentLimits | None = None, **more: object) -> Setup:
    model = SimulatedModel(answers, **more)  # type: ignore[arg-type] # its own options
    return Setup(agent=BashAgent(), model=model, agent_limits=limits or AgentLimits())


def test_an_agent_with_a_model(smith: Task, smith_image: Image) -> None:
    setup = replace(scripted([LOOK, "no action", FIX, SUBMIT]), configuration={"action_format": "text"})
    done = roll_out(smith, smith_image, setup)
    assert (done.exit_status, done.reward, done.failure) == ("submitted", 1.0, None)
    assert (done.model, done.configuration) == ("scripted", {"action_format": "text"})
    assert done.sampling["temperature"] == 1.0
    assert [one.role for one in done.messages] == ["system", *["user", "assistant"] * 4]
    assert [done.messages[turn.message].content for turn in done.turns] == [LOOK, "no action", FIX, SUBMIT]
    assert [(step.turn, step.exit_code) for step in done.steps] == [(1, 0), (3, 0)]
    assert "return a - b" in done.messages[3].content
    assert [(entry.turn, entry.patch) for entry in done.patches] == [(3, done.submission)]
    assert (done.patch_after(2), done.patch_after(4)) == (None, done.patches[0])
    # one row: the history has only grown, and each sampled token carries loss once
    [row] = done.rows
    assert row.turns == (0, 1, 2, 3)
    assert sum(row.mask) == sum(turn.usage.completion for turn in done.turns)
    assert len(row.ids) == done.turns[-1].usage.prompt + done.turns[-1].usage.completion
    assert done.timings.commands > 0.0
    assert Trajectory.from_text(done.to_text()) == done


# --- what goes wrong -------------------------------------------------------------------------------------------------

TIMEOUTS = Timeouts(connect=5.0, read=1.0, total=2.0)


@pytest.mark.slow
def test_every_fault_of_a_model_ends_in_the_right_status_with_the_record_complete(
    smith: Task, smith_image: Image, tmp_path: Path
) -> None:
    tasks = [replace(smith, instance_id=f"calc__{fault.replace('_', '-')}") for fault in FAULTS]
    script = {task.instance_id: [FIX, {"fault": fault}] for task, fault in zip(tasks, FAULTS, strict=True)}
    with serving(ScriptedServer(script)) as server:
        server.orders.retry_after = 0.1
        model = OpenAIModel("scripted", server.url, tokens="yes", timeouts=TIMEOUTS, retries=1)
        found = run_batch(
            tasks, Setup(agent=BashAgent(), model=model), tmp_path, image_of=lambda _: smith_image,
            budgets=Budgets(workers=len(tasks)), tries=2, pause=0.01,
        )  # fmt: skip
    with RunReader(tmp_path) as run:
        for task, fault, summary in zip(tasks, FAULTS, found, strict=True):
            trajectory = run.trajectory(task.instance_id, 0)
            assert trajectory is not None
            check_fault(fault, summary, trajectory)


def check_fault(fault: Fault, summary: Summary, trajectory: Trajectory) -> None:
    assert [one.role for one in trajectory.messages] == ["system", "user", "assistant", "user"], fault
    assert [turn.message for turn in trajectory.turns] == [2], fault
    assert [step.exit_code for step in trajectory.steps] == [0], fault
    assert [row.turns for row in trajectory.rows] == [(0,)], fault
    if fault == "context_length":
        assert (summary.exit_status, summary.reward, summary.tries) == ("submitted (exit_context)", 1.0, 1)
        return
    error = ENDS_WITH[fault]
    assert (summary.exit_status, summary.reward, summary.verdict) == ("exit_api", None, None), fault
    assert (summary.failed_in, summary.reason) == ("model", error.__name__), fault
    # what the server refuses is not asked for again
    causes = [one.kind for one in trajectory.tries]
    assert causes == ([] if error is ModelRefused else [error.__name__]), fault


def test_a_failure_that_passes_leaves_its_cause(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    with serving(ScriptedServer([FIX, SUBMIT])) as server:
        server.fail(None, "invalid_json", "invalid_json", "invalid_json")
        model = OpenAIModel("scripted", server.url, timeouts=TIMEOUTS)
        [found] = run_batch(
            [smith], Setup(agent=BashAgent(), model=model), tmp_path, image_of=lambda _: smith_image, pause=0.01
        )
    assert (found.exit_status, found.reward, found.tries) == ("submitted", 1.0, 2)
    with RunReader(tmp_path) as run:
        trajectory = run.trajectory(smith.instance_id, 0)
    assert trajectory is not None
    assert [(one.phase, one.kind) for one in trajectory.tries] == [("model", "BadAnswer")]
    assert len(trajectory.turns) == 2


def test_a_server_that_refuses_the_first_request_ends_the_batch(
    smith: Task, smith_image: Image, tmp_path: Path
) -> None:
    tasks = [replace(smith, instance_id=f"calc__{number}") for number in range(20)]
    with serving(ScriptedServer([{"fault": "wrong_key"}])) as server:
        setup = Setup(agent=BashAgent(), model=OpenAIModel("scripted", server.url, api_key="secret-key"))
        with pytest.raises(ModelRefused):
            run_batch(tasks, setup, tmp_path, image_of=lambda _: smith_image)
    with RunReader(tmp_path) as run:
        assert [one.exit_status for one in run.summaries()] == ["exit_api"]
    assert b"secret-key" not in (tmp_path / "rollouts.sqlite").read_bytes()


def test_one_request_that_is_refused_ends_no_batch_whose_others_are_answered(
    smith: Task, smith_image: Image, tmp_path: Path
) -> None:
    good, bad = (replace(smith, instance_id=f"calc__{name}") for name in ("good", "bad"))
    answered, noted = asyncio.Event(), asyncio.Event()

    def answer(request: Request) -> str:
        if request.session.startswith("calc__bad"):
            error = ModelRefused("400: this prompt is not allowed")
            error.every_request = False
            raise error
        answered.set()
        return SUBMIT if len(request.messages) > 3 else LOOK

    class Model(SimulatedModel):
        async def complete(self, request: Request) -> Completion:
            if request.session.startswith("calc__bad"):
                await answered.wait()
            elif len(request.messages) > 3:
                await noted.wait()
            return await super().complete(request)

    setup = Setup(agent=BashAgent(), model=Model(answer))
    image_of, both = (lambda _: smith_image), Budgets(workers=2)
    found = run_batch([good, bad], setup, tmp_path, image_of=image_of, budgets=both, progress=lambda news: noted.set())
    assert [one.exit_status for one in found] == ["submitted", "exit_api"]
    # nor is a run ended that had answers before
    later = replace(smith, instance_id="calc__later")
    again = run_batch([bad, later], setup, tmp_path, image_of=image_of, budgets=Budgets(workers=1))
    assert [one.exit_status for one in again] == ["exit_api", "submitted"]


@pytest.mark.slow
def test_a_budget_that_is_used_up_stops_the_batch_and_keeps_what_is_finished(
    smith: Task, smith_image: Image, tmp_path: Path
) -> None:
    tasks = [replace(smith, instance_id=f"calc__{number}") for number in range(8)]
    with serving(ScriptedServer([FIX, SUBMIT])) as server:
        asked = {"agent": BashAgent(), "agent_limits": AgentLimits()}

        def setup(tokens: int | None) -> Setup:
            meter = Meter(Prices(), Budget(tokens=tokens))
            return Setup(**asked, model=OpenAIModel("scripted", server.url, meter=meter))  # type: ignore[arg-type] # as above

        with pytest.raises(BudgetExceeded):
            run_batch(tasks, setup(12_000), tmp_path, image_of=lambda _: smith_image)
        with RunReader(tmp_path) as run:
            first = list(run.summaries())
        assert 0 < sum(one.finished for one in first) < len(tasks)
        assert {(one.exit_status, one.reward) for one in first if not one.finished} == {("exit_cost", None)}
        again = run_batch(tasks, setup(None), tmp_path, image_of=lambda _: smith_image)
    assert {one.reward for one in again} == {1.0}
    assert sum(one.resumed for one in again) == sum(one.finished for one in first)


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "limits", "status", "reward"),
    [
        ([FIX, LOOK], AgentLimits(steps=1), "submitted (exit_steps)", 1.0),
        ([LOOK, LOOK], AgentLimits(steps=1), "exit_steps", 0.0),
        ([FIX, LOOK], AgentLimits(tokens=90), "submitted (exit_tokens)", 1.0),
        ([FIX, LOOK], AgentLimits(context=1500), "submitted (exit_context)", 1.0),
        (["what?"] * 3, AgentLimits(), "exit_format", 0.0),
        ([FIX, "what?", "what?", "what?"], AgentLimits(), "submitted (exit_format)", 1.0),
        ([FIX, "```bash\nsleep 60\n```"], AgentLimits(seconds=3), "submitted (exit_total_execution_time)", 1.0),
    ],
)
def test_limits_are_the_agents_own_endings(
    smith: Task, smith_image: Image, answers: Sequence[object], limits: AgentLimits, status: str, reward: float
) -> None:
    done = roll_out(smith, smith_image, scripted(answers, limits))
    assert (done.exit_status, done.reward, done.failure) == (status, reward, None)
    assert done.turns


def test_a_conversation_that_is_too_long_for_the_model(smith: Task, smith_image: Image) -> None:
    done = roll_out(smith, smith_image, scripted([FIX, LOOK], context=1))
    assert (done.exit_status, done.reward, done.turns) == ("exit_context", 0.0, ())


class Stubborn:
    """An agent that looks at no limit."""

    name = "stubborn"
    needs_model = False

    def __init__(self) -> None:
        self.hangs = asyncio.Event()

    async def run(self, task: Task, session: Session) -> Ending:
        """Change something, and hang."""
        await session.perform("echo '# x' >> calc/core.py", timeout=60)
        self.hangs.set()
        while True:
            with contextlib.suppress(ValueError):
                await asyncio.sleep(600)


def test_an_agent_that_keeps_to_no_limit_is_cut_off(smith: Task, smith_image: Image) -> None:
    done = roll_out(smith, smith_image, Setup(agent=Stubborn(), deadline=1.0))
    assert (done.exit_status, done.reward) == ("submitted (exit_total_execution_time)", 0.0)
    assert len(done.steps) == 1


def test_a_cancelled_rollout_leaves_nothing_behind(smith: Task, smith_image: Image) -> None:
    async def cut() -> None:
        agent = Stubborn()
        work = asyncio.create_task(rollout_async(smith, smith_image, Setup(agent=agent)))
        async with asyncio.timeout(60):
            await agent.hangs.wait()
        assert len(Sandbox.list()) > len(before)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    before = {box.id for box in Sandbox.list()}
    asyncio.run(cut())
    assert {box.id for box in Sandbox.list()} <= before


# --- many ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hundred_at_once(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    # nothing to grade: a hundred gradings are not what this is about
    model = SimulatedModel([LOOK, SUBMIT], latency=lambda request: 0.5 if len(request.messages) > 2 else 3.0)
    tasks = [replace(smith, instance_id=f"calc__{number}") for number in range(25)]
    setup = Setup(agent=BashAgent(AgentOptions(command_timeout=300.0)), model=model)
    found = run_batch(
        tasks, setup, tmp_path, image_of=lambda _: smith_image, attempts=4, budgets=Budgets(workers=100, gradings=4)
    )
    assert len(found) == 100
    assert {one.verdict for one in found} == {Verdict.FAILED}
    assert model.most_in_flight > 10, "they overlap"


def test_drained_by_the_program_itself(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    async def run() -> tuple[Summary, ...]:
        batch = Batch(
            [smith], scripted([LOOK, SUBMIT], latency=0.2), tmp_path, image_of=lambda _: smith_image, attempts=50,
            budgets=Budgets(workers=3), progress=lambda news: batch.drain() if news.done == 2 else None,
        )  # fmt: skip
        return await batch.run()

    found = asyncio.run(run())
    assert 2 <= len(found) < 20
    assert all(one.finished for one in found)


FULL = """
import subprocess, sys
from pathlib import Path
from minisandbox.agents import ReplayAgent
from minisandbox.errors import DiskFull
from minisandbox.images import load_image
from minisandbox.rollouts import RunReader, Setup, run_batch
from minisandbox.store import Store
from minisandbox.tasks import TaskSet

place = Path(sys.argv[3])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=True)
store, tasks = Store.open(sys.argv[1]), TaskSet.load(sys.argv[2], allow_local_sources=True)
agent = ReplayAgent(["head -c 300000 /dev/urandom"])
images = {task.instance_id: load_image(store, "calc__smith-1") for task in tasks}
try:
    run_batch(tasks, Setup(agent=agent), place / "run", image_of=lambda task: images[task.instance_id], attempts=9)
except DiskFull as error:
    with RunReader(place / "run") as run:
        print(error.exit_code, sum(one.finished for one in run.summaries()) in range(1, 9))
"""


def test_a_full_disk_ends_the_batch_and_keeps_what_is_finished(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps(smith.to_row()) + "\n")
    (tmp_path / "small").mkdir()
    enter = ["unshare", "-m" if os.geteuid() == 0 else "-Urm"]
    if not shutil.which("unshare") or subprocess.run([*enter, "true"], check=False, capture_output=True).returncode:
        pytest.skip("unshare(1) cannot make a mount namespace here")
    script = textwrap.dedent(FULL)
    words = [str(smith_image.store.root), str(tmp_path / "tasks.jsonl"), str(tmp_path / "small")]
    done = subprocess.run(
        [*enter, sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == [str(DiskFull.exit_code), "True"], done.stderr
