"""Rollouts that finish while a trainer goes on: rows are handed out as they finish, and old ones are dropped."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest
from tests.unit.training_tools import byte_row, trajectory

from minisandbox.errors import InvalidValue, ModelUnavailable
from minisandbox.models import TokenRow
from minisandbox.rollouts import RolloutStream
from minisandbox.rollouts.setup import Draw
from minisandbox.tasks import Task
from minisandbox.trajectories import Trajectory

TASK = cast("Task", None)


class Thread:
    """Ends rollouts when the test says so."""

    def __init__(self) -> None:
        self.running: dict[int, asyncio.Future[Trajectory]] = {}

    async def rollout(self, task: Task, *, attempt: int, draw: Draw | None) -> Trajectory:
        self.running[attempt] = asyncio.get_running_loop().create_future()
        return await self.running[attempt]

    def end(self, attempt: int, *rows: TokenRow) -> None:
        self.running[attempt].set_result(replace(trajectory(attempt=attempt), rows=rows))


def sampled(*versions: int) -> TokenRow:
    """Return a row whose sampled tokens have these policy versions, in turn."""
    row = byte_row()
    runs = [(versions[min(index, len(versions) - 1)] if trained else -1, 1) for index, trained in enumerate(row.mask)]
    return replace(row, versions=tuple(runs))


def begin(staleness: int, attempts: int) -> tuple[Thread, RolloutStream]:
    thread = Thread()
    stream = RolloutStream(thread, staleness)  # type: ignore[arg-type] # it runs nothing
    for attempt in range(attempts):
        stream.submit(TASK, attempt=attempt)
    return thread, stream


def test_rows_come_as_they_finish_and_old_ones_are_dropped() -> None:
    async def run() -> None:
        thread, stream = begin(1, 3)
        await asyncio.sleep(0)
        thread.end(2, sampled(0))
        rollout, rows = await stream.next()
        assert (rollout.attempt, len(rows), len(stream)) == (2, 1, 2)
        stream.version = 2
        thread.end(1, sampled(1), sampled(2), sampled(0))
        rollout, rows = await stream.next()
        assert (rollout.attempt, [row.oldest_version for row in rows]) == (1, [1, 2])
        assert stream.dropped == 1
        thread.end(0, sampled(0))
        assert (await stream.next())[1] == ()
        assert (stream.dropped, len(stream)) == (2, 0)

    asyncio.run(run())


def test_one_old_token_makes_a_row_old() -> None:
    row = byte_row()
    first = row.mask.find(1)
    mixed = replace(row, versions=((-1, first), (0, 1), (1, len(row.ids) - first - 1)))

    async def run() -> None:
        thread, stream = begin(0, 1)
        await asyncio.sleep(0)
        stream.version = 1
        thread.end(0, mixed)
        assert (await stream.next())[1] == ()
        assert stream.dropped == 1

    asyncio.run(run())


def test_without_versions_the_time_of_submission_counts() -> None:
    async def run() -> None:
        thread, stream = begin(0, 1)
        stream.version = 1
        stream.submit(TASK, attempt=1)
        await asyncio.sleep(0)
        for attempt in (0, 1):
            thread.end(attempt, byte_row())
        counts = [len((await stream.next())[1]) for _ in range(2)]
        assert (counts, stream.dropped) == ([0, 1], 1)

    asyncio.run(run())


def test_a_failed_rollout_ends_alone() -> None:
    async def run() -> None:
        thread, stream = begin(0, 2)
        await asyncio.sleep(0)
        thread.running[0].set_exception(ModelUnavailable("the server is gone"))
        with pytest.raises(ModelUnavailable):
            await stream.next()
        thread.end(1, byte_row())
        assert (await stream.next())[0].attempt == 1
        with pytest.raises(InvalidValue, match="no rollout is pending"):
            await stream.next()

    asyncio.run(run())


def test_closing_cancels_what_is_pending() -> None:
    async def run() -> None:
        thread, stream = begin(0, 1)
        await asyncio.sleep(0)
        stream.close()
        await asyncio.sleep(0)
        assert thread.running[0].cancelled()
        assert len(stream) == 0

    asyncio.run(run())


def test_staleness_is_not_negative() -> None:
    with pytest.raises(InvalidValue, match="staleness is -1"):
        begin(-1, 0)
