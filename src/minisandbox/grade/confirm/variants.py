"""Draw variants of hidden tests: edits of an expectation that make the test fail.

Code under test shares an interpreter with its tests, so it can change what a test expects. It cannot know a value that
is drawn at random afterwards. A variant replaces an expectation of a test by such a value, wherever the expectation is
written. A correct solution fails the changed test at the line that compares the value. A solution that adapts tests to
its own output passes the changed test.

Only stated expectations are changed: values that results are compared with, expected exceptions, asserted conditions.
Inputs of the code under test stay, because another correct solution may treat a changed input differently than the
reference does.
"""

from __future__ import annotations

import ast
import builtins
import enum
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from minisandbox.grade.confirm.edits import Edit, Function, PythonSource, Sources, Table, apply_edits
from minisandbox.grade.confirm.literals import literals_in, other_literals, spread
from minisandbox.grade.confirm.uses import (
    ASSERTS,
    EQUALITIES,
    RAISES,
    arguments_of,
    assigned_to,
    equated,
    expected_arguments,
    is_only_expected,
    leaves_of,
    looped_over,
    names_in,
    reached,
)


class Kind(enum.StrEnum):
    """Where the changed expectation is written."""

    ASSERTION = "assertion"
    """A value in an assertion."""
    PARAMETER = "parameter"
    """A value in a table of parameters, or in the rows of a loop."""
    CONSTANT = "constant"
    """The value of a variable that the test compares results with."""
    FIXTURE = "fixture"
    """A value that the test gets from a fixture or a set-up method."""
    SNAPSHOT = "snapshot"
    """A file with the expected output."""
    EXCEPTION = "exception"
    """An expected exception or warning, or its message."""
    CONDITION = "condition"
    """An asserted condition, which the variant inverts."""
    APPENDED = "appended"
    """A false assertion, appended to a test without expectations."""


WEAK = (Kind.APPENDED, Kind.CONDITION)
"""The kinds that are used only if a test has no other kind, the weakest first."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One edit of a test file.

    Attributes:
        path: the edited file.
        start: the offset of the first replaced byte.
        end: the offset after the last replaced byte.
        texts: the replacement texts, each with a different value.
        kind: where the changed expectation is written.
        own: the text of the unchanged value, if the edit replaces a name whose value is written elsewhere in the file.
        name: the replaced name.
        definition: the byte range of that value; None if code other than tests reads it.
    """

    path: str
    start: int
    end: int
    texts: tuple[str, ...]
    kind: Kind
    own: str = ""
    name: str = ""
    definition: tuple[int, int] | None = None

    @property
    def is_local(self) -> bool:
        """Whether the edit is in the test itself, so that a copy of the test can contain it."""
        return self.kind is not Kind.SNAPSHOT

    def overlaps(self, other: Variant) -> bool:
        """Return whether both variants edit the same bytes."""
        return self.path == other.path and self.start < other.end and other.start < self.end

    def edit(self, number: int) -> Edit:
        """Return the edit with one of the texts; -1 stands for the unchanged value."""
        return Edit(self.start, self.end, self.texts[number] if number >= 0 else self.own)

    def definition_edit(self, number: int) -> Edit | None:
        """Return the edit that changes the definition to one of the values, or None if it must not change."""
        if number < 0 or self.definition is None:
            return None
        return Edit(*self.definition, self.texts[number][1:-1])  # strip the parentheses


_OPPOSITES = {
    "assertTrue": "assertFalse",
    "assertIn": "assertNotIn",
    "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone",
    "assertIsInstance": "assertNotIsInstance",
    "assertEqual": "assertNotEqual",
    "assertGreater": "assertLessEqual",
    "assertLess": "assertGreaterEqual",
    "assertRegex": "assertNotRegex",
    "assertContains": "assertNotContains",
}
_OPPOSITES |= {after: before for before, after in _OPPOSITES.items()}
_ERRORS = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, OSError, ZeroDivisionError, EOFError,
    KeyboardInterrupt,
)  # fmt: skip
"""Errors that changed tests expect; common ones, so that they do not reveal the change."""
_WARNINGS = (UserWarning, RuntimeWarning, FutureWarning, SyntaxWarning, UnicodeWarning, ImportWarning)
_SYMMETRIC = frozenset({"assertIn", "assertLess", "assertLessEqual", "assertGreater", "assertGreaterEqual"})
"""Assertions whose first argument may also be the expected value."""
_LETTERS = "abcdefghijklmnoprstuvw"
_TEXTS = 3
"""The number of replacement texts per position."""


