"""``minisandbox trajectories collect|filter|balance``: from runs to the examples that are trained on."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from minisandbox.cli import exits
from minisandbox.cli.output import Column, Progress, add_json_option, print_json, print_table, say
from minisandbox.errors import InvalidValue
from minisandbox.rollouts.examples import ALL_STYLES, open_examples
from minisandbox.trajectories.choosing import (
    SUBMITTED,
    Collect,
    Filter,
    Filtering,
    balance,
    chosen,
    drawn,
    table_of,
)
from minisandbox.trajectories.example import Example
from minisandbox.trajectories.reports import Report, report_path
from minisandbox.trajectories.sources import Reading
from minisandbox.trajectories.tokenised import count_tokens, open_tokenizer
from minisandbox.trajectories.writing import write_lines

_KEPT = "no file was written; what was there before is still there"


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the options."""
    _configure_collect(verbs)
    _configure_filter(verbs)
    _configure_balance(verbs)


def _configure_collect(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    collect = verbs.add_parser(
        "collect",
        help="write the golden rollouts of runs: submitted, resolved, not flagged",
        description="Write the golden rollouts of runs into a file of examples: those that were submitted, have the "
        "reward 1, and were not flagged. What is left out, and why, is in a report beside it.",
    )
    add_sources(collect)
    collect.add_argument("--min-reward", metavar="X", default="1", help="the least reward; 'none' for any (default: 1)")
    collect.add_argument(
        "--status", metavar="STATUS", action="append",
        help=f"an exit status that is taken; 'any' for all (default: {SUBMITTED})",
    )  # fmt: skip
    collect.add_argument("--any-flags", action="store_true", help="take those too that were flagged")
    collect.add_argument("--agent", metavar="NAME", action="append", default=[], help="an agent that is taken")
    collect.add_argument("--model", metavar="NAME", action="append", default=[], help="a model that is taken")
    collect.add_argument("--no-tokens", action="store_true", help="leave out the tokens: smaller files, text alone")
    _add_output(collect)
    collect.set_defaults(run=run_collect)


def _configure_filter(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    choose = verbs.add_parser(
        "filter",
        help="leave out examples: by length, flags, duplicates, repositories",
        description="Leave out examples by length, flags, duplicates and repositories. What is left out, and why, is "
        "in a report beside the file.",
    )
    add_sources(choose)
    choose.add_argument("--max-tokens", metavar="N", type=int, help="tokens of a conversation, as its engine counted")
    choose.add_argument("--tokenizer", metavar="DIR", help="counts the tokens instead, by its chat template")
    choose.add_argument("--max-chars", metavar="N", type=int, help="characters of all messages together")
    choose.add_argument("--min-turns", metavar="N", type=int, help="answers of the model at least")
    choose.add_argument("--max-turns", metavar="N", type=int, help="answers of the model at most")
    choose.add_argument("--no-flags", action="store_true", help="leave out what is flagged")
    choose.add_argument(
        "--flag", metavar="REGEX", action="append", default=[], help="leave out what has a flag of this kind"
    )
    choose.add_argument(
        "--unique", action="store_true", help="of those of a task with the same submission, keep the first"
    )
    choose.add_argument("--repo", metavar="REGEX", help="a part of the repository's name, as owner/name")
    choose.add_argument("--not-repo", metavar="REGEX", help="the same, for what is left out")
    _add_output(choose)
    choose.set_defaults(run=run_filter)


def _configure_balance(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    even = verbs.add_parser(
        "balance",
        help="keep at most so many examples of each task, drawn by lot",
        description="Keep at most so many examples of each task. Lots decide: the same seed draws the same examples, "
        "in whatever order they come. What is left out, and why, is in a report beside the file.",
    )
    add_sources(even)
    even.add_argument("--max-per-instance", metavar="K", type=int, required=True, help="examples of a task at most")
    even.add_argument("--seed", metavar="S", type=int, default=0, help="of the lots (default: 0)")
    even.add_argument(
        "--total", metavar="N", type=int, help="examples in all at most: the first of each task before second ones"
    )
    _add_output(even)
    even.set_defaults(run=run_balance)


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Declare what is read, for all verbs that read examples."""
    parser.add_argument(
        "sources", metavar="SOURCE", type=Path, nargs="+",
        help="a run; a file of examples; a published set (JSON Lines, JSON, Parquet, a folder of datasets); a "
        "directory of SWE-agent's .traj files",
    )  # fmt: skip
    group = parser.add_argument_group("files of others")
    group.add_argument(
        "--style", choices=tuple(ALL_STYLES), default="", help="how their answers say actions (default: as they look)"
    )
    group.add_argument(
        "--evaluation", metavar="DIR", type=Path, help="where NAME/report.json of .traj files lies (default: beside)"
    )
    group.add_argument(
        "--numbered", action="store_true", help="names of .traj files end in _N, the number of the rollout"
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, required=True, help="the file to write (.jsonl)")
    add_json_option(parser)
    parser.set_defaults(kept=_KEPT)


def examples_of(args: argparse.Namespace) -> Iterator[Example]:
    """Read the sources, one example at a time.

    Args:
        args: the command line.
    """
    reading = Reading(args.style, args.evaluation, args.numbered)
    return itertools.chain.from_iterable(open_examples(path, reading) for path in args.sources)


def run_collect(args: argparse.Namespace) -> int:
    """Collect examples."""
    statuses = tuple(args.status or [SUBMITTED])
    rules = Collect(
        min_reward=_reward(args.min_reward),
        statuses=() if "any" in statuses else statuses,
        any_flags=args.any_flags,
        agents=tuple(args.agent),
        models=tuple(args.model),
    )
    report = Report("collect", table_of(rules))
    kept = chosen(examples_of(args), rules.refuse, report)
    return _write(args, (replace(one, rows=()) for one in kept) if args.no_tokens else kept, report)


def run_filter(args: argparse.Namespace) -> int:
    """Filter examples."""
    rules = Filter(
        args.max_tokens, args.max_chars, args.min_turns, args.max_turns, args.no_flags, tuple(args.flag), args.unique,
        args.repo, args.not_repo,
    )  # fmt: skip
    count: Callable[[Example], int] | None = None
    if args.tokenizer is not None:
        count = functools.partial(count_tokens, tokenizer=open_tokenizer(args.tokenizer))
    report = Report("filter", table_of(rules))
    return _write(args, chosen(examples_of(args), Filtering(rules, count=count).refuse, report), report)


def run_balance(args: argparse.Namespace) -> int:
    """Balance examples. They are read twice, so that they need not all be in memory."""
    names = [(one.instance_id, one.traj_id) for one in examples_of(args)]
    dropped = balance(names, max_per_instance=args.max_per_instance, seed=args.seed, total=args.total)
    rules = {"max_per_instance": args.max_per_instance, "seed": args.seed, "total": args.total}
    report = Report("balance", {name: value for name, value in rules.items() if value is not None})
    return _write(args, drawn(examples_of(args), names, dropped, report), report)


def _reward(text: str) -> float | None:
    wrong = InvalidValue(f"--min-reward {text!r}: not a number", hint="for instance --min-reward 1, or none")
    try:
        found = None if text == "none" else float(text)
    except ValueError:
        raise wrong from None
    if found is not None and math.isnan(found):  # no reward is below it
        raise wrong
    return found


def _write(args: argparse.Namespace, examples: Iterable[Example], report: Report) -> int:
    refuse_to_overwrite(args.out, args.sources)
    with Progress() as progress:
        write_lines(args.out, (one.to_line() for one in told(examples, progress)))
    return finish(args, report, args.out)


def refuse_to_overwrite(out: Path, sources: Sequence[Path]) -> None:
    """Refuse an output that is read at the same time.

    Raises:
        InvalidValue: it is one of the sources.
    """
    if any(out.resolve() == source.resolve() for source in sources):
        raise InvalidValue(f"{out} is read and written at once", hint="write another file")


def told(examples: Iterable[Example], progress: Progress) -> Iterator[Example]:
    """Hand examples on, and tell how many there were.

    Args:
        examples: they.
        progress: what tells it.
    """
    for number, one in enumerate(examples, start=1):
        progress.status(f"{number} {one.instance_id}")
        yield one


def finish(args: argparse.Namespace, report: Report, out: Path) -> int:
    """Write a stage's report beside its output, and print it.

    Args:
        args: the command line.
        report: what the stage did.
        out: what it wrote.

    Returns:
        The exit status: 1 where nothing was kept.
    """
    report.write(report_path(out))
    if args.json:
        print_json({**report.to_json(), "out": str(out)})
    else:
        print_report(report)
        say(f"{out}: {report.kept} examples; {report_path(out)}: what was left out")
    return exits.OK if report.kept else exits.NEGATIVE


def print_report(report: Report) -> None:
    """Print what a stage kept and dropped, as a table.

    Args:
        report: it.
    """
    came, left = report.instances
    rows = [("read", str(report.read), f"of {came} tasks"), ("kept", str(report.kept), f"of {left} tasks")]
    for reason, count in report.reasons.items():
        first = next(one for one in report.dropped if one.reason == reason)
        rows.append((f"dropped: {reason}", str(count), f"{first.traj_id}: {first.detail}"))
    rows += [(f"note: {what}", str(count), "") for what, count in report.notes.items()]
    print_table((Column(report.stage, whole=True), Column("examples", number=True), Column("for instance")), rows)
