"""Convert frozen dataclasses and token rows to JSON and back; reject unknown and missing fields.

Supported types are strings, numbers, booleans, bytes, None, string enumerations, dataclasses, tuples of one type,
unions of these, JSON objects, and token rows. Bytes are stored as UTF-8 text, in which surrogates replace invalid bytes
(PEP 383).
"""

from __future__ import annotations

import base64
import collections.abc
import dataclasses
import enum
import re
import sys
import types
import typing
import zlib
from array import array
from typing import TypeVar

from minisandbox.errors import TrajectoryError
from minisandbox.models import TokenRow

T = TypeVar("T")


def to_json(value: object) -> object:
    """Convert a value to JSON types, which ``json.dumps`` accepts.

    Args:
        value: a dataclass, or a value of another supported type.

    Raises:
        TypeError: the value's type is not supported.
    """
    match value:
        case str():  # also members of a StrEnum
            plain: object = str(value)
        case None | bool() | int() | float():
            plain = value
        case bytes():
            plain = value.decode("utf-8", "surrogateescape")
        case tuple() | list():
            plain = [to_json(item) for item in value]
        case TokenRow():
            plain = row_to_json(value)
        case collections.abc.Mapping():
            plain = {str(name): to_json(item) for name, item in value.items()}
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            plain = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        case _:
            raise TypeError(f"cannot write {type(value).__name__} as JSON: schemas do not hold this type")
    return plain


def from_json(kind: type[T], value: object, *, location: str) -> T:
    """Convert decoded JSON to a value of the given type.

    Args:
        kind: the dataclass, or another supported type.
        value: the result of ``json.loads``.
        location: the value's name in error messages.

    Raises:
        TrajectoryError: a field is unknown, missing, or of the wrong type; the message names it.
    """
    return typing.cast("T", _decode(kind, value, location))


def _decode(kind: object, value: object, location: str) -> object:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    composed = {
        typing.Union: _decode_union, types.UnionType: _decode_union, tuple: _decode_tuple,
        typing.Literal: _decode_literal,
    }.get(origin)  # fmt: skip
    if composed is not None:
        return composed(arguments, value, location)
    if kind is TokenRow:
        return row_from_json(value, location)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, location)
    return _decode_plain(kind, value, location)


def _decode_plain(kind: object, value: object, location: str) -> object:
    if typing.get_origin(kind) is collections.abc.Mapping and isinstance(value, dict):
        return value
    if kind is types.NoneType and value is None:
        return None
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is bytes and isinstance(value, str):
        return _encoded(value, location)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(value)
        except ValueError:
            raise TrajectoryError(f"{location} is {value!r}", reason=f"{kind.__name__} has no such value") from None
    if kind in {str, int, bool} and type(value) is kind:
        return value
    raise TrajectoryError(f"{location} is of type {type(value).__name__}, not {getattr(kind, '__name__', kind)}")


def _decode_literal(choices: tuple[object, ...], value: object, location: str) -> object:
    if value in choices:
        return value
    raise TrajectoryError(f"{location} is {value!r}", reason=f"allowed: {', '.join(map(str, choices))}")


