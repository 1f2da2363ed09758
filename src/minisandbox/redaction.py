"""Remove API keys and other secrets from errors and records."""

from __future__ import annotations

import re

SHORTEST_KEY = 6
"""Minimum characters of a secret key; shorter keys are placeholders (``EMPTY``, ``none``)."""
_LEAK = 12
"""Number of consecutive characters of a key that count as a leak; servers quote up to 11 in their messages."""
_LONG_KEY = 20
"""Minimum characters of a key to search for in responses; models may write shorter keys by chance."""
_START_LEAK = 6
"""Number of a key's first characters that count as a leak at the end of a text, which may be truncated."""
REPEATS_KEY = "it contains the API key"
_BACKSLASHES = re.compile(r"\\(?:\\|u005[cC])*+(?:u([0-9a-fA-F]{4}))?")
_ESCAPED_BLANK = re.compile(r"\\(?:\\|u005[cC])*+([bfnrt])?")  # possessive quantifiers take linear time
_BLANKS = bytes([*range(33), 127])
_SIGNS = bytes(code for code in range(128) if not chr(code).isalnum())
_HALF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?$")


def redact(text: str, secret: str) -> str:
    r"""Replace a secret by stars, even if its letters are escaped as in JSON (``\u0073``, ``\"``), at any depth.

    The number of backslashes is ignored, so backslashes may remain around the stars. If a part of the secret remains
    because the text is truncated or splits the secret, the whole text is replaced.
    """
    letters = secret.replace("\\", "")
    if not letters:
        return text
    # Use possessive quantifiers: without them, a run of backslashes takes exponential time.
    pattern = r"(?:\\*+u005(?i:c))*".join(rf"\\*+(?:u(?i:{ord(letter):04x})|{re.escape(letter)})" for letter in letters)
    redacted = re.sub(rf"(?<!\\){pattern}", "***", text)
    plain_text, key = _letters(_HALF_ESCAPE.sub("", redacted)), _letters(secret)
    key_starts = [key[:length] for length in range(_START_LEAK, min(_LEAK, len(key)))]
    is_truncated = any(plain_text.endswith(start) or f'{start}"' in plain_text for start in key_starts)
    leaks = is_truncated or repeats_key(redacted, secret, _LEAK) or _has_pieces(redacted, secret)
    return REPEATS_KEY if leaks else redacted


def repeats_key(text: str, secret: str, count: int) -> bool:
    """Return whether a text contains the key or ``count`` consecutive characters of it, after undoing JSON escapes."""
    letters, key = _letters(text), _letters(secret)
    length = min(count, len(key))
    return length > 0 and any(key[start : start + length] in letters for start in range(len(key) - length + 1))


def answer_repeats_key(text: str, secret: str) -> bool:
    """Return whether a raw response contains the whole key; ignore short keys, which a model may write by chance."""
    return len(secret) >= _LONG_KEY and repeats_key(text, secret, len(secret))


def contains_key(text: str, secret: str) -> bool:
    """Return whether a text contains a key or a part of a key that :func:`redact` would replace."""
    return len(secret) >= SHORTEST_KEY and redact(text, secret) != text


def _has_pieces(text: str, secret: str) -> bool:
    """Return whether a text contains a part of a key that is split by other characters.

    The splitting characters are blanks, line ends and non-ASCII characters, and for a long key also punctuation. Short
    keys may consist of ordinary words, so for them punctuation does not count.
    """
    separators = _SIGNS if len(_without(secret, _SIGNS)) >= _LONG_KEY else _BLANKS
    key = _without(secret, separators)
    # Try both meanings of a backslash and "n": a line end, or an escaped letter of the key.
    readings = (text, _ESCAPED_BLANK.sub(lambda match: " " if match[1] else match[0], text))
    return len(key) >= SHORTEST_KEY and any(
        repeats_key(_without(reading, separators), key, _LEAK) for reading in readings
    )


def _without(text: str, separators: bytes) -> str:
    return _letters(text).encode("ascii", "ignore").translate(None, separators).decode()


def _letters(text: str) -> str:
    """Undo JSON escapes in a text, and fold its case."""
    return _BACKSLASHES.sub(lambda match: chr(int(match[1], 16)) if match[1] else "", text).casefold()
