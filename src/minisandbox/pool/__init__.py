"""How much work is done at once: threads, sandboxes made ahead, and resumable runs of jobs."""

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
