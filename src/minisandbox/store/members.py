"""Reading a tar archive of the kind that :mod:`.exporting` writes, and no other.

An archive may come from anybody. What a header can say besides a name and a size (sparse files, global settings, chains
of extensions) costs a reader time and memory before anybody sees it, so that nothing else is read here. The format is
that of POSIX.1-2001, pax(1).
"""

from __future__ import annotations

from minisandbox.store.growing import Readable

_BLOCK = 512
_NAME, _SIZE, _SUM, _KIND = slice(0, 100), slice(124, 136), slice(148, 156), slice(156, 157)
_PREFIX = slice(345, 500)
_FILE, _EXTENSION = b"0", b"x"
_LONGEST_EXTENSION = _BLOCK
"""Bytes. It says the size of a file of more than 8 GiB."""
_CHUNK = 1 << 20


class Member:
    """A file of an archive, to be read before the next one is asked for.

    Attributes:
        name: its name.
        size: its bytes.
    """

    def __init__(self, name: str, size: int, source: Readable) -> None:
        self.name = name
        self.size = size
        self.left = size
        self._source = source

    def read(self, size: int, /) -> bytes:
        """Return so many bytes, fewer at its end.

        Raises:
            EOFError: the archive is truncated.
        """
        data = _exactly(self._source, min(size, self.left))
        self.left -= len(data)
        return data


class Members:
    """The files of an archive, in their order.

    Args:
        source: the archive, not compressed.
    """

    def __init__(self, source: Readable) -> None:
        self._source = source
        self._current: Member | None = None

    def next(self) -> Member | None:
        """Go on to the next file; None at the archive's end.

        Raises:
            EOFError: the archive is truncated.
            ValueError: this is no archive, or one that an export does not write.
        """
        self._pass_over()
        header = _exactly(self._source, _BLOCK)
        if header == bytes(_BLOCK):
            return None
        _check(header)
        size = None
        if header[_KIND] == _EXTENSION:
            length = _number(header[_SIZE])
            if length > _LONGEST_EXTENSION:
                raise ValueError(f"a header of {length} bytes")
            size = _size_of(_exactly(self._source, length))
            _exactly(self._source, -length % _BLOCK)
            header = _exactly(self._source, _BLOCK)
            _check(header)
        if header[_KIND] != _FILE or header[_PREFIX].strip(b"\0"):
            raise ValueError(f"a member of type {header[_KIND]!r}, which is not a file with a short name")
        name = header[_NAME].rstrip(b"\0").decode("ascii")
        self._current = Member(name, _number(header[_SIZE]) if size is None else size, self._source)
        return self._current

    def _pass_over(self) -> None:
        if (member := self._current) is not None:
            while member.left:
                member.read(_CHUNK)
            _exactly(self._source, -member.size % _BLOCK)
            self._current = None


def _exactly(source: Readable, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        data = source.read(min(size - len(found), _CHUNK))
        if not data:
            raise EOFError("it ends too early")
        found += data
    return bytes(found)


def _check(header: bytes) -> None:
    blank = header[: _SUM.start] + b" " * 8 + header[_SUM.stop :]
    if _number(header[_SUM]) != sum(blank):
        raise ValueError("a header's checksum is wrong")


def _number(field: bytes) -> int:
    digits = field.strip(b" \0")
    if not digits or digits.strip(b"01234567"):
        raise ValueError(f"{field!r} is no octal number")
    return int(digits, 8)


def _size_of(extension: bytes) -> int:
    """The size in an extended header, which has one record: its own length, a space, ``size=``, digits, a newline."""
    digits = extension.partition(b" size=")[2].removesuffix(b"\n")
    if extension != b"%d size=%b\n" % (len(extension), digits) or not digits.isdigit() or len(digits) > 18:
        raise ValueError(f"an extended header that says {extension[:100]!r}, and not a size alone")
    return int(digits)