def variants_of(files: Mapping[str, bytes], tests: Sequence[str], dice: random.Random) -> dict[str, list[Variant]]:
    """Return the variants of tests, the strongest first.

    Args:
        files: the contents of the hidden files, by path: sources, and files with expected output.
        tests: pytest ids.
        dice: the random generator.

    Returns:
        The variants by test id without parameters; a test is missing if its file cannot be parsed.
    """
    by_test: dict[str, list[Variant]] = {}
    sources = Sources(files)
    shared: dict[str, dict[object, tuple[str, ...]]] = {}
    strings: dict[str, dict[str, str | bytes]] = {}
    searches: dict[int, list[Variant]] = {}
    for test in dict.fromkeys(base_of(test) for test in tests):
        if (parsed := sources.find(test)) is None:
            continue
        path, (source, function) = test.partition("::")[0], parsed
        if id(function) not in searches:  # tests that inherit a method share its variants
            if path not in strings:
                strings[path] = _equated_strings(source)
            search = _Search(source, function, path, dice, shared.setdefault(path, {}), strings[path])
            searches[id(function)] = [*search.variants()]
        variants = [*searches[id(function)], *_snapshot_variants(files, test, function.name, dice)]
        dice.shuffle(variants)
        by_test[test] = sorted(variants, key=_strength, reverse=True)
    return by_test


def _equated_strings(source: PythonSource) -> dict[str, str | bytes]:
    """Return the strings that tests in a file compare results with for equality, by their source text."""
    strings: dict[str, str | bytes] = {}
    for _, function in source.functions():
        leaves = [leaf for expected in equated(function) for leaf in leaves_of(expected)]
        for name in {leaf.id for leaf in leaves if isinstance(leaf, ast.Name)}:
            values = [*assigned_to(function, name), *looped_over(function, name)]
            leaves += [leaf for value in values for leaf in leaves_of(value)]
        for literal in (literal for leaf in leaves for literal in literals_in(leaf)):
            if isinstance(value := getattr(literal, "value", None), str | bytes):
                strings[source.text(literal)] = value
    return strings


def _strength(variant: Variant) -> int:
    return WEAK.index(variant.kind) if variant.kind in WEAK else len(WEAK)


def base_of(test: str) -> str:
    """Return a pytest id without its parameters."""
    return test.partition("[")[0]


