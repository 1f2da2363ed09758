"""Compare `validate` and `evaluate` with the bare host that runs the same test commands in the same environments.

python -m benchmarks.evaluate ROWS [--pins DIR] [--repo-mirrors DIR] [--only GLOB]... [--rounds N] [--workers N]

Needs root. ROWS is a file or folder of SWE-bench and SWE-smith rows; images that are not in the store
(MINISANDBOX_STORE) are built first. A round runs, one after the other and each with so many workers: `minisandbox
validate`, as typed and in a fresh run directory; the same two runs per task on the bare host (:mod:`.host`);
`minisandbox evaluate` of what an agent that copies the references submits; the same single runs on the bare host. No
pass is confirmed, so that both sides run the tests equally often. It prints wall times, CPU times, their ratios and the
load. Other work on the machine distorts ratios of wall times, and hardly those of CPU times.

Then every submission is graded with the default policy. The cost of a resolved one is the time of grading it, divided
by the time of its first run of tests. Exits with 1 if a verdict is not the expected one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.engines.accounts import Account, accounts_of
from benchmarks.evaluate.costs import print_costs, submission_of
from benchmarks.evaluate.host import REFERENCE, UNTOUCHED, HostTask

from minisandbox.images import Image, load_image
from minisandbox.runs import as_finished
from minisandbox.store import Store
from minisandbox.tasks import Task, TaskSet

_PLACE, _ACCOUNT = "MINISANDBOX_BENCHMARK_PLACE", "bench-evaluate"
_UNCONFIRMED = "share(0)"
_PAIRS = {"validate": (REFERENCE, UNTOUCHED), "evaluate": (REFERENCE,)}


def main() -> int:
    """Measure; 0 if all verdicts are as expected."""
    options = _options()
    if (name := os.environ.get(_PLACE)) is not None:
        return _measure(options, Path(name))
    words = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "benchmarks.evaluate"]
    with tempfile.TemporaryDirectory(dir=options.directory) as place:  # removed where the child's mounts are not
        try:
            return subprocess.run([*words, *sys.argv[1:]], env={**os.environ, _PLACE: place}, check=False).returncode
        finally:
            for account in accounts_of(_ACCOUNT):
                account.remove()


def _measure(options: argparse.Namespace, directory: Path) -> int:
    """Measure in a mount namespace of this process's own."""
    _minisandbox("image", "build", *options.given)
    store = Store.open()
    tasks = TaskSet.load(options.rows, pins=options.pins, repo_mirrors=options.repo_mirrors, environment="pins")
    images = [(task, load_image(store, task.instance_id)) for task in tasks.select(options.only or ["*"])]
    comparison = Comparison(options, directory, [HostTask.make(*each, directory) for each in images])
    right = comparison.run()
    return 0 if print_costs(images) and right else 1


class Comparison:
    """The rounds of one comparison.

    Args:
        options: the command line.
        directory: for run directories and predictions.
        hosts: the tasks on the bare host.
    """

    def __init__(self, options: argparse.Namespace, directory: Path, hosts: Sequence[HostTask]) -> None:
        self._options, self._directory, self._hosts = options, directory, hosts
        self._accounts = {name: Account(f"{_ACCOUNT}-{name}") for name in ("minisandbox", "host")}
        self._predictions = directory / "preds.jsonl"
        lines = (_prediction(host.task, host.image) for host in hosts)
        self._predictions.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(self) -> bool:
        """Run the rounds and print them; returns whether the verdicts of both sides are as expected."""
        ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in _PAIRS}
        right = True
        for number in range(self._options.rounds):
            for name, states in _PAIRS.items():
                out = self._directory / f"{name}-{number}"
                wall, cpu = self._timed("minisandbox", partial(self._ours, name, out))
                for host in self._hosts:
                    host.prepare(states)
                host_wall, host_cpu = self._timed("host", partial(self._on_host, states))
                ratios[name].append((wall / host_wall, cpu / host_cpu))
                right &= self._is_expected(name, out, states)
                print(f"round {number + 1} {name}: wall {wall:.1f} and {host_wall:.1f} s on the host, ratio "
                      f"{wall / host_wall:.3f}; CPU {cpu:.1f} and {host_cpu:.1f} s, ratio {cpu / host_cpu:.3f}; load "
                      f"{os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip
        for name, pairs in ratios.items():
            walls, cpus = zip(*pairs, strict=True)
            print(f"{name}: ratio of wall times {statistics.median(walls):.3f} ({min(walls):.3f} to {max(walls):.3f}), "
                  f"of CPU times {statistics.median(cpus):.3f} ({min(cpus):.3f} to {max(cpus):.3f})")  # fmt: skip
        return right

    def _timed(self, side: str, work: Callable[[], None]) -> tuple[float, float]:
        """Return the wall time and the CPU time of work that this process starts."""
        account = self._accounts[side]
        account.enter(os.getpid())
        start, before = time.monotonic(), account.cpu()
        work()
        return time.monotonic() - start, account.cpu() - before

    def _ours(self, name: str, out: Path) -> None:
        more = ("-p", str(self._predictions)) if name == "evaluate" else ()
        workers = ("--workers", str(self._options.workers), "--confirm", _UNCONFIRMED)
        _minisandbox(name, *self._options.given, *more, *workers, "-o", str(out))

    def _on_host(self, states: Sequence[str]) -> None:
        for _ in as_finished(lambda host: host.run(states), self._hosts, self._options.workers):
            pass

    def _is_expected(self, name: str, out: Path, states: Sequence[str]) -> bool:
        """Return whether every task is valid or resolved, and the host's logs say the same."""
        report = json.loads((out / "report.json").read_text())
        count = report["resolved_instances"] if name == "evaluate" else report["counts"]["valid"]
        logs = [host.resolved(state) == (state == REFERENCE) for host in self._hosts for state in states]
        return count == len(self._hosts) and all(logs)


def _prediction(task: Task, image: Image) -> dict[str, str]:
    patch = submission_of(task, image).decode("utf-8", "surrogateescape")
    return {"instance_id": task.instance_id, "model_name_or_path": "reference", "model_patch": patch}


def _minisandbox(*words: str) -> None:
    """Run a command as typed."""
    done = subprocess.run([sys.executable, "-m", "minisandbox", *words], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: a task is not valid
        raise SystemExit(f"minisandbox {' '.join(words)} failed with {done.returncode}:\n{done.stderr}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, metavar="ROWS", help="a file or folder of rows")
    parser.add_argument("--pins", type=Path, metavar="DIR", help="exported environments of the official images")
    parser.add_argument("--repo-mirrors", type=Path, metavar="DIR", help="git repositories to look in first")
    parser.add_argument("--only", action="append", metavar="GLOB", help="ids of tasks")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds (default: 3)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="tasks at once (default: 2)")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="where the copies lie, 200 MB a row")
    options = parser.parse_args()
    given = {"--pins": options.pins, "--repo-mirrors": options.repo_mirrors, "--environment": "pins"}
    pairs = [pair for name, value in given.items() if value is not None for pair in (name, str(value))]
    only = [word for glob in options.only or () for word in ("--only", glob)]
    options.given = [str(options.rows), *pairs, *only]
    return options


if __name__ == "__main__":
    sys.exit(main())
