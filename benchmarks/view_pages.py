"""Time the pages of ``minisandbox view`` in Chromium, next to ``harbor view`` on the same rollouts.

    python -m benchmarks.view_pages [--harbor HARBOR] [--pairs 10]

Needs Playwright and the extra [view] (``make test-view`` makes such an environment), and for the comparison the command
``harbor``. A page is painted when a text at its end is there and two further frames have been drawn.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from tests.browser.serving import serve_runs
from tests.unit.training_tools import trajectory

from minisandbox.grade import Grade, Reason, Verdict
from minisandbox.rollouts import RunDirectory
from minisandbox.rollouts.harbor_job import export_harbor
from minisandbox.trajectories import StepRecord, Trajectory

PAINTED = """
const wait = () => {
  const text = document.evaluate('//text()[contains(., "%s")]', document, null, 9, null).singleNodeValue;
  if (text) requestAnimationFrame(() => requestAnimationFrame(() => { window.painted = performance.now(); }));
  else requestAnimationFrame(wait);
};
requestAnimationFrame(wait);
"""
"""Sets ``window.painted`` to the milliseconds from the start of the navigation until a text is there and drawn."""


def large_rollouts() -> list[Trajectory]:
    """Return a rollout with an observation of 2 MB, and one with 10,000 tests."""
    line = "the quick brown fox jumps over the lazy dog 0123456789\n"
    output = (line * (2_000_000 // len(line))).encode()
    step = StepRecord("cat large", "exited", 0, None, output, b"", 0, 0, 0.1, 1)
    tests = tuple((f"tests/test_a.py::test_{n}", "failed" if n % 7 == 0 else "passed") for n in range(10_000))
    grade = Grade("many-tests", Verdict.FAILED, Reason.TESTS_NOT_PASSED, "1,429 did not pass", tests)
    return [trajectory("large-output", steps=(step,)), trajectory("many-tests", grade=grade)]


def job(rollouts: int) -> list[Trajectory]:
    """Return ordinary rollouts of 30 turns."""
    base = trajectory()
    prompt, (question, answer) = base.messages[:2], (base.messages[3], base.messages[2])
    messages = (*prompt, *(part for _ in range(30) for part in (answer, question)))
    turns = tuple(replace(base.turns[0], message=2 + 2 * turn) for turn in range(30))
    steps = tuple(
        StepRecord("ls", "exited", 0, None, b"src\ntests\n" * 40, b"", 0, 0, 0.1, turn + 1) for turn in range(30)
    )
    whole = replace(base, messages=messages, turns=turns, steps=steps, rows=())
    return [replace(whole, instance_id=f"owner__repo-{number}") for number in range(rollouts)]


def painted(page: Any, url: str, text: str) -> float:
    """Open a page, and return the milliseconds until a text on it has been drawn."""
    context = page.context
    fresh = context.new_page()
    try:
        fresh.add_init_script(PAINTED % text)
        fresh.goto(url, wait_until="commit")
        return float(fresh.wait_for_function("window.painted", timeout=120_000).json_value())
    finally:
        fresh.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harbor", type=Path, help="the command harbor, for the comparison")
    parser.add_argument("--pairs", type=int, default=10, help="openings of each page (10)")
    parser.add_argument("--rollouts", type=int, default=100, help="rollouts of the job (100)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        path = Path(directory)
        with RunDirectory.open(path / "large", {}) as run:
            for record in large_rollouts():
                run.write(record)
        with RunDirectory.open(path / "job", {}) as run:
            for record in job(args.rollouts):
                run.write(record)
        address = serve_runs(path)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_context(bypass_csp=True).new_page()  # for the script that measures
        page.goto(address)
        base = address.partition("/?")[0]
        load = os.getloadavg()[0]
        for name, url, text in (
            ("a rollout with an observation of 2 MB", "rollouts/0/large-output", "Tests"),
            ("that observation, whole", "raw/0/large-output?part=stdout+0", "the lazy dog"),
            ("a rollout with 10,000 tests", "rollouts/0/many-tests", "all tests"),
            ("those tests, all", "raw/0/many-tests?part=tests", "test_9999"),
        ):
            times = [painted(page, f"{base}/runs/large/{url}", text) for _ in range(args.pairs)]
            print(
                f"{name}: painted in {statistics.median(times):.0f} ms (median of {args.pairs}; load {load:.1f})",
                flush=True,
            )
        if args.harbor is not None:
            compare(page, base, path, args)
        browser.close()


def compare(page: Any, base: str, path: Path, args: argparse.Namespace) -> None:
    """Open the job and a trajectory in both viewers by turns."""
    port = 18_642
    list(export_harbor(path / "job", path / "jobs" / "job"))
    command = [args.harbor, "view", path / "jobs", "--port", str(port), "--host", "127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        other = f"http://127.0.0.1:{port}"
        try:
            while True:
                try:
                    urllib.request.urlopen(f"{other}/", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.5)
            task = f"owner__repo-{args.rollouts // 2}"
            pages = {
                "the job": (f"{base}/runs/job", "owner__repo-1", f"{other}/jobs/job", "owner__repo-1"),
                "a trajectory": (
                    f"{base}/runs/job/rollouts/0/{task}", "I look", f"{other}/jobs/job/trials/{task}", "I look",
                ),
            }  # fmt: skip
            for name, (ours, our_text, theirs, their_text) in pages.items():
                pairs = [(painted(page, ours, our_text), painted(page, theirs, their_text)) for _ in range(args.pairs)]
                mine, harbor = (statistics.median(side) for side in zip(*pairs, strict=True))
                print(
                    f"{name}: {mine:.0f} ms; harbor view: {harbor:.0f} ms; ratio {mine / harbor:.2f} "
                    f"(medians of {args.pairs} alternating; load {os.getloadavg()[0]:.1f})", flush=True,
                )  # fmt: skip
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
