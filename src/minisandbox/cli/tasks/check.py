"""``minisandbox tasks check``: what a careful maintainer asks of a task set before anybody trains on it."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import (
    Column,
    Progress,
    add_json_option,
    print_json,
    print_table,
    put,
    require_positive,
)
from minisandbox.cli.common.task_sets import add_tasks_arguments, load
from minisandbox.errors import GradingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisandbox.grade import Progress as News
    from minisandbox.grade.check import Checked
    from minisandbox.tasks import Task
    from minisandbox.tasks.loading import Refused

_MOST = 20
"""Findings of one check that are printed; the reports have all."""


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the verb."""
    check = verbs.add_parser(
        "check",
        help="find leaks, wrong tests, flakiness, duplicates and other faults of tasks",
        description="Find faults of tasks before anybody trains on them: leaks, wrong lists of tests, flakiness, "
        "verifiers that an agent can change, slow tests, duplicates. docs/how-to/check-a-task-set.md lists the checks.",
    )
    add_tasks_arguments(check)
    check.add_argument("--static", action="store_true", help="check rows alone: build nothing, run nothing")
    check.add_argument(
        "-k", "--repeat", type=int, default=2, metavar="K",
        help="runs of the reference, and of the untouched code (default: 2)",
    )  # fmt: skip
    check.add_argument("--timeout", type=float, metavar="SECONDS", help="time limit of one run of a task's tests")
    check.add_argument(
        "-o", "--out", type=Path, metavar="DIR", help="directory for results and reports; an existing one is resumed"
    )
    check.add_argument("--workers", type=int, metavar="N", help="tasks at once (default: one per CPU)")
    check.add_argument("--jobs", type=int, metavar="N", help="build steps at once (default: one per CPU)")
    add_json_option(check)
    kept = "finished layers are kept, and with -o finished tasks; the same command resumes"
    check.set_defaults(run=run, kept=kept)


def run(args: argparse.Namespace) -> int:
    """Check tasks; return 0 without errors, 1 if a task has one, 30 if one could not be checked."""
    from minisandbox.cli.validate import cpus  # noqa: PLC0415 - listing tasks must not load it
    from minisandbox.grade.check import check_report, check_set, write_check_reports  # noqa: PLC0415 - the same

    require_positive(args, "repeat", "timeout", "workers", "jobs")
    refused: list[Refused] = []
    tasks = tuple(load(args, None if args.skip_unusable else refused.append))
    with Progress() as progress:
        images = None if args.static else _Images(args, progress)
        checked = check_set(
            tasks,
            None if images is None else images.builder.image_of,
            refused=() if args.only else refused,
            out=args.out,
            repeat=args.repeat,
            workers=args.workers or cpus(),
            timeout=args.timeout,
            build=None if images is None else images.build,
            progress=lambda news: _show_progress(progress, news),
        )
    if args.out is not None:
        write_check_reports(args.out, checked)
    if args.json:
        print_json(check_report(checked))
    else:
        _print(checked, args.out)
    return _status(checked)


class _Images:
    """Builds the images of a set.

    Args:
        args: the command line.
        progress: where builds are reported.
    """

    def __init__(self, args: argparse.Namespace, progress: Progress) -> None:
        from minisandbox.cli.common.builds import Builder  # noqa: PLC0415 - checking rows must not load it
        from minisandbox.store import Store  # noqa: PLC0415 - the same

        self.builder = Builder(Store.open(), progress, args.repo_mirrors)
        self._jobs: int | None = args.jobs
        # on resume, builds that failed in this run are not retried
        self._retry = args.out is None or not args.out.exists()

    def build(self, tasks: Sequence[Task]) -> None:
        """Build the missing images."""
        from minisandbox.cli.validate import cpus  # noqa: PLC0415 - checking rows must not load it
        from minisandbox.images import Budget  # noqa: PLC0415 - the same

        recipes = {task.instance_id: task.recipe for task in tasks}
        self.builder.build_recipes(recipes, Budget(jobs=self._jobs or cpus()), retry_failed=self._retry)


def _show_progress(progress: Progress, news: News[Checked]) -> None:
    from minisandbox.cli.validate import estimate  # noqa: PLC0415 - listing tasks must not load it

    one = news.latest
    if not news.resumed:
        found = ", ".join(dict.fromkeys(finding.check for finding in one.findings))
        progress.note(f"{news.done}/{news.total} {one.instance_id}: {found or 'ok'} ({one.seconds:.1f} s)")
    progress.status(f"{news.done} of {news.total} tasks{estimate(news.seconds_left)}")


def _print(checked: Sequence[Checked], out: Path | None) -> None:
    from minisandbox.grade.check import CHECKS  # noqa: PLC0415 - listing tasks must not load it
    from minisandbox.grade.check.report import about, all_findings, summary  # noqa: PLC0415 - the same

    found = all_findings(checked)
    counts: Counter[str] = Counter()
    shown = []
    for one in found:
        counts[one.check] += 1
        if counts[one.check] <= _MOST:
            shown.append((one.task, one.severity, one.check, about(one)))
    if shown:
        print_table((Column("task", whole=True), Column("severity"), Column("check"), Column("finding")), shown)
        put()
        for name, count in counts.items():
            more = f" ({count - _MOST} more)" if count > _MOST else ""
            put(f"{name}{more}: {CHECKS[name].advice}")
        put()
    put(summary(checked) + (f"; report in {out}" if out is not None else ""))


def _status(checked: Sequence[Checked]) -> int:
    from minisandbox.grade.check import Severity  # noqa: PLC0415 - listing tasks must not load it

    found = [finding for one in checked for finding in one.findings]
    if any(one.check == "infrastructure" for one in found):
        return GradingError.exit_code
    return exits.NEGATIVE if any(one.severity is Severity.ERROR for one in found) else exits.OK