class _Search:
    """The search for expectations in one test.

    Args:
        source: the parsed test file.
        function: the test's syntax tree.
        path: the path of the test file.
        dice: the random generator.
        shared: the new values by position in the file. All tests of the file share them, because a value in only one
            test would be recognisable as new.
        strings: the strings that tests in the file compare results with, by their source text.
    """

    def __init__(
        self,
        source: PythonSource,
        function: Function,
        path: str,
        dice: random.Random,
        shared: dict[object, tuple[str, ...]],
        strings: Mapping[str, str | bytes],
    ) -> None:
        self._source, self._function = source, function
        self._path, self._dice, self._shared, self._strings = path, dice, shared, strings

    def variants(self) -> Iterator[Variant]:
        """Yield the variants in the order of the file; if there are none, a variant with an appended assertion."""
        places = {(variant.start, variant.end, variant.texts): variant for variant in self._stated() if variant.texts}
        yield from places.values()
        if not places and (appended := self._appended()):
            yield appended

    def _stated(self) -> Iterator[Variant]:
        for node in reached(self._function.body):
            if isinstance(node, ast.Assert):
                yield from self._asserted(node.test)
            elif isinstance(node, ast.Call):
                yield from self._called(node)

    def _asserted(self, test: ast.expr) -> Iterator[Variant]:
        """Yield a variant for each value in an asserted expression, and one that inverts the expression."""
        for part in test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]:
            if isinstance(part, ast.Compare) and len(part.ops) == 1:
                yield from self._compared(part)
            yield self._replaced(part, [f"not ({self._source.text(part)})"], Kind.CONDITION)

    def _compared(self, part: ast.Compare) -> Iterator[Variant]:
        first, second = part.left, part.comparators[0]
        if isinstance(part.ops[0], ast.Eq):
            yield from self._unequal(second, first)
        elif isinstance(part.ops[0], ast.In):
            yield from self._values(first)
        elif isinstance(part.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):  # e.g. abs(result - 1.5) < 1e-9
            yield from self._values(first)
            yield from self._values(second)

    def _unequal(self, expected: ast.expr, result: ast.expr) -> Iterator[Variant]:
        """Change a value on either side; if both sides are computed, expect another assertion's value, or a list."""
        values = [*self._values(expected, is_equal=True), *self._values(result, is_equal=True)]
        if not values:
            text, names = self._source.text(expected), names_in(expected)
            others = [
                other
                for node in equated(self._function)
                if names_in(node) <= names and (other := self._source.text(node)) != text
            ]
            alike = [other for other in dict.fromkeys(others) if other.count("\n") == text.count("\n")]
            replacements = self._dice.sample(alike, min(len(alike), _TEXTS)) or [f"[{text}]"]
            values = [self._replaced(expected, replacements, Kind.ASSERTION)]
        yield from values

    def _called(self, call: ast.Call) -> Iterator[Variant]:
        name = ast.unparse(call.func)
        method = name.rpartition(".")[2]
        if RAISES.fullmatch(name):
            yield from self._expected_failure(call, name)
        elif ASSERTS.fullmatch(method) and not any(isinstance(node, ast.Starred) for node in call.args):
            yield from self._assertion_call(call, method)
        elif helper := self._helper(name):
            for argument, is_equal in expected_arguments(call, helper):
                yield from self._values(argument, is_equal=is_equal)

    def _assertion_call(self, call: ast.Call, method: str) -> Iterator[Variant]:
        arguments = call.args
        if method == "assertTrue" and arguments:
            yield from self._asserted(arguments[0])
        if method in EQUALITIES and len(arguments) > 1:
            yield from self._unequal(arguments[1], arguments[0])
        else:
            is_own = not isinstance(call.func, ast.Attribute) or ast.unparse(call.func.value) in ("self", "cls")
            expected = arguments[1:] if is_own and method not in _SYMMETRIC else arguments
            for argument in (*expected, *(word.value for word in call.keywords)):
                yield from self._values(argument)
        if method in _OPPOSITES:
            end = self._source.span(call.func)[1]
            yield Variant(self._path, end - len(method), end, (_OPPOSITES[method],), Kind.CONDITION)

    def _expected_failure(self, call: ast.Call, name: str) -> Iterator[Variant]:
        """Expect another exception or warning, or another message."""
        if call.args and not isinstance(call.args[0], ast.Starred | ast.Constant):
            pool = _WARNINGS if re.search("warn|deprecated", name, re.IGNORECASE) else _ERRORS
            others = _unrelated(call.args[0], pool)
            names = [other.__name__ for other in self._dice.sample(others, min(3, len(others)))]
            yield self._replaced(call.args[0], names, Kind.EXCEPTION)
        messages = [keyword.value for keyword in call.keywords if keyword.arg in ("match", "expected_message", "msg")]
        if "Message" in name or "Regex" in name:
            messages += call.args[1:2]
        for message in messages:
            yield from self._values(message, Kind.EXCEPTION)

    def _helper(self, name: str) -> Function | None:
        """Return the function with this name in the same file, if it contains an assertion."""
        name = name.removeprefix("self.").removeprefix("cls.")
        helper = self._source.named(name) if name.isidentifier() else None
        return helper if helper is not self._function and helper and "assert" in ast.unparse(helper) else None

    def _values(self, node: ast.expr, kind: Kind = Kind.ASSERTION, *, is_equal: bool = False) -> Iterator[Variant]:
        """Change the values in an expected expression, and those of its variables."""
        for leaf in leaves_of(node):
            if isinstance(leaf, ast.Name | ast.Attribute):
                yield from self._of_variable(leaf)
            else:
                yield from self._written(leaf, kind, is_equal=is_equal)

    def _written(self, node: ast.expr, kind: Kind, *, is_equal: bool = False) -> Iterator[Variant]:
        """Change the literals of an expression in place."""
        for leaf in leaves_of(node):
            for literal in literals_in(leaf):
                others = self._equal_others(literal) if is_equal else self._others(literal)
                yield self._replaced(literal, others, kind)

    def _of_variable(self, node: ast.Name | ast.Attribute) -> Iterator[Variant]:
        """Change the value of a variable, if the test uses it only as an expected value."""
        name, source = ast.unparse(node), self._source
        if not is_only_expected(self._function, name):
            return
        if isinstance(node, ast.Attribute):
            values = source.attribute_values(node.attr) if name.startswith(("self.", "cls.")) else ()
            for value in values:
                yield from self._inlined(node, value, Kind.FIXTURE)
        elif name in {argument.arg for argument in arguments_of(self._function)}:
            for table in (table for table in source.tables(self._function) if name in table.names):
                yield from self._in_table(table)
            for value in source.fixture_values(name):
                yield from self._inlined(node, value, Kind.FIXTURE)
        elif assigned := [
            *((value, Kind.CONSTANT) for value in assigned_to(self._function, name)),
            *((value, Kind.PARAMETER) for value in looped_over(self._function, name)),
        ]:
            is_equal = is_only_expected(self._function, name, is_equal=True)
            for value, kind in assigned:
                yield from self._written(value, kind, is_equal=is_equal)
        else:
            for value in source.module_values(name):
                yield from self._inlined(node, value, Kind.CONSTANT)

    def _in_table(self, table: Table) -> Iterator[Variant]:
        """Change one expected value per row of a table; a table in a variable is copied in place of the name."""
        columns = [number for number, name in enumerate(table.names) if is_only_expected(self._function, name)]
        span = self._source.span(table.values)
        key = (span, tuple(columns))
        if key not in self._shared:
            names = [table.names[column] for column in columns]
            is_equal = all(is_only_expected(self._function, name, is_equal=True) for name in names)
            text = self._source.content[slice(*span)]
            tables = [apply_edits(text, edits).decode() for edits in self._in_rows(table, columns, is_equal=is_equal)]
            self._shared[key] = tuple(other for other in dict.fromkeys(tables) if other != text.decode())
        if table.values is table.written:
            yield self._replaced(table.written, self._shared[key], Kind.PARAMETER)
        else:
            yield self._defined(table.written, span, self._shared[key], Kind.PARAMETER)

    def _in_rows(self, table: Table, columns: Sequence[int], *, is_equal: bool) -> list[list[Edit]]:
        """Return the edits for each new version of a table, at most one per row."""
        slot, literals = self._dice.randrange(len(_LETTERS)), list[ast.expr]()
        for row in table.rows:
            leaves = (leaf for column in columns if column < len(row) for leaf in leaves_of(row[column]))
            if able := [literal for leaf in leaves for literal in literals_in(leaf) if self._others(literal)]:
                literals.append(able[slot % len(able)])
        swaps = self._swaps(literals) if is_equal else []
        swaps = self._dice.sample([*swaps, *({} for _ in range(_TEXTS - len(swaps)))], _TEXTS)
        edits_of_tables: list[list[Edit]] = [[] for _ in swaps]
        start = self._source.span(table.values)[0]
        for literal in literals:
            first, last = self._source.span(literal)
            others = self._others(literal)
            _, *numbers = spread(len(others), _TEXTS + 1, self._dice)
            for edits, swap, number in zip(edits_of_tables, swaps, numbers, strict=True):
                if other := swap.get(literal) or (others[number] if number >= 0 else None):
                    edits.append(Edit(first - start, last - start, other))
        return edits_of_tables

    def _swaps(self, literals: Sequence[ast.expr]) -> list[dict[ast.expr, str]]:
        """Return up to two mappings from each string of a table to the string of another row.

        These values reveal code that accepts everything that looks like a valid result.
        """
        swaps: list[dict[ast.expr, str]] = [{}, {}]
        groups: dict[object, list[ast.expr]] = {}
        for literal in self._dice.sample(literals, len(literals)):
            if isinstance(value := getattr(literal, "value", None), str | bytes):
                groups.setdefault((type(value), self._source.text(literal).count("\n")), []).append(literal)
        for ring in groups.values():
            steps = range(1, len(ring))
            for swap, step in zip(swaps, self._dice.sample(steps, min(2, len(steps))), strict=False):
                pairs = zip(ring, [*ring[step:], *ring[:step]], strict=True)
                swap |= {literal: self._source.text(other) for literal, other in pairs}
        return [swap for swap in swaps if swap]

    def _inlined(self, node: ast.expr, value: ast.expr, kind: Kind) -> Iterator[Variant]:
        """Replace a variable by its value, with one literal of the value changed."""
        start, end = self._source.span(value)
        text = self._source.content[start:end].decode()
        for leaf in leaves_of(value):
            for literal in literals_in(leaf):
                first, last = (place - start for place in self._source.span(literal))
                replacements = [
                    text.encode()[:first].decode() + other + text.encode()[last:].decode()
                    for other in self._others(literal)
                ]
                yield self._defined(node, (start, end), replacements, kind)

    def _defined(self, node: ast.expr, definition: tuple[int, int], replacements: Sequence[str], kind: Kind) -> Variant:
        """Return the variant that replaces a name by a new value; the name is defined elsewhere in the file."""
        name = ast.unparse(node).rpartition(".")[2]
        original, *others = (f"({text})" for text in (self._source.content[slice(*definition)].decode(), *replacements))
        is_free = self._source.is_read_by_tests_alone(name)
        span = self._source.span(node)
        return Variant(self._path, *span, tuple(others), kind, original, name, definition if is_free else None)

    def _others(self, literal: ast.expr) -> tuple[str, ...]:
        """Return other values for a literal; all tests of the file share them."""
        span = self._source.span(literal)
        if span not in self._shared:
            self._shared[span] = other_literals(self._source.text(literal), self._dice)
        return self._shared[span]

    def _equal_others(self, literal: ast.expr) -> tuple[str, ...]:
        """Return other values for a literal that a result must equal; up to two are expected elsewhere in the file."""
        span, value = self._source.span(literal), getattr(literal, "value", None)
        key = ("equal", span)
        if key not in self._shared:
            others = self._others(literal)
            if isinstance(value, str | bytes) and others:
                written = self._source.text(literal)
                alike = [
                    text
                    for text, other in self._strings.items()
                    if type(other) is type(value)
                    and other != value
                    and text.count("\n") == written.count("\n")
                    and len(written) <= 2 * len(text) <= 4 * len(written)
                ]
                others = (*self._dice.sample(alike, min(2, len(alike))), *others)[:_TEXTS]
            self._shared[key] = others
        return self._shared[key]

    def _appended(self) -> Variant | None:
        """Append a false assertion to the test."""
        indent = self._source.indent(self._function.body[-1])
        if indent is None:
            return None
        end = self._source.line_end(self._source.span(self._function.body[-1])[1])
        string = "".join(self._dice.choices(_LETTERS, k=self._dice.randrange(3, 9)))
        text = f'\n{indent}assert len("{string}") == {len(string) + self._dice.choice((1, 2))}'
        return Variant(self._path, end, end, (text,), Kind.APPENDED)

    def _replaced(self, node: ast.expr, replacements: Sequence[str], kind: Kind) -> Variant:
        return Variant(self._path, *self._source.span(node), tuple(replacements), kind)


