"""Run a command over a task set: build its images together, run several tasks at once, and print progress."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from minisandbox.cli.common.builds import Builder
from minisandbox.cli.common.output import Once, Progress, human_seconds
from minisandbox.cli.common.run_options import backend_config, backend_of, cluster_checks, print_nodes
from minisandbox.cli.common.task_sets import cpus
from minisandbox.grade import DATABASE
from minisandbox.grade import Progress as Event
from minisandbox.runs import JobRecord, RunOptions
from minisandbox.store import Store
from minisandbox.tasks import Task

ResultT = TypeVar("ResultT", bound=JobRecord)


class SetRun(Generic[ResultT]):
    """A command's run over a task set.

    Args:
        args: the command line, with the options of :func:`.add_run_arguments`.
        progress: the output for progress messages.
        describe: returns one line about a result; shortens an error that was printed before.
        config: the configuration of the run, without the backend.
        builds_here: whether to build images on this machine if there is no cluster.
        retry: whether to retry builds that failed in the run that is resumed.
        rebuild: whether to rebuild existing images.

    Attributes:
        image_of: returns a task's image; None if this machine builds no images.
        options: keyword arguments for the function that runs the set.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        progress: Progress,
        describe: Callable[[ResultT, Once], str],
        config: Mapping[str, str],
        *,
        builds_here: bool = True,
        retry: bool = False,
        rebuild: bool = False,
    ) -> None:
        resumed = args.out is not None and (args.out / DATABASE).exists()
        self._args, self._retry, self._rebuild = args, retry or rebuild or not resumed, rebuild
        self._cluster = cluster_checks(args, progress)
        self._builder: Builder | None = None
        if builds_here and self._cluster is None:
            self._builder = Builder(Store.open(), progress, args.repo_mirrors, backend_of(args))
        self.image_of = None if self._builder is None else self._builder.image_of
        self.options: RunOptions[Task, ResultT] = {
            "out": args.out,
            "workers": args.workers or cpus(),
            "config": {**config, **backend_config(args)},
            "build": self._build,
            "progress": lambda event: show_progress(progress, event, describe),
            "elsewhere": self._cluster,
        }

    def _build(self, tasks: Sequence[Task]) -> None:
        """Build the images of tasks together on this machine; a failed build becomes the result of its task."""
        if self._builder is None:
            return
        if self._rebuild:
            self._builder.forget(task.instance_id for task in tasks)
        self._builder.build_all(tasks, self._args.jobs, retry_failed=self._retry)

    def print_nodes(self) -> None:
        """Print how much work each node did, if the command ran on a cluster."""
        if self._cluster is not None and not self._args.json:
            print_nodes(self._cluster.reports)


def show_progress(progress: Progress, event: Event[ResultT], describe: Callable[[ResultT, Once], str]) -> None:
    """Report a finished task, and the estimated remaining time.

    Args:
        progress: the output.
        event: the progress of the run.
        describe: returns one line about a result; shortens an error that was printed before.
    """
    if not event.resumed:
        progress.note(f"{event.done}/{event.total} {describe(event.latest, progress.repeats.once)}")
    remaining = f"; about {human_seconds(max(event.seconds_left, 1.0))} left" if event.seconds_left else ""
    progress.status(f"{event.done} of {event.total} done{remaining}")
