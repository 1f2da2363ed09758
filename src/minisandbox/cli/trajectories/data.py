"""``minisandbox trajectories collect|filter|balance``: select training examples from runs."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import Progress, add_json_option, print_json, print_table, say
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
from minisandbox.trajectories.reports import StageReport, report_path
from minisandbox.trajectories.sources import Reading
from minisandbox.trajectories.tokenised import count_tokens, open_tokenizer
from minisandbox.trajectories.writing import write_lines

_KEPT = "no file was written; existing files are unchanged"


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verbs to the parser."""
    _configure_collect(verbs)
    _configure_filter(verbs)
    _configure_balance(verbs)


def _configure_collect(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    collect_parser = verbs.add_parser(
        "collect",
        help="write the golden rollouts of runs: submitted, resolved, not flagged",
        description="Write the golden rollouts of runs to a file of examples: submitted, with reward 1, and not "
        "flagged. A report next to it lists the rejected ones, with reasons.",
    )
    add_sources(collect_parser)
    collect_parser.add_argument(
        "--min-reward", metavar="X", default="1", help="minimum reward; 'none' for any (default: 1)"
    )
    collect_parser.add_argument(
        "--status", metavar="STATUS", action="append",
        help=f"an exit status to accept; 'any' for all (default: {SUBMITTED})",
    )  # fmt: skip
    collect_parser.add_argument("--any-flags", action="store_true", help="accept flagged rollouts too")
    collect_parser.add_argument("--agent", metavar="NAME", action="append", default=[], help="accept only this agent")
    collect_parser.add_argument("--model", metavar="NAME", action="append", default=[], help="accept only this model")
    collect_parser.add_argument("--no-tokens", action="store_true", help="omit the tokens: smaller files, only text")
    _add_output(collect_parser)
    collect_parser.set_defaults(run=run_collect)


def _configure_filter(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    filter_parser = verbs.add_parser(
        "filter",
        help="reject examples by length, flags, duplicates, repositories",
        description="Reject examples by length, flags, duplicates and repositories. A report next to the file lists "
        "the rejected ones, with reasons.",
    )
    add_sources(filter_parser)
    filter_parser.add_argument(
        "--max-tokens", metavar="N", type=int, help="maximum tokens of a conversation, by its engine"
    )
    filter_parser.add_argument("--tokenizer", metavar="DIR", help="count the tokens with this chat template instead")
    filter_parser.add_argument("--max-chars", metavar="N", type=int, help="maximum characters of all messages together")
    filter_parser.add_argument("--min-turns", metavar="N", type=int, help="minimum number of responses")
    filter_parser.add_argument("--max-turns", metavar="N", type=int, help="maximum number of responses")
    filter_parser.add_argument("--no-flags", action="store_true", help="reject flagged examples")
    filter_parser.add_argument(
        "--flag", metavar="REGEX", action="append", default=[], help="reject examples with a flag of this kind"
    )
    filter_parser.add_argument(
        "--unique", action="store_true", help="per task and submission, keep only the first example"
    )
    filter_parser.add_argument("--repo", metavar="REGEX", help="keep only repositories (owner/name) with a match")
    filter_parser.add_argument("--not-repo", metavar="REGEX", help="reject repositories with a match")
    _add_output(filter_parser)
    filter_parser.set_defaults(run=run_filter)


def _configure_balance(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    balance_parser = verbs.add_parser(
        "balance",
        help="limit the examples per task, drawn at random",
        description="Limit the examples per task. A seed draws the same examples in whatever order they are read. A "
        "report next to the file lists the rejected ones, with reasons.",
    )
    add_sources(balance_parser)
    balance_parser.add_argument(
        "--max-per-instance", metavar="K", type=int, required=True, help="maximum examples per task"
    )
    balance_parser.add_argument("--seed", metavar="S", type=int, default=0, help="the seed of the draw (default: 0)")
    balance_parser.add_argument(
        "--total", metavar="N", type=int, help="maximum total: every task's first example comes before second ones"
    )
    _add_output(balance_parser)
    balance_parser.set_defaults(run=run_balance)


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Declare the sources that all verbs on examples read."""
    parser.add_argument(
        "sources", metavar="SOURCE", type=Path, nargs="+",
        help="a run; a file of examples; a published set (JSON Lines, JSON, Parquet, a folder of datasets); a "
        "directory of SWE-agent's .traj or mini-swe-agent's .traj.json files; an ATIF file; a Harbor job",
    )  # fmt: skip
    group = parser.add_argument_group("files of other programs")
    group.add_argument(
        "--style", choices=tuple(ALL_STYLES), default="", help="how their responses write actions (default: detected)"
    )
    group.add_argument(
        "--evaluation",
        metavar="DIR",
        type=Path,
        help="where NAME/report.json of .traj and .traj.json files is (default: next to them)",
    )
    group.add_argument("--numbered", action="store_true", help="names of .traj files end in _N, the rollout's number")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, required=True, help="the file to write (.jsonl)")
    add_json_option(parser)
    parser.set_defaults(kept=_KEPT)


def examples_of(args: argparse.Namespace) -> Iterator[Example]:
    """Return an iterator over the examples in the sources on the command line."""
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
    report = StageReport("collect", table_of(rules))
    examples = chosen(examples_of(args), rules.refuse, report)
    return _write(args, (replace(example, rows=()) for example in examples) if args.no_tokens else examples, report)


def run_filter(args: argparse.Namespace) -> int:
    """Filter examples."""
    rules = Filter(
        args.max_tokens, args.max_chars, args.min_turns, args.max_turns, args.no_flags, tuple(args.flag), args.unique,
        args.repo, args.not_repo,
    )  # fmt: skip
    count: Callable[[Example], int] | None = None
    if args.tokenizer is not None:
        count = functools.partial(count_tokens, tokenizer=open_tokenizer(args.tokenizer))
    report = StageReport("filter", table_of(rules))
    return _write(args, chosen(examples_of(args), Filtering(rules, count=count).refuse, report), report)


def run_balance(args: argparse.Namespace) -> int:
    """Balance examples; read the sources twice, so that the examples need not fit in memory."""
    names = [(example.instance_id, example.traj_id) for example in examples_of(args)]
    dropped_ids = balance(names, max_per_instance=args.max_per_instance, seed=args.seed, total=args.total)
    rules = {"max_per_instance": args.max_per_instance, "seed": args.seed, "total": args.total}
    report = StageReport("balance", {name: value for name, value in rules.items() if value is not None})
    return _write(args, drawn(examples_of(args), names, dropped_ids, report), report)


def _reward(text: str) -> float | None:
    error = InvalidValue(f"--min-reward {text!r} is not a number", hint="for instance --min-reward 1, or none")
    try:
        reward = None if text == "none" else float(text)
    except ValueError:
        raise error from None
    if reward is not None and math.isnan(reward):  # no reward is less than NaN, so the filter would accept all examples
        raise error
    return reward


def _write(args: argparse.Namespace, examples: Iterable[Example], report: StageReport) -> int:
    refuse_to_overwrite(args.out, args.sources)
    with Progress() as progress:
        write_lines(args.out, (example.to_line() for example in with_status(examples, progress)))
    return finish(args, report, args.out)


def refuse_to_overwrite(out: Path, sources: Sequence[Path]) -> None:
    """Check that the output is not also a source.

    Raises:
        InvalidValue: the output is also a source.
    """
    if any(out.resolve() == source.resolve() for source in sources):
        raise InvalidValue(f"output {out} is also a source", hint="write to another file")


def with_status(examples: Iterable[Example], progress: Progress) -> Iterator[Example]:
    """Yield the examples, and show their count in the status line."""
    for count, example in enumerate(examples, start=1):
        progress.status(f"{count} {example.instance_id}")
        yield example


def finish(args: argparse.Namespace, report: StageReport, out: Path) -> int:
    """Write a stage's report next to its output, and print it.

    Args:
        args: the command line.
        report: the stage's report.
        out: the stage's output.

    Returns:
        The exit status: 1 if no example was kept.
    """
    report.write(report_path(out))
    if args.json:
        print_json({**report.to_json(), "out": str(out)})
    else:
        print_report(report)
        say(f"{out}: {report.kept} examples; report: {report_path(out)}")
    return exits.OK if report.kept else exits.NEGATIVE


def print_report(report: StageReport) -> None:
    """Print the counts of kept and dropped examples as a table."""
    read_tasks, kept_tasks = report.instances
    rows = [("read", str(report.read), f"of {read_tasks} tasks"), ("kept", str(report.kept), f"of {kept_tasks} tasks")]
    for reason, count in report.reasons.items():
        example = next(example for example in report.dropped if example.reason == reason)
        rows.append((f"dropped: {reason}", str(count), f"{example.traj_id}: {example.detail}"))
    rows += [(f"note: {note}", str(count), "") for note, count in report.notes.items()]
    titles = (report.stage, "examples", "for instance")
    print_table(titles, rows, numbers=["examples"], unwrapped=[report.stage])
