"""One rollout: a sandbox, an agent in it, its submission, and the grade of that in another sandbox."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import wait
from dataclasses import replace
from typing import TYPE_CHECKING

from minisandbox.agents import EXIT_ERROR, SUBMITTED, Agent, Ending, LimitReached, Session
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
from minisandbox.grade import MAX_SUBMISSION, Grade, Reason, Verdict, grade
from minisandbox.pool import Threads
from minisandbox.rollouts.budgets import Budgets
from minisandbox.rollouts.draft import Draft
from minisandbox.rollouts.setup import Setup
from minisandbox.sandbox import AsyncSandbox
from minisandbox.sandbox.aio_drive import in_thread
from minisandbox.sandbox.cancellation import Cancellation, CancelledError
from minisandbox.tasks import Task
from minisandbox.trajectories import Failure, Trajectory
from minisandbox.types import Limits

if TYPE_CHECKING:
    from minisandbox.images import Image

EXIT_API = "exit_api"
"""The exit status of a rollout whose model did not answer."""
EXIT_CONTEXT = "exit_context"
"""The exit status of an agent whose conversation became longer than its model reads."""
EXIT_COST = "exit_cost"
"""The exit status of an agent that has asked for as much as it may."""
EXIT_TIME = "exit_total_execution_time"
"""The exit status of an agent that has worked as long as it may."""

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
) -> Trajectory:
    """Let an agent that asks no model work on a task once, and grade what it submits.

    :func:`rollout_async` is for agents with a model, and for programs that have an event loop.

    Args:
        task: the task.
        image: its image.
        agent: the agent.
        attempt: which rollout of this task it is.
        limits: what each of the two sandboxes may use.
        timeout: seconds the tests may take; the task's own if None.

    Returns:
        The record. Whatever fails on our side is in its ``failure``; then ``finished`` is False.
    """
    setup = Setup(agent=agent, limits=limits, timeout=timeout)
    return asyncio.run(rollout_async(task, image, setup, attempt=attempt))


async def rollout_async(
    task: Task, image: Image, setup: Setup, *, attempt: int = 0, graders: Threads | None = None
) -> Trajectory:
    """Let an agent work on a task once, and grade what it submits.

    The agent's sandbox has ended, with every process in it, before grading begins. A cancellation leaves no sandbox
    behind: neither the agent's, nor one in which tests are running.

    Args:
        task: the task.
        image: its image.
        setup: who works, with what model, within which bounds.
        attempt: which rollout of this task it is.
        graders: the threads that grade, shared by rollouts that run at once; a thread of its own if None.

    Returns:
        The record. Whatever fails on our side is in its ``failure``; then ``finished`` is False.
    """
    draft = Draft(task, (image.name, image.key), setup, attempt)
    await work(draft, lambda: make_box(image, setup.limits))
    cancellation = Cancellation()
    # a rollout without anything to grade does not queue behind those that have
    grader = graders if graders is not None and draft.failure is None else Threads(1, "grade")
    grading = grader.submit(finish, draft, image, cancellation=cancellation)
    if grader is not graders:
        grader.close()

    def end() -> None:
        cancellation.cancel()
        if not grading.cancelled():  # it has begun
            wait([grading], _ENDING)

    try:
        return await asyncio.wrap_future(grading)
    except asyncio.CancelledError:
        await in_thread(end)
        raise


def graders(count: int | None = None) -> Threads:
    """Return the threads that grade for rollouts that run at once; the caller closes them.

    Args:
        count: how many submissions are graded at once; one for each CPU if None.
    """
    return Threads(Budgets().gradings if count is None else count, "grade")


def unreached(
    task: Task,
    setup: Setup,
    attempt: int,
    error: Exception,
    *,
    waited: dict[str, float] | None = None,
    phase: str = "image",
) -> Trajectory:
    """Return the record of a rollout that could not begin: because there is no image, by default."""
    draft = Draft(task, ("", ""), setup, attempt, waited=waited)
    draft.fail(phase, error)
    return draft.trajectory(None)


async def make_box(image: Image, limits: Limits | None) -> AsyncSandbox:
    """Make an agent's sandbox.

    Raises:
        MiniSandboxError: it cannot be made.
        OSError: the same.
    """
    spec = await asyncio.get_running_loop().run_in_executor(None, image.spec)
    return await AsyncSandbox.create(spec, limits=limits)


# --- the agent's part ------------------------------------------------------------------------------------------------


async def work(draft: Draft, make: MakeBox) -> None:
    """Run the agent in a sandbox and take what it submits; the draft says what came of it.

    Args:
        draft: the rollout.
        make: makes the sandbox, or hands over one that was made ahead.
    """
    try:
        with draft.phase("sandbox_ready"):
            box = await make()
    except (MiniSandboxError, OSError) as error:
        draft.fail("sandbox", error)
        return
    try:
        async with box:
            with draft.phase("agent"):
                await _run_agent(box, draft)
            if draft.failure is None:
                with draft.phase("patch"):
                    await _take_patch(box, draft)
    except SandboxGone as error:  # it would not end: its processes may still be alive, so that nothing is graded
        draft.submission = None
        draft.fail("sandbox", error)


async def _run_agent(box: AsyncSandbox, draft: Draft) -> None:
    setup, name = draft.setup, f"{draft.task.instance_id}__{draft.attempt}"
    draft.session = Session(
        box, model=setup.model, sampling=setup.sampling, limits=setup.agent_limits, attempt=draft.attempt, name=name
    )
    scope = asyncio.timeout(setup.seconds)
    try:
        async with scope:
            draft.ending = await setup.agent.run(draft.task, draft.session)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        # not we: let through, it would end the worker that does one rollout after another, and nobody would be told
        error = RuntimeError("what the agent waited for was cancelled, and it let the cancellation pass")
        draft.fail("agent", error, exit_status=EXIT_ERROR)
    except Exception as error:  # noqa: BLE001 - agents are plugged in from outside; one that breaks must not end a batch
        if isinstance(error, TimeoutError) and scope.expired():
            draft.ending = Ending(EXIT_TIME, f"it was cut off after {setup.seconds:g} s")
        else:
            _conclude(draft, error)


def _conclude(draft: Draft, error: Exception) -> None:
    """Tell an agent's own ending from a failure of ours."""
    match error:
        case LimitReached():
            draft.ending = Ending(error.exit_status, str(error))
        case ContextExceeded():
            draft.ending = Ending(EXIT_CONTEXT, str(error))
        case BudgetExceeded():
            draft.fail("model", error, exit_status=EXIT_COST)
        case ModelError():
            draft.fail("model", error, exit_status=EXIT_API)
        case HostError() | SandboxGone():
            draft.fail("agent", error)
        case _:
            draft.fail("agent", error, exit_status=EXIT_ERROR)


