"""What becomes of a rollout that is being written when its batch ends."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from tests.unit.agent_tools import TASK
from tests.unit.training_tools import trajectory

from minisandbox.agents import EmptyAgent
from minisandbox.errors import DiskFull
from minisandbox.rollouts import Batch, RunDirectory, Setup, Summary
from minisandbox.rollouts.database import Packed, pack
from minisandbox.rollouts.executor import JobOwner
from minisandbox.rollouts.jobs import Job


class Ready:
    """A crew whose rollouts have ended before it begins."""

    async def run(self, todo: list[Job], owner: JobOwner) -> None:
        (job,) = todo
        await owner.ended(job, pack(trajectory(job.task.instance_id)))

    async def serve(self, owner: JobOwner) -> None:
        raise NotImplementedError

    def put(self, jobs: list[Job]) -> None:
        raise NotImplementedError

    def forget(self, job: Job) -> None:
        raise NotImplementedError

    def drain(self) -> None:
        pass

    async def close(self) -> None:
        pass


def test_an_error_in_writing_outlives_the_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, cut_off = threading.Event(), threading.Event()

    def keep(_run: RunDirectory, _packed: Packed) -> Summary:
        began.set()
        assert cut_off.wait(30)
        raise DiskFull("no room")

    monkeypatch.setattr(RunDirectory, "keep", keep)

    async def body() -> None:
        batch = Batch([TASK], Setup(agent=EmptyAgent()), tmp_path / "run", crew=Ready(), drain=0.1)
        running = asyncio.create_task(batch.run())
        await asyncio.to_thread(began.wait, 30)
        batch.drain()
        await asyncio.sleep(0.5)
        cut_off.set()
        with pytest.raises(DiskFull):
            await running

    asyncio.run(body())
