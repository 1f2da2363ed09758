"""Compress and decompress Zstandard (RFC 8878) for exports and frozen layers; decompress gzip fast.

The standard library supports Zstandard only from Python 3.14 on. Until then the functions import the package
`zstandard` when they are called. The package `isal` decompresses gzip in half of zlib's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Protocol, cast

MAGIC = b"\x28\xb5\x2f\xfd"  # RFC 8878, section 3.1.1
_MAX_WINDOW = 1 << 29
"""Maximum window in bytes, which bounds memory for untrusted files; engines allow the same (klauspost/compress)."""
_READ_SIZE = 1 << 20


class ByteSource(Protocol):
    """Source of compressed bytes."""

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes; b"" at the end."""


class Decompressor(Protocol):
    """Decompressor of one stream, with the interface of :class:`bz2.BZ2Decompressor`."""

    @property
    def eof(self) -> bool:
        """Whether the end of the stream was reached."""

    @property
    def needs_input(self) -> bool:
        """Whether :meth:`decompress` needs further compressed bytes."""

    @property
    def unused_data(self) -> bytes:
        """The bytes after the end of the stream."""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Return at most ``max_length`` decompressed bytes."""


def gzip_decompressor() -> Decompressor:
    """Return a decompressor of one gzip member; it raises :func:`gzip_error`."""
    from isal import igzip_lib  # noqa: PLC0415 - rarely needed

    return igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_GZIP)


def gzip_error() -> type[Exception]:
    """Return the exception class for a damaged gzip member."""
    from isal import igzip_lib  # noqa: PLC0415 - rarely needed

    return igzip_lib.error  # type: ignore[return-value] # the stub declares an instance


class CorruptedError(ValueError):
    """A compressed stream is damaged."""


class WindowError(CorruptedError):
    """A compressed stream needs a larger window than allowed."""


@contextmanager
def compressor(file: IO[bytes], level: int, *, window: int = 0, threads: int = 0) -> Iterator[IO[bytes]]:
    """Yield a file object that compresses its content to ``file``, as one frame with a checksum.

    Args:
        file: the file to write; it stays open.
        level: compression level, 1 to 19.
        window: base-2 logarithm of the window size in bytes; 0 uses the level's default.
        threads: number of worker threads; -1 uses one for each CPU.
    """
    import zstandard  # noqa: PLC0415 - slow to import, and rarely needed

    parameters = zstandard.ZstdCompressionParameters.from_level(
        level, window_log=window, threads=threads, write_checksum=True
    )
    with zstandard.ZstdCompressor(compression_params=parameters).stream_writer(file, closefd=False) as writer:
        yield writer


class Decompressed:
    """Read the decompressed content of a stream.

    Args:
        file: the compressed stream.
        head: bytes that were already read from the stream.
        every_frame: whether to read all frames, not only the first one.
    """

    def __init__(self, file: ByteSource, head: bytes = b"", *, every_frame: bool = False) -> None:
        import zstandard  # noqa: PLC0415 - slow to import, and rarely needed

        self._error = zstandard.ZstdError
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        source = cast("IO[bytes]", _Prepended(head, file))
        self._reader = decompressor.stream_reader(
            source, read_size=_READ_SIZE, closefd=False, read_across_frames=every_frame
        )

    def read(self, size: int = -1, /) -> bytes:
        """Read at most ``size`` decompressed bytes; b"" at the end.

        Raises:
            WindowError: the stream needs a larger window than allowed.
            CorruptedError: the stream is damaged.
        """
        try:
            return self._reader.read1(size)  # read() would lose the bytes before an error
        except self._error as error:
            if "too much memory" in str(error):  # zstandard does not expose ZSTD_error_frameParameter_windowTooLarge
                raise WindowError(f"its zstd window is larger than {_MAX_WINDOW >> 20} MiB") from error
            raise CorruptedError(str(error)) from error


class _Prepended:
    """Put bytes that were already read back in front of a stream."""

    def __init__(self, head: bytes, file: ByteSource) -> None:
        self._head = head
        self._file = file

    def read(self, size: int = -1, /) -> bytes:
        """Read the bytes that were put back, then the rest of the stream."""
        head, self._head = self._head, b""
        return head or self._file.read(size)
