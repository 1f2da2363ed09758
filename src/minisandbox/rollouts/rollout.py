"""Run one rollout: run an agent in a sandbox, take its submission, and grade the submission in a fresh sandbox."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import wait
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.agents import EXIT_ERROR, SUBMITTED, Agent, AgentFailed, CommandAgent, Ending, LimitReached, Session
from minisandbox.errors import (
    BudgetExceeded,
    CommandFailed,
    ContextExceeded,
    FileAccessError,
    HostError,
    InvalidValue,
    MiniSandboxError,
    ModelError,
    SandboxGone,
)
from minisandbox.grade import MAX_SUBMISSION, ONCE, Grade, Reason, Verdict, grade, grade_work, start_up
from minisandbox.rollouts.setup import Setup
from minisandbox.rollouts.state import RolloutState
from minisandbox.runs import Threads
from minisandbox.sandbox import AsyncSandbox, Sandbox
from minisandbox.sandbox.cancellation import Cancellation, CancelledError
from minisandbox.sandbox.io_async import call_blocking
from minisandbox.sandbox.tracking import track_changes
from minisandbox.tasks import ScriptGrader, Task
from minisandbox.trajectories import Failure, Trajectory
from minisandbox.types import ImageSpec, Limits, Network

if TYPE_CHECKING:
    from minisandbox.images import Image, Progress
    from minisandbox.store import Store

EXIT_API = "exit_api"
"""The exit status after an error of the model's server."""
EXIT_CONTEXT = "exit_context"
"""The exit status of an agent whose conversation outgrew the model's context window."""
EXIT_COST = "exit_cost"
"""The exit status after the agent's cost limit, or the batch's budget of cost or tokens, is reached."""
EXIT_TIME = "exit_total_execution_time"
"""The exit status of an agent that reached its time limit."""

_LOG = logging.getLogger("minisandbox.rollouts")
_ENDING = 30.0

MakeBox = Callable[[], Awaitable[AsyncSandbox]]


def rollout(
    task: Task,
    image: Image,
    agent: Agent,
    *,
    attempt: int = 0,
    limits: Limits | None = None,
    timeout: float | None = None,
    confirm: str = ONCE,
) -> Trajectory:
    """Run an agent without a model on a task once, and grade its submission.

    Use :func:`rollout_async` for agents with a model, and in programs with an event loop.

    Args:
        task: the task.
        image: the task's image.
        agent: the agent.
        attempt: the index of the rollout among the task's rollouts, from 0.
        limits: resource limits of the agent's and of the grader's sandbox.
        timeout: time limit of the tests in seconds; None for the task's own limit.
        confirm: which passes are confirmed by further test runs, as in :func:`.grade`.

    Returns:
        The record. After an infrastructure error, ``failure`` contains the error, and ``finished`` is False.
    """
    setup = Setup(agent=agent, limits=limits, timeout=timeout, confirm=confirm)
    return asyncio.run(rollout_async(task, image, setup, attempt=attempt))


async def rollout_async(task: Task, image: Image, setup: Setup, *, attempt: int = 0) -> Trajectory:
    """Run an agent on a task once, and grade its submission.

    The agent's sandbox is stopped, with all its processes, before grading begins, unless a script grades the sandbox
    itself. Cancellation also stops the agent's and the grader's sandboxes.

    Args:
        task: the task.
        image: the task's image.
        setup: the agent, its model, and limits.
        attempt: the index of the rollout among the task's rollouts, from 0.

    Returns:
        The record. After an infrastructure error, ``failure`` contains the error, and ``finished`` is False.
    """
    state = RolloutState(task, (image.name, image.key), setup, attempt)
    async with setup.serving():
        await work(state, lambda: make_box(image, task, setup))
    cancellation, grader = Cancellation(), Threads(1, "grade")
    grading = grader.submit(finish, state, image, cancellation=cancellation)
    grader.close()

    def end() -> None:
        cancellation.cancel()
        if not grading.cancelled():  # grading has started
            wait([grading], _ENDING)

    try:
        return await asyncio.wrap_future(grading)
    except asyncio.CancelledError:
        await call_blocking(end)
        raise


def unreached(
    task: Task,
    setup: Setup,
    attempt: int,
    error: Exception,
    *,
    waited: dict[str, float] | None = None,
    phase: str = "image",
) -> Trajectory:
    """Return the record of a rollout that could not begin, by default because its image could not be built."""
    state = RolloutState(task, ("", ""), setup, attempt, waited=waited)
    state.fail(phase, error)
    return state.trajectory(None)


