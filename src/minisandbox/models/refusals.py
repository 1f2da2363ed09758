"""What a server's refusal means: whether to try again, and in whose words to tell."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Literal

from minisandbox.errors import ContextExceeded, ModelError, ModelRefused, ModelUnavailable

Again = Literal["often", "seldom", "never"]
"""Whether to try again: ``often`` for what passes, ``seldom`` for what most likely comes back the same."""

_LONGEST_WORDS = 500
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_SHORTEST_SECRET = 6  # "EMPTY", "none": what people give servers that want any key
_PART = 12  # characters of a key in a row; error messages show as many as 11, and what keys begin with
_LONG = 20  # characters of a key that answers, not errors alone, may not have: models say shorter ones too
_BEGINNING = 6  # characters of a key that the end of a text, or of a string in it, may not be: it may have been cut
REPEATS_KEY = "it repeats the engine's key"
_BACKSLASHES = re.compile(r"\\(?:\\|u005[cC])*+(?:u([0-9a-fA-F]{4}))?")
_ESCAPED_BLANK = re.compile(r"\\(?:\\|u005[cC])*+([bfnrt])?")  # as above: each run is looked at once
_BLANKS = bytes([*range(33), 127])
_SIGNS = bytes(one for one in range(128) if not chr(one).isalnum())
_HALF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?$")
_BY_CODE = frozenset({"context_length_exceeded", "exceed_context_size_error"})
# vLLM, OpenAI, DeepSeek: "maximum context length is N tokens"; SGLang: "longer than the model's context length";
# llama.cpp: "exceeds the available context size", and before it had a type for it "context size exceeded";
# vLLM without max_tokens: "max_tokens must be at least 1, got -N"; vLLM below the API: "maximum model length"
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
    400: "if an option is named, leave it out, or start the server with what it needs",
    401: "is the key of this server in the variable that --api-key-env names?",
    403: "is this key allowed to use this model?",
    404: "is --model a name that the server's /models lists? Most servers' --api-base ends with /v1",
    405: "--api-base is not that of a chat completions API; most servers' ends with /v1",
    407: "the proxy wants a name and a password: HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT",
}


class Failed(Exception):
    """A try failed.

    Attributes:
        error: what to raise if there is no further try.
        again: whether there is one.
        after: seconds that the server asks to wait for, or None.
        named: what the refusal is about, for whoever looks for names of fields in it.
    """

    def __init__(self, error: ModelError, again: Again, *, after: float | None = None, named: str = "") -> None:
        super().__init__(str(error))
        self.error = error
        self.again: Again = again
        self.after = after
        self.named = named


@dataclass(frozen=True, slots=True)
class _Words:
    """What a server says of an error.

    Attributes:
        message: the sentence, cleaned.
        codes: its ``code`` and ``type``.
    """

    message: str
    codes: frozenset[str]


def clean(text: str, secret: str = "") -> str:
    """Make a server's text fit for an error: one bounded line, without control characters, without the key."""
    if len(secret) >= _SHORTEST_SECRET:
        text = without_key(text, secret)
    line = _CONTROL.sub(" ", text).strip()
    return line if len(line) <= _LONGEST_WORDS else f"{line[:_LONGEST_WORDS]}..."


def without_key(text: str, secret: str) -> str:
    r"""Put stars in place of a key; each letter may be escaped as in JSON (``\u0073``, ``\"``), however often.

    How many backslashes there are says nothing: those of the key may be missing, and at its ends they may stay. Where
    a part of the key stays, nothing of the text does: it was cut within the key, or says it in pieces.
    """
    letters = secret.replace("\\", "")
    if not letters:
        return text
    # a run of backslashes is looked at once, not from each of its own, nor given back one by one: that takes for ever
    pattern = r"(?:\\*+u005(?i:c))*".join(rf"\\*+(?:u(?i:{ord(one):04x})|{re.escape(one)})" for one in letters)
    shown = re.sub(rf"(?<!\\){pattern}", "***", text)
    said, key = _letters(_HALF_ESCAPE.sub("", shown)), _letters(secret)
    beginnings = [key[:length] for length in range(_BEGINNING, min(_PART, len(key)))]
    ends = any(said.endswith(one) or f'{one}"' in said for one in beginnings)
    return REPEATS_KEY if ends or repeats_key(shown, secret, _PART) or _has_pieces(shown, secret) else shown


def repeats_key(text: str, secret: str, least: int) -> bool:
    """Whether a text has so many characters of a key in a row, or all if it has fewer; escaped as in JSON or not."""
    said, key = _letters(text), _letters(secret)
    length = min(least, len(key))
    return length > 0 and any(key[start : start + length] in said for start in range(len(key) - length + 1))


def answer_repeats_key(text: str, secret: str) -> bool:
    """Whether an answer, as it came, has a whole key that no model says by itself; escaped as in JSON or not."""
    return len(secret) >= _LONG and repeats_key(text, secret, len(secret))


