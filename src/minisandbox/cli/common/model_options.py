"""Options for the model of a command; their defaults are those of :class:`ModelOptions`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_args

from minisandbox.cli.common.sandbox_options import parse_pair
from minisandbox.errors import InvalidValue
from minisandbox.models import ModelOptions, Prices, Sampling
from minisandbox.models.dialect import TokensWanted


@dataclass(frozen=True, slots=True)
class _Option:
    """An option of the command line.

    Attributes:
        flag: its name on the command line.
        of: the class that has its value.
        field: the attribute of that class.
        read: converts the text to a value.
        metavar: the placeholder in the help.
        help: its description, without the default.
        choices: the allowed texts, or None for any.
    """

    flag: str
    of: type
    field: str
    read: Callable[[str], object]
    metavar: str | None
    help: str
    choices: tuple[str, ...] | None = None

    @property
    def destination(self) -> str:
        return f"model_{self.of.__name__.lower()}_{self.field}"

    @property
    def default(self) -> object:
        for one in dataclasses.fields(self.of):
            if one.name == self.field:
                return None if one.default is dataclasses.MISSING else one.default
        raise AssertionError(f"{self.of.__name__} has no {self.field}")


_OPTIONS = (
    _Option("--model", ModelOptions, "model", str, "NAME",
            "the model's name at its server; local: the embedded model; scripted:FILE: responses from a file"),
    _Option("--api-base", ModelOptions, "api_base", str, "URL", "the server's address: http://localhost:8000/v1"),
    _Option("--api-key-env", ModelOptions, "api_key_env", str, "VARIABLE", "the environment variable with its key"),
    _Option("--tokens", ModelOptions, "tokens", str, None,
            "token ids and log-probabilities, for training; yes requires them, auto takes them if available",
            get_args(TokensWanted)),
    _Option("--temperature", Sampling, "temperature", float, "T", "randomness of sampling; 0: the likeliest token"),
    _Option("--top-p", Sampling, "top_p", float, "P", "sample from the likeliest tokens with this total probability"),
    _Option("--top-k", Sampling, "top_k", int, "N", "sample from this many of the likeliest tokens; 0: from all"),
    _Option("--max-tokens", Sampling, "max_tokens", int, "N", "maximum length of a response"),
    _Option("--sampling-seed", Sampling, "seed", int, "N", "base of the seeds of all responses"),
    _Option("--model-timeout", ModelOptions, "timeout", float, "SECONDS", "time limit of one try of a request"),
    _Option("--model-connect-timeout", ModelOptions, "connect_timeout", float, "SECONDS", "time limit to connect"),
    _Option("--model-read-timeout", ModelOptions, "read_timeout", float, "SECONDS", "time limit between two reads"),
    _Option("--model-retries", ModelOptions, "retries", int, "N", "retries after transient failures"),
    _Option("--model-concurrency", ModelOptions, "concurrency", int, "N", "concurrent requests"),
    _Option("--requests-per-minute", ModelOptions, "requests_per_minute", float, "N", "rate limit, retries included"),
    _Option("--budget", ModelOptions, "budget_dollars", float, "DOLLARS", "the run's maximum cost; needs --price"),
    _Option("--budget-tokens", ModelOptions, "budget_tokens", int, "N", "the run's maximum of tokens, in and out"),
)  # fmt: skip


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the model."""
    group = parser.add_argument_group("the model")
    for one in _OPTIONS:
        default = "" if one.default is None else f" (default: {one.default})"
        group.add_argument(
            one.flag,
            dest=one.destination,
            type=one.read,
            metavar=one.metavar,
            choices=one.choices,
            default=one.default,
            help=one.help + default,
        )
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
    """Read the options of :func:`add_model_arguments`; return None if no model was named.

    Raises:
        InvalidValue: a value cannot be used, or an option was given without ``--model``.
    """
    given = {one: getattr(args, one.destination) for one in _OPTIONS}
    values: dict[type, dict[str, Any]] = {ModelOptions: {}, Sampling: {}}  # argparse has converted each value
    for one, value in given.items():
        values[one.of][one.field] = value
    if values[ModelOptions]["model"] is None:
        idle = [one.flag for one, value in given.items() if value != one.default]
        idle += ["--price"] * bool(args.model_prices) + ["--sampling"] * bool(args.model_extra)
        if idle:
            raise InvalidValue(f"{idle[0]} needs --model", hint="--model NAME --api-base URL, or --model local")
        return None
    sampling = Sampling(**values[Sampling], extra=_extra(args.model_extra))
    return ModelOptions(**values[ModelOptions], sampling=sampling, prices=_prices(args.model_prices))


def _prices(texts: Iterable[str]) -> Prices:
    found: dict[str, float] = {}
    for text in texts:
        name, value = parse_pair(text, "--price")
        if name not in Prices.__slots__:
            raise InvalidValue(f"--price {text}: unknown price {name!r}", hint=f"use {', '.join(Prices.__slots__)}")
        try:
            found[name] = float(value)
        except ValueError:
            raise InvalidValue(f"--price {text}: not a number", hint="give dollars per million tokens") from None
    return Prices(**found)


def _extra(texts: Iterable[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for text in texts:
        name, value = parse_pair(text, "--sampling")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value  # a word need not be quoted
    return found
