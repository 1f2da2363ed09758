"""Which model a command asks, and how: one definition per option; the defaults are those of :class:`ModelOptions`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_args

from minisandbox.cli.sandbox_options import parse_pair
from minisandbox.errors import InvalidValue
from minisandbox.models import ModelOptions, Prices, Sampling
from minisandbox.models.dialect import TokensWanted


@dataclass(frozen=True, slots=True)
class _Option:
    """An option of the command line.

    Attributes:
        flag: how it is typed.
        of: the class that has its value.
        field: the attribute of that class.
        read: makes a value of a text.
        metavar: what stands for the text.
        help: what it does; the default is added.
        choices: the texts that there are, if not all.
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
            "the name that a server knows it by; local: the one that comes along; scripted:FILE: answers of a file"),
    _Option("--api-base", ModelOptions, "api_base", str, "URL", "where its server is: http://localhost:8000/v1"),
    _Option("--api-key-env", ModelOptions, "api_key_env", str, "VARIABLE", "the environment variable with its key"),
    _Option("--tokens", ModelOptions, "tokens", str, None,
            "ask for the token ids and log-probabilities that training needs: insist on them, where there are any, no",
            get_args(TokensWanted)),
    _Option("--temperature", Sampling, "temperature", float, "T", "how answers are drawn; 0: the likeliest token"),
    _Option("--top-p", Sampling, "top_p", float, "P", "draw from the likeliest tokens with this much probability"),
    _Option("--top-k", Sampling, "top_k", int, "N", "draw from as many of the likeliest tokens; 0: from all"),
    _Option("--max-tokens", Sampling, "max_tokens", int, "N", "an answer's length at most"),
    _Option("--sampling-seed", Sampling, "seed", int, "N", "what the seeds of all answers are derived from"),
    _Option("--model-timeout", ModelOptions, "timeout", float, "SECONDS", "what one try of a request may take"),
    _Option("--model-connect-timeout", ModelOptions, "connect_timeout", float, "SECONDS", "until it is connected"),
    _Option("--model-read-timeout", ModelOptions, "read_timeout", float, "SECONDS", "between two pieces of an answer"),
    _Option("--model-retries", ModelOptions, "retries", int, "N", "further tries after failures that may pass"),
    _Option("--model-concurrency", ModelOptions, "concurrency", int, "N", "requests in flight at once"),
    _Option("--requests-per-minute", ModelOptions, "requests_per_minute", float, "N", "tries that begin in a minute"),
    _Option("--budget", ModelOptions, "budget_dollars", float, "DOLLARS", "what the run may spend; needs --price"),
    _Option("--budget-tokens", ModelOptions, "budget_tokens", int, "N", "tokens that the run may take, both ways"),
)  # fmt: skip


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which model is asked, and how."""
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
        help=f"of a million tokens: {names}",
    )
    group.add_argument(
        "--sampling",
        dest="model_extra",
        metavar="NAME=JSON",
        action="append",
        default=[],
        help="a further field of requests, as the server knows it",
    )


def model_options(args: argparse.Namespace) -> ModelOptions | None:
    """Read what :func:`add_model_arguments` declares; None if no model was named.

    Raises:
        InvalidValue: a value cannot be used, or an option was given without ``--model``.
    """
    given = {one: getattr(args, one.destination) for one in _OPTIONS}
    values: dict[type, dict[str, Any]] = {ModelOptions: {}, Sampling: {}}  # each is of its field's own type
    for one, value in given.items():
        values[one.of][one.field] = value
    if values[ModelOptions]["model"] is None:
        idle = [one.flag for one, value in given.items() if value != one.default]
        idle += ["--price"] * bool(args.model_prices) + ["--sampling"] * bool(args.model_extra)
        if idle:
            raise InvalidValue(f"{idle[0]} without --model", hint="--model NAME --api-base URL, or --model local")
        return None
    sampling = Sampling(**values[Sampling], extra=_extra(args.model_extra))
    return ModelOptions(**values[ModelOptions], sampling=sampling, prices=_prices(args.model_prices))


def _prices(texts: Iterable[str]) -> Prices:
    found: dict[str, float] = {}
    for text in texts:
        name, value = parse_pair(text, "--price")
        if name not in Prices.__slots__:
            raise InvalidValue(f"--price {text}: there is no price {name!r}", hint=f"{', '.join(Prices.__slots__)}")
        try:
            found[name] = float(value)
        except ValueError:
            raise InvalidValue(f"--price {text}: no number", hint="dollars for a million tokens") from None
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
