"""Names of the faults between an agent and its model, and the error of a request that meets one every time."""

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
``timeout``: no response. ``reset``, ``reset_mid_answer``: the connection is cut. ``rate_limit``: 429, and with
``_retry_after`` the time to wait. ``server_error``: 500. ``invalid_json``; ``empty_choices``; ``empty_answer``;
``aborted``: malformed responses. ``context_length``: 400, in vLLM's wording. ``huge``: 10 MB of text. ``drip``: a byte
at a time, forever. ``wrong_token_counts``: a log-probability is missing. ``no_tokens``: no token ids, though requested.
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
"""The error of a request whose tries all meet the fault, with tokens requested."""
