"""Measure what the capture proxy adds: the delay of a stream's first event, and the CPU time of its process.

python benchmarks/capture_speed.py [--answers N] [--sessions N] [--seconds S]

The engine answers at once, with token ids, from a process of its own; so does a model in the process of a second
proxy. A conversation has 48 kB of instructions, as of Claude Code, and grows by 2 kB a turn. Requests to the engine
and through a proxy alternate. Other work on the machine delays both, so the fastest tenth of the delays counts, and
the batch of answers with the least CPU time. Then many sessions work at once, with an engine that needs some seconds
for an answer.
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
from array import array
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from minisandbox.models import Completion, Message, Request, Tokens, TokenUsage
from minisandbox.models.capture import CaptureProxy

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
        port.send(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
        await asyncio.Event().wait()

    asyncio.run(serve())


class InstantModel:
    """A model in the proxy's process, with the same answers."""

    name = "m"

    async def complete(self, request: Request) -> Completion:
        """Complete a conversation."""
        count = request.sampling.max_tokens or 1
        await asyncio.sleep(request.sampling.seed or 0)
        prompt = array("i", [7]) * (sum(len(message.content) for message in request.messages) // 4)
        tokens = Tokens(prompt, array("i", [7]) * count, array("d", [-0.5]) * count)
        message = Message("assistant", "word" * count)
        return Completion(message, "stop", TokenUsage(len(prompt), count), tokens, model="m")

    async def close(self) -> None:
        """Do nothing."""


def serve_model(port: Connection) -> None:
    """Serve a proxy and its model until the process is ended; send the port."""

    async def serve() -> None:
        async with CaptureProxy(InstantModel(), open_unknown=True) as proxy:
            port.send(proxy.base_url)
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
    """Return the CPU time of a process's first thread, which does all the work, more precisely than in ticks."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[0]) / 1e6


async def measure(urls: dict[str, str], pids: dict[str, int], args: argparse.Namespace) -> None:
    """Measure each way of a request, and print a line for each result."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        for name, pid in pids.items():
            per_request = []
            for turns, count in CASES:
                delays: dict[str, list[float]] = {"engine": [], name: []}
                times = []
                for number in range(0, args.answers, BATCH):
                    began = cpu_ms(pid)
                    for part in range(0, BATCH, turns):
                        key = f"ms-{turns}-{count}-{number}-{part}"
                        ways = {way: urls[way] for way in delays}
                        for way, values in (await converse(client, ways, key, (turns, count))).items():
                            delays[way] += values
                    times.append((cpu_ms(pid) - began) / BATCH)
                per_request.append(min(times))
                fast = {way: statistics.quantiles(values, n=10)[0] for way, values in delays.items()}
                say(
                    f"{name}, {turns} answers of {count} tokens: first event {fast[name] - fast['engine']:.1f} ms later"
                    f" than the engine's after {fast['engine']:.1f} ms; CPU {per_request[-1]:.2f} ms a request"
                )
            say(f"{name}, CPU for 1,000 tokens: {(per_request[1] - per_request[0]) / 4:.2f} ms")
        for name, url in urls.items():
            began = time.perf_counter()
            keys = [f"ms-many-{number}" for number in range(args.sessions)]
            results = await asyncio.gather(*(converse(client, {name: url}, key, MANY, args.seconds) for key in keys))
            waits = sorted(delay - 1000 * args.seconds for delays in results for delay in delays[name])
            say(
                f"{name}, {args.sessions} sessions at once: {len(waits) / (time.perf_counter() - began):.0f} answers/s,"
                f" p50 {statistics.median(waits):.0f} ms, p99 {waits[int(len(waits) * 0.99)]:.0f} ms after the engine"
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
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe()
    processes = [spawn.Process(target=serve, args=(sender,), daemon=True) for serve in (serve_engine, serve_model)]
    addresses = []
    for process in processes:
        process.start()
        addresses.append(receiver.recv())
    command = [str(Path(sys.executable).with_name("minisandbox")), "model", "proxy", "--api-base", addresses[0]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
        try:
            assert proxy.stdout is not None
            urls = {"engine": addresses[0], "proxy": proxy.stdout.readline().strip(), "in process": addresses[1]}
            pids = {"proxy": proxy.pid, "in process": processes[1].pid or 0}
            asyncio.run(measure(urls, pids, args))
        finally:
            proxy.terminate()
            for process in processes:
                process.terminate()
    say(f"load: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
