"""Declare and read the options of commands over tasks: the task set, its layout, the selection, the run directory."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from minisandbox.cli.common.output import say
from minisandbox.errors import InvalidValue
from minisandbox.tasks import DIALECTS, ENVIRONMENTS, TaskSet
from minisandbox.tasks.choosing import shuffled
from minisandbox.tasks.loading import Refused

_SET_HELP = (
    "a bundled set's name, a file (.jsonl, .json, .parquet), a folder of such files or datasets, harbor:DIR, "
    "hub:OWNER/NAME"
)


def add_tasks_arguments(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """Declare the task set and the selection of its tasks."""
    add_source_options(parser, default=default)
    add_only_option(parser)


def add_source_options(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """Declare the task set, and how its rows are read."""
    if default is None:
        parser.add_argument("tasks", metavar="TASKS", help=_SET_HELP)
    else:
        help_text = f"{_SET_HELP} (default: {default})"
        parser.add_argument("tasks", metavar="TASKS", nargs="?", default=default, help=help_text)
    _add_reading_options(parser)


def add_tasks_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--tasks`` and the selection of its tasks, for commands that take other positional arguments."""
    parser.add_argument("--tasks", metavar="TASKS", help=_SET_HELP)
    add_only_option(parser)
    _add_reading_options(parser)


def add_only_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--only``."""
    parser.add_argument(
        "--only", metavar="ID", action="append", default=[], help="an id or a glob of ids; may be repeated"
    )


def _add_reading_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dataset",
        metavar="LAYOUT",
        help=f"the layout of the rows, if their columns do not show it: {', '.join(DIALECTS)}",
    )
    parser.add_argument("--pins", metavar="DIR", type=Path, help="pins exported from the dataset's official images")
    parser.add_argument(
        "--environment",
        choices=ENVIRONMENTS,
        default="auto",
        help="how rows are built whose data set publishes container images: from pins, from the image, or from exact "
        "pins where they are known and else from the image (auto)",
    )
    parser.add_argument(
        "--repo-mirrors",
        metavar="DIR",
        type=Path,
        help="local git repositories that are tried before the network",
    )
    parser.add_argument(
        "--torch-backend",
        choices=("cpu",),
        default="",
        help="cpu: build images with PyTorch without CUDA, whatever their pins say: sandboxes see no GPU",
    )
    add_local_sources_option(parser)
    parser.add_argument(
        "--skip-unusable", action="store_true", help="skip rows that are not valid tasks, and report why"
    )


def add_local_sources_option(parser: argparse.ArgumentParser) -> None:
    """Declare the permissions of tasks on this machine: ``--allow-local-sources`` and ``--public-network``."""
    parser.add_argument(
        "--allow-local-sources",
        action="store_true",
        help="rows may name any directory and repository of this machine, not only directories next to their file; "
        "only for rows that you trust with every file you can read",
    )
    parser.add_argument(
        "--public-network",
        action="store_true",
        help="tasks that ask for the public network get it: HTTP and HTTPS to all public hosts",
    )


def add_run_arguments(parser: argparse.ArgumentParser, results: str = "tasks") -> None:
    """Declare the run directory and the concurrency of a command that builds images and tests tasks.

    Args:
        parser: the command's parser.
        results: plural noun for the results that the run directory keeps.
    """
    parser.add_argument(
        "-o", "--out", type=Path, metavar="DIR", help="directory for results and reports; an existing one is resumed"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="tasks at once (default: one per CPU)")
    add_jobs_option(parser)
    parser.set_defaults(kept=f"finished layers are kept, and with -o finished {results}; the same command resumes")


def add_jobs_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--jobs`` of commands that build images."""
    parser.add_argument("--jobs", type=int, metavar="N", help="build steps at once (default: one per CPU)")


def cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


# --- selection and order of tasks ------------------------------------------------------------------------------------


def add_selection_options(group: argparse._ActionsContainer) -> None:
    """Declare ``--id``, ``--repo``, ``--shuffle`` and ``--range``."""
    group.add_argument("--id", metavar="REGEX", help="tasks whose id contains a match; ^ and $ anchor it")
    group.add_argument("--repo", metavar="REGEX", help="tasks whose repository name contains a match")
    add_shuffle_option(group)
    group.add_argument("--range", metavar="A:B", help="of the selected tasks, those from A (from 0) to before B")


def add_shuffle_option(group: argparse._ActionsContainer) -> None:
    """Declare ``--shuffle``."""
    group.add_argument("--shuffle", metavar="SEED", type=int, help="shuffle the tasks, reproducibly by seed")


def matching_ids(tasks: TaskSet, args: argparse.Namespace) -> list[str]:
    """Return the ids of the tasks that ``--id`` and ``--repo`` select, in the order of the set.

    Raises:
        InvalidValue: a regular expression is malformed.
    """
    return [
        task.instance_id
        for task in tasks
        if _matches(args.repo, task.repo, "--repo") and _matches(args.id, task.instance_id, "--id")
    ]


def _matches(pattern: str | None, text: str, option: str) -> bool:
    """Return whether a text contains a match of a regular expression; None matches every text."""
    try:
        return pattern is None or re.search(pattern, text) is not None
    except re.error as error:
        raise InvalidValue(f"{option} {pattern!r} is not a regular expression", reason=str(error)) from None


def ordered_part(ids: Sequence[str], seed: int | None, part: slice) -> list[str]:
    """Shuffle ids by the seed of ``--shuffle``, and return the part that ``--range`` selects."""
    return (list(ids) if seed is None else shuffled(ids, seed))[part]


def parse_range(text: str | None) -> slice:
    """Parse ``A:B`` as a slice; None selects all.

    Raises:
        InvalidValue: the text is not a range.
    """
    match = re.fullmatch(r"(-?\d+)?:(-?\d+)?", text or ":")
    if match is None:
        raise InvalidValue(f"--range {text!r} is not a range", hint="for instance --range 0:100, or 100: for the rest")
    return slice(*(None if bound is None else int(bound) for bound in match.groups()))


# --- loading ---------------------------------------------------------------------------------------------------------


def load_both(args: argparse.Namespace) -> tuple[TaskSet, TaskSet]:
    """Load the whole task set, and the part that ``--only`` selects."""
    tasks = load(argparse.Namespace(**{**vars(args), "only": []}))
    return tasks, tasks.select(args.only) if args.only else tasks


def load(args: argparse.Namespace, on_refused: Callable[[Refused], None] | None = None) -> TaskSet:
    """Load the tasks selected on the command line.

    Args:
        args: the command line.
        on_refused: called with the error of each row that is not a valid task; None raises the first error. With
            ``--skip-unusable``, errors are only printed.
    """
    for option, directory in (("--pins", args.pins), ("--repo-mirrors", args.repo_mirrors)):
        if directory is not None and not directory.is_dir():
            raise InvalidValue(f"{option} {directory} is not a directory", hint="check the path")
    tasks = TaskSet.load(
        args.tasks,
        pins=args.pins,
        repo_mirrors=args.repo_mirrors,
        form=args.dataset,
        environment=args.environment,
        torch_backend=args.torch_backend,
        allow_local_sources=args.allow_local_sources,
        public_network=args.public_network,
        on_refused=(lambda error: say(f"skipped: {error}")) if args.skip_unusable else on_refused,
    )
    only = getattr(args, "only", [])
    return tasks.select(only) if only else tasks
