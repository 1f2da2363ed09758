"""Rollouts for real: agents in sandboxes, their submissions graded, kept, and gone on with after an end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests import waiting
from tests.builds import python_build

from minisandbox.agents import Agent, EmptyAgent, Ending, OracleAgent, ReplayAgent, Session
from minisandbox.errors import BuildError, InvalidValue, NotFound, RunError, SandboxGone
from minisandbox.grade import Grade, Reason, Verdict
from minisandbox.images import Budget as Jobs
from minisandbox.images import BuildEvent, Building, Image, StepState
from minisandbox.rollouts import (
    EXIT_ENVIRONMENT_ERROR,
    Batch,
    Budgets,
    Progress,
    RunReader,
    Setup,
    Summary,
    load_replay,
    rollout,
    rollout_async,
    run_batch,
)
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.cancellation import CancelledError
from minisandbox.sandbox.core import Core
from minisandbox.store import Store
from minisandbox.tasks import PytestGrader, Task
from minisandbox.trajectories import Trajectory

pytestmark = pytest.mark.kernel
rollout_module = sys.modules[rollout.__module__]


class Scripted:
    """An agent that runs one function."""

    name = "scripted"
    needs_model = False

    def __init__(self, work: Callable[[Task, Session], Coroutine[Any, Any, Ending]]) -> None:
        self.run = work


def test_the_oracle_resolves_both_forms(smith: Task, bench: Task, images: Callable[[Task], Image]) -> None:
    for task in (smith, bench):
        done = rollout(task, images(task), OracleAgent())
        assert done.grade is not None, done.failure
        assert done.grade.verdict is Verdict.RESOLVED, done.grade
        assert (done.exit_status, done.failure, done.finished) == ("submitted", None, True)
        assert done.submission is not None
        assert b"calc/core.py" in done.submission
        assert done.image_key == images(task).key
        phases = (done.timings.sandbox_ready, done.timings.agent, done.timings.patch, done.timings.grade)
        assert all(seconds > 0 for seconds in phases)
        assert sum(phases) <= done.timings.total + 0.01
        assert Trajectory.from_text(done.to_text()) == done


def test_the_empty_agent_resolves_nothing(smith: Task, smith_image: Image) -> None:
    done = rollout(smith, smith_image, EmptyAgent(), attempt=2)
    assert (done.submission, done.attempt, done.steps) == (b"", 2, ())
    assert done.grade is not None
    assert done.grade.verdict is Verdict.FAILED
    assert done.finished


@pytest.mark.once
def test_replay_goes_on_after_a_failure(smith: Task, smith_image: Image) -> None:
    agent = ReplayAgent(["no-such-command", ("false",), "sed -i 's/a - b/a + b/' calc/core.py", "printf '\\377'"])
    done = rollout(smith, smith_image, agent)
    assert done.grade is not None
    assert done.grade.verdict is Verdict.RESOLVED
    assert [step.exit_code for step in done.steps] == [127, 1, 0, 0]
    assert done.steps[3].stdout == b"\xff"


@pytest.mark.slow
@pytest.mark.once
def test_what_the_oracle_did_can_be_replayed(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text(rollout(smith, smith_image, OracleAgent()).to_text())
    done = rollout(smith, smith_image, ReplayAgent.load(file))
    assert done.grade is not None
    assert done.grade.verdict is Verdict.RESOLVED


@pytest.mark.slow
@pytest.mark.once
def test_a_run_can_be_replayed_shell_and_all(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    async def work(task: Task, session: Session) -> Ending:
        await session.perform("cd calc", timeout=60, stateful=True)
        await session.perform("sed -i 's/a - b/a + b/' core.py", timeout=60, stateful=True)
        await session.close()
        return Ending()

    [first] = batch([smith], Scripted(work), tmp_path, lambda _: smith_image)
    assert first.verdict is Verdict.RESOLVED
    again = rollout(smith, smith_image, load_replay(tmp_path))
    assert again.grade is not None
    assert again.grade.verdict is Verdict.RESOLVED
    assert [step.stateful for step in again.steps] == [True, True]


@pytest.mark.parametrize(
    "command", ["rm -rf .git", "rm -rf .git; echo 'gitdir: /nowhere' > .git", "rm -rf /testbed", "echo x > .git/HEAD"]
)
def test_an_agent_that_destroys_the_repository_gets_nothing_for_it(
    smith: Task, smith_image: Image, command: str
) -> None:
    done = rollout(smith, smith_image, ReplayAgent([command]))
    assert done.grade is not None, done.failure
    assert done.grade.reward == 0.0, done
    assert done.finished, "it is the agent's doing, and not tried again"


def test_an_agent_that_breaks_is_no_verdict_about_its_work(smith: Task, smith_image: Image) -> None:
    async def work(task: Task, session: Session) -> Ending:
        raise KeyError("oops")

    done = rollout(smith, smith_image, Scripted(work))
    assert (done.exit_status, done.grade, done.finished) == ("exit_error", None, False)
    assert done.failure is not None
    assert (done.failure.phase, done.failure.kind) == ("agent", "KeyError")


def test_a_sandbox_that_ends_under_the_agent_is_our_failure(smith: Task, smith_image: Image) -> None:
    async def work(task: Task, session: Session) -> Ending:
        await session.box.stop()
        await session.perform("true", timeout=1.0)
        return Ending()

    done = rollout(smith, smith_image, Scripted(work))
    assert (done.exit_status, done.grade, done.finished) == (EXIT_ENVIRONMENT_ERROR, None, False)
    assert done.failure is not None
    assert done.failure.kind == "SandboxGone"


def test_a_sandbox_that_will_not_end_is_our_failure(
    smith: Task, smith_image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = Core.leave

    def hang(core: Core) -> None:
        leave(core)
        raise SandboxGone(f"sandbox {core.id} did not end", reason="a process hangs in the kernel")

    monkeypatch.setattr(Core, "leave", hang)
    done = rollout(smith, smith_image, EmptyAgent())
    assert not done.finished
    assert done.failure is not None
    assert (done.failure.phase, done.failure.kind) == ("sandbox", "SandboxGone")
    assert done.grade is None


def test_nothing_of_the_agents_lives_on_when_it_is_graded(smith: Task, smith_image: Image) -> None:
    loop = "while :; do echo 'def test_add(): pass' > /testbed/tests/test_add.py; sleep 0.05; done"
    rewriter = f"setsid sh -c {shlex.quote(loop)} >/dev/null 2>&1 &"
    seen = "until grep -q pass /testbed/tests/test_add.py; do sleep 0.05; done"
    done = rollout(smith, smith_image, ReplayAgent([rewriter, seen]))
    assert done.grade is not None
    assert done.grade.verdict is Verdict.FAILED
    assert [flag.path for flag in done.grade.flags] == ["tests/test_add.py"]


# --- batches ---------------------------------------------------------------------------------------------------------


def batch(
    tasks: list[Task],
    agent: Agent,
    out: Path,
    image_of: Callable[[Task], Image],
    *,
    attempts: int = 1,
    workers: int = 1,
    progress: Callable[[Progress[Summary]], None] | None = None,
) -> tuple[Summary, ...]:
    """What the tests here want of a batch."""
    setup, budgets = Setup(agent=agent), Budgets(workers=workers)
    return run_batch(
        tasks, setup, out, image_of=image_of, attempts=attempts, budgets=budgets, pause=0.01, progress=progress
    )


@pytest.mark.slow
def test_a_batch_and_its_resumption(smith: Task, bench: Task, images: Callable[[Task], Image], tmp_path: Path) -> None:
    told: list[Progress[Summary]] = []
    first = batch([smith, bench], OracleAgent(), tmp_path, images, attempts=2, workers=2, progress=told.append)
    assert [(one.instance_id, one.attempt) for one in first] == [
        (task.instance_id, attempt) for task in (smith, bench) for attempt in range(2)
    ]
    assert {(one.verdict, one.reward) for one in first} == {(Verdict.RESOLVED, 1.0)}
    assert [progress.done for progress in told] == [1, 2, 3, 4]
    assert all(not one.resumed and one.finished and one.steps == 1 for one in first)
    assert json.loads((tmp_path / "run.json").read_text())["config"]["agent"] == "oracle"

    with closing(sqlite3.connect(tmp_path / "rollouts.sqlite")) as database, database:
        before = dict(database.execute("SELECT instance_id || attempt, ended || hex(trajectory) FROM rollouts"))
        assert len(before) == 4
        database.execute("DELETE FROM rollouts WHERE instance_id = ? AND attempt = 1", (smith.instance_id,))
    again = batch([smith, bench], OracleAgent(), tmp_path, images, attempts=2)
    assert [one.resumed for one in again] == [True, False, True, True]
    with closing(sqlite3.connect(tmp_path / "rollouts.sqlite")) as database:
        after = dict(database.execute("SELECT instance_id || attempt, ended || hex(trajectory) FROM rollouts"))
    assert [key for key in before if before[key] != after[key]] == [f"{smith.instance_id}1"]
    with pytest.raises(RunError, match="agent"):
        batch([smith], EmptyAgent(), tmp_path, images)


@pytest.mark.once
def test_one_bad_task_loses_nothing(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    bad = replace(smith, instance_id="calc__bad")

    def image_of(task: Task) -> Image:
        if task is bad:
            raise BuildError("install failed", step="install")
        return smith_image

    found = batch([bad, smith], OracleAgent(), tmp_path, image_of)
    assert [one.verdict for one in found] == [None, Verdict.RESOLVED]
    assert (found[0].reason, found[0].finished) == ("BuildError", False)
    healed = batch([bad, smith], OracleAgent(), tmp_path, lambda task: smith_image)
    assert [(one.verdict, one.resumed) for one in healed] == [(Verdict.RESOLVED, False), (Verdict.RESOLVED, True)]


@pytest.mark.once
def test_what_we_failed_to_grade_is_done_again(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    broken = replace(smith, grader=replace(smith.grader, command="no-such-runner"))
    [found] = batch([broken], OracleAgent(), tmp_path, lambda task: smith_image)
    assert (found.verdict, found.reason) == (Verdict.INFRA_ERROR, Reason.REFERENCE_UNTRUSTED)
    [again] = batch([smith], OracleAgent(), tmp_path, lambda task: smith_image)
    assert (again.verdict, again.resumed) == (Verdict.RESOLVED, False)


@pytest.mark.once
def test_a_task_that_cannot_be_graded_is_named_and_left(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    other = replace(smith, instance_id="calc__other", FAIL_TO_PASS=("not pytest's",))
    found = batch([other, smith], EmptyAgent(), tmp_path, lambda task: smith_image)
    assert [(one.verdict, one.finished) for one in found] == [(None, False), (Verdict.FAILED, True)]
    assert (found[0].reason, found[0].exit_status) == ("InvalidValue", "submitted")
    assert "pytest node id" in found[0].detail


@pytest.mark.once
def test_a_grading_that_breaks_is_one_rollouts_failure(
    smith: Task, smith_image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(smith, instance_id="calc__other")
    real: Callable[..., Grade] = rollout_module.grade

    def grade(task: Task, image: Image, submission: bytes, **more: Any) -> Grade:
        if task is other:
            raise KeyError("a row that nobody has thought of")
        return real(task, image, submission, **more)

    monkeypatch.setattr(rollout_module, "grade", grade)
    found = batch([other, smith], OracleAgent(), tmp_path, lambda task: smith_image)
    assert [(one.verdict, one.reward) for one in found] == [(None, None), (Verdict.RESOLVED, 1.0)]
    assert (found[0].failed_in, found[0].reason, found[0].steps) == ("grade", "KeyError", 1)


@pytest.mark.once
def test_a_cancellation_that_is_not_ours_is_the_agents_failure(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    async def work(task: Task, session: Session) -> Ending:
        if not session.attempt:
            call = asyncio.ensure_future(asyncio.sleep(600))
            call.cancel()
            await call
        return Ending()

    found = batch([smith], Scripted(work), tmp_path, lambda task: smith_image, attempts=2)
    assert [(one.exit_status, one.reward) for one in found] == [("exit_error", None), ("submitted", 0.0)]
    assert "cancelled" in found[0].detail


@pytest.mark.once
def test_a_mistake_of_ours_ends_the_batch_and_keeps_what_is_finished(
    smith: Task, smith_image: Image, tmp_path: Path
) -> None:
    begun = threading.Event()

    def image_of(task: Task) -> Image:
        if task is not smith:
            assert begun.wait(120)
            raise RuntimeError("a mistake")
        return smith_image

    async def work(task: Task, session: Session) -> Ending:
        begun.set()
        await session.perform("sleep 0.5", timeout=60)
        return Ending()

    other = replace(smith, instance_id="calc__other")
    with pytest.raises(RuntimeError, match="a mistake"):  # however little time Ctrl-C would leave
        run_batch([smith, other], Setup(agent=Scripted(work)), tmp_path, image_of=image_of, drain=0.01)
    [kept] = batch([smith], Scripted(work), tmp_path, image_of)
    assert kept.resumed


@pytest.mark.once
@pytest.mark.parametrize("option", ["attempts", "workers"])
def test_numbers_that_make_no_sense(option: str, tmp_path: Path, smith: Task, smith_image: Image) -> None:
    with pytest.raises(InvalidValue, match=option):
        batch([smith], EmptyAgent(), tmp_path / "run", lambda task: smith_image, **{option: 0})  # type: ignore[arg-type] # one of two ints
    assert not (tmp_path / "run").exists()


@pytest.mark.once
def test_what_cannot_be_a_batch(tmp_path: Path, smith: Task, smith_image: Image) -> None:
    with pytest.raises(InvalidValue, match="is listed twice"):
        batch([smith, smith], EmptyAgent(), tmp_path / "run", lambda task: smith_image)
    with pytest.raises(InvalidValue, match="image_of or images"):
        run_batch([smith], Setup(agent=EmptyAgent()), tmp_path / "run")
    with pytest.raises(InvalidValue, match="configuration cannot be stored"):
        Setup(agent=EmptyAgent(), configuration={"x": float("nan")})
    assert not (tmp_path / "run").exists()


@pytest.mark.once
def test_a_grading_is_called_off(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    """A drained batch, a cancelled one and a cancelled rollout leave no tests running, and no verdict of them."""
    slow = replace(smith, grader=PytestGrader("touch /testbed/begun; sleep 600; pytest", 900.0))
    before = {box.id for box in Sandbox.list()}

    def tests_run() -> bool:
        with contextlib.suppress(NotFound, SandboxGone):  # the agent's has ended meanwhile
            return any(Sandbox.attach(box.id).files.exists("begun") for box in Sandbox.list() if box.id not in before)
        return False

    async def cut(how: str) -> None:
        setup = Setup(agent=OracleAgent())
        made = Batch([slow], setup, tmp_path / how, image_of=lambda _: smith_image, drain=0.01)
        work = rollout_async(slow, smith_image, setup) if how == "rollout" else made.run()
        running: asyncio.Future[object] = asyncio.ensure_future(work)
        await asyncio.to_thread(waiting.until, tests_run, 120)
        if how == "drain":
            made.drain()
            assert await running == ()
            return
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    for how in ("drain", "cancel", "rollout"):
        asyncio.run(cut(how))
        assert {box.id for box in Sandbox.list()} <= before, how
        assert how == "rollout" or kept(tmp_path / how) == [], how


@pytest.mark.once
def test_images_of_a_batch_are_made_together(smith: Task, store: Store, tmp_path: Path) -> None:
    events: list[BuildEvent] = []
    tasks = [replace(smith, instance_id=f"calc__{number}", patch=smith.patch) for number in range(3)]
    bad = replace(smith, instance_id="calc__bad", patch=smith.patch.replace("return a + b", "return nothing"))

    def begin(tasks: Sequence[Task], jobs: int) -> Building:
        recipes = {task.instance_id: task.recipe for task in tasks}
        return Building(recipes, store=store, budget=Jobs(jobs=jobs), progress=events.append)

    setup = Setup(agent=EmptyAgent())
    found = run_batch([bad, *tasks], setup, tmp_path, images=begin, budgets=Budgets(workers=2, builds=2))
    assert [(one.instance_id, one.verdict) for one in found] == [
        ("calc__bad", None),
        *((task.instance_id, Verdict.FAILED) for task in tasks),
    ]
    assert (found[0].failed_in, found[0].reason) == ("image", "PatchError")
    steps = Counter(event.step for event in events if event.state is StepState.FINISHED)
    assert set(steps.values()) <= {1}, "what they share is made once"


@pytest.mark.once
def test_who_drains_a_batch_ends_its_builds(smith: Task, smith_image: Image, store: Store, tmp_path: Path) -> None:
    begun = threading.Event()
    slow = replace(smith, instance_id="calc__slow", build=replace(python_build(smith), install=("sleep 600",)))
    made: list[Building] = []

    def tell(event: BuildEvent) -> None:
        if event.step == "install" and event.state is StepState.STARTED:
            begun.set()

    def begin(tasks: Sequence[Task], jobs: int) -> Building:
        made.append(Building({task.instance_id: task.recipe for task in tasks}, store=store, progress=tell))
        return made[0]

    async def run() -> tuple[Summary, ...]:
        batch = Batch([slow], Setup(agent=EmptyAgent()), tmp_path / "run", images=begin, drain=600)
        running = asyncio.create_task(batch.run())
        assert await asyncio.to_thread(begun.wait, 120)
        batch.drain()
        return await running

    assert asyncio.run(run()) == ()
    assert isinstance(made[0].images[slow.instance_id].exception(), CancelledError)
    assert kept(tmp_path / "run") == []


@pytest.mark.once
def test_several_workers_really_overlap(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    met = 0

    async def work(task: Task, session: Session) -> Ending:
        nonlocal met
        met += 1
        async with asyncio.timeout(120):
            while met < 3:
                await asyncio.sleep(0.01)
        return Ending()

    found = batch([smith], Scripted(work), tmp_path, lambda task: smith_image, attempts=3, workers=3)
    assert [one.verdict for one in found] == [Verdict.FAILED] * 3


BATCH = """
import asyncio, sys
from pathlib import Path
from typing import Any
from minisandbox.agents import Ending
from minisandbox.images import load_image
from minisandbox.rollouts import Setup, run_batch
from minisandbox.store import Store
from minisandbox.tasks import TaskSet

