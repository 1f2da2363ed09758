"""Shared helpers that translate other APIs (Messages, Responses) to chat completions and back."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from minisandbox.errors import InvalidValue
from minisandbox.models.protocol import Completion

_SEAL = "minisandbox."
_PIECE = 1000  # maximum characters of text per streamed event


@dataclass(frozen=True, slots=True)
class Api:
    """An API, with functions that translate its requests to chat completions and translate the responses back.

    Attributes:
        path: the route below ``/v1``.
        read: converts a request's JSON to a chat completions request; raises InvalidValue.
        answer: converts a completion to the response's JSON; the second argument is the request's JSON.
        events: converts a response's JSON to the events of a stream. The ``type`` of each event is also its SSE name.
        failure: returns the event that ends a stream with an error, from an HTTP status and a message.
        ping: the event that keeps a stream open.
    """

    path: str
    read: Callable[[object], dict[str, object]]
    answer: Callable[[Completion, Mapping[str, object]], dict[str, object]]
    events: Callable[[Mapping[str, object]], Iterator[dict[str, object]]]
    failure: Callable[[int, str], dict[str, object]]
    ping: bytes = b": ping\n\n"


def new_id(prefix: str) -> str:
    """Return a random id. Ids must be unique, because agents merge responses with equal ids."""
    return f"{prefix}_{secrets.token_hex(12)}"


def pieces(text: str) -> Iterator[str]:
    """Split a text into pieces, one per streamed event."""
    return (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))


def joined_text(content: object, kinds: Sequence[str], owner: str) -> str:
    """Return a text unchanged, or join the texts of a list of text blocks with newlines.

    Args:
        content: the text, the list of blocks, or None for an empty text.
        kinds: the accepted types of blocks.
        owner: the name of the object that has the content, for the error message.

    Raises:
        InvalidValue: the content is neither a text nor a list of text blocks.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidValue(f"{owner} is neither a text nor a list of blocks")
    return "\n".join(block_text(block, kinds, owner) for block in content)


def block_text(block: object, kinds: Sequence[str], owner: str) -> str:
    """Return the text of a text block.

    Raises:
        InvalidValue: the block's type is not in ``kinds``, or the block has no text.
    """
    fields = object_of(block, f"a block of {owner}")
    kind = fields.get("type")
    text = fields.get("refusal" if kind == "refusal" else "text")
    if kind not in kinds or not isinstance(text, str):
        raise InvalidValue(f"{owner} has a block of type {str(kind)[:100]!r}", hint="only text is supported")
    return text


def object_of(value: object, owner: str) -> Mapping[str, object]:
    """Return a value that must be a JSON object.

    Raises:
        InvalidValue: the value is not an object.
    """
    if not isinstance(value, Mapping):
        raise InvalidValue(f"{owner} is not an object")
    return value


def string_in(fields: Mapping[str, object], name: str, owner: str) -> str:
    """Return a required string field of a JSON object.

    Raises:
        InvalidValue: the field is missing, or not a string.
    """
    value = fields.get(name)
    if not isinstance(value, str):
        raise InvalidValue(f"{owner} has no {name}")
    return value


def function_tool(name: str, description: object, parameters: object) -> dict[str, object]:
    """Return a function tool in the format of chat completions."""
    function: dict[str, object] = {"name": name, "parameters": parameters or {"type": "object", "properties": {}}}
    if description:
        function["description"] = description
    return {"type": "function", "function": function}


def json_format(schema: object) -> dict[str, object]:
    """Return the ``response_format`` of chat completions for a JSON schema."""
    return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}


def seal(reasoning: str) -> str:
    """Encode reasoning as an opaque string, which agents send back unchanged in later requests."""
    return _SEAL + base64.b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()


def unseal(sealed: object) -> str | None:
    """Decode the reasoning in a string from :func:`seal`; return None for any other value."""
    if not isinstance(sealed, str) or not sealed.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_SEAL), validate=True).decode("utf-8", "surrogatepass")
    except ValueError:
        return None