async def make_box(image: Image, task: Task, setup: Setup) -> AsyncSandbox:
    """Create an agent's sandbox and start it. Without limits in the setup, the task's own limits apply.

    A command-line agent's program is installed at the first call, and added to the image as a layer on top.

    Raises:
        MiniSandboxError: the sandbox cannot be created, or its entrypoint exited.
        OSError: the sandbox cannot be created.
    """
    spec, network = await asyncio.get_running_loop().run_in_executor(None, image.spec), task.needs.network
    if isinstance(agent := setup.agent, CommandAgent):
        if network != Network.off():
            raise InvalidValue(
                f"{task.instance_id} needs a network, and the agent {agent.name!r} reaches only the model",
                hint="use an agent of MiniSandbox: --agent bash",
            )
        layers = await asyncio.get_running_loop().run_in_executor(None, install, agent, image.store)
        spec, network = replace(spec, layers=(*spec.layers, *layers)), agent.network
    box = await AsyncSandbox.create(spec, limits=task.needs.limits(setup.limits), network=network)
    if task.needs.directories or task.needs.entrypoint:
        try:
            await call_blocking(lambda: start_up(Sandbox.attach(box.id), task, spec))
        except BaseException:  # also on cancellation, because no other code stops the sandbox
            await box.stop()
            raise
    return box


def install(agent: CommandAgent, store: Store, progress: Progress | None = None) -> list[Path]:
    """Install a command-line agent in a store, as an image of its own; return the layers for other images.

    Later calls return the same layers as long as they exist, because planning a build takes longer than a sandbox.

    Raises:
        MiniSandboxError: the installation failed.
    """
    from minisandbox.images import build  # noqa: PLC0415 - other agents need no build

    recipe, layers = agent.recipe.image(), agent.layers.get(store.root)
    if recipe is None:
        return []
    if layers is None or not all(layer.is_dir() for layer in layers):
        image = build(recipe, store=store, name=f"agent-{agent.recipe.title.replace(' ', '-')}", progress=progress)
        layers = agent.layers[store.root] = [store.layer_tree(key) for key in image.layers[1:]]
    return layers


# --- the agent's part ------------------------------------------------------------------------------------------------


async def work(state: RolloutState, make: MakeBox) -> None:
    """Run the agent in a sandbox, take its submission, and record both in ``state``.

    Args:
        state: the rollout's state.
        make: creates the sandbox, or returns a sandbox that was created in advance.
    """
    try:
        with state.phase("sandbox_ready"):
            box = await make()
    except (MiniSandboxError, OSError) as error:
        state.fail("sandbox", error)
        return
    try:
        async with box:
            with state.phase("agent"):
                await _run_agent(box, state)
            if state.failure is None:
                with state.phase("patch"):
                    await _take_patch(box, state)
            if state.failure is None:
                await _grade_work(box, state)
    except SandboxGone as error:  # the agent's processes may still run, so do not grade the submission
        state.submission = None
        state.fail("sandbox", error)


async def _run_agent(box: AsyncSandbox, state: RolloutState) -> None:
    setup, name = state.setup, f"{state.task.instance_id}__{state.attempt}"
    tracker = track_changes(box) if setup.turn_patches and setup.model is not None else None
    state.session = Session(
        box, model=setup.model, sampling=setup.sampling, limits=setup.agent_limits, attempt=state.attempt, name=name,
        changes=None if tracker is None else tracker.patch,
    )  # fmt: skip
    seconds = min(setup.seconds, state.task.needs.seconds or setup.seconds)
    scope = asyncio.timeout(setup.deadline)
    try:
        async with scope, state.session.deadline(seconds) as charged:
            state.ending = await setup.agent.run(state.task, state.session)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        # the agent's code raised this cancellation; re-raising it would silently stop the worker and its later rollouts
        error = RuntimeError("something that the agent awaited was cancelled, and the agent passed the cancellation on")
        state.fail("agent", error, exit_status=EXIT_ERROR)
    except Exception as error:  # noqa: BLE001 - a broken agent plug-in must not end the batch
        if isinstance(error, TimeoutError) and (scope.expired() or charged.expired()):
            stopped = setup.deadline if scope.expired() else seconds
            state.ending = Ending(EXIT_TIME, f"the agent was stopped after {stopped:g} s")
        else:
            _conclude(state, error)
    finally:
        if tracker is not None:
            try:
                await state.session.record_patch()
            finally:
                await tracker.close()


