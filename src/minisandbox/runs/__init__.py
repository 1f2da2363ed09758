"""Keep a run in a directory with a database, run its jobs concurrently, and resume it.

Validations, evaluations and batches of rollouts share this package.
"""

from minisandbox.runs.database import DATABASE, Database, Result, Results
from minisandbox.runs.directory import VERSION, Config, RunDirectory, write_whole
from minisandbox.runs.jobs import (
    Elsewhere,
    ImageOf,
    Job,
    JobRecord,
    Progress,
    RunOptions,
    read_fields,
    run_job,
    run_jobs,
)
from minisandbox.runs.threads import Threads, as_finished

__all__ = [
    "DATABASE",
    "VERSION",
    "Config",
    "Database",
    "Elsewhere",
    "ImageOf",
    "Job",
    "JobRecord",
    "Progress",
    "Result",
    "Results",
    "RunDirectory",
    "RunOptions",
    "Threads",
    "as_finished",
    "read_fields",
    "run_job",
    "run_jobs",
    "write_whole",
]
