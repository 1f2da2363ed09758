"""Comparisons by what values hold: test files in which a submission's own ``__eq__`` is not asked.

Where a test says that two values are equal, it is the submission that answers: with a text that equals each of four
likely answers, the right one is among them, and a sentinel, which expects another one still, fails as it has to. So
a submission that seems to solve a task is run once more, on test files in which values are first made plain: a text of
whatever class is the characters that it holds, a number the one that it holds. What is solved passes then too. So it
is with every comparison in an assertion: a number whose ``-`` and ``<`` are its own could be near each likely answer.

Unlike a sentinel, such a test has to pass, so that nothing is gained by knowing it.
"""

from __future__ import annotations

import ast
import secrets
from collections.abc import Iterator, Mapping, Sequence

from minisandbox.grade.confirm.edits import Edit, Source, apply_edits

_OF_ONE_TYPE = frozenset(
    {"assertListEqual", "assertDictEqual", "assertTupleEqual", "assertSetEqual", "assertMultiLineEqual"}
)
_EQUALITIES = _OF_ONE_TYPE | {"assertEqual", "assertEquals", "assert_equal", "eq_"}
_APPROXIMATE = frozenset({"assertAlmostEqual", "assertAlmostEquals", "assert_almost_equal"})
_ORDERINGS = frozenset(
    {"assertLess", "assertLessEqual", "assertGreater", "assertGreaterEqual"}
    | {"assert_less", "assert_less_equal", "assert_greater", "assert_greater_equal"}
)
_DISTANCES = frozenset({"abs", "fabs"})
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_OPERATORS = (
    "eq ne lt le gt ge abs neg pos invert add sub mul truediv floordiv mod pow and or xor"
    " radd rsub rmul rtruediv rfloordiv rmod rpow rand ror rxor"
)
# For any Python from 2.7 on. No method of a class in Python is asked, nor a metaclass: it may say now this, now that.
_PLAINLY = """

def {name}(claim, *values):
    from fractions import Fraction
    texts, numbers = (str, type(u""), bytes), (int, type(1 << 99), float, complex)
    kinds = texts + (bool, type(None), list, tuple, set, frozenset, dict) + numbers
    methods = {("decimal", "Decimal"): "__float__", ("numpy", "generic"): "item"}

    def is_a(value, kind):  # isinstance() would ask the value what it is
        return issubclass(type(value), kind)

    def is_plain(value):
        return any([type(value) is kind for kind in kinds])

    def is_short(value):  # what is asked for one thing is not copied for it each time
        known = any([type(value) is kind for kind in (list, tuple, set, frozenset)])
        return any([is_a(value, kind) for kind in texts]) or (known and len(value) < 1000)

    def is_told(value):  # whatever is compared with it, it is known what that should be
        if any([type(value) is kind for kind in (list, tuple, set, frozenset, dict)]):
            return bool(value) and all([is_told(item) for item in value])
        return is_plain(value) and value is not None

    def is_own(value):  # whether Python's code says how it compares
        for kind in type.__dict__["__mro__"].__get__(type(value)):
            names = type.__dict__["__dict__"].__get__(kind)
            for word in "{operators}".split():
                found = type(names.get("__" + word + "__"))
                if not any([found is kind for kind in (type(None), type(int.__add__), type(str.join))]):
                    return True
        return False

    def hidden(value):
        if type(value) is dict:
            return dict([(hidden(key), hidden(item)) for key, item in value.items()])
        if any([type(value) is kind for kind in (list, tuple, set, frozenset)]):
            return type(value)([hidden(item) for item in value])
        return object() if is_own(value) else value

    def plain(value):
        if type(value) is bool:
            return value
        for kind in texts:
            if is_a(value, kind):
                return kind.__getitem__(value, slice(None))
        for kind in numbers:
            if is_a(value, kind):
                return kind.__pos__(value)
        for kind in (list, tuple, set, frozenset):
            if is_a(value, kind):
                return kind([plain(item) for item in kind.__iter__(value)])
        if is_a(value, dict):
            return dict([(plain(key), plain(item)) for key, item in dict.items(value)])
        if is_a(value, Fraction):
            parts = [plain(part.__get__(value)) for part in (Fraction._numerator, Fraction._denominator)]
            return float(Fraction(*parts))
        return converted(value)

    def converted(value):  # by a method written in C, which is of that very class
        for kind in type.__dict__["__mro__"].__get__(type(value)):
            method = type.__dict__["__dict__"].__get__(kind).get(methods.get((kind.__module__, kind.__name__)))
            if type(method) in (type(str.join), type(float.__float__)) and method.__objclass__ is kind:
                found = method(value)
                return found if is_plain(found) else value
        return value

    def same(one, other):
        for kind in (list, tuple):
            if type(one) is kind and type(other) is kind:
                return len(one) == len(other) and all([same(*pair) for pair in zip(one, other)])
        if type(one) is dict and type(other) is dict:
            return set(one) == set(other) and all([same(one[key], other[key]) for key in one])
        return is_plain(one) is is_plain(other) and bool(one == other)

    if claim is None:
        one = plain(values[0])
        return one if is_plain(one) else object()
    if claim is not True:
        containers, values = values[0], values[1:]
        if not all([any([type(value) is kind for kind in kinds[:5] + numbers]) for value in values]):
            kept = [number in containers and not is_short(value) for number, value in enumerate(values)]
            values = [value if keep else plain(value) for keep, value in zip(kept, values)]
            if any([is_told(value) for keep, value in zip(kept, values) if not keep]):
                values = [value if keep else hidden(value) for keep, value in zip(kept, values)]
        return claim(*values)
    try:
        if same(plain(values[0]), plain(values[1])):
            return True
    except Exception:
        pass
    raise AssertionError("not the same")  # not by a jump in the test, whose code could have been changed in memory
"""


