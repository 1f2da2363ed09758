"""Run the recorded commands of rollouts again: for the replay agent, or for the diff of each turn."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from minisandbox.agents import ReplayAgent, Session
from minisandbox.agents.replay import Command, InShell, play
from minisandbox.images import load_image
from minisandbox.rollouts.database import NAME
from minisandbox.rollouts.rundir import RunReader
from minisandbox.sandbox import AsyncSandbox
from minisandbox.sandbox.tracking import track_changes
from minisandbox.store import Store
from minisandbox.trajectories import PatchRecord, StepRecord, Trajectory

_SECONDS = 600.0
"""Time limit of the replay of one rollout."""


def load_replay(path: Path) -> ReplayAgent:
    """Return an agent that replays recorded commands.

    Args:
        path: a run's directory, to replay the first rollout of each task; or a path that :meth:`.ReplayAgent.load`
            accepts.

    Raises:
        InvalidValue: the recording cannot be read, or has no commands.
        RunError: the run's database cannot be read.
    """
    if not (path / NAME).is_file():
        return ReplayAgent.load(path)
    recorded: dict[str, tuple[Command, ...]] = {}
    with RunReader(path) as run:
        for summary in run.summaries():
            if summary.instance_id not in recorded:
                trajectory = run.trajectory(summary.instance_id, summary.attempt)
                assert trajectory is not None
                recorded[summary.instance_id] = tuple(map(_command, trajectory.steps))
    return ReplayAgent(per_task=recorded)


def _command(step: StepRecord) -> Command:
    """Return the command of a recorded step, wrapped in :class:`.InShell` if it ran in a stateful shell."""
    return InShell(step.command) if step.stateful and isinstance(step.command, str) else step.command


@dataclass(frozen=True, slots=True)
class Replay:
    """The workspace's changes that a replay of a rollout's commands found.

    Attributes:
        patches: the changes after each turn that changed the workspace.
        commands: the number of replayed commands.
        differing: the number of commands whose exit status differs from the recorded one.
        is_same_image: whether the image has not been built anew since the rollout.
    """

    patches: tuple[PatchRecord, ...]
    commands: int
    differing: int
    is_same_image: bool


async def replay_patches(trajectory: Trajectory, store: Store) -> Replay:
    """Run a rollout's commands in a new sandbox without network, and return the workspace's changes after each turn.

    Args:
        trajectory: the rollout.
        store: the store with the rollout's image.

    Raises:
        MiniSandboxError: the image is missing, the sandbox cannot be created, or it has ended.
        OSError: the sandbox cannot be created.
    """
    image = load_image(store, trajectory.image)
    patches: list[PatchRecord] = []
    turn = 0
    async with await AsyncSandbox.create(image.spec(), labels={"replay": trajectory.instance_id}) as box:
        tracker = track_changes(box)
        session = Session(box, changes=None if tracker is None else tracker.patch)
        recorded = session.record.patches
        try:
            async with asyncio.timeout(_SECONDS):
                for turn, steps in groupby(trajectory.steps, key=lambda step: step.turn):
                    for step in steps:
                        await play(_command(step), session, timeout=60 + 2 * step.duration)
                    count = len(recorded)
                    await session.record_patch()
                    patches += [PatchRecord(turn, entry.patch, entry.detail) for entry in recorded[count:]]
        except TimeoutError:
            patches.append(PatchRecord(turn, None, f"the replay was stopped after {_SECONDS:g} s"))
        finally:
            await session.close()
            if tracker is not None:
                await tracker.close()
    statuses = [
        (step.result.exit_code, old.exit_code)
        for step, old in zip(session.record.steps, trajectory.steps, strict=False)
    ]
    differing = sum(new != old for new, old in statuses)
    return Replay(tuple(patches), len(statuses), differing, image.key == trajectory.image_key)
