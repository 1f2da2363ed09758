"""Zstandard (RFC 8878) in one place: exports and frozen layers are written and read with it.

Python has it from 3.14 on; until then `zstandard` is loaded by what compresses, and only then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Protocol, cast

MAGIC = b"\x28\xb5\x2f\xfd"  # RFC 8878, section 3.1.1
_WINDOW = 1 << 29
"""Bytes of memory that a foreign file may ask for to be unpacked; engines allow as much (klauspost/compress, zstd)."""
_READ = 1 << 20


class ByteSource(Protocol):
    """What compressed bytes are read from."""

    def read(self, size: int, /) -> bytes:
        """Return at most so many bytes; none at the end."""


class CorruptedError(ValueError):
    """A compressed stream is not what was written."""


class WindowError(CorruptedError):
    """A compressed stream needs more memory to be unpacked than a foreign file may ask for."""


@contextmanager
def compressor(file: IO[bytes], level: int, *, window: int = 0, threads: int = 0) -> Iterator[IO[bytes]]:
    """Yield a file object; its content is written compressed to a file as one frame with a checksum.

    Args:
        file: where to; it stays open.
        level: 1 to 19: how hard to try.
        window: the power of two of bytes in which equal content is looked for; 0: as the level has it.
        threads: how many help; -1: as many as there are CPUs.
    """
    import zstandard  # noqa: PLC0415 - only those who compress pay for it

    parameters = zstandard.ZstdCompressionParameters.from_level(
        level, window_log=window, threads=threads, write_checksum=True
    )
    with zstandard.ZstdCompressor(compression_params=parameters).stream_writer(file, closefd=False) as out:
        yield out


class Decompressed:
    """What a compressed stream holds.

    Args:
        file: the stream.
        head: what was read of it already.
        every_frame: whether to read all frames of it, not only the first.
    """

    def __init__(self, file: ByteSource, head: bytes = b"", *, every_frame: bool = False) -> None:
        import zstandard  # noqa: PLC0415 - only those who decompress pay for it

        self._error = zstandard.ZstdError
        unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        source = cast("IO[bytes]", _Rest(head, file))
        self._reader = unpacker.stream_reader(source, read_size=_READ, closefd=False, read_across_frames=every_frame)

    def read(self, size: int = -1, /) -> bytes:
        """Read what was compressed, at most so many bytes.

        Raises:
            WindowError: the stream needs too much memory.
            CorruptedError: a byte of the stream is not what was written.
        """
        try:
            return self._reader.read1(size)  # read() loses what precedes an error
        except self._error as error:
            if "too much memory" in str(error):  # ZSTD_error_frameParameter_windowTooLarge has no number here
                raise WindowError(f"its zstd window is larger than {_WINDOW >> 20} MiB") from error
            raise CorruptedError(str(error)) from error


class _Rest:
    """A stream whose first bytes were read already."""

    def __init__(self, head: bytes, file: ByteSource) -> None:
        self._head = head
        self._file = file

    def read(self, size: int = -1, /) -> bytes:
        """Read the first bytes again, then the others."""
        head, self._head = self._head, b""
        return head or self._file.read(size)
