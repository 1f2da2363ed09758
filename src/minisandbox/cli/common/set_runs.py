"""Work through a task set: its images are built together, several tasks run at once, and progress has an estimate."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

from minisandbox.cli.common.builds import Builder
from minisandbox.cli.common.output import Once, Progress, human_seconds
from minisandbox.cli.common.task_sets import cpus
from minisandbox.grade import DATABASE
from minisandbox.grade import Progress as News
from minisandbox.store import Store
from minisandbox.tasks import Task

Latest = TypeVar("Latest")


class SetRun:
    """How a command works through a task set.

    Args:
        args: the command line, with the options of :func:`.add_run_arguments`.
        progress: the output for progress messages.
        here: whether this machine makes the images.
        backend: what makes their sandboxes; "" for namespaces.
        retry: whether to retry builds that failed in the run that is resumed.
        rebuild: whether to rebuild images that there are.

    Attributes:
        workers: tasks at once.
        image_of: returns a task's image; None where another machine makes it.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        progress: Progress,
        *,
        here: bool = True,
        backend: str = "",
        retry: bool = False,
        rebuild: bool = False,
    ) -> None:
        resumed = args.out is not None and (args.out / DATABASE).exists()
        self._jobs, self._retry, self._rebuild = args.jobs, retry or rebuild or not resumed, rebuild
        self._builder = Builder(Store.open(), progress, args.repo_mirrors, backend) if here else None
        self.workers: int = args.workers or cpus()
        self.image_of = None if self._builder is None else self._builder.image_of

    def build(self, tasks: Sequence[Task]) -> None:
        """Build the images of tasks on this machine, together; a failure becomes the result of its task."""
        if self._builder is None:
            return
        if self._rebuild:
            self._builder.forget(task.instance_id for task in tasks)
        self._builder.build_all(tasks, self._jobs, retry_failed=self._retry)


def show_progress(progress: Progress, news: News[Latest], describe: Callable[[Latest, Once], str]) -> None:
    """Report a finished task, and the estimated time for the rest.

    Args:
        progress: the output.
        news: the progress of the run.
        describe: returns the line about a result, with an error that was printed before shortened.
    """
    if not news.resumed:
        progress.note(f"{news.done}/{news.total} {describe(news.latest, progress.repeats.once)}")
    left = f"; about {human_seconds(max(news.seconds_left, 1.0))} left" if news.seconds_left else ""
    progress.status(f"{news.done} of {news.total} done{left}")
