"""Recordings of runs, to be played again."""

from __future__ import annotations

from pathlib import Path

from minisandbox.agents import ReplayAgent
from minisandbox.agents.replay import Command, InShell
from minisandbox.rollouts.database import NAME
from minisandbox.rollouts.rundir import RunReader
from minisandbox.trajectories import StepRecord


def load_replay(path: Path) -> ReplayAgent:
    """Return an agent that plays what was recorded.

    Args:
        path: a run's directory, of which each task's first rollout is played, or what :meth:`.ReplayAgent.load` takes.

    Raises:
        InvalidValue: it cannot be read, or holds nothing that can be played.
        RunError: it is a run, and its database cannot be read.
    """
    if not (path / NAME).is_file():
        return ReplayAgent.load(path)
    recorded: dict[str, tuple[Command, ...]] = {}
    with RunReader(path) as run:
        for one in run.summaries():
            if one.instance_id not in recorded:
                trajectory = run.trajectory(one.instance_id, one.attempt)
                assert trajectory is not None
                recorded[one.instance_id] = tuple(map(_command, trajectory.steps))
    return ReplayAgent(per_task=recorded)


def _command(step: StepRecord) -> Command:
    """A command as it ran; an edit comes back as its own text."""
    return InShell(step.command) if step.stateful and isinstance(step.command, str) else step.command