class Slow:
    name, needs_model = "slow", False
    async def run(self, task, session):
        if session.attempt:
            print("hanging", flush=True)
            await session.perform(f"sleep {sys.argv[4]}", timeout=None)
        return Ending()

store = Store.open(sys.argv[1])
tasks = TaskSet.load(sys.argv[2], allow_local_sources=True)
run_batch(tasks, Setup(agent=Slow()), Path(sys.argv[3]), attempts=3, notice=lambda said: print(said, flush=True),
          image_of=lambda task: load_image(store, task.instance_id))
"""


def start_batch(smith: Task, image: Image, place: Path, seconds: int) -> subprocess.Popen[str]:
    """Begin a batch whose second rollout hangs; it has said so."""
    tasks = place / "tasks.jsonl"
    tasks.write_text(json.dumps(smith.to_row()) + "\n")
    command = [sys.executable, "-c", BATCH, str(image.store.root), str(tasks), str(place / "run"), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "hanging\n", process.stderr.read()
    return process


def kept(run: Path) -> list[tuple[int, bool]]:
    with RunReader(run) as reader:
        return [(one.attempt, one.finished) for one in reader.summaries()]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_batch_keeps_what_is_finished(
    smith: Task, smith_image: Image, tmp_path: Path, number: signal.Signals
) -> None:
    with start_batch(smith, smith_image, tmp_path, 600) as process:
        waiting.until(lambda: kept(tmp_path / "run") == [(0, True)], 120)
        told = time.monotonic()
        process.send_signal(number)
        if number == signal.SIGINT:
            assert process.stdout is not None
            # 2 where the first has been put down this moment and is still counted
            said = process.stdout.readline()
            assert re.match("no more rollouts begin; [12] under way have 60 s to end", said), said
            process.send_signal(number)
        process.wait(120)
        assert time.monotonic() - told < 120, "it did not wait for the rollout under way"
        assert process.returncode in (-number, 130, 1)
    assert kept(tmp_path / "run") == [(0, True)]


@pytest.mark.once
def test_ctrl_c_lets_what_is_under_way_end(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    with start_batch(smith, smith_image, tmp_path, 3) as process:
        process.send_signal(signal.SIGINT)
        process.wait(120)
        assert process.returncode in (-signal.SIGINT, 130, 1)
    assert kept(tmp_path / "run") == [(0, True), (1, True)], "the third has not begun"
