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
import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from minisandbox.grade.confirm.edits import Edit, Function, PythonSource, Sources, Table, apply_edits
from minisandbox.grade.confirm.literals import MOST_OTHERS, MOST_PER_SIDE, OtherValues, literals_in, other_literals
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
        others: the replacement texts, each with a different value.
        kind: where the changed expectation is written.
        own: the text of the unchanged value, if the edit replaces a name whose value is written elsewhere in the file.
        name: the replaced name.
        definition: the byte range of that value; None if code other than tests reads it.
    """

    path: str
    start: int
    end: int
    others: OtherValues
    kind: Kind
    own: str = ""
    name: str = ""
    definition: tuple[int, int] | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The replacement texts."""
        return self.others.replacements

    @property
    def is_local(self) -> bool:
        """Whether the edit is in the test itself, so that a copy of the test can contain it."""
        return self.kind is not Kind.SNAPSHOT

    def overlaps(self, other: Variant) -> bool:
        """Return whether both variants edit the same bytes."""
        return self.path == other.path and self.start < other.end and other.start < self.end

    def edit(self, text_index: int) -> Edit:
        """Return the edit with one of the texts; -1 stands for the unchanged value."""
        return Edit(self.start, self.end, self.texts[text_index] if text_index >= 0 else self.own)

    def definition_edit(self, text_index: int) -> Edit | None:
        """Return the edit that changes the definition to one of the values, or None if it must not change."""
        if text_index < 0 or self.definition is None:
            return None
        return Edit(*self.definition, self.texts[text_index][1:-1])  # without the parentheses around the value


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
_MOST_LOOKALIKES = 2
"""How many values of other tests may replace one value."""


