"""Token rows in JSON: compact and bit-exact."""

from __future__ import annotations

import base64
import re
import sys
import zlib
from array import array

from minisandbox.errors import TrajectoryError
from minisandbox.models import TokenRow

_LARGEST = 1 << 30


def row_to_json(row: TokenRow) -> dict[str, object]:
    """Return a row in its JSON form.

    Numbers are little-endian arrays (32-bit ids, 64-bit floats), compressed by zlib, in base64. ``loss`` is a list of
    half-open spans ``[start, end]`` of the tokens that carry loss.

    Args:
        row: the row.
    """
    return {
        "turns": list(row.turns),
        "length": len(row.ids),
        "ids": _packed(row.ids),
        "logprobs": _packed(row.logprobs),
        "loss": [[span.start(), span.end()] for span in re.finditer(rb"\x01+", row.mask)],
    }


_KEYS = {"turns", "length", "ids", "logprobs", "loss"}


def row_from_json(value: object, location: str) -> TokenRow:
    """Return the row that :func:`row_to_json` encoded.

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
    if not isinstance(turns, list) or not all(type(turn) is int for turn in turns):
        raise TrajectoryError(f"{location}.turns is not a list of turn indices")
    ids: array[int] = array("i", _unpacked(value["ids"], 4, f"{location}.ids"))
    logprobs: array[float] = array("d", _unpacked(value["logprobs"], 8, f"{location}.logprobs"))
    if sys.byteorder == "big":
        ids.byteswap()
        logprobs.byteswap()
    if not len(ids) == len(logprobs) == length:
        raise TrajectoryError(f"{location} has {len(ids)} ids and {len(logprobs)} log-probabilities, not {length}")
    return TokenRow(ids, logprobs, _mask(loss, length, f"{location}.loss"), tuple(turns))


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
