"""``minisandbox rollout``: run an agent on tasks."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from minisandbox.agents import Agent, AgentLimits, CommandAgent, open_agent
from minisandbox.cli.common import exits
from minisandbox.cli.common.builds import Builder
from minisandbox.cli.common.output import Progress as Output
from minisandbox.cli.common.output import (
    add_json_option,
    human_seconds,
    plain,
    plain_fields,
    print_table,
    put,
    require_positive,
    say,
)
from minisandbox.cli.common.rollout_options import (
    add_agent_arguments,
    add_model_arguments,
    agent_limits,
    agent_options,
    model_options,
)
from minisandbox.cli.common.run_options import (
    add_backend_argument,
    add_cluster_argument,
    add_grading_arguments,
    backend_config,
    backend_of,
    grading_options,
    print_nodes,
)
from minisandbox.cli.common.task_sets import (
    add_selection_options,
    add_tasks_arguments,
    load,
    matching_ids,
    ordered_part,
    parse_range,
)
from minisandbox.cli.rollout_display import BackgroundReporter, Display
from minisandbox.errors import GradingError, InvalidValue, RunError
from minisandbox.grade import Verdict
from minisandbox.models import Budget, ModelOptions, Sampling, open_model
from minisandbox.rollouts import Budgets, Progress, RunReader, Setup, Summary, load_replay, run_batch
from minisandbox.rollouts.batch import DRAIN
from minisandbox.rollouts.cluster import Cluster
from minisandbox.rollouts.rollout import install
from minisandbox.rollouts.setup import DEADLINE
from minisandbox.store import Store
from minisandbox.tasks import Task, TaskSet

_REPORT_TIMEOUT = 10.0  # seconds to wait for a slow reader of the output


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    add_tasks_arguments(parser)
    add_selection_options(parser.add_argument_group("selection of tasks"))
    add_agent_arguments(parser)
    add_model_arguments(parser)
    _add_run_options(parser)
    add_json_option(parser)
    parser.set_defaults(run=run, kept="finished rollouts are kept; the same command resumes")


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument(
        "-o", "--out", type=Path, metavar="DIR",
        help="the run's directory (default: runs/TASKS-AGENT); an existing one is resumed",
    )  # fmt: skip
    group.add_argument(
        "--n", "--attempts", dest="attempts", type=int, default=1, metavar="N", help="rollouts per task (default: 1)"
    )
    for name, text in (
        ("workers", "rollouts at once (default: 1)"),
        ("builds", "images built at once (default: one per core)"),
        ("starts", "sandboxes started at once (default: two per core)"),
        ("gradings", "submissions graded at once (default: one per core)"),
    ):
        group.add_argument(f"--{name}", type=int, metavar="N", help=text)
    for name, default, text in (
        ("deadline", DEADLINE, f"time limit of an agent, waiting included (default: {DEADLINE:g})"),
        ("start-jitter", 0.0, "spread the first rollouts randomly over this time (default: 0)"),
        ("drain", DRAIN, f"time for running rollouts to finish after Ctrl-C (default: {DRAIN:g})"),
    ):
        group.add_argument(f"--{name}", type=float, default=default, metavar="SECONDS", help=text)
    add_grading_arguments(group)
    group.add_argument(
        "--tries", type=int, default=3, metavar="N", help="tries of a rollout after infrastructure errors (default: 3)"
    )
    group.add_argument(
        "--no-turn-patches", action="store_true", help="do not record the workspace's changes after each turn"
    )
    add_backend_argument(group)
    add_cluster_argument(group)
    group.add_argument("--quiet", action="store_true", help="no progress, and only counts at the end")


def run(args: argparse.Namespace) -> int:
    """Run rollouts; return 0 if each has a reward, 30 if a rollout is unconfirmed or had an infrastructure error."""
    require_positive(args, "attempts", "workers", "builds", "starts", "gradings", "deadline", "tries")
    backend = backend_of(args)
    agent, model, task_set = _agent(args), model_options(args), load(args)
    tasks = _selected_tasks(task_set, args)
    out = args.out or Path("runs", f"{task_set.name or 'tasks'}-{agent.name}")
    budget = None if model is None else _remaining_budget(model, out)
    setup = _setup(args, agent, model, budget)
    with Output(quiet=args.quiet) as output:
        cluster = _cluster(args, model, budget, output)
        builder = Builder(Store.open(), output, args.repo_mirrors, backend) if cluster is None else None
        if builder is not None and isinstance(agent, CommandAgent):
            install(agent, builder.store, builder.report)
        remaining_builds = (lambda: builder.remaining) if builder is not None else str
        display = Display(output, agent.name, quiet=args.quiet or args.json, remaining_builds=remaining_builds)
        reporter = BackgroundReporter(_print_json_line if args.json else display.record)
        try:
            summaries = run_batch(
                tasks,
                setup,
                out,
                images=builder.begin if builder is not None else None,
                attempts=args.attempts,
                budgets=_budgets(args),
                tries=args.tries,
                jitter=args.start_jitter,
                drain=args.drain,
                config=_config(args, setup),
                progress=reporter,
                notice=lambda text: output.announce(f"minisandbox: {text}"),
                companion=display.follow,
                cluster=cluster,
            )
        finally:
            reporter.close(_REPORT_TIMEOUT)
    _print(args, out, summaries)
    if cluster is not None:
        print_nodes(cluster.reports, as_json=args.json)
    return _status(summaries)


def _agent(args: argparse.Namespace) -> Agent:
    options = agent_options(args)
    if args.agent == "replay" and options.recording is not None:
        return load_replay(options.recording)
    return open_agent(args.agent, options)


def _selected_tasks(tasks: TaskSet, args: argparse.Namespace) -> list[Task]:
    """Return the selected tasks, in the order in which they start.

    Raises:
        InvalidValue: no task is selected.
    """
    ids = ordered_part(matching_ids(tasks, args), args.shuffle, parse_range(args.range))
    if not ids:
        raise InvalidValue("no task is selected", reason="--id, --repo and --range exclude all", hint="loosen one")
    return [tasks[name] for name in ids]


def _setup(args: argparse.Namespace, agent: Agent, model_choice: ModelOptions | None, budget: Budget | None) -> Setup:
    """Return the setup of the rollouts, and open its model with the remaining budget."""
    options = agent_options(args)
    configuration: dict[str, object] = {"agent": args.agent, **plain_fields(options)}
    if isinstance(agent, CommandAgent):
        configuration["agent_version"] = agent.recipe.version
    limits, grading = agent_limits(args), grading_options(args)
    model = None
    if model_choice is not None:
        if not agent.needs_model:
            raise InvalidValue(f"the agent {agent.name!r} uses no model", hint="leave out --model")
        configuration["model"] = _public(model_choice)
        quiet = args.quiet or args.json
        model = open_model(model_choice, budget, report=lambda text: None if quiet else say(f"minisandbox: {text}"))
    return Setup(
        agent=agent,
        model=model,
        sampling=Sampling() if model_choice is None else model_choice.sampling,
        agent_limits=limits,
        timeout=grading.timeout,
        confirm=grading.confirm,
        deadline=args.deadline,
        turn_patches=not args.no_turn_patches,
        configuration={**configuration, "limits": plain_fields(limits)},
    )


def _cluster(
    args: argparse.Namespace, model: ModelOptions | None, budget: Budget | None, output: Output
) -> Cluster | None:
    if args.cluster is None:
        return None
    return Cluster(address=args.cluster, model=model, budget=budget, mirrors=args.repo_mirrors, notice=output.note)


def _remaining_budget(model: ModelOptions, out: Path) -> Budget:
    """Return the run's budget, minus the usage of its finished rollouts."""
    budget = model.budget()
    try:
        with RunReader(out) as run:
            for summary in run.summaries():
                budget.charge(summary.usage.prompt + summary.usage.completion, summary.cost)
    except (LookupError, RunError):  # a new run, or a damaged run, which run_batch will report
        pass
    return budget