def variants_of(files: Mapping[str, bytes], tests: Sequence[str], rng: random.Random) -> dict[str, list[Variant]]:
    """Return the variants of tests, the strongest first.

    Args:
        files: the contents of the hidden files, by path: sources, and files with expected output.
        tests: pytest ids.
        rng: the random generator.

    Returns:
        The variants by test id without parameters; a test is missing if its file cannot be parsed.
    """
    by_test: dict[str, list[Variant]] = {}
    sources = Sources(files)
    new_values: dict[str, dict[object, OtherValues]] = {}
    equated_strings: dict[str, dict[str, str | bytes]] = {}
    function_variants: dict[int, list[Variant]] = {}
    for test in dict.fromkeys(base_of(test) for test in tests):
        if (parsed := sources.find(test)) is None:
            continue
        path, (source, function) = test.partition("::")[0], parsed
        if id(function) not in function_variants:  # tests that inherit a method share its variants
            if path not in equated_strings:
                equated_strings[path] = _equated_strings(source)
            search = _Search(source, function, path, rng, new_values.setdefault(path, {}), equated_strings[path])
            function_variants[id(function)] = [*search.variants()]
        variants = [*function_variants[id(function)], *_snapshot_variants(files, test, function.name, rng)]
        rng.shuffle(variants)
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


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for expectations in one test.

    Attributes:
        source: the parsed test file.
        function: the test's syntax tree.
        path: the path of the test file.
        rng: the random generator.
        new_values: the new values by position in the file. All tests of the file share them, because a value in only
            one test would be recognisable as new.
        equated_strings: the strings that tests in the file compare results with, by their source text.
    """

    source: PythonSource
    function: Function
    path: str
    rng: random.Random
    new_values: dict[object, OtherValues]
    equated_strings: Mapping[str, str | bytes]

    def variants(self) -> Iterator[Variant]:
        """Yield the variants in the order of the file; if there are none, a variant with an appended assertion."""
        variants = {(variant.start, variant.end, variant.texts): variant for variant in self._stated() if variant.texts}
        yield from variants.values()
        if not variants and (appended := self._appended()):
            yield appended

    def _stated(self) -> Iterator[Variant]:
        for node in reached(self.function.body):
            if isinstance(node, ast.Assert):
                yield from self._asserted(node.test)
            elif isinstance(node, ast.Call):
                yield from self._called(node)

    def _asserted(self, test: ast.expr) -> Iterator[Variant]:
        """Yield a variant for each value in an asserted expression, and one that inverts the expression."""
        for condition in test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]:
            if isinstance(condition, ast.Compare) and len(condition.ops) == 1:
                yield from self._compared(condition)
            inverted = OtherValues((f"not ({self.source.text(condition)})",))
            yield self._replaced(condition, inverted, Kind.CONDITION)

    def _compared(self, comparison: ast.Compare) -> Iterator[Variant]:
        left_side, right_side = comparison.left, comparison.comparators[0]
        if isinstance(comparison.ops[0], ast.Eq):
            yield from self._unequal(right_side, left_side)
        elif isinstance(comparison.ops[0], ast.In):
            yield from self._values(left_side)
        elif isinstance(comparison.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):  # e.g. abs(result - 1.5) < 1e-9
            yield from self._values(left_side)
            yield from self._values(right_side)

    def _unequal(self, expected: ast.expr, result: ast.expr) -> Iterator[Variant]:
        """Change a literal on either side; without one, expect another assertion's value, or the value in a list."""
        variants = [*self._values(expected, for_equality=True), *self._values(result, for_equality=True)]
        if not variants:
            text, names = self.source.text(expected), names_in(expected)
            candidates = [
                candidate
                for node in equated(self.function)
                if names_in(node) <= names and (candidate := self.source.text(node)) != text
            ]
            choices = [
                candidate for candidate in dict.fromkeys(candidates) if candidate.count("\n") == text.count("\n")
            ]
            drawn = self.rng.sample(choices, min(len(choices), MOST_OTHERS)) or [f"[{text}]"]
            variants = [self._replaced(expected, OtherValues(tuple(drawn)), Kind.ASSERTION)]
        yield from variants

    def _called(self, call: ast.Call) -> Iterator[Variant]:
        name = ast.unparse(call.func)
        method = name.rpartition(".")[2]
        if RAISES.fullmatch(name):
            yield from self._expected_failure(call, name)
        elif ASSERTS.fullmatch(method) and not any(isinstance(node, ast.Starred) for node in call.args):
            yield from self._assertion_call(call, method)
        elif helper := self._helper(name):
            for argument, for_equality in expected_arguments(call, helper):
                yield from self._values(argument, for_equality=for_equality)

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
            end = self.source.span(call.func)[1]
            yield Variant(self.path, end - len(method), end, OtherValues((_OPPOSITES[method],)), Kind.CONDITION)

    def _expected_failure(self, call: ast.Call, name: str) -> Iterator[Variant]:
        """Expect another exception or warning, or another message."""
        if call.args and not isinstance(call.args[0], ast.Starred | ast.Constant):
            pool = _WARNINGS if re.search("warn|deprecated", name, re.IGNORECASE) else _ERRORS
            types = _unrelated(call.args[0], pool)
            drawn = self.rng.sample(types, min(MOST_OTHERS, len(types)))
            names = OtherValues(tuple(kind.__name__ for kind in drawn))
            yield self._replaced(call.args[0], names, Kind.EXCEPTION)
        messages = [keyword.value for keyword in call.keywords if keyword.arg in ("match", "expected_message", "msg")]
        if "Message" in name or "Regex" in name:
            messages += call.args[1:2]
        for message in messages:
            yield from self._values(message, Kind.EXCEPTION)

    def _helper(self, name: str) -> Function | None:
        """Return the function with this name in the same file, if it contains an assertion."""
        name = name.removeprefix("self.").removeprefix("cls.")
        helper = self.source.named(name) if name.isidentifier() else None
        return helper if helper is not self.function and helper and "assert" in ast.unparse(helper) else None

    def _values(self, node: ast.expr, kind: Kind = Kind.ASSERTION, *, for_equality: bool = False) -> Iterator[Variant]:
        """Change the values in an expected expression, and those of its variables."""
        for leaf in leaves_of(node):
            if isinstance(leaf, ast.Name | ast.Attribute):
                yield from self._of_variable(leaf)
            else:
                yield from self._written(leaf, kind, for_equality=for_equality)

    def _written(self, node: ast.expr, kind: Kind, *, for_equality: bool = False) -> Iterator[Variant]:
        """Change the literals of an expression in place."""
        for leaf in leaves_of(node):
            for literal in literals_in(leaf):
                values = self._equal_others(literal) if for_equality else self._others(literal)
                yield self._replaced(literal, values, kind)

    def _of_variable(self, node: ast.Name | ast.Attribute) -> Iterator[Variant]:
        """Change the value of a variable, if the test uses it only as an expected value."""
        name, source = ast.unparse(node), self.source
        if not is_only_expected(self.function, name):
            return
        if isinstance(node, ast.Attribute):
            values = source.attribute_values(node.attr) if name.startswith(("self.", "cls.")) else ()
            for value in values:
                yield from self._inlined(node, value, Kind.FIXTURE)
        elif name in {argument.arg for argument in arguments_of(self.function)}:
            for table in (table for table in source.tables(self.function) if name in table.names):
                yield from self._in_table(table)
            for value in source.fixture_values(name):
                yield from self._inlined(node, value, Kind.FIXTURE)
        elif assigned := [
            *((value, Kind.CONSTANT) for value in assigned_to(self.function, name)),
            *((value, Kind.PARAMETER) for value in looped_over(self.function, name)),
        ]:
            for_equality = is_only_expected(self.function, name, for_equality=True)
            for value, kind in assigned:
                yield from self._written(value, kind, for_equality=for_equality)
        else:
            for value in source.module_values(name):
                yield from self._inlined(node, value, Kind.CONSTANT)

    def _in_table(self, table: Table) -> Iterator[Variant]:
        """Change one expected value per row of a table; a changed copy replaces the name of a variable."""
        columns = [column for column, name in enumerate(table.names) if is_only_expected(self.function, name)]
        span = self.source.span(table.values)
        key = (span, tuple(columns))
        if key not in self.new_values:
            names = [table.names[column] for column in columns]
            for_equality = all(is_only_expected(self.function, name, for_equality=True) for name in names)
            self.new_values[key] = self._other_tables(table, columns, for_equality=for_equality)
        if table.values is table.argument:
            yield self._replaced(table.argument, self.new_values[key], Kind.PARAMETER)
        else:
            yield self._defined(table.argument, span, self.new_values[key], Kind.PARAMETER)

    def _other_tables(self, table: Table, columns: Sequence[int], *, for_equality: bool) -> OtherValues:
        """Return new versions of a table: all rows lower, all rows higher, or with values of other rows."""
        preferred, rows = self.rng.randrange(len(_LETTERS)), list[tuple[ast.expr, OtherValues]]()
        for row in table.rows:
            leaves = (leaf for column in columns if column < len(row) for leaf in leaves_of(row[column]))
            if options := [
                (literal, others)
                for leaf in leaves
                for literal in literals_in(leaf)
                if (others := self._others(literal)).replacements
            ]:
                rows.append(options[preferred % len(options)])
        swaps = self._swaps([literal for literal, _ in rows]) if for_equality else []
        edits_of_tables: list[list[Edit]] = [[] for _ in range(MOST_OTHERS + len(swaps))]
        table_start, table_end = self.source.span(table.values)
        for literal, others in rows:
            start, end = (offset - table_start for offset in self.source.span(literal))
            new_values = [
                *self._by_table(others),
                *(swap.get(literal, self.rng.choice(others.replacements)) for swap in swaps),
            ]
            for edits, text in zip(edits_of_tables, new_values, strict=True):
                if text is not None:
                    edits.append(Edit(start, end, text))
        content = self.source.content[table_start:table_end]
        tables = [apply_edits(content, edits).decode() for edits in edits_of_tables]
        is_new = [text != content.decode() and text not in tables[:index] for index, text in enumerate(tables)]
        values = OtherValues(tuple(tables), MOST_PER_SIDE, len(swaps))
        return values.kept([index for index, new in enumerate(is_new) if new])

    def _by_table(self, others: OtherValues) -> list[str | None]:
        """Return a row's value in each of six tables; None in one of them if the row has fewer other values."""
        if len(others.replacements) == MOST_OTHERS:
            return list(others.replacements)
        cells = itertools.islice(itertools.cycle(others.replacements), MOST_OTHERS - 1)
        return self.rng.sample([*cells, None], MOST_OTHERS)

    def _swaps(self, literals: Sequence[ast.expr]) -> list[dict[ast.expr, str]]:
        """Return up to two mappings from each string of a table to the string of another row.

        These values reveal code that accepts everything that looks like a valid result.
        """
        swaps: list[dict[ast.expr, str]] = [{}, {}]
        groups: dict[object, list[ast.expr]] = {}
        for literal in self.rng.sample(literals, len(literals)):
            if isinstance(value := getattr(literal, "value", None), str | bytes):
                groups.setdefault((type(value), self.source.text(literal).count("\n")), []).append(literal)
        for group in groups.values():
            steps = range(1, len(group))
            for swap, step in zip(swaps, self.rng.sample(steps, min(_MOST_LOOKALIKES, len(steps))), strict=False):
                pairs = zip(group, [*group[step:], *group[:step]], strict=True)
                swap |= {literal: self.source.text(other) for literal, other in pairs}
        return [swap for swap in swaps if swap]

    def _inlined(self, node: ast.expr, value: ast.expr, kind: Kind) -> Iterator[Variant]:
        """Replace a variable by its value, with one literal of the value changed."""
        value_start, value_end = self.source.span(value)
        value_source = self.source.content[value_start:value_end]
        for leaf in leaves_of(value):
            for literal in literals_in(leaf):
                start, end = (offset - value_start for offset in self.source.span(literal))
                before, after = (part.decode() for part in (value_source[:start], value_source[end:]))
                values = self._others(literal).within(before, after)
                yield self._defined(node, (value_start, value_end), values, kind)

    def _defined(self, node: ast.expr, definition: tuple[int, int], values: OtherValues, kind: Kind) -> Variant:
        """Return the variant that replaces a name by a new value; the name is defined elsewhere in the file."""
        name = ast.unparse(node).rpartition(".")[2]
        original = f"({self.source.content[slice(*definition)].decode()})"
        values = values.within("(", ")")
        is_free = self.source.is_read_by_tests_alone(name)
        span = self.source.span(node)
        return Variant(self.path, *span, values, kind, original, name, definition if is_free else None)

    def _others(self, literal: ast.expr) -> OtherValues:
        """Return other values for a literal; all tests of the file share them."""
        span = self.source.span(literal)
        if span not in self.new_values:
            self.new_values[span] = other_literals(self.source.text(literal), self.rng)
        return self.new_values[span]

    def _equal_others(self, literal: ast.expr) -> OtherValues:
        """Return other values for a literal that a result must equal; other tests in the file expect up to two."""
        span, value = self.source.span(literal), getattr(literal, "value", None)
        key = ("equal", span)
        if key not in self.new_values:
            others, text = self._others(literal), self.source.text(literal)
            candidates = [
                candidate
                for candidate, string in self.equated_strings.items()
                if others.replacements
                and type(string) is type(value)
                and string != value
                and candidate.count("\n") == text.count("\n")
                and len(text) <= 2 * len(candidate) <= 4 * len(text)
                and candidate not in others.replacements
            ]
            lookalikes = self.rng.sample(candidates, min(_MOST_LOOKALIKES, len(candidates)))
            self.new_values[key] = replace(
                others, replacements=(*others.replacements, *lookalikes), lookalikes=len(lookalikes)
            )
        return self.new_values[key]

    def _appended(self) -> Variant | None:
        """Append a false assertion to the test."""
        indent = self.source.indent(self.function.body[-1])
        if indent is None:
            return None
        offset = self.source.line_end(self.source.span(self.function.body[-1])[1])
        string = "".join(self.rng.choices(_LETTERS, k=self.rng.randrange(3, 9)))
        assertion = f'\n{indent}assert len("{string}") == {len(string) + self.rng.choice((1, 2))}'
        return Variant(self.path, offset, offset, OtherValues((assertion,)), Kind.APPENDED)

    def _replaced(self, node: ast.expr, values: OtherValues, kind: Kind) -> Variant:
        return Variant(self.path, *self.source.span(node), values, kind)


