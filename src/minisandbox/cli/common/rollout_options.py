"""Declare and read the options of rollouts: the agent, its limits, and the model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import get_args

from minisandbox.agents import AGENTS, AgentLimits, AgentOptions
from minisandbox.agents.command.recipe import bundled_recipes
from minisandbox.cli.common.fields import FieldOption, options_of, parse_pair, read_options
from minisandbox.errors import InvalidValue
from minisandbox.models import ModelOptions, Prices, Sampling
from minisandbox.models.dialect import TokensWanted

AGENT_OPTIONS = options_of(AgentOptions, {"extra": "--agent-option"})
LIMIT_OPTIONS = options_of(
    AgentLimits,
    {name: f"--{name.removesuffix('s')}-limit" for name in ("steps", "tokens", "context", "cost")}
    | {"seconds": "--time-limit"},
    none=True,
)


def add_agent_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--agent``, the agents' options and the limits of a rollout."""
    group = parser.add_argument_group("the agent")
    names = f"{', '.join(AGENTS)}, command:RECIPE ({', '.join(bundled_recipes())}, or a file), package.module:Class"
    group.add_argument("--agent", required=True, metavar="NAME", help=names)
    for option in AGENT_OPTIONS:
        option.add(group)
    group = parser.add_argument_group("limits of a rollout, each a number or 'none'")
    for option in LIMIT_OPTIONS:
        option.add(group)


def agent_options(args: argparse.Namespace) -> AgentOptions:
    """Read the options of agents that :func:`add_agent_arguments` declares.

    Raises:
        InvalidValue: a value is invalid.
    """
    return read_options(AgentOptions, args, AGENT_OPTIONS)


def agent_limits(args: argparse.Namespace) -> AgentLimits:
    """Read the limits that :func:`add_agent_arguments` declares.

    Raises:
        InvalidValue: a limit is not positive.
    """
    return read_options(AgentLimits, args, LIMIT_OPTIONS)


_MODEL_OPTIONS = (
    FieldOption("--model", ModelOptions, "model", "NAME",
                "the model's name at its server; local: the embedded model; scripted:FILE: responses from a file"),
    FieldOption("--api-base", ModelOptions, "api_base", "URL", "the server's address: http://localhost:8000/v1"),
    FieldOption("--api-key-env", ModelOptions, "api_key_env", "VARIABLE", "the environment variable with its key"),
    FieldOption("--tokenizer", ModelOptions, "tokenizer", "DIR",
                "the server's tokenizer, to send token ids; server: send text (default: the server's, if it is here)"),
    FieldOption("--tokens", ModelOptions, "tokens", None,
                "token ids and log-probabilities, for training; yes requires them, auto takes them if available",
                choices=get_args(TokensWanted)),
    FieldOption("--temperature", Sampling, "temperature", "T", "randomness of sampling; 0: the likeliest token"),
    FieldOption("--top-p", Sampling, "top_p", "P", "sample from the likeliest tokens with this total probability"),
    FieldOption("--top-k", Sampling, "top_k", "N", "sample from this many of the likeliest tokens; 0: from all"),
    FieldOption("--max-tokens", Sampling, "max_tokens", "N", "maximum length of a response"),
    FieldOption("--sampling-seed", Sampling, "seed", "N", "base of the seeds of all responses"),
    FieldOption("--model-timeout", ModelOptions, "timeout", "SECONDS", "time limit of one try of a request"),
    FieldOption("--model-connect-timeout", ModelOptions, "connect_timeout", "SECONDS", "time limit to connect"),
    FieldOption("--model-read-timeout", ModelOptions, "read_timeout", "SECONDS", "time limit between two reads"),
    FieldOption("--model-retries", ModelOptions, "retries", "N", "retries after transient failures"),
    FieldOption("--model-concurrency", ModelOptions, "concurrency", "N", "concurrent requests"),
    FieldOption("--requests-per-minute", ModelOptions, "requests_per_minute", "N", "rate limit, retries included"),
    FieldOption("--budget", ModelOptions, "budget_dollars", "DOLLARS", "the run's maximum cost; needs --price"),
    FieldOption("--budget-tokens", ModelOptions, "budget_tokens", "N", "the run's maximum of tokens, in and out"),
)  # fmt: skip


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the model."""
    group = parser.add_argument_group("the model")
    for option in _MODEL_OPTIONS:
        option.add(group)
    names = ", ".join(Prices.__slots__)
    group.add_argument(
        "--price",
        dest="model_prices",
        metavar="NAME=DOLLARS",
        action="append",
        default=[],
        help=f"price of a million tokens: {names}",
    )
    group.add_argument(
        "--sampling",
        dest="model_extra",
        metavar="NAME=JSON",
        action="append",
        default=[],
        help="an additional field of each request, in the server's terms",
    )


def model_options(args: argparse.Namespace) -> ModelOptions | None:
    """Read the options that :func:`add_model_arguments` declares; return None without ``--model``.

    Raises:
        InvalidValue: a value is invalid, or an option was given without ``--model``.
    """
    if args.model is None:
        unused = [option.flag for option in _MODEL_OPTIONS if option.value(args) != option.default]
        unused += ["--price"] * bool(args.model_prices) + ["--sampling"] * bool(args.model_extra)
        if unused:
            raise InvalidValue(f"{unused[0]} needs --model", hint="--model NAME --api-base URL, or --model local")
        return None
    sampling = read_options(Sampling, args, _MODEL_OPTIONS, extra=_extra(args.model_extra))
    return read_options(ModelOptions, args, _MODEL_OPTIONS, sampling=sampling, prices=_prices(args.model_prices))


def _prices(pairs: Iterable[str]) -> Prices:
    prices: dict[str, float] = {}
    for pair in pairs:
        name, dollars = parse_pair(pair, "--price")
        if name not in Prices.__slots__:
            raise InvalidValue(f"--price {pair}: unknown price {name!r}", hint=f"use {', '.join(Prices.__slots__)}")
        try:
            prices[name] = float(dollars)
        except ValueError:
            raise InvalidValue(f"--price {pair}: not a number", hint="give dollars per million tokens") from None
    return Prices(**prices)


def _extra(pairs: Iterable[str]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for pair in pairs:
        name, text = parse_pair(pair, "--sampling")
        try:
            fields[name] = json.loads(text)
        except ValueError:
            fields[name] = text  # accept a string without quotes
    return fields
