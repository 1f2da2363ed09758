"""``minisandbox tasks filter|unique-images``: write part of a set, in the set's own format."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import add_json_option, print_json, print_table, put, say
from minisandbox.cli.common.task_sets import (
    add_selection_options,
    add_tasks_arguments,
    load,
    matching_ids,
    ordered_part,
    parse_range,
)
from minisandbox.errors import InvalidValue
from minisandbox.tasks import TaskSet, read_statuses
from minisandbox.tasks.choosing import MISSING, merged, parts_of, unique_images, with_status
from minisandbox.tasks.reading import layout_of_name

_IMAGES = ("built", "failed", "missing", "broken")
_OUT = "the file or folder to write; its suffix chooses the format (default: that of TASKS)"


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verbs to the parser."""
    choose = verbs.add_parser(
        "filter",
        help="write the tasks that meet all conditions, in their own format",
        description="Write the tasks that meet all conditions, in their own format; without --out print their ids.",
    )
    add_tasks_arguments(choose)
    choose.add_argument(
        "--statuses", metavar="RUN", type=Path, action="append", default=[],
        help="results of a run: its directory, or a run_batch_exit_statuses.yaml; later ones override earlier ones",
    )  # fmt: skip
    choose.add_argument(
        "--status", metavar="STATUS", action="append",
        help=f"a status in --statuses, or a glob; '{MISSING}' for tasks without one (default: passed)",
    )  # fmt: skip
    choose.add_argument("--image", choices=_IMAGES, action="append", help="state of the task's image in the store")
    add_selection_options(choose)
    choose.add_argument(
        "--split", metavar="NAME=SHARE", action="append",
        help="a random part (by --shuffle's seed, or 0), written to OUT-NAME; repeat it for each part",
    )  # fmt: skip
    _add_output(choose)
    choose.set_defaults(run=run_filter)
    unique = verbs.add_parser(
        "unique-images",
        help="select one task per environment: the images to build first",
        description="Select one task per environment: tasks share one if their images differ only by patches.",
    )
    add_tasks_arguments(unique)
    _add_output(unique)
    unique.set_defaults(run=run_unique)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--out", metavar="OUT", type=Path, help=_OUT)
    add_json_option(parser)


def run_filter(args: argparse.Namespace) -> int:
    """Filter a task set."""
    if args.status and not args.statuses:
        raise InvalidValue("--status needs --statuses", hint="name the run: --statuses DIR")
    if args.split and args.out is None:
        raise InvalidValue("--split needs --out", hint="name the output: --out tasks.jsonl")
    fractions = dict(_share(text) for text in args.split or ())
    part = parse_range(args.range)
    tasks = load(args)
    ids = ordered_part(_chosen_ids(tasks, args), args.shuffle, part)
    if args.json:
        print_json(ids)
    elif args.out is None:
        put("".join(f"{instance_id}\n" for instance_id in ids), end="")
    parts = parts_of(ids, fractions, args.shuffle or 0) if fractions else {"": ids}
    for name, part_ids in parts.items():
        _write(tasks, part_ids, args.out, name)
    return exits.OK


def run_unique(args: argparse.Namespace) -> int:
    """Select one task per environment."""
    tasks = load(args)
    groups = unique_images(tasks)
    if args.json:
        print_json(groups)
    elif args.out is None:
        rows = [(name, tasks[name].repo, str(len(ids))) for name, ids in groups.items()]
        print_table(("task", "repository", "tasks"), rows, numbers=["tasks"], unwrapped=["task"])
    _write(tasks, list(groups), args.out)
    return exits.OK


def _write(tasks: TaskSet, ids: Sequence[str], out: Path | None, part: str = "") -> None:
    if out is None:
        return
    path = out if not part else part_name(out, part)
    tasks.take(ids).save(path)
    say(f"{path}: {len(ids)} of {len(tasks)} tasks")


def part_name(out: Path, part: str) -> Path:
    """Return the path of the file or folder for a part of a split."""
    if layout_of_name(out) is None:
        return out.with_name(f"{out.name}-{part}")
    stem, dot, endings = out.name.partition(".json" if ".json" in out.name else ".parquet")
    return out.with_name(f"{stem}-{part}{dot}{endings}")


def _chosen_ids(tasks: TaskSet, args: argparse.Namespace) -> list[str]:
    """Return the ids of tasks that meet the conditions, in the order of the set."""
    ids = matching_ids(tasks, args)
    if args.statuses:
        statuses, _ = merged([read_statuses(path) for path in args.statuses])
        ids = with_status(ids, statuses, args.status or ["passed"])
    if args.image:
        ids = with_status(ids, _image_statuses(), args.image)
    return ids


def _image_statuses() -> dict[str, str]:
    from minisandbox.store import Store  # noqa: PLC0415 - only --image needs the store
    from minisandbox.store.overview import ImageStatus, image_rows  # noqa: PLC0415 - only --image needs it

    labels = {ImageStatus.READY: "built", ImageStatus.FAILED: "failed", ImageStatus.BROKEN: "broken"}
    return {row.name: labels[row.status] for row in image_rows(Store.open())}


def _share(text: str) -> tuple[str, float]:
    """Parse ``NAME=SHARE``."""
    name, _, share = text.partition("=")
    try:
        if re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            return name, float(share)
    except ValueError:
        pass
    raise InvalidValue(f"--split {text!r} is not NAME=SHARE", hint="for instance --split train=0.9")