def _public(model: ModelOptions) -> dict[str, object]:
    """Return the options of a model that affect its responses, for the record of the run."""
    values = plain_fields(model)
    return {name: values[name] for name in ("model", "api_base", "sampling", "tokens")}


def _config(args: argparse.Namespace, setup: Setup) -> dict[str, str | int | float | bool | None]:
    """Return the configuration that must not change on resume. It leaves out the server's address, which may change."""
    options, has_model = agent_options(args), setup.model is not None
    parts: dict[str, object] = {}
    if has_model or options.given() - {"recording"}:
        parts["agent options"] = plain_fields(options)
    if has_model or setup.agent_limits != AgentLimits():
        parts["limits"] = plain_fields(setup.agent_limits)
    if has_model:
        parts["sampling"] = dataclasses.asdict(setup.sampling)
    return {
        "tasks": args.tasks,
        **backend_config(args),
        **({"recording": str(options.recording)} if options.recording else {}),
        **{name: json.dumps(part, sort_keys=True) for name, part in parts.items()},
    }


def _budgets(args: argparse.Namespace) -> Budgets:
    values = {field.name: getattr(args, field.name) for field in fields(Budgets)}
    return Budgets(**{name: value for name, value in values.items() if value is not None})


# --- printed output -------------------------------------------------------------------------------------------------


