"""Interpret a server's error responses: decide whether to retry, and write a message without the API key."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Literal

from minisandbox.errors import ContextExceeded, ModelError, ModelRefused, ModelUnavailable
from minisandbox.redaction import SHORTEST_KEY, redact

Again = Literal["often", "seldom", "never"]
"""Whether to retry: ``often`` for transient failures, ``seldom`` for failures that will probably repeat."""

_LONGEST_WORDS = 500
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_BY_CODE = frozenset({"context_length_exceeded", "exceed_context_size_error"})
# Messages of servers about a conversation that is too long:
# vLLM, OpenAI, DeepSeek: "maximum context length is N tokens"
# SGLang: "longer than the model's context length"
# llama.cpp: "exceeds the available context size"; versions without an error type: "context size exceeded"
# vLLM without max_tokens: "max_tokens must be at least 1, got -N"; vLLM's engine: "maximum model length"
_BY_WORDS = re.compile(
    r"maximum (?:context|model|input) length|model's context length|available context size|context size exceeded"
    r"|exceeds? (?:the )?context (?:window|length|size)|context window exceeds|prompt is too long"
    r"|max_tokens must be at least 1, got -|please reduce the length of the (?:messages|prompt|input)",
    re.IGNORECASE,
)
_PASSES = frozenset({408, 409, 425, 429})
_OF_ONE_REQUEST = frozenset({400, 413, 422})
_NO_MONEY = frozenset({"insufficient_quota", "billing_not_active", "billing_hard_limit_reached"})
_HINTS: Mapping[int, str] = {
    400: "if an option is named, leave it out, or start the server with support for it",
    401: "check that the variable in --api-key-env has the key of this server",
    403: "check that this key is allowed to use this model",
    404: "check that --model is listed by the server's /models; most servers' --api-base ends with /v1",
    405: "check --api-base: it is not a chat completions API; most servers' ends with /v1",
    407: "give the proxy's user name and password: HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT",
}


class Failed(Exception):
    """A failed try.

    Attributes:
        error: the error to raise after the last try.
        again: whether to retry.
        after: the seconds that the server asks to wait, or None.
        named: the text of the error response, in which to search for rejected fields.
    """

    def __init__(self, error: ModelError, again: Again, *, after: float | None = None, named: str = "") -> None:
        super().__init__(str(error))
        self.error = error
        self.again: Again = again
        self.after = after
        self.named = named


@dataclass(frozen=True, slots=True)
class _ErrorText:
    """A server's description of an error.

    Attributes:
        message: the message, cleaned.
        codes: the error's ``code`` and ``type``.
    """

    message: str
    codes: frozenset[str]


def clean(text: str, secret: str = "") -> str:
    """Return a server's text as one line of bounded length, without control characters and without the key."""
    if len(secret) >= SHORTEST_KEY:
        text = redact(text, secret)
    line = _CONTROL.sub(" ", text).strip()
    return line if len(line) <= _LONGEST_WORDS else f"{line[:_LONGEST_WORDS]}..."


def failure_of(
    status: int, headers: Mapping[str, str], body: bytes, *, server: str, model: str, secret: str = ""
) -> Failed:
    """Interpret an error response.

    Args:
        status: the HTTP status, or the status in the body of a response with the HTTP status 200.
        headers: the response's headers.
        body: the body, possibly truncated.
        server: the server's name, for the message.
        model: the requested model.
        secret: the key, which the message must not contain.
    """
    error_text = _error_text(body, secret)
    what = f"{server} responds {status} for {model!r}: {error_text.message or '(empty)'}"
    named = body.decode("utf-8", "replace")
    if status < 600 and _is_about_length(status, error_text):
        error = ContextExceeded(what, hint="shorten the history or the response (--max-tokens), or raise the context")
        return Failed(error, "never", named=named)
    if status in _PASSES or status >= 500:
        if error_text.codes & _NO_MONEY:
            refused = ModelRefused(what, reason="the account has no quota left", hint="see the provider's billing page")
            return Failed(refused, "never")
        unavailable = ModelUnavailable(what, hint="if the server is overloaded, lower --model-concurrency")
        return Failed(unavailable, "often", after=retry_after(headers))
    if 300 <= status < 400:
        location = clean(headers.get("Location", "another address"), secret)
        hint = f"redirects are not followed, to protect the key; the server is at {location}: change --api-base"
        return Failed(ModelRefused(what, hint=hint), "never")
    refused = ModelRefused(what, hint=_HINTS.get(status, "look at the server's log"))
    refused.every_request = status not in _OF_ONE_REQUEST
    return Failed(refused, "never", named=named)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asks to wait (RFC 9110, 10.2.3), or None."""
    try:
        if "retry-after-ms" in headers:  # a header of OpenAI
            return max(float(headers["retry-after-ms"]) / 1000, 0.0)
        text = headers.get("Retry-After", "")
        if text.strip().isdigit():
            return float(text)
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0) if text else None
    except (ValueError, OverflowError):
        return None


def error_in(body: object) -> tuple[int, bytes] | None:
    """Return the status and text of an error that a server sent with HTTP status 200, or None if there is no error."""
    error = body.get("error") if isinstance(body, Mapping) and not body.get("choices") else None
    if isinstance(body, Mapping) and body.get("object") == "error":
        error = body
    if not error:
        return None
    code = error.get("code") if isinstance(error, Mapping) else None
    status = code if isinstance(code, int) and 300 <= code < 600 else 500
    return status, json.dumps(body).encode()


def _is_about_length(status: int, error_text: _ErrorText) -> bool:
    if error_text.codes & _BY_CODE:
        return True
    # llama.cpp sends 500; with other statuses the same words may mean another error
    return status in (400, 413, 422, 500) and _BY_WORDS.search(error_text.message) is not None


def _error_text(body: bytes, secret: str) -> _ErrorText:
    """Parse an error body: ``{"error": {"message", "type", "code"}}``, vLLM's old format, ``detail``, or plain text."""
    try:
        value: object = json.loads(body)
    except (ValueError, RecursionError):
        return _ErrorText(clean(body.decode("utf-8", "replace"), secret), frozenset())
    error = value.get("error", value) if isinstance(value, Mapping) else value
    if not isinstance(error, Mapping):
        return _ErrorText(clean(str(error), secret), frozenset())
    message = error.get("message") or error.get("detail") or error
    codes = frozenset(str(error.get(name)) for name in ("code", "type"))
    return _ErrorText(clean(message if isinstance(message, str) else json.dumps(message), secret), codes)