def tells_key(text: str, secret: str) -> bool:
    """Whether a text has a key, or a part of it, that an error may not tell."""
    return len(secret) >= _SHORTEST_SECRET and without_key(text, secret) != text


def _has_pieces(text: str, secret: str) -> bool:
    """Whether a text has a part of a key once what stands between its pieces is gone.

    Blanks, line ends and what is not ASCII; of a long key any sign: shorter ones may be made of words that texts have.
    """
    joints = _SIGNS if len(_without(secret, _SIGNS)) >= _LONG else _BLANKS
    key = _without(secret, joints)
    # a backslash and "n" are the end of a line, or a letter of the key
    readings = (text, _ESCAPED_BLANK.sub(lambda found: " " if found[1] else found[0], text))
    return len(key) >= _SHORTEST_SECRET and any(repeats_key(_without(one, joints), key, _PART) for one in readings)


def _without(text: str, joints: bytes) -> str:
    return _letters(text).encode("ascii", "ignore").translate(None, joints).decode()


def _letters(text: str) -> str:
    """What is said once all of JSON's escapes are undone, whatever the case of its letters."""
    return _BACKSLASHES.sub(lambda found: chr(int(found[1], 16)) if found[1] else "", text).casefold()


def failure_of(
    status: int, headers: Mapping[str, str], body: bytes, *, server: str, model: str, secret: str = ""
) -> Failed:
    """Say what an answer that is no completion means.

    Args:
        status: of HTTP, or what the body says in its place.
        headers: of the answer.
        body: the answer, or its beginning.
        server: whom it is from, for people.
        model: what was asked for.
        secret: what must not be repeated.
    """
    words = _words(body, secret)
    said = f"{server} answers {status} for {model!r}: {words.message or '(nothing)'}"
    named = body.decode("utf-8", "replace")
    if status < 600 and _is_about_length(status, words):
        error = ContextExceeded(said, hint="a shorter history or answer (--max-tokens), or a larger context")
        return Failed(error, "never", named=named)
    if status in _PASSES or status >= 500:
        if words.codes & _NO_MONEY:
            refused = ModelRefused(said, reason="the account has no quota left", hint="see the provider's billing page")
            return Failed(refused, "never")
        unavailable = ModelUnavailable(said, hint="is the server overloaded? Lower --model-concurrency")
        return Failed(unavailable, "often", after=retry_after(headers))
    if 300 <= status < 400:
        there = clean(headers.get("Location", "another place"), secret)
        hint = f"redirects are not followed, since the key would go along: give --api-base for {there}"
        return Failed(ModelRefused(said, hint=hint), "never")
    refused = ModelRefused(said, hint=_HINTS.get(status, "the server's own log says more"))
    refused.every_request = status not in _OF_ONE_REQUEST
    return Failed(refused, "never", named=named)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds for which a server asks to be left alone (RFC 9110, 10.2.3), or None."""
    try:
        if "retry-after-ms" in headers:  # OpenAI's own
            return max(float(headers["retry-after-ms"]) / 1000, 0.0)
        text = headers.get("Retry-After", "")
        if text.strip().isdigit():
            return float(text)
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0) if text else None
    except (ValueError, OverflowError):
        return None


def error_in(body: object) -> tuple[int, bytes] | None:
    """Find the error that some servers send with the status 200: its status, and its text; None if there is none."""
    error = body.get("error") if isinstance(body, Mapping) and not body.get("choices") else None
    if isinstance(body, Mapping) and body.get("object") == "error":
        error = body
    if not error:
        return None
    code = error.get("code") if isinstance(error, Mapping) else None
    status = code if isinstance(code, int) and 300 <= code < 600 else 500
    return status, json.dumps(body).encode()


def _is_about_length(status: int, words: _Words) -> bool:
    if words.codes & _BY_CODE:
        return True
    # 500 is what llama.cpp answers; in other errors of servers these words may stand for anything
    return status in (400, 413, 422, 500) and _BY_WORDS.search(words.message) is not None


def _words(body: bytes, secret: str) -> _Words:
    """Read ``{"error": {"message", "type", "code"}}``, vLLM's old form without ``error``, ``detail``, or plain text."""
    try:
        found: object = json.loads(body)
    except (ValueError, RecursionError):
        return _Words(clean(body.decode("utf-8", "replace"), secret), frozenset())
    error = found.get("error", found) if isinstance(found, Mapping) else found
    if not isinstance(error, Mapping):
        return _Words(clean(str(error), secret), frozenset())
    message = error.get("message") or error.get("detail") or error
    codes = frozenset(str(error.get(name)) for name in ("code", "type"))
    return _Words(clean(message if isinstance(message, str) else json.dumps(message), secret), codes)