def _unrelated(expected: ast.expr, pool: Sequence[type[BaseException]]) -> list[type[BaseException]]:
    """Return the exceptions of the pool that are unrelated to those named in an expression."""
    names = (getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(expected))
    named_types = [kind for name in names if isinstance(kind := getattr(builtins, name, None), type)]
    return [kind for kind in pool if not any(issubclass(kind, base) or issubclass(base, kind) for base in named_types)]


def _snapshot_variants(files: Mapping[str, bytes], test: str, name: str, rng: random.Random) -> Iterator[Variant]:
    """Change a letter of a test's expected output in a snapshot file (syrupy, pytest-snapshot)."""
    module = test.partition("::")[0].rpartition("/")[2].removesuffix(".py")
    for path, content in files.items():
        if path.endswith(".ambr") and path.rpartition("/")[2] == f"{module}.ambr":
            header = re.search(rb"^# name: (?:\w+\.)?" + re.escape(name.encode()) + rb"\b.*$", content, re.MULTILINE)
            body_start = header.end() if header else len(content)
            body_end = content.find(b"\n# ---", body_start)
        elif f"/{module}/{name}/" in f"/{path}":
            body_start, body_end = 0, len(content)
        else:
            continue
        offsets = [match.start() for match in re.finditer(rb"[A-Za-z0-9]", content[body_start:body_end])]
        if offsets:
            offset = body_start + rng.choice(offsets)
            letter = rng.choice([letter for letter in _LETTERS if letter != chr(content[offset]).lower()])
            yield Variant(path, offset, offset + 1, OtherValues((letter,)), Kind.SNAPSHOT)