def _encoded(text: str, location: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise TrajectoryError(f"{location} has unpaired surrogates, which encode no byte") from None


def _decode_union(choices: tuple[object, ...], value: object, location: str) -> object:
    problem: TrajectoryError | None = None
    for choice in choices:
        try:
            return _decode(choice, value, location)
        except TrajectoryError as error:
            problem = error if problem is None or choice is not types.NoneType else problem
    assert problem is not None
    raise problem


def _decode_tuple(arguments: tuple[object, ...], value: object, location: str) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise TrajectoryError(f"{location} is of type {type(value).__name__}, not list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_decode(arguments[0], item, f"{location}[{n}]") for n, item in enumerate(value))
    if len(arguments) != len(value):
        raise TrajectoryError(f"{location} has {len(value)} entries, not {len(arguments)}")
    return tuple(
        _decode(kind, item, f"{location}[{n}]") for n, (kind, item) in enumerate(zip(arguments, value, strict=True))
    )


def _decode_dataclass(kind: type, value: object, location: str) -> object:
    if not isinstance(value, dict):
        raise TrajectoryError(f"{location} is of type {type(value).__name__}, not object")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise TrajectoryError(f"{location} has the unknown field {unknown[0]!r}")
    missing = [name for name in fields if name not in value]
    if missing:
        raise TrajectoryError(f"{location} lacks the field {missing[0]!r}")
    return kind(**{name: _decode(hints[name], item, f"{location}.{name}") for name, item in value.items()})


_LARGEST = 1 << 30


def row_to_json(row: TokenRow) -> dict[str, object]:
    """Convert a token row to compact JSON.

    Token ids and log-probabilities are little-endian arrays (32-bit integers, 64-bit floats), compressed by zlib and
    encoded in base64. ``loss`` is a list of half-open spans ``[start, end]`` of the tokens that carry loss, and
    ``versions`` a list of runs ``[version, count]``.

    Args:
        row: the row.
    """
    return {
        "turns": list(row.turns),
        "length": len(row.ids),
        "ids": _packed(row.ids),
        "logprobs": _packed(row.logprobs),
        "loss": [[span.start(), span.end()] for span in re.finditer(rb"\x01+", row.mask)],
        "versions": [list(run) for run in row.versions],
    }


_KEYS = {"turns", "length", "ids", "logprobs", "loss", "versions"}


def row_from_json(value: object, location: str) -> TokenRow:
    """Decode the token row that :func:`row_to_json` encoded.

    Args:
        value: the decoded JSON.
        location: the row's name in error messages.

    Raises:
        TrajectoryError: the data is damaged.
    """
    if not isinstance(value, dict) or set(value) != _KEYS:
        has = ", ".join(sorted(map(str, value))) if isinstance(value, dict) else type(value).__name__
        raise TrajectoryError(
            f"{location} is not a row of tokens",
            reason=f"it must have {', '.join(sorted(_KEYS))}, and has {has or 'nothing'}",
            hint="the file is damaged, or another program wrote it: export the run again",
        )
    turns, length, loss = value["turns"], value["length"], value["loss"]
    versions = from_json(tuple[tuple[int, int], ...], value["versions"], location=f"{location}.versions")
    if not isinstance(turns, list) or not all(type(turn) is int for turn in turns):
        raise TrajectoryError(f"{location}.turns is not a list of turn indices")
    ids: array[int] = array("i", _unpacked(value["ids"], 4, f"{location}.ids"))
    logprobs: array[float] = array("d", _unpacked(value["logprobs"], 8, f"{location}.logprobs"))
    if sys.byteorder == "big":
        ids.byteswap()
        logprobs.byteswap()
    if not len(ids) == len(logprobs) == length:
        raise TrajectoryError(f"{location} has {len(ids)} ids and {len(logprobs)} log-probabilities, not {length}")
    if versions and (min(count for _, count in versions) < 1 or sum(count for _, count in versions) != length):
        raise TrajectoryError(f"{location}.versions are not of {length} tokens")
    return TokenRow(ids, logprobs, _mask(loss, length, f"{location}.loss"), tuple(turns), versions)


def _packed(numbers: array[int] | array[float]) -> str:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return base64.b64encode(zlib.compress(numbers.tobytes())).decode("ascii")


def _unpacked(text: object, size: int, location: str) -> bytes:
    try:
        if not isinstance(text, str):
            raise TypeError(f"of type {type(text).__name__}")
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(text, validate=True), _LARGEST)
        if not inflater.eof or len(data) % size:
            raise ValueError("truncated")
    except (ValueError, TypeError, zlib.error) as error:
        raise TrajectoryError(f"{location} cannot be read", reason=f"it is damaged: {error}") from error
    return data


def _mask(loss: object, length: int, location: str) -> bytes:
    mask = bytearray(length)
    spans = loss if isinstance(loss, list) else [None]
    end = 0
    for span in spans:
        if not (isinstance(span, list) and len(span) == 2 and all(type(position) is int for position in span)):
            raise TrajectoryError(f"{location} is not a list of spans [start, end]")
        if not end <= span[0] < span[1] <= length:
            raise TrajectoryError(f"{location} has the invalid span {span}", reason=f"the row has {length} tokens")
        mask[span[0] : span[1]] = b"\x01" * (span[1] - span[0])
        end = span[1]
    return bytes(mask)
