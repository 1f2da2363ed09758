"""``minisandbox trajectories``: declare all verbs, and implement ``ls``, ``show`` and ``open``."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import add_json_option, print_json, put, say
from minisandbox.cli.common.streams import follow, has_terminal, window
from minisandbox.cli.rollout import plain_totals, print_summaries
from minisandbox.cli.trajectories import data, export
from minisandbox.cli.trajectories.text import RolloutPrinter
from minisandbox.errors import InvalidValue, NotFound, PatchError
from minisandbox.images import load_image
from minisandbox.rollouts import RunReader, Summary
from minisandbox.sandbox import Sandbox
from minisandbox.store import Store
from minisandbox.trajectories import Trajectory
from minisandbox.trajectories.codec import to_json

_MAX_LINES = 40


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs to the parser."""
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    ls = verbs.add_parser("ls", help="list the rollouts of a run", description="List the rollouts of a run.")
    ls.add_argument("directory", metavar="RUN", type=Path, help="the run's directory")
    ls.add_argument("--status", metavar="WORD", help="only rollouts whose exit status or verdict contains this word")
    add_json_option(ls)
    ls.set_defaults(run=run_ls)
    show = verbs.add_parser(
        "show",
        help="print a rollout: its turns, patch and tests",
        description="Print a rollout: its turns with timings, then its patch and tests. Without ID, list the rollouts.",
    )
    show.add_argument("directory", metavar="RUN", type=Path, help="the run's directory")
    show.add_argument("id", metavar="ID", nargs="?", help="the task's id; ID#N for its N-th rollout, from 0")
    show.add_argument("--full", action="store_true", help=f"whole texts instead of {_MAX_LINES} lines of each")
    show.add_argument("--turn", metavar="N", type=int, help="only the patch after the N-th turn, from 1, for git apply")
    add_json_option(show)
    show.set_defaults(run=run_show, status=None)
    reopen = verbs.add_parser(
        "open",
        help="open a shell in the workspace of a rollout",
        description="Open a bash in a new sandbox of the rollout's image, with the workspace as the agent submitted "
        "it, or as it was after a turn. Without a terminal, commands are read from stdin. Files that git ignores are "
        "missing.",
    )
    reopen.add_argument("directory", metavar="RUN", type=Path, help="the run's directory")
    reopen.add_argument("id", metavar="ID", help="the task's id; ID#N for its N-th rollout, from 0")
    reopen.add_argument("--turn", metavar="N", type=int, help="after the N-th turn, from 1 (default: as submitted)")
    reopen.set_defaults(run=run_open, kept="the sandbox has been removed")
    data.configure(verbs)
    export.configure(verbs)


def run_ls(args: argparse.Namespace) -> int:
    """List the rollouts of a run."""
    with RunReader(args.directory) as run:
        summaries = [summary for summary in run.summaries() if args.status is None or _has(summary, args.status)]
    if args.json:
        print_json(summaries)
        return exits.OK
    print_summaries(summaries)
    totals = plain_totals(summaries)
    mean = totals["reward"]
    reward = f"; mean reward {mean:.3f} over {totals['finished']}" if isinstance(mean, float) else ""
    put(f"\n{len(summaries)} rollouts{reward}")
    return exits.OK


def _has(summary: Summary, text: str) -> bool:
    return text in summary.exit_status or text in (summary.verdict or "not graded")


def run_show(args: argparse.Namespace) -> int:
    """Print a rollout."""
    if args.id is None:
        return run_ls(args)
    trajectory = find(args.directory, args.id)
    if args.turn is not None:
        patch = patch_after(trajectory, args.turn)
        if sys.stdout.isatty():
            put(patch.decode("utf-8", "replace"), end="")
        else:  # write the unchanged bytes, for git apply
            sys.stdout.buffer.write(patch)
    elif args.json:
        print_json(to_json(trajectory))
    else:
        RolloutPrinter(None if args.full else _MAX_LINES).print(trajectory)
    return exits.OK


def run_open(args: argparse.Namespace) -> int:
    """Open a shell in a rollout's workspace; return its exit status."""
    trajectory = find(args.directory, args.id)
    patch = (trajectory.submission or b"") if args.turn is None else patch_after(trajectory, args.turn)
    image = load_image(Store.open(), trajectory.image)
    if image.key != trajectory.image_key:
        say(f"minisandbox: the image {image.name} was built anew since the rollout; its files may differ")
    terminal = has_terminal()
    with Sandbox.create(image.spec(), labels={"rollout": f"{trajectory.instance_id}#{trajectory.attempt}"}) as box:
        result = box.exec(["git", "apply", "--whitespace=nowarn", "-"], stdin=patch, timeout=120) if patch else None
        if result is not None and not result.ok:
            raise PatchError(
                "the patch does not apply to the image", reason=result.stderr.strip()[:300],
                hint=f"take it with minisandbox trajectories show {args.directory} '{args.id}'",
            )  # fmt: skip
        env = {"TERM": os.environ.get("TERM", "xterm")} if terminal else {}
        with box.start(["bash"], env=env, pty=window() if terminal else None) as process:
            return follow(process, stdin=True, terminal=terminal)


def patch_after(trajectory: Trajectory, turn: int) -> bytes:
    """Return the patch of the workspace after a turn, counted from 1.

    Raises:
        NotFound: there is no such turn, or its patch was not recorded.
    """
    name = f"{trajectory.instance_id}#{trajectory.attempt}"
    if not 1 <= turn <= len(trajectory.turns):
        raise NotFound(f"{name} has no turn {turn}", reason=f"it has {len(trajectory.turns)} turns")
    record = trajectory.patch_after(turn)
    if record is None and not trajectory.patches and trajectory.submission:
        raise NotFound(f"{name} has no patches of turns", hint="the run had --no-turn-patches")
    if record is not None and record.patch is None:
        raise NotFound(f"{name} has no patch after turn {turn}", reason=record.detail)
    return b"" if record is None or record.patch is None else record.patch


def find(directory: Path, name: str) -> Trajectory:
    """Return a rollout of a run.

    Args:
        directory: the run's directory.
        name: the task's id or an unambiguous part of it; ``#N`` after it for its N-th rollout.

    Raises:
        NotFound: there is no such rollout, or there are several.
        InvalidValue: N is not a number.
    """
    task_name, _, number = name.partition("#")
    if number and not re.fullmatch(r"\d+", number):
        raise InvalidValue(f"{name}: {number!r} is not a number", hint=f"for instance {task_name}#0")
    with RunReader(directory) as run:
        rollouts = {(summary.instance_id, summary.attempt) for summary in run.summaries()}
        ids = {task for task, _ in rollouts}
        matches = {task_name} if task_name in ids else {task for task in ids if task_name in task}
        if len(matches) != 1:
            examples = ", ".join(sorted(matches or ids)[:3]) or "none"
            problem = "matches several tasks" if matches else "matches no task"
            raise NotFound(f"{directory}: {name!r} {problem}", hint=f"the run has, for instance, {examples}")
        [instance_id] = matches
        attempt = int(number) if number else min(attempt for task, attempt in rollouts if task == instance_id)
        trajectory = run.trajectory(instance_id, attempt)
    if trajectory is None:
        raise NotFound(f"{directory}: {instance_id} has no rollout {attempt}", hint="see minisandbox trajectories ls")
    return trajectory
