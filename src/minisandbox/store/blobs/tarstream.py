"""Read a tar archive as a stream, with ustar, pax and GNU headers (tar(5), POSIX.1-2017 pax).

The standard library's ``tarfile`` is unsafe for untrusted archives. Its streaming mode ends silently at a damaged
header, and it reads extended headers of any size into memory (2 GiB for a header that claims 1 GiB). Python 3.11.7
needs 18 s for an extended header with 128 KiB of digits (CVE-2024-6232).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from minisandbox.errors import ImageRefused

FILE, HARD_LINK, LINK, DIRECTORY, FIFO = "file", "hard link", "link", "directory", "FIFO"
CHARACTER, BLOCK = "character device", "block device"
_KINDS = {
    b"0": FILE, b"\0": FILE, b"7": FILE, b"1": HARD_LINK, b"2": LINK, b"3": CHARACTER, b"4": BLOCK,
    b"5": DIRECTORY, b"6": FIFO,
}  # fmt: skip
_SIZE = 512
_ZEROS = bytes(_SIZE)
_MOST_HEADER = 1 << 20
"""Maximum bytes of an extended header; a path has at most 4,095 bytes, an extended attribute 64 KiB (limits.h)."""
_MOST_HEADERS = 64
"""Maximum number of extended headers of one member."""
_LONGEST_PATH = 4096  # limits.h: PATH_MAX
_MOST_ATTRIBUTES = 1 << 16
"""Maximum bytes of one member's extended attributes (limits.h: XATTR_LIST_MAX)."""
_LONGEST_NUMBER = 20
_NUMBER = re.compile(rb"-?[0-9]{1,20}")
_USUAL_OCTAL = re.compile(rb"[0-7]+[\0 ]")
_USUAL_NUMBERS = re.compile(rb"([0-7]{7})[\0 ]" * 3 + rb"([0-7]{11})[\0 ]" * 2)
"""Mode, uid, gid, size and mtime of a header as most programs write them."""
_ADLER_BASE = 65521
_MOMENT = re.compile(rb"(-?)([0-9]{1,12})(?:\.([0-9]{0,30}))?")
_NANO = 10**9


class Stream(Protocol):
    """Source of an archive's bytes."""

    @property
    def name(self) -> str:
        """Name of the archive in error messages."""

    def some(self, size: int) -> bytes:
        """Read between 1 and ``size`` bytes; b"" at the end."""

    def exactly(self, size: int) -> bytes:
        """Read ``size`` bytes; fewer only at the end."""

    def skip(self, size: int) -> bool:
        """Skip ``size`` bytes; return False if the stream is shorter."""


@dataclass(slots=True)
class Member:
    """One member of an archive.

    Attributes:
        name: path of the member, exactly as in the archive.
        kind: type of the member, one of the constants above.
        mode: permission bits.
        uid: numeric owner.
        gid: numeric group.
        mtime: nanoseconds since the epoch.
        size: bytes of the content.
        target: target of a symbolic or hard link.
        attributes: extended attributes.
    """

    name: bytes
    kind: str
    mode: int
    uid: int
    gid: int
    mtime: int
    size: int
    target: bytes = b""
    attributes: dict[str, bytes] = field(default_factory=dict)


class MemberReader(Protocol):
    """Iterator over members. The content of a member must be read before the iterator advances."""

    def __iter__(self) -> Iterator[Member]:
        """Yield the members."""

    def content(self) -> Iterator[bytes]:
        """Yield the content of the member that was yielded last."""

    def refuse(self, reason: str, name: bytes | None = None) -> NoReturn:
        """Raise an error for the member ``name``; None means the member that follows the last one read."""


