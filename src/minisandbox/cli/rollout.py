"""``minisandbox rollout``."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from minisandbox.agents import Agent, EmptyAgent, OracleAgent, ReplayAgent
from minisandbox.cli import exits
from minisandbox.cli.builds import Builder
from minisandbox.cli.output import (
    Column,
    add_json_option,
    human_seconds,
    print_json,
    print_table,
    put,
    require_positive,
    say,
)
from minisandbox.cli.output import Progress as Output
from minisandbox.cli.task_sets import add_tasks_arguments, load
from minisandbox.errors import GradingError, InvalidValue
from minisandbox.rollouts import Progress, Summary, run_batch
from minisandbox.store import Store

_AGENTS = ("oracle", "empty", "replay")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_tasks_arguments(parser)
    parser.add_argument("--agent", choices=_AGENTS, required=True, help="who works on the tasks")
    parser.add_argument(
        "--recording", type=Path, metavar="PATH", help="what replay plays: a list of commands, a trajectory, or a run"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the run's directory (default: runs/TASKS-AGENT); the same one goes on"
    )
    parser.add_argument("--attempts", type=int, default=1, metavar="N", help="rollouts per task (default: 1)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="rollouts at once (default: 1)")
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="what the tests may take (default: the task's)"
    )
    add_json_option(parser)
    parser.set_defaults(run=run, kept="finished rollouts are kept; the same command goes on")


def run(args: argparse.Namespace) -> int:
    """Run rollouts: 0 if every one has a verdict, whichever, 30 if we failed at one."""
    require_positive(args, "attempts", "workers", "timeout")
    agent, tasks = _agent(args.agent, args.recording), load(args)
    out = args.out or Path("runs", f"{tasks.name or 'tasks'}-{agent.name}")
    config = {"tasks": args.tasks} | ({"recording": str(args.recording)} if args.recording else {})
    with Output() as output:
        builder = Builder(Store.open(), output, args.repo_mirrors)
        summaries = run_batch(
            tasks,
            agent,
            out,
            image_of=builder.image_of,
            attempts=args.attempts,
            workers=args.workers,
            timeout=args.timeout,
            config=config,
            progress=lambda news: tell(output, agent.name, news),
        )
    if args.json:
        print_json({"run": out.absolute(), "rollouts": summaries})
    else:
        print_summaries(summaries)
        counts = Counter(summary.verdict or "not graded" for summary in summaries)
        resumed = sum(summary.resumed for summary in summaries)
        before = f"; {resumed} of them finished before" if resumed else ""
        put(
            f"\n{', '.join(f'{count} {what}' for what, count in sorted(counts.items()))}{before}; trajectories in {out}"
        )
    failed = [summary for summary in summaries if not summary.finished]
    if failed:
        say(
            f"minisandbox: rollouts without a verdict: {len(failed)}",
            "  what to do: the same command does them again; if a task is at fault, minisandbox validate says how",
        )
        return GradingError.exit_code
    return exits.OK


def _agent(name: str, recording: Path | None) -> Agent:
    if (name == "replay") != (recording is not None):
        raise InvalidValue("--recording is for --agent replay, which needs it", hint="--agent replay --recording PATH")
    if recording is not None:
        return ReplayAgent.load(recording)
    return OracleAgent() if name == "oracle" else EmptyAgent()


def tell(output: Output, agent: str, news: Progress) -> None:
    """Tell of a rollout that has ended."""
    latest = news.latest
    if not latest.resumed:
        verdict = latest.verdict or f"not graded: {latest.detail}"
        output.note(f"{news.done}/{news.total} {agent} {latest.instance_id}: {verdict}")


def print_summaries(summaries: Sequence[Summary]) -> None:
    """Print rollouts as a table."""
    columns = ("task", "attempt", "verdict", "reason", "exit status", "sandbox", "agent", "grade")
    numbers = ("attempt", "sandbox", "agent", "grade")
    print_table(
        [Column(title, number=title in numbers, whole=title == "task") for title in columns],
        [
            (
                one.instance_id, str(one.attempt), one.verdict or "none", one.reason, one.exit_status,
                *(human_seconds(s) for s in (one.timings.sandbox_ready, one.timings.agent, one.timings.grade)),
            )
            for one in summaries
        ],
    )  # fmt: skip
