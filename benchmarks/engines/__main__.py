"""Measure engines in alternation, and print the table.

    python -m benchmarks.engines [ENGINE...] [--quick] [-o DIR] [--page]

An engine's name also stands for its variants. Run it as root for all of them; one that is not installed is reported.
An interrupted run resumes: the same command measures what is missing. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.measuring import measure
from benchmarks.engines.registry import ENGINES, chosen
from benchmarks.engines.report import picture, table
from benchmarks.engines.results import Quantity, Results, plan, values
from tools.pages import with_part

ROOT = Path(__file__).parents[2]
PAGE, PICTURE = ROOT / "docs" / "benchmarks.md", "assets/engines.svg"
DEFAULT = ("minisandbox", "bubblewrap", "kern", "sandlock", "podman", "docker", "original")
PROJECTS = ("flask", "marshmallow")  # of benchmarks/projects.json


def main() -> int:
    """Measure, print, and write the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", metavar="ENGINE", default=DEFAULT, help=", ".join(ENGINES))
    parser.add_argument("--quick", action="store_true", help="small counts: 3 minutes instead of 20")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="the results (default: build/engines-full)")
    parser.add_argument("--fresh", action="store_true", help="discard the results of an earlier run")
    parser.add_argument("--page", action="store_true", help="also write them into docs/benchmarks.md")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="for temporary files, on a disk")
    options = parser.parse_args()
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.default_int_handler)
    projects = PROJECTS[:1] if options.quick else PROJECTS
    quantities = plan(projects, quick=options.quick)
    output = options.output or ROOT / "build" / f"engines-{'quick' if options.quick else 'full'}"
    common = about(quantities)
    try:
        titles = chosen(options.engines)
        results = Results(output, common, fresh=options.fresh)
    except ValueError as error:
        parser.error(str(error))
    measure(titles, projects, quantities, results, options.directory)
    text = f"{table(results, quantities, titles)}\n\n{summary(results, quantities, titles, common)}"
    print(text)
    if options.page:
        (PAGE.parent / PICTURE).write_text(picture(results, quantities, titles))
        image = f"![Bars: creation, many at once, a rollout]({PICTURE})"
        PAGE.write_text(with_part(PAGE.read_text(), "engines", f"{text}\n\n{image}"))
    return 0


def about(quantities: Sequence[Quantity]) -> dict[str, Any]:
    """Return what all samples of a run have in common."""
    git = ["git", "-C", str(ROOT)]
    commands = ([*git, "log", "-1", "--format=%h", "--", "src"], [*git, "status", "--porcelain", "--", "src"])
    commit, changed = (subprocess.run(one, capture_output=True, text=True, check=False).stdout for one in commands)
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "version": f"{commit.strip() or 'an unknown commit'}{' with changes' if changed else ''}",
        "plan": [[one.name, one.rounds, one.arguments] for one in quantities],
    }


def summary(results: Results, plan: Sequence[Quantity], titles: Mapping[str, str], common: Mapping[str, Any]) -> str:
    """Return what the table's numbers depend on, in a few sentences."""
    engines = dict.fromkeys(filter(None, (results.status(name).get("version") for name in titles)))
    loads = values([one for name in titles for what in plan for one in results.samples(name, what.name)], "load")
    samples = {one.kind: one.rounds * one.arguments.get("count", 1) for one in plan}
    rollouts = f"{samples['rollout']} rollouts" if samples["rollout"] > 1 else "1 rollout (a quick run)"
    return (
        f"{time.strftime('%Y-%m-%d')}, {common['machine']}; MiniSandbox at {', '.join([common['version'], *engines])}. "
        f"Of each engine at most {samples['creation']} creations, {samples['exec']} commands and {rollouts}; fewer of "
        f"slow ones. The load before a sample was {min(loads, default=0):.1f} to {max(loads, default=0):.1f}."
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command resumes")
