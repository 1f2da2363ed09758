"""Comparisons by what values hold: what is right passes, whoever says that it is."""

from __future__ import annotations

import enum
import numbers
import textwrap
import unittest
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction

import pytest

from minisandbox.grade.comparisons import compare_plainly


class Near(int):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and abs(int(self) - other) < 10

    __hash__ = int.__hash__


class AnyEnding(str):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self[:-2] == other[:-2]

    __hash__ = str.__hash__


class OneOf:
    def __init__(self, *values: object) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return other in self.values

    __hash__ = None  # type: ignore[assignment]


class Liar(OneOf):
    """Says that it is of another class, from some question on."""

    def __init__(self, told: type, after: int, *values: object) -> None:
        super().__init__(*values)
        self.told, self.after = told, after

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        self.after -= 1
        return self.told if self.after < 0 else Liar

    def __iter__(self) -> Iterator[object]:
        return iter([OneOf(4, 5)])

    def __len__(self) -> int:
        return 1


class Pair:
    def __init__(self, one: int, other: int) -> None:
        self.both = one, other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pair) and self.both == other.both

    __hash__ = None  # type: ignore[assignment]


class Mode(str, enum.Enum):  # noqa: UP042 - as they were before Python 3.11
    ON = "on"


class Own(int):
    pass


def drawing(kind: type, says: object) -> type:
    """A subclass of a built-in class that is equal to anything, and answers by its own methods what is expected."""
    methods = ["int", "float", "complex", "index", "trunc", "pos", "str", "bytes", "getitem", "buffer", "iter", "len"]
    names: dict[str, object] = {f"__{name}__": lambda *_: says for name in methods}
    names |= {"__eq__": lambda *_: True, "__hash__": lambda _: hash(says), "items": lambda _: says, "real": says}
    return type("Drawing", (kind,), names)


class EqualsKinds(type):
    """A class that is equal to whatever class it is compared with."""

    def __eq__(cls, other: object) -> bool:
        return True

    __hash__ = type.__hash__


class OfAnyKind(OneOf, metaclass=EqualsKinds):
    pass


def half(numerator: object) -> Fraction:
    made = Fraction(1, 2)
    made._numerator = numerator  # type: ignore[attr-defined]
    return made


def passes(body: str, value: object) -> bool:
    """Whether a test with a body passes where f() returns a value, its comparisons made plain."""
    indented = textwrap.indent(body, "        ")
    text = f"import unittest\nfrom pytest import approx\nclass T(unittest.TestCase):\n    def test(self):\n{indented}\n"
    changed = compare_plainly({"test_a.py": text.encode()})["test_a.py"].decode()
    names: dict[str, object] = {"f": lambda: value, "Pair": Pair}
    exec(changed, names)
    case = names["T"]
    assert isinstance(case, type)
    assert issubclass(case, unittest.TestCase)
    result = case("test").run()
    assert result is not None
    return result.wasSuccessful()


