"""Print tables and JSON to stdout, and progress and the errors of many tasks to stderr."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import enum
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Self, TextIO

from minisandbox.errors import InvalidValue, MiniSandboxError, clean

Once = Callable[[str, str], str]
"""Type of the method :meth:`Repeats.once`."""
_IMAGE_OR_LOG = re.compile(r" of image '[^']*'|[^\s']*/logs/[^\s';]+")
"""Parts of an error message that differ between tasks with the same error, in addition to the task's id."""
_MANY_ROWS = 1000  # number of rows that rich prints in a second


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def require_positive(args: argparse.Namespace, *options: str) -> None:
    """Check that options are positive numbers.

    Args:
        args: the command line.
        options: names of options; None as a value means that the option was not given.

    Raises:
        InvalidValue: an option is zero, negative or not a number.
    """
    for option in options:
        value = getattr(args, option)
        if value is not None and not value > 0:
            raise InvalidValue(f"--{option} {value} is not a positive number", hint=f"for instance --{option} 1")


def print_json(value: object) -> None:
    """Print one JSON document.

    Args:
        value: the document, which may contain dataclasses, enums, paths, bytes and tuples.
    """
    print(json.dumps(plain(value), indent=1))


def plain(value: object) -> object:
    """Convert a value to JSON types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    match value:
        case enum.Enum():
            return value.value
        case PurePath():
            return str(value)
        case bytes():
            return value.decode("utf-8", "replace")
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    return value


def plain_fields(value: object) -> dict[str, object]:
    """Return the fields of a dataclass in JSON types, by name."""
    fields = plain(value)
    assert isinstance(fields, dict)
    return fields


def put(text: str = "", *, end: str = "\n", flush: bool = False) -> None:
    """Print text to stdout without control characters; all output but JSON and tables must use this function."""
    print(clean(text), end=end, flush=flush)


def put_styled(text: str) -> None:
    """Print a coloured line from which the caller has removed control characters."""
    print(text)


def say(*lines: str) -> None:
    """Print lines to stderr; a closed stderr is ignored."""
    _write_error("".join(f"{clean(line)}\n" for line in lines))


def _write_error(text: str) -> None:
    with contextlib.suppress(OSError):  # a closed stderr leaves no way to report the error
        print(text, end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def ray_output_to_stderr() -> Iterator[None]:
    """Redirect the node messages of Ray's threads to stderr, because stdout may carry JSON."""
    stream = sys.stdout
    with contextlib.redirect_stdout(_StdoutWithoutRay(stream)):  # type: ignore[type-var] # see __getattr__
        yield


