"""Comparisons by what values hold: what is right passes, whoever says that it is."""

from __future__ import annotations

import enum
import math
import numbers
import textwrap
import unittest
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from minisandbox.grade.confirm.plain_values import compare_plainly


class Near(int):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and abs(int(self) - other) < 10

    __hash__ = int.__hash__


class AnyEnding(str):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self[:-2] == other[:-2]

    __hash__ = str.__hash__


class NearAll(float):
    """Knows no answer and is near each."""

    def __sub__(self, other: object) -> float:
        return NearAll(0)

    def __abs__(self) -> float:
        return 0.0

    def __lt__(self, other: object) -> bool:
        return True

    __rsub__ = __add__ = __sub__
    __neg__ = __abs__
    __gt__ = __le__ = __ge__ = __lt__


class NearAllButNoNumber:
    __sub__ = __rsub__ = NearAll.__sub__
    __lt__ = __gt__ = __le__ = __ge__ = NearAll.__lt__


class Holding(list):  # type: ignore[type-arg]
    def __init__(self, *values: object) -> None:
        self.values = values

    def __contains__(self, value: object) -> bool:
        return value in self.values


class SaysYes(type):
    """Its classes equal all others."""

    def __eq__(cls, other: object) -> bool:
        return True

    __hash__ = type.__hash__


class Asked(metaclass=SaysYes):
    """A method that is called like one, and is none of Python's."""

    def __get__(self, one: object, kind: object) -> Callable[[object], bool]:
        return lambda other: other in (4, 5)


class OneOfHidden(metaclass=SaysYes):
    __eq__ = Asked()
    __hash__ = None  # type: ignore[assignment]

    __ne__ = type("", (Asked,), {"__get__": lambda *_: lambda other: other not in (4, 5)})()


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
    names: dict[str, object] = {
        "f": lambda: value,
        "Pair": Pair,
        "math": math,
        "Path": Path,
        "date": date,
        "timedelta": timedelta,
    }
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


NEAR_FIVE = [
    "assert abs(f() - 5) < 1e-9",
    "assert math.fabs(5 - f()) <= 1e-9 and f() < 6",
    "assert 4.9 < f() < 5.1",
    "assert not f() > 5.1\nassert not 4.9 > f()",
    "assert -f() < -4.9\nassert f() + 1 < 6.1",
    "self.assertTrue(abs(f() - 5) < 1e-9)",
    "self.assertFalse(abs(f() - 5) > 1e-9)",
    "self.assertLess(abs(f() - 5), 1e-9)",
    "self.assertGreaterEqual(f(), 4.9)\nself.assertLessEqual(f(), 5.1)",
]


@pytest.mark.parametrize("body", NEAR_FIVE)
def test_what_is_near_all_others_is_as_near_as_what_it_holds(body: str) -> None:
    held: list[object] = [5, 5.0, Own(5), NearAll(5), Decimal(5), Fraction(5)]
    assert [value for value in held if not passes(body, value)] == []
    for value in (NearAll(4), NearAll(7), NearAllButNoNumber()):
        assert not passes(body, value)


@pytest.mark.parametrize(
    "body", ["five = 5.0\nassert abs(f() - five) < 1 / five", "self.assertLess(f(), (five := 5.5))"]
)
def test_what_is_near_all_numbers_that_have_names(body: str) -> None:
    assert passes(body, 5)
    assert passes(body, NearAll(5))
    assert not passes(body, NearAll(7))


FORMS_OF_FIVE = [
    "assert f() == 5 == f()",
    "assert 4.9 < f() == 5",
    "assert not f() != 5",
    "assert not (f() != 5 or f() < 4)",
    "assert (f() == 5) is True",
    "assert bool(f() == 5)",
    "assert f() == 5 or f() == 55",
    "assert f() in (5, 55)",
    "assert not f() not in [5]",
    "assert f() in {5: 1}",
    "assert all(n == 5 for n in [f()])",
    "assert all([n == 5 for n in (f(),)]), 'words'",
    "assert (f() == 5 if f() else False)",
    "assert (lambda n: n == 5)(f())",
    "assert not [n for n in [f()] if n != 5]",
    "assert [(f() == 5)] == [True]",
    "assert len([n for n in [f()] if n == 5]) == 1",
    "self.assertFalse(f() != 5)",
    "self.assertTrue(not f() != 5)",
    "self.assertEqual(f() == 5, True)",
    "assert not f() != approx(5)",
    "assert not [f()] != [5]",
]


@pytest.mark.parametrize("body", FORMS_OF_FIVE)
def test_equality_wherever_an_assertion_spells_it(body: str) -> None:
    for right in (5, 5.0, Own(5), Near(5), NearAll(5)):
        assert passes(body, right)
    for wrong in (4, Near(4), OneOf(4, 5), OneOfHidden(), OfAnyKind(4, 5), NearAll(4), Liar(int, 2, 4, 5)):
        assert not passes(body, wrong)


def test_objects_compare_themselves_beside_others() -> None:
    path = Path("a")
    for body in (
        "assert f() / 'b' in [f() / 'b', 3]",
        "assert not f() != Path('a')",
        "assert 'a' != f()",
        "assert f() in {f()}",
    ):
        assert passes(body, path)
    assert not passes("assert not f() != Path('b')", path)
    assert passes("assert 5 in f() and 7 not in f()", Holding(5))
    assert passes("assert 5 in f() and 7 not in f()", dict.fromkeys(range(6)))
    assert passes("assert 5 in f() and 7777 not in f()", list(range(2000)))


def test_much_is_not_copied_for_each_question() -> None:
    many = {str(number) for number in range(30_000)}
    assert passes("for text in f():\n    assert text in f()", many)


def test_what_else_has_an_order_keeps_it() -> None:
    today = date(2020, 2, 2)
    for body in ("assert date(2020, 2, 1) < f() <= date(2020, 2, 2)", "assert f() - date(2020, 2, 1) < timedelta(2)"):
        assert passes(body, today)
        assert not passes(body, today + timedelta(9))
    assert passes("assert {1} <= f().keys()", {1: 2})
    assert passes("assert f() < [5]", [4])
    assert passes("assert f() < 'b'", "a")


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
    [b"def test():\n    assert f()\n", b"print 5\n", b"\xff\xfe", b"def test():\n    assert f() is (not g())\n", b""],
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
