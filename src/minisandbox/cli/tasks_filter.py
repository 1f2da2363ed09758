"""``minisandbox tasks filter|unique-images``: part of a set, in the format that the set came in."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from minisandbox.cli import exits
from minisandbox.cli.output import Column, add_json_option, print_json, print_table, put, say
from minisandbox.cli.task_sets import add_tasks_arguments, load
from minisandbox.errors import InvalidValue
from minisandbox.tasks import TaskSet, read_statuses
from minisandbox.tasks.choosing import MISSING, merged, parts_of, shuffled, unique_images, with_status
from minisandbox.tasks.reading import layout_of_name

_IMAGES = ("built", "failed", "missing", "broken")
_OUT = "the file or folder to write; its ending says the format, else it is that of TASKS"


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the options."""
    choose = verbs.add_parser(
        "filter",
        help="write the tasks that meet all conditions, in the format they came in",
        description="Write the tasks that meet all conditions, in the format they came in; without --out print ids.",
    )
    add_tasks_arguments(choose)
    choose.add_argument(
        "--statuses", metavar="RUN", type=Path, action="append", default=[],
        help="how tasks ended: a run_batch_exit_statuses.yaml, or the directory of a run; a later one wins",
    )  # fmt: skip
    choose.add_argument(
        "--status", metavar="STATUS", action="append",
        help=f"a status in --statuses, or a glob; '{MISSING}' for tasks that none tells of (default: passed)",
    )  # fmt: skip
    choose.add_argument("--image", choices=_IMAGES, action="append", help="what the store has of the task's image")
    choose.add_argument("--repo", metavar="REGEX", help="a part of the repository's name")
    choose.add_argument("--id", metavar="REGEX", help="a part of the id; ^ and $ stand for its ends")
    choose.add_argument("--shuffle", metavar="SEED", type=int, help="mix the tasks, the same way for the same seed")
    choose.add_argument(
        "--range", metavar="A:B", help="of what is left then, the A-th (from 0) to the one before the B-th"
    )
    choose.add_argument(
        "--split", metavar="NAME=SHARE", action="append",
        help="a part drawn by lot (by --shuffle's seed, or 0), written to OUT-NAME; give it once for each part",
    )  # fmt: skip
    _add_output(choose)
    choose.set_defaults(run=run_filter)
    unique = verbs.add_parser(
        "unique-images",
        help="one task for each environment: what to build first",
        description="Choose one task for each environment: tasks share one if their images differ by patches alone.",
    )
    add_tasks_arguments(unique)
    _add_output(unique)
    unique.set_defaults(run=run_unique)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--out", metavar="OUT", type=Path, help=_OUT)
    add_json_option(parser)


def run_filter(args: argparse.Namespace) -> int:
    """Filter a set."""
    if args.status and not args.statuses:
        raise InvalidValue("--status without --statuses", hint="name the run: --statuses DIR")
    if args.split and args.out is None:
        raise InvalidValue("--split without --out", hint="say where the parts go: --out tasks.jsonl")
    fractions = dict(share(text) for text in args.split or ())
    chosen_range = parse_range(args.range)
    tasks = load(args)
    ids = _meeting(tasks, args)
    if args.shuffle is not None:
        ids = shuffled(ids, args.shuffle)
    ids = ids[chosen_range]
    if args.json:
        print_json(ids)
    elif args.out is None:
        put("".join(f"{instance_id}\n" for instance_id in ids), end="")
    parts = parts_of(ids, fractions, args.shuffle or 0) if fractions else {"": ids}
    for name, part in parts.items():
        _write(tasks, part, args.out, name)
    return exits.OK


def run_unique(args: argparse.Namespace) -> int:
    """Choose one task for each environment."""
    tasks = load(args)
    groups = unique_images(tasks)
    if args.json:
        print_json(groups)
    elif args.out is None:
        columns = (Column("task", whole=True), Column("repository"), Column("tasks of it", number=True))
        print_table(columns, [(name, tasks[name].repo, str(len(ids))) for name, ids in groups.items()])
    _write(tasks, list(groups), args.out)
    return exits.OK


def _write(tasks: TaskSet, ids: Sequence[str], out: Path | None, part: str = "") -> None:
    if out is None:
        return
    path = out if not part else part_name(out, part)
    tasks.take(ids).save(path)
    say(f"{path}: {len(ids)} of {len(tasks)} tasks")


def part_name(out: Path, part: str) -> Path:
    """Return the name of a part's file or folder."""
    if layout_of_name(out) is None:
        return out.with_name(f"{out.name}-{part}")
    stem, dot, endings = out.name.partition(".json" if ".json" in out.name else ".parquet")
    return out.with_name(f"{stem}-{part}{dot}{endings}")


def _meeting(tasks: TaskSet, args: argparse.Namespace) -> list[str]:
    """The ids that meet the conditions, in the set's order."""
    ids = [
        task.instance_id
        for task in tasks
        if found(args.repo, task.repo, "--repo") and found(args.id, task.instance_id, "--id")
    ]
    if args.statuses:
        statuses, _ = merged([read_statuses(path) for path in args.statuses])
        ids = with_status(ids, statuses, args.status or ["passed"])
    if args.image:
        ids = with_status(ids, _image_statuses(), args.image)
    return ids


def _image_statuses() -> dict[str, str]:
    from minisandbox.store import Store  # noqa: PLC0415 - only this condition looks into the store
    from minisandbox.store.overview import Status, image_rows  # noqa: PLC0415 - the same

    words = {Status.READY: "built", Status.FAILED: "failed", Status.BROKEN: "broken"}
    return {row.name: words[row.status] for row in image_rows(Store.open())}


def found(pattern: str | None, text: str, option: str) -> bool:
    """Whether a regular expression is found in a text; None is found in every one.

    Raises:
        InvalidValue: it is no regular expression.
    """
    if pattern is None:
        return True
    try:
        return re.search(pattern, text) is not None
    except re.error as error:
        raise InvalidValue(f"{option} {pattern!r}: not a regular expression", reason=str(error)) from None


def parse_range(text: str | None) -> slice:
    """Read ``A:B``; None for all.

    Raises:
        InvalidValue: it is no range.
    """
    match = re.fullmatch(r"(-?\d+)?:(-?\d+)?", text or ":")
    if match is None:
        raise InvalidValue(f"--range {text!r}: not a range", hint="for instance --range 0:100, or 100: for the rest")
    return slice(*(None if bound is None else int(bound) for bound in match.groups()))


def share(text: str) -> tuple[str, float]:
    """Read ``NAME=SHARE``.

    Raises:
        InvalidValue: it is none.
    """
    name, _, share = text.partition("=")
    try:
        if re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            return name, float(share)
    except ValueError:
        pass
    raise InvalidValue(f"--split {text!r}: not a name and a share", hint="for instance --split train=0.9")