def _print_json_line(event: Progress[Summary]) -> None:
    put(json.dumps({"rollout": plain(event.latest)}), flush=True)


def _print(args: argparse.Namespace, out: Path, summaries: Sequence[Summary]) -> None:
    if args.json:
        put(json.dumps({"summary": {"run": str(out.absolute()), **plain_totals(summaries)}}), flush=True)
        return
    if not args.quiet:
        print_summaries(summaries)
        put()
    counts = Counter(summary.verdict or "not graded" for summary in summaries)
    resumed = sum(summary.resumed for summary in summaries)
    resumed_note = f"; {resumed} of them from an earlier call" if resumed else ""
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    put(f"{verdicts}{resumed_note}; trajectories in {out}")


def plain_totals(summaries: Sequence[Summary]) -> dict[str, object]:
    """Return the totals of rollouts as JSON values."""
    rewards = [summary.reward for summary in summaries if summary.reward is not None]
    return {
        "rollouts": len(summaries),
        "resumed": sum(summary.resumed for summary in summaries),
        "finished": len(rewards),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "verdicts": dict(Counter(str(summary.verdict) if summary.verdict else "not_graded" for summary in summaries)),
        "exit_statuses": dict(Counter(summary.exit_status for summary in summaries)),
        "failures": dict(
            Counter(f"{summary.failed_in}: {summary.reason}" for summary in summaries if summary.failed_in)
        ),
        "cost": sum(summary.cost for summary in summaries),
        "prompt_tokens": sum(summary.usage.prompt for summary in summaries),
        "completion_tokens": sum(summary.usage.completion for summary in summaries),
    }


def _status(summaries: Sequence[Summary]) -> int:
    unfinished = [summary for summary in summaries if not summary.finished]
    if not unfinished:
        return exits.OK
    unconfirmed_count = sum(summary.verdict is Verdict.UNCONFIRMED for summary in unfinished)
    unconfirmed = f", {unconfirmed_count} of them unconfirmed" if unconfirmed_count else ""
    say(
        f"minisandbox: rollouts without a reward: {len(unfinished)}{unconfirmed}",
        "  what to do: repeat the command, which runs only these; check a task with minisandbox validate",
    )
    return GradingError.exit_code


def print_summaries(summaries: Sequence[Summary]) -> None:
    """Print rollouts as a table."""
    print_table(
        ("task", "attempt", "verdict", "reason", "exit status", "turns", "sandbox", "agent", "grade"),
        [
            (
                summary.instance_id, str(summary.attempt), summary.verdict or "none", summary.reason,
                summary.exit_status, str(summary.turns), human_seconds(summary.timings.sandbox_ready),
                human_seconds(summary.timings.agent), human_seconds(summary.timings.grade),
            )
            for summary in summaries
        ],
        numbers=("attempt", "turns", "sandbox", "agent", "grade"),
        unwrapped=["task"],
    )  # fmt: skip
