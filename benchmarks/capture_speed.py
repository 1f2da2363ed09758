"""Measure what the capture proxy adds: the delay of a stream's first event, and the CPU time of its process.

python benchmarks/capture_speed.py [--answers N] [--sessions N] [--seconds S]

The engine answers at once, with token ids, from a process of its own. A conversation has 48 kB of instructions, as of
Claude Code, and grows by 2 kB a turn. Requests to the engine and through the proxy alternate. Other work on the machine
delays both, so the fastest tenth of the delays counts, and the batch of answers with the least CPU time. Then many
sessions work at once, with an engine that needs some seconds for an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

INSTRUCTIONS, OUTPUT = "instruction " * 4000, "a line of output\n" * 120
CASES = ((1, 10), (1, 4010), (20, 200))
"""Answers in a conversation, and sampled tokens of each."""
MANY = (5, 200)
"""The same for many sessions at once."""
BATCH = 20
"""Answers for which CPU time is measured together."""
USAGE = {"prompt_tokens": 0, "completion_tokens": 0}
IDS = "7," * 1_000_000
LOGPROB = '{"token":"word","logprob":-0.51234,"bytes":[119,111,114,100],"top_logprobs":[]}'


@cache
def bodies(count: int) -> tuple[bytes, tuple[str, str]]:
    """Return a stream of so many tokens, and the text before and after the prompt's ids of the same as one response."""
    head = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "usage": USAGE}
    choice: dict[str, Any] = {"index": 0, "finish_reason": None, "logprobs": None}
    chunks = [{**head, "choices": [{**choice, "delta": {"content": "word" * 10}}]}] * (count // 10)
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    message = {"role": "assistant", "content": "word" * count}
    full = {**choice, "message": message, "finish_reason": "stop", "token_ids": 0, "logprobs": {"content": 0}}
    text = json.dumps({**head, "choices": [full], "prompt_token_ids": 0})
    text = text.replace('"token_ids": 0', f'"token_ids": [{IDS[: 2 * count - 1]}]', 1)
    text = text.replace('"content": 0', f'"content": [{",".join([LOGPROB] * count)}]', 1)
    before, after = text.split('"prompt_token_ids": 0')
    return stream.encode(), (f'{before}"prompt_token_ids": [', f"]{after}")


async def answer(request: web.Request) -> web.StreamResponse:
    """Answer with as many tokens as the request allows; each has four characters, and all ids are equal."""
    data = await request.read()
    body = json.loads(data)
    await asyncio.sleep(float(body.get("seed", 0)))
    stream, (before, after) = bodies(body["max_tokens"])
    if body.get("stream"):
        return web.Response(body=stream, content_type="text/event-stream")
    return web.Response(text=f"{before}{IDS[: len(data) // 4 * 2 - 1]}{after}", content_type="application/json")


def serve_engine(port: Connection) -> None:
    """Serve until the process is ended; send the port."""

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())


async def first_event(client: aiohttp.ClientSession, url: str, key: str, body: dict[str, Any]) -> tuple[float, str]:
    """Return the milliseconds to the first event of a stream, and the stream's text."""
    began = time.perf_counter()
    async with client.post(
        f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
    ) as response:
        first = await response.content.readany()
        delay = (time.perf_counter() - began) * 1000
        assert response.status == 200, first
        return delay, (first + await response.content.read()).decode()


def conversation(turn: int, count: int) -> list[dict[str, str]]:
    """Return the messages of a request."""
    history = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": "Fix it."}]
    for _ in range(turn):
        history += [{"role": "assistant", "content": "word" * count}, {"role": "user", "content": OUTPUT}]
    return history


async def converse(
    client: aiohttp.ClientSession, urls: dict[str, str], key: str, case: tuple[int, int], seconds: int = 0
) -> dict[str, list[float]]:
    """Return the delays of each address, over a conversation."""
    turns, count = case
    delays: dict[str, list[float]] = {name: [] for name in urls}
    for turn in range(turns):
        body = {"model": "m", "messages": conversation(turn, count), "max_tokens": count, "stream": True}
        for name, url in urls.items():
            delays[name].append((await first_event(client, url, key, body | {"seed": seconds}))[0])
    return delays


def cpu_ms(pid: int) -> float:
    """Return the CPU time of a process."""
    user, system = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) * 1000 / os.sysconf("SC_CLK_TCK")


async def measure(engine: str, proxy: str, pid: int, args: argparse.Namespace) -> None:
    """Measure both ways of a request, and print a line for each result."""
    per_request, urls = [], {"engine": engine, "proxy": proxy}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        for turns, count in CASES:
            delays: dict[str, list[float]] = {"engine": [], "proxy": []}
            times = []
            for number in range(0, args.answers, BATCH):
                began = cpu_ms(pid)
                for part in range(0, BATCH, turns):
                    key = f"ms-{turns}-{count}-{number}-{part}"
                    for name, values in (await converse(client, urls, key, (turns, count))).items():
                        delays[name] += values
                times.append((cpu_ms(pid) - began) / BATCH)
            per_request.append(min(times))
            fast = {name: statistics.quantiles(values, n=10)[0] for name, values in delays.items()}
            say(
                f"{turns} answers of {count} tokens: first event after {fast['engine']:.1f} ms directly,"
                f" {fast['proxy']:.1f} ms through the proxy; CPU {per_request[-1]:.2f} ms a request"
            )
        say(f"CPU for 1,000 tokens: {(per_request[1] - per_request[0]) / 4:.2f} ms")
        for name, url in urls.items():
            began, cpu = time.perf_counter(), cpu_ms(pid)
            keys = [f"ms-many-{number}" for number in range(args.sessions)]
            results = await asyncio.gather(*(converse(client, {name: url}, key, MANY, args.seconds) for key in keys))
            waits = sorted(delay - 1000 * args.seconds for delays in results for delay in delays[name])
            say(
                f"{args.sessions} sessions at once, {name}: {len(waits) / (time.perf_counter() - began):.0f} answers/s,"
                f" p50 {statistics.median(waits):.0f} ms, p99 {waits[int(len(waits) * 0.99)]:.0f} ms after the engine,"
                f" CPU of the proxy {(cpu_ms(pid) - cpu) / len(waits):.2f} ms a request"
            )


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Measure, and print one line for each result."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--answers", type=int, default=200, help="answers through each address, for each case")
    parser.add_argument("--sessions", type=int, default=128)
    parser.add_argument("--seconds", type=int, default=5, help="time of the engine for an answer, with many sessions")
    args = parser.parse_args()
    receiver, sender = multiprocessing.Pipe()
    engine = multiprocessing.get_context("spawn").Process(target=serve_engine, args=(sender,), daemon=True)
    engine.start()
    url = f"http://127.0.0.1:{receiver.recv()}/v1"
    command = [str(Path(sys.executable).with_name("minisandbox")), "model", "proxy", "--api-base", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
        try:
            assert proxy.stdout is not None
            asyncio.run(measure(url, proxy.stdout.readline().strip(), proxy.pid, args))
        finally:
            proxy.terminate()
            engine.terminate()
    say(f"load: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
