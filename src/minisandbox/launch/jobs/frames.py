"""Frames: the messages between the controller and the workers of a sandbox, on a stream socket.

A frame is two big-endian 32-bit lengths, a JSON object of the first length, and bytes of the second. The codec does no
I/O: bytes go in, frames come out.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

Header = dict[str, object]
_LENGTHS = struct.Struct(">II")
_JSON = json.JSONEncoder(separators=(",", ":"))
MAX_HEADER = 8 << 20
STDIN_CREDIT = 1 << 20
"""Bytes of standard input that the controller may send before the process reads them."""


class FrameError(ValueError):
    """The peer sent bytes that are not a frame."""


def encode(header: Header, payload: bytes = b"") -> bytes:
    """Encode one frame. Surrogate escapes in the header survive the round trip."""
    encoded_header = _JSON.encode(header).encode("ascii")
    return _LENGTHS.pack(len(encoded_header), len(payload)) + encoded_header + payload


def integer(header: Header, key: str) -> int:
    """Return a field of a header that is an integer."""
    number = header[key]
    assert isinstance(number, int)
    return number


class Decoder:
    """Turns a stream of bytes into frames.

    Args:
        max_payload: size limit of a payload in bytes.
    """

    def __init__(self, max_payload: int = 0xFFFFFFFF) -> None:
        self._max_payload = max_payload
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Header, bytes]]:
        """Add received bytes; yield every frame that is now complete.

        Raises:
            FrameError: the bytes are not frames.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTHS.size:
            head_size, payload_size = _LENGTHS.unpack_from(self._buffer)
            if head_size > MAX_HEADER or payload_size > self._max_payload:
                raise FrameError(f"a frame of {head_size} and {payload_size} bytes")
            start = _LENGTHS.size + head_size
            if len(self._buffer) < start + payload_size:
                return
            header = _header(bytes(self._buffer[_LENGTHS.size : start]))
            payload = bytes(self._buffer[start : start + payload_size])
            del self._buffer[: start + payload_size]
            yield header, payload


def _header(data: bytes) -> Header:
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a header that is not JSON: {data[:80]!r}") from error
    if not isinstance(header, dict):
        raise FrameError(f"a header that is not an object: {data[:80]!r}")
    return header