def _unrelated(expected: ast.expr, pool: Sequence[type[BaseException]]) -> list[type[BaseException]]:
    """Return the exceptions of the pool that are unrelated to those named in an expression."""
    names = (getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(expected))
    named = [kind for name in names if isinstance(kind := getattr(builtins, name, None), type)]
    return [kind for kind in pool if not any(issubclass(kind, other) or issubclass(other, kind) for other in named)]


def _snapshot_variants(files: Mapping[str, bytes], test: str, name: str, dice: random.Random) -> Iterator[Variant]:
    """Change a letter of a test's expected output in a snapshot file (syrupy, pytest-snapshot)."""
    module = test.partition("::")[0].rpartition("/")[2].removesuffix(".py")
    for path, content in files.items():
        if path.endswith(".ambr") and path.rpartition("/")[2] == f"{module}.ambr":
            header = re.search(rb"^# name: (?:\w+\.)?" + re.escape(name.encode()) + rb"\b.*$", content, re.MULTILINE)
            begin = header.end() if header else len(content)
            stop = content.find(b"\n# ---", begin)
        elif f"/{module}/{name}/" in f"/{path}":
            begin, stop = 0, len(content)
        else:
            continue
        places = [match.start() for match in re.finditer(rb"[A-Za-z0-9]", content[begin:stop])]
        if places:
            start = begin + dice.choice(places)
            letter = dice.choice([letter for letter in _LETTERS if letter != chr(content[start]).lower()])
            yield Variant(path, start, start + 1, (letter,), Kind.SNAPSHOT)