class _StdoutWithoutRay:
    """Write to stdout, but to stderr in Ray's threads; Ray has no option for the destination of its messages."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        is_ray = threading.current_thread().name.startswith("ray_")
        return (sys.stderr if is_ray else self._stream).write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def clean_line(text: str) -> str:
    """Replace control characters and line breaks, so that a name cannot forge another line of output."""
    return clean(text).replace("\n", "\N{REPLACEMENT CHARACTER}")


def print_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Collection[str] = (),
    unwrapped: Collection[str] = (),
) -> None:
    """Print a table to stdout, wrapped to fit a terminal; print one line per row if there are many or no terminal.

    Args:
        titles: the headings of the columns.
        rows: the cells of each row.
        numbers: titles of columns with numbers, which are aligned to the right and not wrapped.
        unwrapped: titles of further columns whose cells are not wrapped.
    """
    rows = [[clean_line(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty() or len(rows) > _MANY_ROWS:
        _print_lines(titles, rows, numbers)
        return
    from rich.console import Console  # noqa: PLC0415 - only tables on terminals need rich
    from rich.table import Table  # noqa: PLC0415 - only tables on terminals need rich
    from rich.text import Text  # noqa: PLC0415 - only tables on terminals need rich

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    unwrapped = {*numbers, *unwrapped}
    for title in titles:
        justify = "right" if title in numbers else "left"
        table.add_column(title, justify=justify, no_wrap=title in unwrapped, overflow="fold")  # type: ignore[arg-type] # rich declares literals
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    # Let a narrow terminal break the lines, because rich would shrink columns to one letter.
    minimum = _least_width(titles, rows, unwrapped)
    Console(highlight=False, width=max(Console().width, minimum)).print(table)


def _print_lines(titles: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str]) -> None:
    """Print one line per row; rich takes seconds for thousands of rows."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    justify = [str.rjust if title in numbers else str.ljust for title in titles]
    lines = []
    for row in (titles, *rows):
        cells = [align(cell, width) for align, cell, width in zip(justify, row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    print("\n".join(lines))


def _least_width(titles: Sequence[str], rows: Sequence[Sequence[str]], unwrapped: Collection[str]) -> int:
    """Return the minimum width of a table, at which its wrapped columns are still readable."""
    total_width = 0
    for title, *cells in zip(titles, *rows, strict=True):
        full_width = max(len(cell) for cell in (title, *cells))
        total_width += 2 + (full_width if title in unwrapped else min(full_width, _NARROW))
    return total_width


_NARROW = 16
_STYLES = {
    "ok": "green", "valid": "green", "resolved": "green", "as expected": "green",
    "degraded": "yellow", "untried": "yellow", "unconfirmed": "yellow",
    "missing": "bold red", "invalid": "bold red", "error": "bold red",
    "infra_error": "bold red", "tampered": "bold red", "NOT as expected": "bold red",
}  # fmt: skip


def human_seconds(seconds: float) -> str:
    """Format seconds: ``8 ms``, ``1.3 s``, ``4 min 10 s``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def human_age(seconds: float) -> str:
    """Format an age: ``just now``, ``5 min``, ``3 h``, ``12 d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "just now"


class Progress:
    """Shows progress on stderr as permanent lines and, on a terminal, as a status line that is overwritten.

    Thread-safe.

    Args:
        quiet: whether to print only announcements.

    Attributes:
        terminal: whether stderr is a terminal and the status line is shown.
        repeats: record of the errors that were printed.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.terminal = sys.stderr.isatty() and not quiet
        self.repeats = Repeats()
        self._quiet = quiet
        self._print: Callable[[str], None] | None = None
        self._lock = threading.Lock()
        self._shown = False
        self._began = time.monotonic()

    def note(self, text: str) -> None:
        """Print a permanent line, unless quiet."""
        if not self._quiet:
            self.announce(f"[{time.monotonic() - self._began:6.1f} s] {text}")

    def announce(self, text: str) -> None:
        """Print a permanent line even if quiet."""
        with self._lock:
            if self._print is not None:  # the live display would overwrite a line that is printed to stderr directly
                self._print(clean(text))
                return
            self._wipe()
            _write_error(f"{clean(text)}\n")

    def status(self, text: str) -> None:
        """Show the current activity in the status line if stderr is a terminal."""
        if self.terminal:
            with self._lock:
                if self._print is not None:
                    return
                self._wipe()
                _write_error(clean(text)[:100])
                self._shown = True

    def redirect(self, print_line: Callable[[str], None] | None) -> None:
        """Print lines through a live display, and drop statuses until the redirection ends.

        Args:
            print_line: prints a line; None ends the redirection.
        """
        with self._lock:
            self._wipe()
            self._print = print_line

    def close(self) -> None:
        """Erase the status line."""
        with self._lock:
            self._wipe()

    def __enter__(self) -> Self:
        """Enter a ``with`` block that erases the status line at its end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Erase the status line."""
        self.close()

    def _wipe(self) -> None:
        if self._shown:
            _write_error("\r\x1b[K")
            self._shown = False


class Repeats:
    """Records the errors that were printed; thread-safe."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}

    def once(self, name: str, text: str) -> str:
        """Return an error's text the first time, and later only the name of the task for which it was printed.

        Args:
            name: the task's id.
            text: the error.
        """
        key = same_error(name, text)
        if key not in self._first:
            self._first[key] = name
            return text
        first_name = self._first[key]
        return "the same error as before" if first_name == name else f"the same error as {first_name}"


def same_error(name: str, text: str) -> str:
    """Return an error's text without the parts that depend on the task, to compare the errors of several tasks.

    Args:
        name: the task's id.
        text: the error.
    """
    return _IMAGE_OR_LOG.sub("", text.replace(name, ""))


def raise_failures(failures: Mapping[str, MiniSandboxError], noun: str = "tasks") -> None:
    """Print each error once, with the number of tasks that it affects, and raise the first error.

    Args:
        failures: the errors, by task; may be empty.
        noun: plural noun for the keys in messages.

    Raises:
        MiniSandboxError: the first error.
    """
    groups: dict[tuple[type, str], list[str]] = {}
    for name, error in failures.items():
        key = type(error), same_error(name, f"{error.what}; {error.reason}")
        groups.setdefault(key, []).append(name)
    errors = [_summary(failures[names[0]], names, noun) for names in groups.values()]
    for error in errors[1:]:
        say(f"minisandbox: {error}")
    if errors:
        raise errors[0]


def _summary(error: MiniSandboxError, names: list[str], noun: str) -> MiniSandboxError:
    if len(names) == 1:
        return error.about(names[0])
    summary = copy.copy(error)
    summary.what = f"{len(names)} {noun}: {error.what.removeprefix(f'{names[0]}: ')} (first: {names[0]})"
    return summary