def compare_plainly(files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Have tests compare by what values hold.

    Args:
        files: test files, by path, with their content.

    Returns:
        Those that have a comparison which can be changed, changed. What the reference's own values do not pass is
        known by running it.
    """
    changed = {path: _changed(content) for path, content in files.items() if path.endswith(".py")}
    return {path: content for path, content in changed.items() if content is not None}


def _changed(content: bytes) -> bytes | None:
    source = Source.read(content)
    if source is None:
        return None
    name = f"plainly_{secrets.token_hex(4)}"
    edits = list(_Plain(source, name).edits())
    text = apply_edits(content, edits) + _PLAINLY.replace("{name}", name).replace("{operators}", _OPERATORS).encode()
    return text if edits and Source.read(text) else None


class _Plain:
    """Makes the comparisons of a test file plain.

    Args:
        source: the file.
        name: the function that does it.
    """

    def __init__(self, source: Source, name: str) -> None:
        self._source = source
        self._name = name

    def edits(self) -> Iterator[Edit]:
        """What is changed in the file's claims."""
        for node in self._source.walk():
            if isinstance(node, ast.Assert):
                yield from self._claim(node.test)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                call = node.value
                if not any(isinstance(argument, ast.Starred) for argument in call.args):
                    yield from self._call(call)

    def _call(self, call: ast.Call) -> Iterator[Edit]:
        method, arguments = _called(call), call.args
        if method == "assertTrue" and arguments:
            yield from self._claim(arguments[0])
        elif method == "assertFalse" and arguments:
            yield from self._inside(arguments[0])
        elif method in _EQUALITIES and len(arguments) > 1:
            one, other = arguments[:2]
            text = f"{self._same(one, other)}, True"
            start, end = self._source.span(one)[0], self._source.span(other)[1]
            if method in _OF_ONE_TYPE:
                start, text = self._source.span(call.func)[1] - len(method), f"assertEqual({text}"
            yield Edit(start, end, text)
        elif method in _APPROXIMATE:
            yield from map(self._alone, arguments[:2])
        elif method in _ORDERINGS:
            yield from self._sides(arguments[:2])

    def _claim(self, test: ast.expr) -> Iterator[Edit]:
        """Edit what is claimed by one expression: an equality that has to hold is one that raises where it does not."""
        for part in test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]:
            if isinstance(part, ast.Compare) and len(part.ops) == 1 and isinstance(part.ops[0], ast.Eq):
                yield self._equality(part)
            else:
                yield from self._inside(part)

    def _equality(self, part: ast.Compare) -> Edit:
        one, other = part.left, part.comparators[0]
        if "approx" in (_called(one), _called(other)):
            return self._alone(one if _called(other) == "approx" else other)
        return Edit(*self._source.span(part), self._same(one, other))

    def _inside(self, node: ast.AST) -> Iterator[Edit]:
        """Edit comparisons wherever they stand in an expression."""
        if not isinstance(node, ast.Compare) or any(isinstance(sign, ast.Is | ast.IsNot) for sign in node.ops):
            for child in ast.iter_child_nodes(node):
                yield from self._inside(child)
        elif "approx" in map(_called, sides := [node.left, *node.comparators]):
            yield from (self._alone(side) for side in sides if _called(side) != "approx")
        else:
            yield self._compared(node, sides)

    def _compared(self, node: ast.Compare, sides: list[ast.expr]) -> Edit:
        """Have a comparison made of plain values: beside those, none that says itself how it compares."""
        is_order = all(isinstance(sign, _ORDERS) for sign in node.ops)
        values = [value for side in sides for value in (_operands(side) if is_order else [side])]
        start, end = self._source.span(node)
        spans = [self._source.span(value) for value in values]
        edits = [Edit(first - start, last - start, f"a{number}") for number, (first, last) in enumerate(spans)]
        body = apply_edits(self._source.content[start:end], edits).decode()
        containers = [
            side for sign, side in zip(node.ops, sides[1:], strict=True) if isinstance(sign, ast.In | ast.NotIn)
        ]
        kept = [number for number, value in enumerate(values) if value in containers]
        arguments = ", ".join(map(self._text, values))
        names = ", ".join(f"a{number}" for number in range(len(values)))
        return Edit(start, end, f"{self._name}(lambda {names}: ({body}), {kept}, {arguments})")

    def _sides(self, sides: Sequence[ast.expr]) -> Iterator[Edit]:
        """Edit the sides of an order that a method asks for."""
        values = [value for side in sides for value in _operands(side)]
        told = any(isinstance(value, ast.Constant) for value in values)
        for value in values:
            if told:
                yield self._alone(value)
            else:
                yield Edit(
                    *self._source.span(value), f"{self._name}(None, [{self._text(value)}])[0]"
                )  # stays what it is

    def _same(self, one: ast.expr, other: ast.expr) -> str:
        return f"{self._name}(True, {self._text(one)}, {self._text(other)})"

    def _alone(self, node: ast.expr) -> Edit:
        return Edit(*self._source.span(node), f"{self._name}(None, {self._text(node)})")

    def _text(self, node: ast.expr) -> str:
        start, end = self._source.span(node)
        edits = [edit.moved(-start) for edit in self._inside(node)]
        return apply_edits(self._source.content[start:end], edits).decode()


def _operands(node: ast.expr) -> list[ast.expr]:
    """The values that a number is made of: ``f(x)`` and ``3`` of ``abs(f(x) - 3)``."""
    if isinstance(node, ast.BinOp):
        return _operands(node.left) + _operands(node.right)
    if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
        return _operands(node.operand)
    if isinstance(node, ast.Call) and _called(node) in _DISTANCES and len(node.args) == 1:
        return _operands(node.args[0])
    return [node]


def _called(node: ast.expr) -> str:
    """The name of the function or method that an expression calls, without what it is of; empty for others."""
    if not isinstance(node, ast.Call):
        return ""
    return str(getattr(node.func, "attr", None) or getattr(node.func, "id", ""))
