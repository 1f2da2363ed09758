"""Load the recorded commands of a run for the replay agent."""

from __future__ import annotations

from pathlib import Path

from minisandbox.agents import ReplayAgent
from minisandbox.agents.replay import Command, InShell
from minisandbox.rollouts.database import NAME
from minisandbox.rollouts.rundir import RunReader
from minisandbox.trajectories import StepRecord


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
