"""What every command over tasks takes: where they are, what layout their rows have, which of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from minisandbox.cli.output import say
from minisandbox.errors import InvalidValue
from minisandbox.tasks import DIALECTS, TaskSet

_WHAT = "a bundled set's name, a file (.jsonl, .json, .parquet), a folder of these or of datasets, or hub:OWNER/NAME"


def add_tasks_arguments(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """Declare what every command over tasks takes: the set, and which of its tasks."""
    add_source_options(parser, default=default)
    parser.add_argument(
        "--only", metavar="ID", action="append", default=[], help="an id or a glob of ids; may be given several times"
    )


def add_source_options(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """Declare the set, and how its rows are read."""
    if default is None:
        parser.add_argument("tasks", metavar="TASKS", help=_WHAT)
    else:
        parser.add_argument("tasks", metavar="TASKS", nargs="?", default=default, help=f"{_WHAT} (default: {default})")
    parser.add_argument(
        "--dataset",
        metavar="LAYOUT",
        help=f"the layout of the rows, where their columns do not say it: {', '.join(DIALECTS)}",
    )
    parser.add_argument(
        "--pins", metavar="DIR", type=Path, help="exported environments of the dataset's official images"
    )
    parser.add_argument(
        "--repo-mirrors",
        metavar="DIR",
        type=Path,
        help="git repositories to take commits from before the network is asked",
    )
    parser.add_argument(
        "--torch-backend",
        choices=("cpu",),
        default="",
        help="cpu: images get builds of PyTorch without CUDA, whatever their pins say: sandboxes see no GPU",
    )
    add_local_sources_option(parser)
    parser.add_argument(
        "--skip-unusable", action="store_true", help="leave out rows that are no tasks, and say why, instead of ending"
    )


def add_local_sources_option(parser: argparse.ArgumentParser) -> None:
    """Declare whether rows may name any directory of this machine."""
    parser.add_argument(
        "--allow-local-sources",
        action="store_true",
        help="rows may name any directory and repository of this machine, not only directories beside their file; "
        "only for rows that you trust with all that you can read",
    )


def load(args: argparse.Namespace) -> TaskSet:
    """Read the tasks that :func:`add_tasks_arguments` let the user choose."""
    for option in ("pins", "repo_mirrors"):
        directory = getattr(args, option)
        if directory is not None and not directory.is_dir():
            raise InvalidValue(f"--{option.replace('_', '-')} {directory}: not a directory", hint="check the path")
    tasks = TaskSet.load(
        args.tasks,
        pins=args.pins,
        repo_mirrors=args.repo_mirrors,
        form=args.dataset,
        torch_backend=args.torch_backend,
        allow_local_sources=args.allow_local_sources,
        on_refused=(lambda error: say(f"left out: {error}")) if args.skip_unusable else None,
    )
    only = getattr(args, "only", [])
    return tasks.select(only) if only else tasks
