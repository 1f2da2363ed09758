"""Make tasks of real commits in languages other than Python, validate them, and compare with podman.

    python -m benchmarks.languages [--cache DIR] [--list] [LANGUAGE|TASK ...]

As root, with Debian's podman, buildah, runc, skopeo, docker-registry, debootstrap, dpkg-dev and patch; the network has
to reach Debian's mirror and npm's registry. A commit is a patch that Debian took from a project's upstream; its source
package is fetched by apt. Images are built from ``dockerfiles`` by our builder, FAIL_TO_PASS and PASS_TO_PASS are
measured with swebench 5's parsers, and ``minisandbox compare`` validates every task in sandboxes and in podman. The
cache keeps sources, images (5 GB) and the task file. The exit status is 0 if every task is valid in both.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from benchmarks.images.engine import in_private_mounts, private_engine
from benchmarks.languages.projects import PROJECTS
from benchmarks.languages.running import build_roots, draft, measured, name_of, table, verdicts
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
    chosen = [
        one for one in every if not options.chosen or not {one[0].language, one[2]}.isdisjoint(options.chosen)
    ]
    if options.list:
        print("\n".join(name for _, _, name in chosen))
        return 0
    if os.geteuid():
        parser.error("root is needed: debootstrap and podman")
    if (status := in_private_mounts("benchmarks.languages")) is not None:
        return status
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    place = options.cache / "tasks"
    place.mkdir(parents=True, exist_ok=True)
    store, archive = Store.open(options.cache / "store"), Archive(options.cache / "sources")
    build_roots(sorted({project.suite for project, _, _ in chosen}), options.cache / "roots", store)
    made = [measured(draft(project, patch, archive, place), project.language, place, store) for project, patch, _ in chosen]
    tasks = place / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(one.row) + "\n" for one in made))
    with private_engine(options.cache / "e") as engine:
        found = verdicts(tasks, store.root, engine.environment)
    print(table(made, found))
    valid = (one["equal"] and one["sandbox"]["status"] == "valid" for one in found.values())
    return 0 if all(valid) else 1


if __name__ == "__main__":
    sys.exit(main())