class TarReader:
    """Read the members of an archive in order.

    Args:
        stream: the archive.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._data = self._padding = 0
        self._last = b""

    def refuse(self, reason: str, name: bytes | None = None, hint: str = "is it an image that you trust?") -> NoReturn:
        """Raise an error for a malformed or unsafe archive.

        Args:
            reason: what is wrong.
            name: name of the member; None for the member that follows the last one read.
            hint: what the user can do.

        Raises:
            ImageRefused: always.
        """
        subject = self._last if name is None else name
        label = "its first entry" if name is None and not subject else f"entry {_shown(subject)}"
        raise ImageRefused(
            f"{self._stream.name}: {label if name is not None or not subject else f'the one after {label}'} is refused",
            reason=reason,
            hint=f"nothing of it was published; {hint}",
        )

    def __iter__(self) -> Iterator[Member]:
        """Yield the members; unread content of a member is skipped.

        Raises:
            ImageRefused: the archive is malformed or ends early.
        """
        while (header := self._next_header()) is not None:
            yield self._member(header)

    def content(self) -> Iterator[bytes]:
        """Yield the content of the member that was yielded last.

        Raises:
            ImageRefused: the archive ends early.
        """
        while self._data:
            chunk = self._stream.some(self._data)
            if not chunk:
                self.refuse("the archive ends in the middle of its content", self._last)
            self._data -= len(chunk)
            yield chunk

    def _member(self, header: bytes) -> Member:
        """Read a member's headers."""
        records: dict[str, bytes] = {}
        count = 0
        while (flag := header[156:157]) in b"xgLK":
            count += 1
            if count > _MOST_HEADERS:
                self.refuse(f"it has more than {_MOST_HEADERS} extended headers")
            extension = self._extended(header)
            if flag == b"L":
                records["path"] = extension.rstrip(b"\0")
            elif flag == b"K":
                records["linkpath"] = extension.rstrip(b"\0")
            elif flag == b"x":  # container engines use Go's archive/tar, which ignores global headers (g)
                records |= self._records(extension)
            next_header = self._next_header()
            if next_header is None:
                self.refuse("the archive ends after an extended header")
            header = next_header
        return self._described(header, records)

    def _described(self, header: bytes, records: dict[str, bytes]) -> Member:
        name = (records and (records.get("GNU.sparse.name") or records.get("path"))) or _own_name(header)
        self._last = name
        flag = header[156:157]
        kind = _KINDS.get(flag)
        if flag == b"S" or (records and any(key.startswith("GNU.sparse.") for key in records)):
            self.refuse(
                "it is a sparse file, which cannot be read here", name, "make the archive without tar's --sparse (-S)"
            )
        if kind is None:
            self.refuse(f"it has the type {flag!r}, which no layer has", name)
        if kind == FILE and name.endswith(b"/"):
            kind = DIRECTORY
        target = records.get("linkpath") or _text(header[157:257])
        if b"\0" in name or b"\0" in target:
            self.refuse("its name has a NUL character", name)
        if len(name) > _LONGEST_PATH or len(target) > _LONGEST_PATH:
            self.refuse(f"its name or what it links to is too long: more than {_LONGEST_PATH} bytes", name)
        usual = _USUAL_NUMBERS.match(header, 100)
        if usual is None or not records.keys().isdisjoint(("uid", "gid", "size")):
            mode, uid, gid, size = self._numbers(header, records, name)
            mtime = 0 if records.get("mtime") else self._field(header[136:148], name)
        else:
            mode, uid, gid, size, mtime = (int(digits, 8) for digits in usual.groups())
        mtime = self._moment(records["mtime"], name) if records.get("mtime") else mtime * _NANO
        if kind != FILE:  # Go's archive/tar also ignores the size of members other than files
            size = 0
        self._data, self._padding = size, -size % _SIZE
        attributes = self._attributes(records, name) if records else {}
        return Member(name, kind, mode & 0o7777, uid, gid, mtime, size, target, attributes)

    def _numbers(self, header: bytes, records: dict[str, bytes], name: bytes) -> list[int]:
        """Return the mode, uid, gid and size; a pax record overrides the header's field."""
        numbers = [
            self._number(records[key], name) if records.get(key) else self._field(header[start:end], name)
            for key, start, end in (("", 100, 108), ("uid", 108, 116), ("gid", 116, 124), ("size", 124, 136))
        ]
        if min(numbers) < 0:
            self.refuse("it has a negative size, owner or mode", name)
        return numbers

    def _attributes(self, records: dict[str, bytes], name: bytes) -> dict[str, bytes]:
        prefix = "SCHILY.xattr."
        attributes = {key.removeprefix(prefix): value for key, value in records.items() if key.startswith(prefix)}
        if sum(len(key) + len(value) for key, value in attributes.items()) > _MOST_ATTRIBUTES:
            self.refuse(f"its extended attributes have more than {_MOST_ATTRIBUTES} bytes", name)
        return attributes

    # --- headers ---

    def _next_header(self) -> bytes | None:
        """Skip to the next header and return it, or None at the end of the archive."""
        if (unread := self._data + self._padding) and not self._stream.skip(unread):
            self.refuse("the archive ends in the middle of its content", self._last)
        self._data = self._padding = 0
        block = self._stream.exactly(_SIZE)
        if not block or block == _ZEROS:
            return None
        if len(block) < _SIZE:
            self.refuse("the archive ends in the middle of a header")
        checksum = _octal(block[148:156])
        # The low half of Adler-32 is the sum of the bytes, plus 1; the checksum counts its own field as spaces.
        total = zlib.adler32(block[:148] + b" " * 8 + block[156:]) & 0xFFFF
        if checksum is None or ((checksum + 1) % _ADLER_BASE != total and checksum != _signed_sum(block)):
            self.refuse("its header is damaged: the checksum is wrong")
        return block

    def _extended(self, header: bytes) -> bytes:
        size = self._field(header[124:136], header[:100])
        if not 0 <= size <= _MOST_HEADER:
            self.refuse(f"an extended header has {size} bytes; {_MOST_HEADER} are allowed")
        text = self._stream.exactly(size)
        padding = -size % _SIZE
        if len(text) < size or len(self._stream.exactly(padding)) < padding:
            self.refuse("the archive ends in the middle of an extended header")
        return text

    def _records(self, extension: bytes) -> dict[str, bytes]:
        """Parse a pax header: lines of ``LENGTH KEY=VALUE``, in which values may contain any byte."""
        records: dict[str, bytes] = {}
        offset = 0
        while offset < len(extension):
            space = extension.find(b" ", offset, offset + _LONGEST_NUMBER)
            length = int(extension[offset:space]) if space > offset and extension[offset:space].isdigit() else 0
            record = extension[space + 1 : offset + length]
            key, equals, value = record.partition(b"=")
            fits = 0 < length <= len(extension) - offset
            if not fits or record[-1:] != b"\n" or not equals or not key or b"\0" in key:
                self.refuse("its pax header is malformed")
            records[key.decode("utf-8", "surrogateescape")] = value[:-1]
            offset += length
        return records

    # --- fields ---

    def _field(self, field: bytes, name: bytes) -> int:
        """Parse a number in a header: octal, or base 256 (GNU) if the first bit is set."""
        if _USUAL_OCTAL.fullmatch(field):
            return int(field[:-1], 8)
        if field[0] & 0x80:
            sign_byte = field[0] if field[0] & 0x40 else field[0] & 0x3F
            number = int.from_bytes(bytes([sign_byte]) + field[1:], signed=True)
        else:
            octal = _octal(field)
            if octal is None:
                self.refuse(f"its header has the number {field!r}", name)
            number = octal
        if abs(number) >= 1 << 63:
            self.refuse("its header has a number that is too large", name)
        return number

    def _number(self, digits: bytes, name: bytes) -> int:
        if not _NUMBER.fullmatch(digits) or abs(number := int(digits)) >= 1 << 63:
            self.refuse(f"its extended header has the number {digits[:40]!r}", name)
        return number

    def _moment(self, seconds_text: bytes, name: bytes) -> int:
        match = _MOMENT.fullmatch(seconds_text)
        if match is None:
            self.refuse(f"its extended header has the time {seconds_text[:40]!r}", name)
        sign, seconds, fraction = match.groups()
        nanoseconds = int(seconds) * _NANO + int((fraction or b"")[:9].ljust(9, b"0"))
        return -nanoseconds if sign else nanoseconds


def _octal(field: bytes) -> int | None:
    digits = field.strip(b" \0").split(b"\0")[0].split(b" ")[0]
    number: int = int(digits or b"0", 8) if not digits.strip(b"01234567") else -1
    return None if number < 0 else number


def _signed_sum(block: bytes) -> int:
    """Return the checksum over signed bytes, which some old programs write instead of unsigned bytes."""
    return 8 * 32 + sum(byte - 256 if byte > 127 else byte for byte in block[:148] + block[156:])


def _text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _own_name(header: bytes) -> bytes:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _shown(name: bytes) -> str:
    label = repr(name.decode("utf-8", "backslashreplace"))
    return label if len(label) <= 200 else f"{label[:100]}...{label[-60:]}"