def _conclude(state: RolloutState, error: Exception) -> None:
    """Record how the agent ended, or an infrastructure error, depending on the exception."""
    match error:
        case LimitReached():
            state.ending = Ending(error.exit_status, str(error))
        case ContextExceeded():
            state.ending = Ending(EXIT_CONTEXT, str(error))
        case BudgetExceeded():
            state.fail("model", error, exit_status=EXIT_COST)
        case ModelError():
            state.fail("model", error, exit_status=EXIT_API)
        case AgentFailed():
            state.fail("agent", error, exit_status=error.exit_status)
        case HostError() | SandboxGone():
            state.fail("agent", error)
        case _:
            state.fail("agent", error, exit_status=EXIT_ERROR)


async def _take_patch(box: AsyncSandbox, state: RolloutState) -> None:
    grader = state.task.grader
    if isinstance(grader, ScriptGrader) and grader.carry:  # the carried files are the submission
        return
    try:
        state.submission = await box.patch(limit=MAX_SUBMISSION)
    except (CommandFailed, FileAccessError) as error:
        # taking a patch worked when the image was built, so the agent has broken the workspace
        state.ending = replace(state.ending, exit_status=EXIT_ERROR, detail=f"cannot take a patch: {error}")
        state.submission = b""
    except (MiniSandboxError, OSError) as error:
        state.fail("patch", error)
        return
    if state.submission and state.ending.exit_status != SUBMITTED:
        # SWE-agent's notation for an agent that stopped without submitting, whose changes are graded anyway
        state.ending = replace(state.ending, exit_status=f"{SUBMITTED} ({state.ending.exit_status})")


async def _grade_work(box: AsyncSandbox, state: RolloutState) -> None:
    """Grade a script task in the agent's sandbox, or copy the submitted files to a clean sandbox and grade there."""
    grader = state.task.grader
    if isinstance(grader, ScriptGrader) and (grader.mode == "live" or grader.carry):
        with state.phase("grade"):
            state.grade = await call_blocking(_attach_and_grade, state.task, box.id, box.image, state.setup)


def _attach_and_grade(task: Task, box: str, image: ImageSpec, setup: Setup) -> Grade:
    attached = Sandbox.attach(box)
    return grade_work(task, attached, image, timeout=setup.timeout, limits=setup.limits, confirm=setup.confirm)


# --- the grade -------------------------------------------------------------------------------------------------------


def finish(
    state: RolloutState, image: Image, *, tries: int = 1, cancellation: Cancellation | None = None
) -> Trajectory:
    """Grade the submission if there is one, and return the rollout's record.

    Args:
        state: the rollout's state, after its agent has ended.
        image: the task's image.
        tries: maximum gradings; infrastructure errors are retried.
        cancellation: cancels the grading from another thread.

    Raises:
        CancelledError: the grading was cancelled.
    """
    if state.failure is not None or (state.submission is None and state.grade is None):
        return state.trajectory(None)
    with state.phase("grade") if state.grade is None else nullcontext():
        graded = _graded(state, image, tries, cancellation)
    return state.trajectory(graded)


def _graded(state: RolloutState, image: Image, tries: int, cancellation: Cancellation | None) -> Grade | None:
    while True:
        tries -= 1
        try:
            graded = _grade(state, image, cancellation)
        except CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - a malformed task or a bug must not end the batch
            if not isinstance(error, InvalidValue):
                _LOG.exception("%s: the grading failed", state.task.instance_id)
            state.failure = Failure("grade", type(error).__name__, str(error))
            return None
        if graded.resolved is not None or graded.verdict is Verdict.UNCONFIRMED:
            return graded
        failure = Failure("grade", graded.reason, graded.detail)
        final = tries <= 0 or state.grade is not None
        # retry infrastructure errors only: a failed reference solution would fail again
        if final or graded.reason is not Reason.INFRASTRUCTURE:
            state.failure = failure
            return graded
        state.tries = (*state.tries, failure)


def _grade(state: RolloutState, image: Image, cancellation: Cancellation | None) -> Grade:
    if state.grade is not None:
        return state.grade
    task, submission, setup = state.task, state.submission, state.setup
    assert submission is not None

    def make() -> Grade:
        return grade(
            task, image, submission, timeout=setup.timeout, limits=setup.limits, confirm=setup.confirm,
            cancellation=cancellation,
        )  # fmt: skip

    return (
        make() if setup.grades is None else setup.grades.of(image.key, task.instance_id, submission, make, cancellation)
    )
