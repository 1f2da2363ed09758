"""Edits of test files: text in place of an expression, and everything else as it was."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Self

from minisandbox.syntax import parse_python

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Edit:
    """Text in place of a range of bytes.

    Attributes:
        strength: of several, the strongest is made.
    """

    start: int
    end: int
    text: str
    strength: int = 0

    def moved(self, by: int) -> Edit:
        """Return it for a text that begins elsewhere."""
        return replace(self, start=self.start + by, end=self.end + by)


def apply_edits(content: bytes, edits: Iterable[Edit]) -> bytes:
    """Make edits, which do not overlap."""
    for edit in sorted(edits, key=lambda one: one.start, reverse=True):
        content = content[: edit.start] + edit.text.encode() + content[edit.end :]
    return content


class Source:
    """A test file as bytes and as a tree."""

    def __init__(self, content: bytes, tree: ast.Module) -> None:
        self.content = content
        self._tree = tree
        lengths = [len(line) for line in content.split(b"\n")]
        self._starts = [sum(lengths[:number]) + number for number in range(len(lengths))]

    @classmethod
    def read(cls, content: bytes) -> Self | None:
        """Read a file; None for what this Python cannot parse (Python 2's own syntax), or is not plain UTF-8."""
        if content.startswith(b"\xef\xbb\xbf") or b"\r" in content or b"\f" in content:
            return None
        try:
            tree = parse_python(content.decode())
        except UnicodeDecodeError:
            return None
        return None if tree is None else cls(content, tree)

    def functions(self) -> Iterator[tuple[str, Function]]:
        """Yield test functions and methods by what pytest calls them."""
        return _functions(self._tree.body, "")

    def walk(self) -> Iterator[ast.AST]:
        """Yield every node."""
        return ast.walk(self._tree)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return where a node lies, in bytes."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, node: ast.expr) -> str:
        """Return a node's own text."""
        start, end = self.span(node)
        return self.content[start:end].decode()

    def indent(self, statement: ast.stmt) -> str | None:
        """Return what stands before a statement, or None if that is not white space alone."""
        start = self._starts[statement.lineno - 1]
        before = self.content[start : start + statement.col_offset].decode()
        return before if not before.strip() else None

    def copied(self, function: Function, name: str, edit: Edit | None) -> Edit | None:
        """Return what adds a copy of a function below it, under another name and with an edit, if any, made in it.

        None where something else stands on its first or last line.
        """
        begin = min((function, *function.decorator_list), key=lambda node: node.lineno)
        start = self._starts[begin.lineno - 1]
        end = self.line_end(self.span(function)[1])
        after = self.content[self.span(function)[1] : end].strip()
        before = self.content[start : start + begin.col_offset]
        if before.strip(b" \t@") or (after and not after.startswith(b"#")):
            return None
        edits = [self.renamed(function, name), edit]
        text = apply_edits(self.content[start:end], [one.moved(-start) for one in edits if one])
        return Edit(end, end, f"\n\n{text.decode()}")

    def renamed(self, function: Function, name: str) -> Edit:
        """Return what gives a function another name."""
        named = self.content.find(function.name.encode(), self.content.find(b"def ", self.span(function)[0]) + 4)
        return Edit(named, named + len(function.name.encode()), name)

    def line_end(self, position: int) -> int:
        """Return where the line of a position ends."""
        found = self.content.find(b"\n", position)
        return len(self.content) if found < 0 else found


def _functions(body: Iterable[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
    for node in body:
        if isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}::")
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions(node.body, prefix)
