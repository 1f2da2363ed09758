"""Run work concurrently: blocking calls in threads, sandboxes created ahead, and resumable jobs."""

from minisandbox.pool.runner import (
    DATABASE,
    Elsewhere,
    ImageOf,
    Job,
    Progress,
    open_results,
    run_job,
    run_jobs,
)
from minisandbox.pool.threads import Threads, as_finished
from minisandbox.pool.warm import WarmPool

__all__ = [
    "DATABASE",
    "Elsewhere",
    "ImageOf",
    "Job",
    "Progress",
    "Threads",
    "WarmPool",
    "as_finished",
    "open_results",
    "run_job",
    "run_jobs",
]
