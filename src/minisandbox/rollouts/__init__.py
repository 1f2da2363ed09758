"""Rollouts: attempts of agents at tasks, one at a time or in batches."""

from minisandbox.rollouts.batch import Progress, Summary, run_batch
from minisandbox.rollouts.rollout import EXIT_ENVIRONMENT_ERROR, rollout
from minisandbox.rollouts.rundir import RunDirectory

__all__ = ["EXIT_ENVIRONMENT_ERROR", "Progress", "RunDirectory", "Summary", "rollout", "run_batch"]