async def _take_patch(box: AsyncSandbox, draft: Draft) -> None:
    try:
        draft.submission = await box.patch("/testbed", limit=MAX_SUBMISSION)
    except (CommandFailed, FileAccessError) as error:  # it worked when the image was made: the agent's doing
        draft.ending = replace(draft.ending, exit_status=EXIT_ERROR, detail=f"no patch could be taken: {error}")
        draft.submission = b""
    except (MiniSandboxError, OSError) as error:
        draft.fail("patch", error)
        return
    if draft.submission and draft.ending.exit_status != SUBMITTED:
        # in SWE-agent's words: it did not come to submit, and what it had until then counts
        draft.ending = replace(draft.ending, exit_status=f"{SUBMITTED} ({draft.ending.exit_status})")


# --- the grade -------------------------------------------------------------------------------------------------------


def finish(draft: Draft, image: Image, *, tries: int = 1, cancellation: Cancellation | None = None) -> Trajectory:
    """Grade what the agent submitted, if there is anything to grade, and return the whole record.

    Args:
        draft: the rollout, whose agent has ended.
        image: the task's image.
        tries: how often it is graded at most, where that fails on our side.
        cancellation: calls it off, from another thread.

    Raises:
        CancelledError: it was called off.
    """
    if draft.failure is not None or draft.submission is None:
        return draft.trajectory(None)
    with draft.phase("grade"):
        graded = _graded(draft, image, tries, cancellation)
    return draft.trajectory(graded)


def _graded(draft: Draft, image: Image, tries: int, cancellation: Cancellation | None) -> Grade | None:
    while True:
        tries -= 1
        try:
            graded = _grade(draft, image, cancellation)
        except CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - a wrong row, or a mistake of ours: a batch goes on without this one
            if not isinstance(error, InvalidValue):
                _LOG.exception("%s: the grading failed", draft.task.instance_id)
            draft.failure = Failure("grade", type(error).__name__, str(error))
            return None
        if graded.resolved is not None or graded.verdict is Verdict.UNCONFIRMED:
            return graded
        failure = Failure("grade", graded.reason, graded.detail)
        if tries <= 0 or graded.reason is not Reason.INFRASTRUCTURE:  # else the task's own reference fails: no accident
            draft.failure = failure
            return graded
        draft.tries = (*draft.tries, failure)


def _grade(draft: Draft, image: Image, cancellation: Cancellation | None) -> Grade:
    task, submission, setup = draft.task, draft.submission, draft.setup
    assert submission is not None

    def make() -> Grade:
        return grade(
            task, image, submission, timeout=setup.timeout, limits=setup.limits, cancellation=cancellation
        )  # fmt: skip

    return (
        make() if setup.grades is None else setup.grades.of(image.key, task.instance_id, submission, make, cancellation)
    )