SAME = [
    ("assert f() == 5", 5),
    ("assert 5 == f(), 'words'", 5),
    ("assert f() == 5 and f() == 5.0", 5),
    ("assert (f()  # of course\n    == 5)", Own(5)),
    ("assert f() == 5", Decimal(5)),
    ("assert f() == 0.5", Fraction(1, 2)),
    ("assert f() == 5j", 5j),
    ("assert f() == True", 1),
    ("assert f() == 'on'", Mode.ON),
    ("assert f() == b'on'", b"on"),
    ("assert f() == [1, ('a', {'b': 2})]", [1, ("a", {"b": 2})]),
    ("assert f() == {1, 2}", frozenset((1, 2))),
    ("assert f() == Pair(1, 2)", Pair(1, 2)),
    ("assert f() == None", None),
    ("assert f() == approx(5.1, abs=0.2)", 5),
    ("assert approx([5.1], abs=0.2) == f()", [5]),
    ("self.assertEqual(f(), 5)", 5),
    ("self.assertEqual(\n    f(),\n    5,\n    'words')", 5),
    ("self.assertTrue(f() == 5)", 5),
    ("self.assertDictEqual(f(), {'a': 5})", {"a": 5}),
    ("self.assertAlmostEqual(f(), 5.00000001)", 5),
    ("for n in (1, 2):\n    assert f() == n or f() == 5\n    assert f() == 5", 5),
]
DRAWN = [
    ("5", drawing(int, 5)(4), 4),
    ("5.5", drawing(float, 5.5)(4.0), 4.0),
    ("5j", drawing(complex, 5j)(4j), 4j),
    ("'on'", drawing(str, "on")("off"), "off"),
    ("b'on'", drawing(bytes, b"on")(b"off"), b"off"),
    ("[5]", drawing(list, iter([5]))([4]), [4]),
    ("(5,)", drawing(tuple, iter([5]))([4]), (4,)),
    ("{5}", drawing(frozenset, iter([5]))([4]), {4}),
    ("{'a': 5}", drawing(dict, [("a", 5)])({"a": 4}), {"a": 4}),
    ("2.5", drawing(Fraction, 2.5)(3, 2), 1.5),
    ("2.5", half(drawing(int, 5)(3)), 1.5),
    ("2.5", drawing(Decimal, 2.5)("1.5"), 1.5),
    ("[2.5]", [drawing(Decimal, 2.5)("1.5")], [1.5]),
]
OTHER = [
    ("assert f() == 5", OfAnyKind(4, 5)),
    ("assert f() == [5]", [OfAnyKind(4, 5)]),
    ("self.assertAlmostEqual(f(), 5)", OfAnyKind(4, 5)),
    ("assert f() == 5", Near(4)),
    ("assert 5 == f()", Near(4)),
    ("assert f() == 5", OneOf(4, 5)),
    ("assert 'x' and f() == 5", OneOf(4, 5)),
    ("assert f() == 5", pytest.approx(4, abs=2)),
    ("assert f() == [5]", [OneOf(4, 5)]),
    ("assert f() == {'a': [5]}", {"a": [Near(4)]}),
    ("assert f() == ('a', '100th')", ("a", AnyEnding("100st"))),
    ("assert f() == approx(5)", OneOf(5)),
    ("assert f() == approx(5)", Near(4)),
    ("assert f() == '100th'", AnyEnding("100st")),
    ("assert f() == None", OneOf(4, None)),
    ("assert f() == [5]", OneOf([4], [5])),
    ("assert f() == {'a': 5}", OneOf({}, {"a": 5})),
    ("assert f() == {5}", OneOf({4}, {5})),
    ("self.assertEqual(f(), '100th')", AnyEnding("100st")),
    ("self.assertTrue(f() == 5)", Near(4)),
    ("self.assertAlmostEqual(f(), 5)", Near(4)),
    ("self.assertAlmostEqual(f(), 5)", OneOf(4, 5)),
]


@pytest.mark.parametrize(("body", "value"), SAME)
def test_what_is_right_passes(body: str, value: object) -> None:
    assert passes(body, value)


@pytest.mark.parametrize(("body", "value"), OTHER)
def test_what_says_so_itself_does_not(body: str, value: object) -> None:
    assert not passes(body, value)


@pytest.mark.parametrize(("wanted", "value", "held"), DRAWN, ids=range(len(DRAWN)))
def test_a_value_is_what_it_holds_whatever_its_class_makes_of_it(wanted: str, value: object, held: object) -> None:
    """Otherwise one that equals two likely answers, and converts to one of them by lot, would often be right."""
    assert not passes(f"assert f() == {wanted}", value)
    assert passes(f"assert f() == {held!r}", value)


def test_a_number_that_is_of_no_class_of_c_is_no_plain_number() -> None:
    class Number(numbers.Number):
        def __float__(self) -> float:
            return 5.0

        __int__ = __float__
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    class generic(list[int]):  # noqa: N801 - named like numpy's
        __module__ = "numpy"
        item = list.pop

    assert not passes("assert f() == 5", Number())
    assert not passes("assert f() == 5", generic([4, 5]))


def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    for wanted, value in (("5", numpy.int64(5)), ("0.5", numpy.float32(0.5)), ("5j", numpy.complex64(5j))):
        assert passes(f"assert f() == {wanted}", value)
        assert passes(f"assert f() == [{wanted}]", [value])
        assert not passes("assert f() == 4", value)


@pytest.mark.parametrize("after", range(30))
def test_what_it_says_that_it_is_counts_for_nothing(after: int) -> None:
    assert not passes("assert f() == 5", Liar(int, after, 4, 5))
    assert not passes("assert f() == '5'", Liar(str, after, "4", "5"))
    assert not passes("assert f() == [5]", Liar(list, after, [4], [5]))
    assert not passes("assert f() == approx(5)", Liar(int, after, 4, 5, pytest.approx(5)))


@pytest.mark.parametrize(
    "text",
    [b"def test():\n    assert f()\n", b"print 5\n", b"\xff\xfe", b"def test():\n    assert f() == 5 == g()\n", b""],
)
def test_files_without_a_comparison_that_can_be_changed(text: bytes) -> None:
    assert compare_plainly({"test_a.py": text, "data.json": b"{}"}) == {}


def test_no_jump_in_the_test_decides() -> None:
    """One in its own code can be turned round in memory by what it calls."""
    text = b"def test(value):\n    assert value == 5\n"
    names: dict[str, Callable[[int], None]] = {}
    exec(compare_plainly({"test.py": text})["test.py"].replace(b"assert ", b"assert not "), names)
    for value in (4, 5):  # false, so that the test fails; true, so that the jump that was turned round has it fail
        with pytest.raises(AssertionError, match="not the same" if value == 4 else "^$"):
            names["test"](value)
