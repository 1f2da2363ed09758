"""Comparisons by what values hold: test files in which a submission's own ``__eq__`` is not asked.

Where a test says that two values are equal, it is the submission that answers: with a text that equals each of four
likely answers, the right one is among them, and a sentinel, which expects another one still, fails as it has to. So
whoever seems to have solved a task is run once more, on test files in which values are first made plain: a text of
whatever class is the characters that it holds, a number the one that it holds. What is solved passes then too.

Unlike a sentinel, such a test has to pass, so that nothing is gained by knowing it.
"""

from __future__ import annotations

import ast
import secrets
from collections.abc import Iterator, Mapping

from minisandbox.grade.edits import Edit, Source, apply_edits

_OF_ONE_TYPE = frozenset(
    {"assertListEqual", "assertDictEqual", "assertTupleEqual", "assertSetEqual", "assertMultiLineEqual"}
)
_EQUALITIES = _OF_ONE_TYPE | {"assertEqual", "assertEquals", "assert_equal", "eq_"}
_APPROXIMATE = frozenset({"assertAlmostEqual", "assertAlmostEquals", "assert_almost_equal"})
# For any Python from 2.7 on. No method of a class in Python is asked, nor a metaclass: it may say now this, now that.
_PLAINLY = """

def {name}(one, *others):
    from fractions import Fraction
    texts, numbers = (str, type(u""), bytes), (int, type(1 << 99), float, complex)
    kinds = texts + (bool, type(None), list, tuple, set, frozenset, dict) + numbers
    methods = {("decimal", "Decimal"): "__float__", ("numpy", "generic"): "item"}

    def is_a(value, kind):  # isinstance() would ask the value what it is
        return issubclass(type(value), kind)

    def is_plain(value):
        return any([type(value) is kind for kind in kinds])

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

    if not others:
        one = plain(one)
        return one if is_plain(one) else object()
    try:
        if same(plain(one), plain(others[0])):
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
    edits = list(_edits(source, name))
    text = apply_edits(content, edits) + _PLAINLY.replace("{name}", name).encode()
    return text if edits and Source.read(text) else None


def _edits(source: Source, name: str) -> Iterator[Edit]:
    for node in source.walk():
        if isinstance(node, ast.Assert):
            yield from _claim_edits(source, name, node.test)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            if not any(isinstance(argument, ast.Starred) for argument in call.args):
                yield from _call_edits(source, name, call)


def _call_edits(source: Source, name: str, call: ast.Call) -> Iterator[Edit]:
    method, arguments = _called(call), call.args
    if method == "assertTrue" and arguments:
        yield from _claim_edits(source, name, arguments[0])
    elif method in _EQUALITIES and len(arguments) > 1:
        one, other = arguments[:2]
        text = f"{name}({source.text(one)}, {source.text(other)}), True"
        if method in _OF_ONE_TYPE:
            start = source.span(call.func)[1] - len(method)
            yield Edit(start, source.span(other)[1], f"assertEqual({text}")
        else:
            yield Edit(source.span(one)[0], source.span(other)[1], text)
    elif method in _APPROXIMATE:
        yield from (_made_plain(source, name, argument) for argument in arguments[:2])


def _claim_edits(source: Source, name: str, test: ast.expr) -> Iterator[Edit]:
    """Edit the equalities that are all asserted by one expression."""
    for part in test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]:
        if not (isinstance(part, ast.Compare) and len(part.ops) == 1 and isinstance(part.ops[0], ast.Eq)):
            continue
        one, other = part.left, part.comparators[0]
        if _called(one) == "approx":
            yield _made_plain(source, name, other)
        elif _called(other) == "approx":
            yield _made_plain(source, name, one)
        else:
            yield Edit(*source.span(part), f"{name}({source.text(one)}, {source.text(other)})")


def _made_plain(source: Source, name: str, node: ast.expr) -> Edit:
    return Edit(*source.span(node), f"{name}({source.text(node)})")


def _called(node: ast.expr) -> str:
    """The name of the function or method that an expression calls, without what it is of; empty for others."""
    if not isinstance(node, ast.Call):
        return ""
    return str(getattr(node.func, "attr", None) or getattr(node.func, "id", ""))
