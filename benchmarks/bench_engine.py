"""Tokens per second of the embedded model at 1, 4 and 8 requests at once, and what kept conversations save.

python benchmarks/bench_engine.py [--model DIRECTORY] [--threads N] [--tokens N]

Needs the extra [local]. Without --model the embedded model is fetched first. Log-probabilities of all rows are computed
again; the largest difference is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from minisandbox.errors import MissingExtra
from minisandbox.models import Completion, Message, Request, Sampling, TokenGraph
from minisandbox.models.engine import TransformersEngine, fetch_model, recompute_logprobs

SYSTEM = Message("system", "You are a software engineer. " * 40)
TURNS = 6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a directory of save_pretrained (default: the embedded model)")
    parser.add_argument("--threads", type=int, default=1, help="processors for the model (default: 1)")
    parser.add_argument("--tokens", type=int, default=48, help="sampled per request (default: 48)")
    options = parser.parse_args()
    try:
        directory = options.model or fetch_model(report=print)
        import torch  # noqa: PLC0415 - an extra
    except MissingExtra as error:
        print(f"not measured: {error}")
        return
    torch.set_num_threads(options.threads)
    asyncio.run(measure(directory, options.tokens))


async def measure(directory: Path, tokens: int) -> None:
    """Measure requests at once, then a conversation with and without what is kept."""
    print(f"{'':<24} {'seconds':>8} {'CPU s':>8} {'tokens/s':>9} {'tokens/CPU s':>13} {'difference':>11}")
    for cache_bytes in (1 << 30, 0):
        engine = TransformersEngine.load(directory, cache_bytes=cache_bytes)
        await converse(engine, "warm up", 1, 2)
        if cache_bytes:
            for count in (1, 4, 8):
                began = time.perf_counter(), time.process_time()
                talks = await asyncio.gather(*(converse(engine, f"{n}", 1, tokens) for n in range(count)))
                report(f"{count} at once", engine, talks, began)
        began = time.perf_counter(), time.process_time()
        talk = await converse(engine, "long", TURNS, 32)
        report(f"{TURNS} turns, {'kept' if cache_bytes else 'read again'}", engine, [talk], began)
        await engine.close()


async def converse(engine: TransformersEngine, name: str, turns: int, tokens: int) -> list[Completion]:
    """Ask, and show output of commands, again and again."""
    messages = [SYSTEM, Message("user", f"Task {name}: fix the test that fails.")]
    answers = []
    for turn in range(turns):
        sampling = Sampling(max_tokens=tokens, seed=turn)
        answers.append(await engine.complete(Request(tuple(messages), (), sampling, name)))
        messages += [answers[-1].message, Message("user", "line of output\n" * 60)]
    return answers


def report(
    what: str, engine: TransformersEngine, talks: Sequence[Sequence[Completion]], began: tuple[float, float]
) -> None:
    """Print a line."""
    wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
    count = sum(answer.usage.completion for talk in talks for answer in talk)
    difference = max(worst(engine, talk) for talk in talks)
    print(f"{what:<24} {wall:8.1f} {cpu:8.1f} {count / wall:9.1f} {count / cpu:13.1f} {difference:11.1e}", flush=True)


def worst(engine: TransformersEngine, talk: Sequence[Completion]) -> float:
    """The largest difference between captured and recomputed log-probabilities of a conversation."""
    graph = TokenGraph()
    for answer in talk:
        if answer.tokens is not None:
            graph.add(answer.tokens)
    (row,) = graph.rows()
    again = recompute_logprobs(engine.model, row)
    return max(abs(a - b) for a, b in zip(again, row.logprobs, strict=True))


if __name__ == "__main__":
    main()
