"""What can go wrong between an agent and its model: names for it, and how a request ends that meets it every time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from minisandbox.errors import BadAnswer, ContextExceeded, ModelError, ModelRefused, ModelUnavailable

Fault = Literal[
    "timeout",
    "reset",
    "reset_mid_answer",
    "rate_limit",
    "rate_limit_retry_after",
    "server_error",
    "invalid_json",
    "empty_choices",
    "empty_answer",
    "aborted",
    "context_length",
    "huge",
    "drip",
    "wrong_token_counts",
    "no_tokens",
    "wrong_key",
    "unknown_model",
    "redirect",
]
"""
``timeout``: never an answer. ``reset``, ``reset_mid_answer``: the connection is cut. ``rate_limit``: 429; with
``_retry_after`` it says for how long. ``server_error``: 500. ``invalid_json``; ``empty_choices``; ``empty_answer``;
``aborted``: answers that are none. ``context_length``: 400, as vLLM says it. ``huge``: 10 MB of text. ``drip``: a byte
now and then, for ever. ``wrong_token_counts``: a log-probability too few. ``no_tokens``: none, though asked.
``wrong_key``: 401. ``unknown_model``: 404. ``redirect``: 307 to another host.
"""

FAULTS: tuple[Fault, ...] = get_args(Fault)

ENDS_WITH: Mapping[Fault, type[ModelError]] = {
    "timeout": ModelUnavailable,
    "reset": ModelUnavailable,
    "reset_mid_answer": ModelUnavailable,
    "rate_limit": ModelUnavailable,
    "rate_limit_retry_after": ModelUnavailable,
    "server_error": ModelUnavailable,
    "invalid_json": BadAnswer,
    "empty_choices": BadAnswer,
    "empty_answer": BadAnswer,
    "aborted": BadAnswer,
    "context_length": ContextExceeded,
    "huge": BadAnswer,
    "drip": ModelUnavailable,
    "wrong_token_counts": BadAnswer,
    "no_tokens": ModelRefused,
    "wrong_key": ModelRefused,
    "unknown_model": ModelRefused,
    "redirect": ModelRefused,
}
"""The error of a request whose every try meets the fault, where tokens are asked for."""
