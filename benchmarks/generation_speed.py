"""Tokens per second of the engine at a batch of 8, next to those of an earlier commit, in alternation.

python benchmarks/generation_speed.py [--before COMMIT] [--rounds N] [--tokens N] [--threads N]

Needs the extra [local]. Each round runs both versions in a process of its own on the same prompts: the earlier one with
OMP_NUM_THREADS=1, this one with --threads. The median of the rounds' ratios is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from minisandbox.models.engine import fetch_model

ROOT = Path(__file__).resolve().parents[1]
BATCH = 8
PROGRAM = """
import asyncio, json, sys, time
from pathlib import Path
from minisandbox.models import Message, Request, Sampling
from minisandbox.models.engine import TransformersEngine

async def measure(directory, tokens):
    engine = TransformersEngine.load(Path(directory))
    engine._decoder._ends = frozenset()  # every response has the same length

    async def generate(number, count):
        prompt = Message("user", f"Task {number}: fix the test that fails. " * 20)
        sampling = Sampling(max_tokens=count, seed=number)
        return (await engine.complete(Request((prompt,), (), sampling, str(number)))).usage.completion

    await asyncio.gather(*(generate(number, 2) for number in range(8)))
    wall, cpu = time.perf_counter(), time.process_time()
    counts = await asyncio.gather(*(generate(number, tokens) for number in range(8)))
    print(json.dumps([sum(counts), time.perf_counter() - wall, time.process_time() - cpu]))
    await engine.close()

asyncio.run(measure(sys.argv[1], int(sys.argv[2])))
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", default="414e1d8", metavar="COMMIT", help="the earlier commit (default: 414e1d8)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each version (default: 5)")
    parser.add_argument("--tokens", type=int, default=64, help="sampled per response (default: 64)")
    parser.add_argument("--threads", type=int, default=1, help="of this version (default: 1)")
    options = parser.parse_args()
    directory = fetch_model(report=print)
    with tempfile.TemporaryDirectory() as tree:
        archive = subprocess.run(["git", "archive", options.before, "src"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
        ratios: list[tuple[float, float]] = []
        print(f"{'':<8} {'tokens/s':>9} {'tokens/CPU s':>13}")
        for _ in range(options.rounds):
            before = measure(Path(tree, "src"), directory, options.tokens, OMP_NUM_THREADS="1")
            now = measure(ROOT / "src", directory, options.tokens, OMP_NUM_THREADS=str(options.threads))
            for name, (wall, cpu) in (("before", before), ("now", now)):
                print(f"{name:<8} {wall:9.1f} {cpu:13.1f}", flush=True)
            ratios.append((now[0] / before[0], now[1] / before[1]))
    walls, cpus = zip(*ratios, strict=True)
    print(f"{'ratio':<8} {statistics.median(walls):9.2f} {statistics.median(cpus):13.2f}")


def measure(source: Path, directory: Path, tokens: int, **variables: str) -> tuple[float, float]:
    """Return the tokens per second and per CPU second of a version."""
    environment = {**os.environ, **variables, "PYTHONPATH": str(source)}
    command = [sys.executable, "-c", PROGRAM, str(directory), str(tokens)]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    count, wall, cpu = json.loads(output)
    return count / wall, count / cpu


if __name__ == "__main__":
    main()
