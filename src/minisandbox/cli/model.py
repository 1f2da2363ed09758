"""``minisandbox model fetch|serve|proxy``: fetch and serve the embedded model, and capture tokens of requests."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.output import Progress, put, require_positive, say
from minisandbox.errors import InvalidValue
from minisandbox.models import Model, ModelOptions, open_model
from minisandbox.models.capture import CaptureProxy, CaptureSession
from minisandbox.models.engine import EngineServer, TransformersEngine, fetch_model
from minisandbox.models.options import LOCAL
from minisandbox.models.serving import HttpServer
from minisandbox.values import parse_size

ADMIN_KEY = "MINISANDBOX_CAPTURE_KEY"
"""Environment variable with the API key for ``/capture/rows``."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs to the parser."""
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    fetch = verbs.add_parser("fetch", help="download and convert the embedded model for offline use")
    _add_cache_option(fetch)
    fetch.set_defaults(run=run_fetch, kept="the same command starts over")
    _add_serve_options(verbs.add_parser("serve", help="serve chat completions with a model on this machine"))
    _add_proxy_options(verbs.add_parser("proxy", help="capture the tokens of agents, as a proxy to an engine"))


def _add_cache_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", type=Path, metavar="DIR", help="directory for models (default: the user's cache)")


def _add_address_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=0, help="the port (default: a free one; it is printed)")


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default=LOCAL, metavar="MODEL", help="local (the embedded model), or a model's directory"
    )
    parser.add_argument("--name", help="the model's name for clients (default: local, or the directory's name)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the weights")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ... (default: cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads for the model (default: all)")
    parser.add_argument("--max-batch", type=int, default=8, metavar="N", help="responses at once (default: 8)")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="maximum context (default: the model's)")
    parser.add_argument("--kept", default="1G", metavar="SIZE", help="memory for cached conversations (default: 1G)")
    _add_cache_option(parser)
    _add_address_options(parser)
    parser.set_defaults(run=run_serve)


def _add_proxy_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-base", action="append", required=True, metavar="URL",
        help="an engine's API; may be repeated: each session uses one engine",
    )  # fmt: skip
    parser.add_argument(
        "--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="environment variable with the engines' key"
    )
    parser.add_argument("--model", help="the model's name at the engines (default: the agent's)")
    parser.add_argument(
        "--tokenizer", default="", metavar="DIR", help="the model's tokenizer, to send token ids; needs --model"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="at the end, write the rows to this JSON Lines file")
    _add_address_options(parser)
    parser.add_argument("--address", default="", help="the host in URLs for agents (default: --host)")
    parser.set_defaults(run=run_proxy)


def run_fetch(args: argparse.Namespace) -> int:
    """Fetch the embedded model and print its directory."""
    with Progress() as output:
        put(str(fetch_model(cache=args.cache, report=output.note, status=output.status)))
    return exits.OK


def run_serve(args: argparse.Namespace) -> int:
    """Serve a model until interrupted."""
    require_positive(args, "threads", "max_batch", "context")
    asyncio.run(_serve(_load(args), args))
    return exits.OK


def _load(args: argparse.Namespace) -> TransformersEngine:
    with Progress() as output:
        directory = fetch_model(cache=args.cache, report=output.note) if args.model == LOCAL else Path(args.model)
        output.note(f"loading {directory}")
        engine = TransformersEngine.load(
            directory,
            name=args.name or (LOCAL if args.model == LOCAL else None),
            dtype=args.dtype,
            device=args.device,
            max_batch=args.max_batch,
            context=args.context,
            cache_bytes=parse_size(args.kept),
        )
    if args.threads:
        import torch  # noqa: PLC0415 - an optional package, which the engine has imported

        torch.set_num_threads(args.threads)
    return engine


async def _serve(engine: TransformersEngine, args: argparse.Namespace) -> None:
    try:
        server = EngineServer(engine, host=args.host, port=args.port)
        await _until_interrupted(server, f"{engine.name} listens")
    finally:
        await engine.close()


def run_proxy(args: argparse.Namespace) -> int:
    """Run a proxy that captures tokens until it is interrupted, then write the captured rows."""
    if args.out is not None and not args.out.parent.is_dir():
        raise InvalidValue(
            f"--out {args.out}: there is no directory {args.out.parent}", hint=f"mkdir -p {args.out.parent}"
        )
    admin_key = os.environ.get(ADMIN_KEY) or secrets.token_urlsafe(24)
    model = _tokenizing_model(args) if args.tokenizer else None
    proxy = CaptureProxy(
        model or args.api_base,
        api_key=os.environ.get(args.api_key_env, ""),
        model=args.model,
        host=args.host,
        port=args.port,
        address=args.address,
        open_unknown=True,
        admin_key=admin_key,
    )
    if ADMIN_KEY not in os.environ:
        say(f"to read the rows: GET /capture/rows with the key {admin_key}")
    try:
        asyncio.run(_capture(proxy, model))
    finally:
        sessions = proxy.sessions()
        if args.out is not None:
            say(f"{write_rows(args.out, sessions)} rows of {len(sessions)} sessions in {args.out}")
        turns, forks = sum(len(session.turns) for session in sessions), sum(session.forks for session in sessions)
        say(f"{forks} of {turns} answers are forks ({forks / max(turns, 1):.1%})")
    return exits.OK


def _tokenizing_model(args: argparse.Namespace) -> Model:
    """Return a model that tokenizes in this process, and does not retry."""
    if not args.model or len(args.api_base) > 1:
        raise InvalidValue("--tokenizer needs --model and one --api-base", hint="run one proxy per engine")
    options = ModelOptions(args.model, args.api_base[0], args.api_key_env, tokenizer=args.tokenizer, retries=0)
    return open_model(options)


async def _capture(proxy: CaptureProxy, model: Model | None) -> None:
    try:
        await _until_interrupted(proxy, "agents use the API key ms-NAME, one per rollout; listening")
    finally:
        if model is not None:
            await model.close()


def write_rows(path: Path, sessions: Iterable[CaptureSession]) -> int:
    """Write the captured rows of all sessions to a JSON Lines file atomically; return their number."""
    from minisandbox.tasks.formats.writing import written_whole  # noqa: PLC0415 - slow: imports the task readers

    count = 0
    with written_whole(path) as part, part.open("w", encoding="utf-8") as file:
        for count, row in enumerate((row for session in sessions for row in session.to_json()), start=1):  # noqa: B007 - the total is returned
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return count


async def _until_interrupted(server: AbstractAsyncContextManager[HttpServer], description: str) -> None:
    """Serve until SIGINT or SIGTERM; print only the address to stdout, so that scripts can read it."""
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, interrupted.set)
    async with server as http_server:
        say(f"{description} at {http_server.base_url}; Ctrl-C ends it")
        put(http_server.base_url, flush=True)
        await interrupted.wait()
