"""Edit test files: replace expressions, and leave all other bytes unchanged."""

from __future__ import annotations

import ast
import codecs
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

from minisandbox.syntax import parse_python

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Edit:
    """A replacement for a range of bytes in a file."""

    start: int
    end: int
    text: str

    def moved(self, by: int) -> Edit:
        """Return the edit with its range moved by a number of bytes."""
        return replace(self, start=self.start + by, end=self.end + by)


def apply_edits(content: bytes, edits: Iterable[Edit]) -> bytes:
    """Apply edits whose ranges do not overlap."""
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        content = content[: edit.start] + edit.text.encode() + content[edit.end :]
    return content


@dataclass(frozen=True, slots=True)
class Table:
    """A table of test parameters.

    Attributes:
        names: the names of the parameters.
        argument: the second argument of ``parametrize``: a literal table, or the name of a variable.
        values: the literal table: the argument itself, or the value of the variable.
        rows: the values of each row.
    """

    names: list[str]
    argument: ast.expr
    values: ast.expr
    rows: list[list[ast.expr]]


class PythonSource:
    """A Python test file: its bytes and its syntax tree."""

    def __init__(self, content: bytes, tree: ast.Module) -> None:
        self.content = content
        self._tree = tree
        self._all_functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
        self._classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        self._tests = dict(_functions(tree.body, ""))
        lengths = [len(line) + 1 for line in content.split(b"\n")]
        self._starts = [0, *itertools.accumulate(lengths)]
        if content.startswith(codecs.BOM_UTF8):  # the parser's offsets do not include the byte order mark
            self._starts[0] = len(codecs.BOM_UTF8)

    @classmethod
    def read(cls, content: bytes) -> Self | None:
        """Parse a file; return None if it is not UTF-8, or if this Python cannot parse it (e.g. Python 2 syntax)."""
        if b"\r" in content.replace(b"\r\n", b"") or b"\f" in content:
            return None  # the parser numbers the lines of such a file differently
        try:
            tree = parse_python(content.decode("utf-8-sig"))
        except UnicodeDecodeError:
            return None
        return None if tree is None else cls(content, tree)

    def functions(self) -> Iterator[tuple[str, Function]]:
        """Yield test functions and methods with their pytest names."""
        yield from self._tests.items()

    def function(self, name: str) -> Function | None:
        """Return a test, which may be inherited, by its pytest name in the file, such as ``TestIt::test_x``."""
        if name in self._tests:
            return self._tests[name]
        owner, _, method = name.rpartition("::")
        base = next((node for node in self._classes if node.name == owner), None)
        inherited = (self.function(f"{ast.unparse(parent)}::{method}") for parent in base.bases) if base else ()
        return next((function for function in inherited if function), None)

    def named(self, name: str) -> Function | None:
        """Return the first function or method of the file with this name."""
        return next((function for function in self._all_functions if function.name == name), None)

    def enclosing(self, line: int) -> Function | None:
        """Return the innermost function that contains a line."""
        around = [node for node in self._all_functions if node.lineno <= line <= (node.end_lineno or node.lineno)]
        return max(around, key=lambda node: node.lineno, default=None)

    def tables(self, function: Function) -> Iterator[Table]:
        """Yield the literal parameter tables of a test (``pytest.mark.parametrize``).

        A table may be the value of a module variable.
        """
        for mark in function.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("parametrize") and len(mark.args) > 1:
                names, argument = _names_of(mark.args[0]), mark.args[1]
                rows = next(self.module_values(ast.unparse(argument)), argument)
                if names and isinstance(rows, ast.List | ast.Tuple) and not _is_indirect(mark, rows):
                    yield Table(names, argument, rows, [_cells(row, len(names)) for row in rows.elts])

    def fixture_values(self, name: str) -> Iterator[ast.expr]:
        """Yield the return values of a fixture in the file."""
        fixture = self.named(name)
        if fixture is not None and any("fixture" in ast.unparse(mark) for mark in fixture.decorator_list):
            for node in ast.walk(fixture):
                if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
                    yield node.value

    def module_values(self, name: str) -> Iterator[ast.expr]:
        """Yield the values that the module assigns to a variable."""
        yield from assigned_values(self._tree.body, name)

    def attribute_values(self, name: str) -> Iterator[ast.expr]:
        """Yield the values that classes of the file, and their set-up methods, assign to an attribute."""
        for owner in self._classes:
            yield from assigned_values(owner.body, name)
            for method in owner.body:
                if isinstance(method, Function) and "setup" in method.name.lower().replace("_", ""):
                    yield from assigned_values(method.body, f"self.{name}")

    def uses(self, name: str, functions: Iterable[Function]) -> bool:
        """Return whether any of the functions reads this variable or attribute."""
        return any(_reads(node, name) for function in functions for node in ast.walk(function))

    def is_read_by_tests_alone(self, name: str) -> bool:
        """Return whether only test functions read a variable, an attribute or a fixture."""
        functions = [function for function in self._tests.values() if function.name.startswith("test")]
        node_ids = {id(node) for function in functions for node in ast.walk(function)}
        return not any(
            id(node) not in node_ids and (_reads(node, name) or (isinstance(node, ast.arg) and node.arg == name))
            for node in ast.walk(self._tree)
        )

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return the byte range of a node."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, node: ast.expr) -> str:
        """Return the source text of a node."""
        start, end = self.span(node)
        return self.content[start:end].decode()

    def indent(self, statement: ast.stmt) -> str | None:
        """Return the indentation of a statement, or None if other code precedes it on its line."""
        start = self._starts[statement.lineno - 1]
        line_prefix = self.content[start : start + statement.col_offset].decode()
        return line_prefix if not line_prefix.strip() else None

    def copied(self, function: Function, name: str, edits: Iterable[Edit] = ()) -> Edit | None:
        """Return the edit that inserts an edited copy of a function, with another name, below the function.

        Return None if other code shares the function's first or last line.
        """
        first_node = min((function, *function.decorator_list), key=lambda node: node.lineno)
        start = self._starts[first_node.lineno - 1]
        end = self.line_end(self.span(function)[1])
        line_suffix = self.content[self.span(function)[1] : end].strip()
        line_prefix = self.content[start : start + first_node.col_offset]
        if line_prefix.strip(b" \t@") or (line_suffix and not line_suffix.startswith(b"#")):
            return None
        copied_source = apply_edits(
            self.content[start:end], [edit.moved(-start) for edit in (self.renamed(function, name), *edits)]
        )
        return Edit(end, end, f"\n\n{copied_source.decode()}")

    def renamed(self, function: Function, name: str) -> Edit:
        """Return the edit that renames a function."""
        name_offset = self.content.find(function.name.encode(), self.content.find(b"def ", self.span(function)[0]) + 4)
        return Edit(name_offset, name_offset + len(function.name.encode()), name)

    def line_end(self, position: int) -> int:
        """Return the end of the line that contains a position."""
        line_end = self.content.find(b"\n", position)
        return len(self.content) if line_end < 0 else line_end


