"""Run an agent on tasks and grade its submissions, one rollout at a time or in batches, and store the results."""

from minisandbox.rollouts.batch import Batch
from minisandbox.rollouts.budgets import Budgets
from minisandbox.rollouts.export import export_overview, export_sweagent
from minisandbox.rollouts.grades import KnownGrades
from minisandbox.rollouts.harbor_job import export_harbor
from minisandbox.rollouts.inspect_log import export_inspect
from minisandbox.rollouts.replay import load_replay
from minisandbox.rollouts.rollout import EXIT_API, EXIT_CONTEXT, EXIT_COST, EXIT_TIME, rollout, rollout_async
from minisandbox.rollouts.rundir import RunDirectory, RunReader
from minisandbox.rollouts.running import run_batch
from minisandbox.rollouts.setup import ImageOf, ImagesOf, Setup
from minisandbox.rollouts.state import EXIT_ENVIRONMENT_ERROR
from minisandbox.rollouts.submitting import ClusterChecks, RolloutStream, RolloutThread
from minisandbox.rollouts.summary import Summary
from minisandbox.runs import Progress

__all__ = [
    "EXIT_API",
    "EXIT_CONTEXT",
    "EXIT_COST",
    "EXIT_ENVIRONMENT_ERROR",
    "EXIT_TIME",
    "Batch",
    "Budgets",
    "ClusterChecks",
    "ImageOf",
    "ImagesOf",
    "KnownGrades",
    "Progress",
    "RolloutStream",
    "RolloutThread",
    "RunDirectory",
    "RunReader",
    "Setup",
    "Summary",
    "export_harbor",
    "export_inspect",
    "export_overview",
    "export_sweagent",
    "load_replay",
    "rollout",
    "rollout_async",
    "run_batch",
]
