"""Make tasks of real commits in languages other than Python, validate them, and compare with podman.

    python -m benchmarks.languages [--cache DIR] [--list] [LANGUAGE|TASK ...]

As root, with Debian's podman, buildah, runc, skopeo, docker-registry, debootstrap, dpkg-dev and patch; the network has
to reach Debian's mirror and npm's registry. A commit is a patch that Debian took from a project's upstream; its source
package is fetched by apt. Images are built from ``dockerfiles`` by our builder, FAIL_TO_PASS and PASS_TO_PASS are
measured with swebench 5's parsers, and ``minisandbox compare`` validates every task in sandboxes and in podman. The
cache keeps sources, images (8 GB), task files and results: an interrupted run resumes. The exit status is 0 if every
task is valid in both.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.images.engine import in_private_mounts, private_engine
from benchmarks.languages.projects import PROJECTS, Project
from benchmarks.languages.running import DOCKERFILES, build_root, compared, draft, measured, name_of, table
from benchmarks.languages.sources import Archive

from minisandbox import Store


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chosen", nargs="*", metavar="LANGUAGE|TASK", help="default: every task")
    parser.add_argument("--cache", type=Path, default=Path("/var/cache/minisandbox-languages"))
    parser.add_argument("--list", action="store_true", help="print the tasks")
    options = parser.parse_args()
    every = [(project, patch, name_of(project, patch)) for project in PROJECTS for patch in project.patches]
    if unknown := set(options.chosen) - {known for project, _, name in every for known in (project.language, name)}:
        parser.error(f"there is no language or task {', '.join(sorted(unknown))}; see --list")
    chosen = [one for one in every if not options.chosen or not {one[0].language, one[2]}.isdisjoint(options.chosen)]
    if options.list:
        print("\n".join(name for _, _, name in chosen))
        return 0
    if os.geteuid():
        parser.error("root is needed: debootstrap and podman")
    if (status := in_private_mounts("benchmarks.languages")) is not None:
        return status
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    results = run_all(chosen, options.cache)
    print(table(results))
    return (
        0 if all(one["verdicts"]["equal"] and one["verdicts"]["sandbox"]["status"] == "valid" for one in results) else 1
    )


def run_all(chosen: Sequence[tuple[Project, str, str]], cache: Path) -> list[dict[str, Any]]:
    """Make, validate and compare tasks; results in the cache are kept where the task is the same."""
    place = cache / "tasks"
    place.mkdir(parents=True, exist_ok=True)
    store, archive = Store.open(cache / "store"), Archive(cache / "sources")
    results = []
    for project, patch, name in chosen:
        known = place / f"{name}.result.json"
        row = draft(project, patch, archive, place)
        key = json.dumps([row, (DOCKERFILES / f"{project.language}.Dockerfile").read_text()])
        result = json.loads(known.read_text()) if known.exists() else {}
        if result.get("key") != key:
            build_root(project.suite, cache / "roots" / project.suite, store)
            row, seen = measured(row, place, store)
            tasks = place / f"{name}.jsonl"
            tasks.write_text(json.dumps(row) + "\n")
            with private_engine(cache / f"e{os.getpid()}") as engine:
                verdicts = compared(tasks, store.root, engine.environment)
            result = {"key": key, "language": project.language, "row": row, "seen": seen, "verdicts": verdicts}
            known.write_text(json.dumps(result))
        print(table([result]).splitlines()[-1], file=sys.stderr)
        results.append(result)
    return results


if __name__ == "__main__":
    sys.exit(main())