class Sources:
    """The Python files among a task's test files; each is parsed once, when it is first needed.

    Args:
        files: the contents of the files, by path.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files
        self._parsed: dict[str, PythonSource | None] = {}

    def source(self, path: str) -> PythonSource | None:
        """Return a parsed file, or None if there is no such file or it cannot be parsed."""
        if path not in self._parsed:
            is_python = path in self._files and path.endswith(".py")
            self._parsed[path] = PythonSource.read(self._files[path]) if is_python else None
        return self._parsed[path]

    def find(self, test: str) -> tuple[PythonSource, Function] | None:
        """Return a test's file and function by its pytest id without parameters, or None if no function has this id."""
        path, _, name = test.partition("::")
        source = self.source(path)
        function = source.function(name) if source else None
        return (source, function) if source and function else None


def _reads(node: ast.AST, name: str) -> bool:
    read = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return read == name and isinstance(getattr(node, "ctx", None), ast.Load)


def assigned_values(nodes: Iterable[ast.AST], name: str) -> Iterator[ast.expr]:
    """Yield the values that assignments among the nodes give to a variable or to an attribute (``self.x``)."""
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and node.value
            and name in [_text(target) for target in targets]
        ):
            yield node.value


def _text(node: ast.expr | None) -> str:
    return ast.unparse(node) if node is not None else ""


def _names_of(node: ast.expr) -> list[str]:
    """Return the names in the first argument of ``parametrize``; empty if the argument is not a literal."""
    try:
        literal = ast.literal_eval(node)
    except ValueError:
        return []
    names = literal.split(",") if isinstance(literal, str) else literal
    return [str(name).strip() for name in names if str(name).strip()]


def _is_indirect(mark: ast.Call, rows: ast.List | ast.Tuple) -> bool:
    return any(word.arg == "indirect" for word in mark.keywords) or any(
        isinstance(row, ast.Starred) for row in rows.elts
    )


def _cells(row: ast.expr, count: int) -> list[ast.expr]:
    """Return the values in a table row; for ``pytest.param(...)``, its arguments."""
    if isinstance(row, ast.Call) and ast.unparse(row.func).rpartition(".")[2] == "param":
        return row.args
    if count > 1:
        return row.elts if isinstance(row, ast.Tuple | ast.List) else []
    return [row]


def _functions(body: Iterable[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
    for node in body:
        if isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}::")
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions(node.body, prefix)
