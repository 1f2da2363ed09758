"""Compute layer keys: the hash of the parent layer's key and of the build step that creates the layer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

from minisandbox.errors import InvalidValue
from minisandbox.values import JSONValue

_KEY = re.compile(r"[0-9a-f]{64}")


def canonical_json(value: JSONValue) -> bytes:
    """Return a value as canonical JSON: sorted keys, no spaces, ASCII only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def step_key(parent: str | None, step: Mapping[str, JSONValue]) -> str:
    """Return the key of the layer that a build step creates on top of another layer.

    Args:
        parent: the key of the layer below, or None for the bottom layer.
        step: everything that determines the step's result.

    Returns:
        64 hexadecimal digits.
    """
    return hashlib.sha256((parent or "").encode() + b"\n" + canonical_json(step)).hexdigest()


def is_key(text: str) -> bool:
    """Return whether a string has the form of a layer key."""
    return _KEY.fullmatch(text) is not None


def check_key(key: str) -> str:
    """Return the key if it is well-formed; a malformed key could name a path outside the layers' directory.

    Raises:
        InvalidValue: the key is not 64 hexadecimal digits.
    """
    if not is_key(key):
        raise InvalidValue(f"{key!r} is not a layer key", hint="a key is 64 lower-case hexadecimal digits")
    return key
