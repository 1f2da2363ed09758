"""Convert frozen dataclasses and token rows to JSON and back; reject unknown and missing fields.

Supported types are strings, numbers, booleans, bytes, None, string enumerations, dataclasses, tuples of one type,
unions of these, JSON objects, and token rows. Bytes are stored as UTF-8 text, in which surrogates replace invalid bytes
(PEP 383).
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import re
import types
import typing
import zlib
from array import array
from collections.abc import Mapping
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
        case Mapping():
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
    if origin in (typing.Union, types.UnionType):
        return _decode_union(arguments, value, location)
    if origin is tuple:
        return _decode_tuple(arguments, value, location)
    if origin is typing.Literal and value not in arguments:
        raise TrajectoryError(f"{location} is {value!r}", reason=f"allowed: {', '.join(map(str, arguments))}")
    if origin is typing.Literal or (origin is Mapping and isinstance(value, dict)):
        return value
    if kind is TokenRow:
        return row_from_json(value, location)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast("type", kind), value, location)
    return _decode_plain(kind, value, location)


def _decode_plain(kind: object, value: object, location: str) -> object:
    if kind is float and type(value) in (int, float):
        return float(typing.cast("float", value))
    if kind is bytes and isinstance(value, str):
        try:
            return value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise TrajectoryError(f"{location} has unpaired surrogates, which encode no byte") from None
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(value)
        except ValueError:
            raise TrajectoryError(f"{location} is {value!r}", reason=f"{kind.__name__} has no such value") from None
    if kind in {str, int, bool, types.NoneType} and type(value) is kind:
        return value
    raise TrajectoryError(f"{location} is of type {type(value).__name__}, not {getattr(kind, '__name__', kind)}")


def _decode_union(choices: tuple[object, ...], value: object, location: str) -> object:
    """Decode a value as the first type that fits, or raise the error of the last type other than None."""
    if value is None and types.NoneType in choices:
        return None
    *choices_before, last_choice = (choice for choice in choices if choice is not types.NoneType)
    for choice in choices_before:
        try:
            return _decode(choice, value, location)
        except TrajectoryError:
            continue
    return _decode(last_choice, value, location)


def _decode_tuple(arguments: tuple[object, ...], value: object, location: str) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise TrajectoryError(f"{location} is of type {type(value).__name__}, not list")
    kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
    if len(kinds) != len(value):
        raise TrajectoryError(f"{location} has {len(value)} entries, not {len(kinds)}")
    return tuple(_decode(kinds[index], item, f"{location}[{index}]") for index, item in enumerate(value))


_hints = functools.cache(typing.get_type_hints)


def _decode_dataclass(kind: type, value: object, location: str) -> object:
    if not isinstance(value, dict):
        raise TrajectoryError(f"{location} is of type {type(value).__name__}, not object")
    hints = _hints(kind)
    if unknown := sorted(value.keys() - hints.keys()):
        raise TrajectoryError(f"{location} has the unknown field {unknown[0]!r}")
    if missing := [name for name in hints if name not in value]:
        raise TrajectoryError(f"{location} lacks the field {missing[0]!r}")
    return kind(**{name: _decode(hints[name], item, f"{location}.{name}") for name, item in value.items()})


_LARGEST = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class _StoredRow:
    """A token row in its file format.

    Attributes:
        turns: the row's turns.
        length: the number of tokens.
        ids: the token ids, as compressed 32-bit integers in base64.
        logprobs: the log-probabilities, as compressed 64-bit floats in base64.
        loss: half-open spans ``[start, end]`` of the tokens that carry loss.
        versions: runs ``[version, count]`` of policy versions.
    """

    turns: tuple[int, ...]
    length: int
    ids: str
    logprobs: str
    loss: tuple[tuple[int, int], ...]
    versions: tuple[tuple[int, int], ...]


def row_to_json(row: TokenRow) -> object:
    """Convert a token row to compact JSON, with the fields of :class:`_StoredRow`."""
    spans = tuple(span.span() for span in re.finditer(rb"\x01+", row.mask))
    stored_row = _StoredRow(row.turns, len(row.ids), _packed(row.ids), _packed(row.logprobs), spans, row.versions)
    return to_json(stored_row)


def row_from_json(value: object, location: str) -> TokenRow:
    """Decode the token row that :func:`row_to_json` encoded.

    Args:
        value: the decoded JSON.
        location: the row's name in error messages.

    Raises:
        TrajectoryError: the data is damaged.
    """
    row = from_json(_StoredRow, value, location=location)
    ids: array[int] = _unpacked("i", row.ids, f"{location}.ids")
    logprobs: array[float] = _unpacked("d", row.logprobs, f"{location}.logprobs")
    if not len(ids) == len(logprobs) == row.length:
        raise TrajectoryError(f"{location} has {len(ids)} ids and {len(logprobs)} log-probabilities, not {row.length}")
    counts = [count for _, count in row.versions]
    if counts and (min(counts) < 1 or sum(counts) != row.length):
        raise TrajectoryError(f"{location}.versions are not of {row.length} tokens")
    mask, previous_end = bytearray(row.length), 0
    for start, end in row.loss:
        if not previous_end <= start < end <= row.length:
            reason = f"the row has {row.length} tokens"
            raise TrajectoryError(f"{location}.loss has the invalid span {[start, end]}", reason=reason)
        mask[start:end] = b"\x01" * (end - start)
        previous_end = end
    return TokenRow(ids, logprobs, bytes(mask), row.turns, row.versions)


def _packed(numbers: array[int] | array[float]) -> str:
    """Compress an array. Its bytes are little-endian, like all machines that MiniSandbox supports."""
    return base64.b64encode(zlib.compress(numbers.tobytes())).decode("ascii")


def _unpacked(typecode: str, text: str, location: str) -> array[typing.Any]:
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(text, validate=True), _LARGEST)
        if not inflater.eof:
            raise ValueError("truncated")
        return array(typecode, data)
    except (ValueError, zlib.error) as error:
        raise TrajectoryError(f"{location} cannot be read", reason=f"it is damaged: {error}") from error
