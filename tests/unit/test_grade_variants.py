"""Variants: a test that passed fails once an expectation is changed; a confirming run draws from those that do."""

from __future__ import annotations

import ast
import builtins
import random
import re
import textwrap
import unittest
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from minisandbox.grade.confirm.changeable import Changeable, ChangeableTests, CheckedVariant
from minisandbox.grade.confirm.collection import mismatches, spelled
from minisandbox.grade.confirm.draws import VersionDraw, draws, draws_without_copies
from minisandbox.grade.confirm.editions import Changes, make_edition
from minisandbox.grade.confirm.edits import PythonSource, apply_edits
from minisandbox.grade.confirm.literals import OtherValues, other_literals
from minisandbox.grade.confirm.variants import WEAK, Kind, Variant, variants_of
from minisandbox.grade.report import Parameters
from minisandbox.syntax import parse_python

BODIES = [
    "assert add(2, 3) == 5",
    "assert 5 == add(2, 3)",
    "assert add(2, 3) == 5, 'words'",
    "assert add(2, 3) == -(-5)",
    "assert (add(2,\n     3)\n     == 5)",
    "x = 5\nassert add(2, 3) == x",
    "assert add(2, 3) != 6",
    "assert add(2, 3) < 6 and add(2, 3) == 5",
    "assert add(2, 3) < 6 or add(2, 3) == 7",
    "assert 4 < add(2, 3) == 5",
    "assert not add(2, -2)",
    "assert add(2, 3)",
    "assert add(2, 3) in (5, 6)",
    "assert add('é', 'b') == u'éb'",
    "assert add('-', '-') == '--'",
    "assert add(b'a', b'\\xff') == b'a\\xff'",
    "assert add('', '') == ''",
    "assert add(1.5, 2) == 3.5",
    "assert add(1j, 0) == 1j",
    "assert add(0, 1) == True",
    "assert [add(1, 1), {'a': add(1, 2)}] == [2, {'a': 3}]",
    "assert [] == []",
    "assert [add(1, 1)][1:] == []",
    "assert None == None",
    "for n in (1, 2):\n    assert add(n, 1) == n + 1",
    "with open('/dev/null') as f:\n    assert add(2, 3) == 5",
    "import pytest\nwith pytest.raises(TypeError):\n    add(1, None)  # comment",
    "if add(2, 3) != 5:\n    raise AssertionError",
    "'''Words.'''\nassert add(2, 3) == 5",
    "add(2, 3)",
]
METHODS = [
    "self.assertEqual(add(2, 3), 5)",
    "self.assertEqual(5, add(2, 3))",
    "self.assertEqual(add(2, 3), add(1, 4), 'words')",
    "self.assertTrue(add(2, 3) == 5)",
    "self.assertTrue(add(2, 3))",
    "self.assertFalse(add(2, -2))",
    "self.assertIn(add(2, 3), [5])",
    "self.assertIsNone(None)",
    "self.assertAlmostEqual(add(2, 3), 5.0)",
    "with self.assertRaises(TypeError):\n    add(1, None)",
    "with self.subTest():\n    self.assertEqual(add(2, 3), 5)",
]


def add(a: object, b: object) -> object:
    return a + b  # type: ignore[operator] # whatever the tests give


def passes(text: bytes, method: bool = False) -> bool:
    names: dict[str, object] = {"add": add, "unittest": unittest}
    exec(compile(text, "test_x.py", "exec"), names)
    if method:
        case = names["TestIt"]("test_it")  # type: ignore[operator] # a class
        result = unittest.TestResult()
        case.run(result)
        return result.wasSuccessful()
    try:
        names["test_it"]()  # type: ignore[operator] # a function
    except Exception:  # noqa: BLE001 - whatever the test raises
        return False
    return True


def found(text: str, test: str = "t.py::test_it", seed: int = 0) -> list[Variant]:
    return variants_of({"t.py": text.encode()}, [test], random.Random(seed)).get(test, [])


def changed(text: str, variant: Variant) -> list[bytes]:
    return [apply_edits(text.encode(), [variant.edit(number)]) for number in range(len(variant.texts))]


@pytest.mark.parametrize("body", BODIES + METHODS)
def test_a_test_that_passed_fails_when_it_is_changed(body: str) -> None:
    method = body in METHODS
    head, indent = ("class TestIt(unittest.TestCase):\n    def test_it(self):\n", "        ") if method else (
        "def test_it():\n", "    "
    )  # fmt: skip
    text = head + textwrap.indent(body, indent) + "\n"
    assert passes(text.encode(), method)
    for seed in range(10):
        variants = found(text, "t.py::TestIt::test_it" if method else "t.py::test_it", seed)
        contents = [content for variant in variants for content in changed(text, variant)]
        assert any(not passes(content, method) for content in contents), contents
        assert all(
            content.count(b"\n") == text.count("\n") + (variants[0].kind is Kind.APPENDED) for content in contents
        )


HELPER = "def check(a, b):\n    assert f(a) == b\n\n\n"
NAMES = "abc", "abd", "xyz", "xyzt"
PLAUSIBLE = {
    "a table": (
        f"@pytest.mark.parametrize('a,b', {[*enumerate(NAMES)]})\ndef test_it(a, b):\n    assert f(a) == b\n", 2
    ),
    "a table with cells of several strings": (
        f"@pytest.mark.parametrize('a', {[(1, NAMES[:2]), (2, NAMES[2:])]})\ndef test_it(a):\n    assert f() == a\n",
        1,
    ),
    "assertions": ("def test_it():\n" + "".join(f"    assert f({name!r}) == {name!r}\n" for name in NAMES), 2),
    "of other tests": (
        "def test_it():\n    assert f() == 'abc'\n\n\ndef test_two(tester):\n    tester.assertEqual(f(), 'abd')\n", 1
    ),
    "a loop": (f"def test_it():\n    for a, b in {[*enumerate(NAMES)]}:\n        assert f(a) == b\n", 2),
    "of a helper": (
        HELPER + "def test_it():\n    check(1, 'abc')\n\n\ndef test_two():\n    assert f() == 'abd'\n",
        1,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "least"), PLAUSIBLE.values(), ids=PLAUSIBLE)
@pytest.mark.parametrize("seed", range(5))
def test_strings_are_replaced_by_others_that_tests_of_the_file_expect(text: str, least: int, seed: int) -> None:
    for variant in found(text, seed=seed):
        if variant.kind is not Kind.CONDITION:
            strings = [
                {literal.value for literal in ast.walk(ast.parse(content)) if isinstance(literal, ast.Constant)}
                for content in changed(text, variant)
            ]
            likely = [each for each in strings if {one for one in each if isinstance(one, str)} <= {*NAMES, "a,b", "a"}]
            assert len(likely) >= least


@pytest.mark.parametrize(
    "text",
    [
        "def test_it():\n    assert 'abc' in f()\n\n\ndef test_two():\n    assert f() == 'xyz'\n",
        "@pytest.mark.parametrize('a,b', [(1, 'abc'), (2, 'xyz')])\ndef test_it(a, b):\n    assert b in f(a)\n",
    ],
)
def test_values_that_need_not_be_equal_are_not_exchanged(text: str) -> None:
    """Another solution may well print another string that the file's tests look for."""
    for seed in range(20):
        for variant in found(text, seed=seed):
            contents = [content.decode() for content in changed(text, variant)]
            assert variant.kind is Kind.CONDITION or all(
                text.count(name) >= content.count(name) for content in contents for name in ("'abc'", "'xyz'")
            )
            assert variant.kind is not Kind.PARAMETER or not any(
                content.count("'abc'") == content.count("'xyz'") == 1 for content in contents
            )


EXPECTATIONS = {
    "a value in an assertion": ("def test_it():\n    assert f(1, 2) == 'abc'\n", Kind.ASSERTION),
    "of a class that is a value": ("def test_it():\n    assert f() == Decimal('1.5')\n", Kind.ASSERTION),
    "near a value": ("def test_it():\n    assert abs(f(1) - 5.5) < f(2)\n", Kind.ASSERTION),
    "two unknown values": ("def test_it():\n    assert f(1) == g(2)\n", Kind.ASSERTION),
    "of a helper": (
        "def check(text, expected):\n    assert f(text) == expected\n\n\ndef test_it():\n    check('a', 'b')\n",
        Kind.ASSERTION,
    ),
    "of a tester's own assertion": ("def test_it(tester):\n    tester.fnmatch_lines(['*a*'])\n", Kind.ASSERTION),
    "a table": (
        "@pytest.mark.parametrize('a,b', [(1, 2), pytest.param(3, 4)])\ndef test_it(a, b):\n    assert f(a) == b\n",
        Kind.PARAMETER,
    ),
    "a table elsewhere": (
        "T = (('a', 'b'), ('c', 'd'))\n@pytest.mark.parametrize('a, b', T)\ndef test_it(a, b):\n    assert f(a) == b\n",
        Kind.PARAMETER,
    ),
    "a loop": ("def test_it():\n    for a, b in [(1, 2), (3, 4)]:\n        assert f(a) == b\n", Kind.PARAMETER),
    "a variable": ("def test_it():\n    expected = {'a': 1}\n    assert f('x') == expected\n", Kind.CONSTANT),
    "a constant": ("EXPECTED = [1, 2]\n\n\ndef test_it():\n    assert f('x') == EXPECTED\n", Kind.CONSTANT),
    "a fixture": (
        "@pytest.fixture\ndef expected():\n    return 'a'\n\n\ndef test_it(expected):\n    assert f() == expected\n",
        Kind.FIXTURE,
    ),
    "an attribute": (
        "class TestIt:\n  def setup_method(self):\n    self.a = 5\n  def test_it(self):\n    assert f() == self.a\n",
        Kind.FIXTURE,
    ),
    "an exception": ("def test_it():\n    with pytest.raises(ValueError):\n        f(1)\n", Kind.EXCEPTION),
    "its message": ("def test_it():\n    with pytest.raises(E, match='no x'):\n        f(1)\n", Kind.EXCEPTION),
    "a condition": ("def test_it():\n    assert f(1)\n", Kind.CONDITION),
    "nothing": ("def test_it():\n    f(1)\n", Kind.APPENDED),
    "with CRLF": ("def test_it():\r\n    assert f(1) == 2\r\n", Kind.ASSERTION),
    "with a byte order mark": ("\ufeffdef test_it():\n    assert f(1) == 2\n", Kind.ASSERTION),
    "inherited": ("class A:\n  def test_it(self):\n    assert f(1) == 2\nclass TestIt(A):\n  x = 1\n", Kind.ASSERTION),
}  # fmt: skip


@pytest.mark.parametrize(("text", "kind"), EXPECTATIONS.values(), ids=EXPECTATIONS)
def test_an_expectation_is_changed_wherever_it_is_written(text: str, kind: Kind) -> None:
    test = "t.py::TestIt::test_it" if "class TestIt" in text else "t.py::test_it"
    strongest = found(text, test)[0]
    assert strongest.kind is kind
    for content in changed(text, strongest):
        assert PythonSource.read(content) is not None
        assert content != text.encode()


def test_computed_values_are_expected_of_one_another() -> None:
    """A list would be of another type, which an object can tell."""
    text = (
        "def test_it():\n    assert f(1) == D({1: 2})\n    assert f(2) == D({1: 3})\n    later = 1\n"
        "    assert f(3) == g(later)\n    assert f(4) == D(\n        {1: 3})\n"
    )
    texts = {text[one.start : one.end]: one.texts for one in found(text) if one.kind is Kind.ASSERTION}
    assert texts["D({1: 2})"] == ("D({1: 3})",)
    assert texts["D({1: 3})"] == ("D({1: 2})",)
    assert texts["g(later)"] == ("[g(later)]",), "no name is read that this assertion does not read"


INPUTS = [
    "def test_it():\n    result = f('abc')\n    assert result == g()\n",
    "def test_it():\n    x = 'abc'\n    assert f(x) == x\n",
    "def test_it():\n    assert Schema('a') == g()\n",
    "@pytest.mark.parametrize('x', ['a', 'b'])\ndef test_it(x):\n    assert f(x) == g(x)\n",
    "def check(text, expected):\n    assert f(text) == expected\n\n\ndef test_it():\n    check('a', g())\n",
]


@pytest.mark.parametrize("text", INPUTS)
def test_an_input_of_the_code_under_test_is_never_changed(text: str) -> None:
    """Another correct solution may treat a changed input differently than the reference does."""
    for variant in found(text):
        for content in changed(text, variant):
            for value in ("'abc'", "'a'", "'b'"):
                assert content.count(value.encode()) == text.count(value), content


@pytest.mark.parametrize(
    "text", ["5", "-5", "0x1f", "1_000", "True", "None", "1.5", "1e308", "2j", "'a'", '"""a\nb"""', "''", "r'\\d'",
             "'\\n\\x41z'", "u'a'", "b'a'", "'a' 'b'", "('a'\n 'b')"]
)  # fmt: skip
def test_another_literal_has_another_value_of_the_same_kind(text: str) -> None:
    for seed in range(20):
        others = other_literals(text, random.Random(seed)).replacements
        assert others
        for other in others:
            value, new = ast.literal_eval(text), ast.literal_eval(other)
            assert new != value
            assert {value, new} <= {None, False, True} or type(new) is type(value)
            assert other.count("\n") == text.count("\n")


@pytest.mark.parametrize("form", ["{}", "-{}", "{}.5", "{}.25", "4_{}00", "'{}'", "'i'"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_rank_of_the_original_among_the_values_of_a_run_is_random(form: str, count: int) -> None:
    """The other values are drawn once for a task; were its rank the same in all runs, a rule could tell it."""
    for seed in range(20):
        rng = random.Random(seed)
        text = form.format(rng.randrange(3, 7) if "'" in form else rng.randrange(13, 40))
        others = other_literals(text, rng)
        value, values = ast.literal_eval(text), [*map(ast.literal_eval, others.replacements)]
        assert (len(values), others.below, others.most_drawn) == (6, 3, 3)
        if isinstance(value, float):
            assert {str(other).partition(".")[2] for other in values} == {str(value).partition(".")[2]}
        draws = [[values[index] for index in others.draw(count, rng)] for _ in range(400)]
        ranks = Counter(sorted([value, *drawn]).index(value) for drawn in draws)
        assert {*ranks} == {*range(count + 1)}
        assert max(ranks.values()) < 400 / (count + 1) * 1.4


@pytest.mark.parametrize(("text", "below"), [("0", 0), ("1", 1), ("-1", None), ("'a'", 0), ("''", 0), ("0.5", 0)])
def test_a_value_at_an_edge_has_other_values_on_one_side(text: str, below: int | None) -> None:
    for seed in range(20):
        others = other_literals(text, random.Random(seed))
        assert others.below == (len(others.replacements) if below is None else below)
        assert len(others.replacements) >= 3
        assert len({*others.draw(others.most_drawn, random.Random(seed))}) == others.most_drawn


def test_a_run_never_shows_all_values_of_both_sides() -> None:
    assert [OtherValues(("a",) * count, count // 2).most_drawn for count in range(8)] == [0, 1, 1, 1, 2, 2, 3, 3]
    assert [OtherValues(("a",) * count).most_drawn for count in range(6)] == [0, 1, 2, 3, 3, 3]


def test_a_run_shows_a_lookalike_and_any_first_part_of_a_check_has_all_sides() -> None:
    others = OtherValues(("a", "b", "d", "e", "x", "y"), 2, lookalikes=2)
    assert (others.order, others.kept([1, 2, 5])) == ([4, 2, 0, 5, 3, 1], OtherValues(("b", "d", "y"), 1, 1))
    assert all({4, 5} & {*others.draw(count, random.Random(seed))} for seed in range(40) for count in (1, 2, 3))


@pytest.mark.parametrize(
    ("expected", "related"),
    [
        ("ValueError", ()),
        ("(KeyError, OSError)", ("IndexError",)),
        ("LookupError", ()),
        ("mylib.E", ()),
        ("Exception", ()),
    ],
)
def test_changed_tests_expect_common_exceptions_unrelated_to_their_own(expected: str, related: tuple[str, ...]) -> None:
    text = f"def test_it():\n    with pytest.raises({expected}):\n        f(1)\n"
    named = [getattr(builtins, name) for name in re.findall("[A-Z][A-Za-z]+", expected) if hasattr(builtins, name)]
    drawn = set()
    for seed in range(40):
        (variant,) = variants_of({"t.py": text.encode()}, ["t.py::test_it"], random.Random(seed))["t.py::test_it"]
        drawn |= set(variant.texts)
    assert drawn if expected == "Exception" else {"TypeError", "RuntimeError", *related} <= drawn
    for name in drawn:
        kind = getattr(builtins, name)
        assert not any(issubclass(kind, other) or issubclass(other, kind) for other in named), name


def checked(text: str, tests: list[str], seed: int = 0) -> ChangeableTests:
    """Return all variants of tests, as if the reference failed each."""
    variants = variants_of({"t.py": text.encode()}, tests, random.Random(seed))
    return ChangeableTests(
        tuple(
            Changeable(
                test, test, ("",), ("",), True, 0.0, test,
                variants=tuple(CheckedVariant(each, ({"": "+1"},) * len(each.texts)) for each in variants[test]),
            )
            for test in tests
        )
    )  # fmt: skip


def draw(tests: ChangeableTests, seconds: float, dice: random.Random) -> VersionDraw:
    (drawn,) = draws(tests, seconds, dice)
    return drawn


def is_changed(changes: Changes) -> bool:
    return any(number >= 0 for _, number in changes)


DRAWN = {
    "two places": "def test_a():\n    assert f(1) == 2\n    assert f(2) == 3\n",
    "one place": "def test_a():\n    assert f(3) == 4\n",
    "a truth": "def test_a():\n    assert f(3) == True\n    assert f(4) == 5\n",
    "a constant": "E = {'a': 1, 'b': 2}\n\n\ndef test_a():\n    assert f() == E\n    assert g() == 4\n",
    "a table": "T = [(1, 2), (3, 4)]\n\n\n@mark.parametrize('a, b', T)\ndef test_a(a, b):\n    assert f(a) == b\n",
    "a fixture": "@pytest.fixture\ndef e():\n    return [5, 9]\n\n\ndef test_a(e):\n    assert f() == e\n",
    "an attribute": "class TestIt:\n    e = 5\n\n    def test_a(self):\n        assert f() == self.e\n",
}


@pytest.mark.parametrize("text", DRAWN.values(), ids=DRAWN)
def test_what_versions_share_does_not_tell_what_the_original_expects(text: str) -> None:
    """Each value that a place has in some version is there in as many versions as any other."""
    test = "t.py::TestIt::test_a" if "class" in text else "t.py::test_a"
    tests = checked(text, [test])
    first, defined = set(), set()
    for seed in range(40):
        drawn = draw(tests, 1.0, random.Random(seed))
        versions = drawn.versions[test]
        assert [is_changed(changes) for changes in versions].count(False) == 1
        for variant in {variant for changes in versions for variant, _ in changes}:
            numbers = [dict(changes).get(variant, -1) for changes in versions]
            assert len({*Counter(numbers).values()}) == 1, numbers
        first.add(is_changed(versions[0]))
        edition = make_edition({"t.py": text.encode()}, drawn.versions, random.Random(seed), drawn.definitions)
        assert parse_python(edition.files["t.py"].decode()) is not None
        assert len(edition.versions) == len(versions) >= 4
        defined.add(edition.files["t.py"][: text.index("def test_a")])
    assert first == {True, False}, "chance decides whether the test's own name is changed"
    assert (len(defined) > 2) is ("E =" in text or "T =" in text or " e" in text), "so does it for definitions"


@pytest.mark.parametrize("use", ["def helper():\n    return E\n", "F = [E]\n", "def test_b():\n    assert f(E)\n"])
def test_a_definition_that_something_else_reads_is_left_alone(use: str) -> None:
    text = f"E = 7\n{use}\n\ndef test_a():\n    assert f() == E\n"
    tests = checked(text, ["t.py::test_a"])
    contents = set()
    for seed in range(20):
        drawn = draw(tests, 1.0, random.Random(seed))
        drawn.versions.update({"t.py::test_b": [()]} if "test_b" in use else {})
        edition = make_edition({"t.py": text.encode()}, drawn.versions, random.Random(seed), drawn.definitions)
        contents.add(edition.files["t.py"].partition(b"\n")[0])
    assert contents == {b"E = 7"}


def test_without_copies_a_definition_does_not_tell_whether_the_test_is_changed() -> None:
    text = "E = 7\n\n\ndef test_a():\n    assert f() == E\n"
    tests, contents = checked(text, ["t.py::test_a"]), set()
    for seed in range(40):
        for drawn in draws_without_copies(tests, random.Random(seed)):
            edition = make_edition({"t.py": text.encode()}, drawn.versions, random.Random(seed), drawn.definitions)
            content = edition.files["t.py"].decode()
            (version,) = edition.versions
            numbers = re.findall(r"\d+", content)
            assert ("== (7)" in content) is not version.is_changed
            contents.add((version.is_changed, numbers[0] == "7", numbers[0] == numbers[1]))
    assert contents == {(False, True, True), (False, False, False), (True, True, False), (True, False, True)}


def test_the_values_of_one_definition_are_new_in_the_same_way_for_all_tests() -> None:
    """A value that two tests have in common would be the original one."""
    text = "E = 7\n\n\ndef test_a():\n    assert f() == E\n\n\ndef test_b():\n    assert g() == E\n"
    (one, *_), (other, *_) = variants_of(
        {"t.py": text.encode()}, ["t.py::test_a", "t.py::test_b"], random.Random(0)
    ).values()
    assert one.texts == other.texts
    tests = checked(text, ["t.py::test_a", "t.py::test_b"])
    for seed in range(20):
        shown = [
            {variant.texts[index] for changes in versions for variant, index in changes if index >= 0}
            for versions in draw(tests, 1.0, random.Random(seed)).versions.values()
        ]
        assert shown[0] == shown[1], "and the same of them in one run"


def test_the_place_where_the_untouched_code_fails_is_always_changed() -> None:
    text = "def test_a():\n" + "".join(f"    assert f({n}) == {n}\n" for n in range(20))
    (function,) = checked(text, ["t.py::test_a"]).functions
    variants = tuple(
        replace(one, failing=({"": f"+{text[: one.variant.start].count(chr(10))}"},) * len(one.variant.texts))
        for one in function.variants
    )
    (broken,) = (one.variant for one in variants if one.variant.kind not in WEAK and one.failing[0][""] == "+7")
    function = replace(function, variants=variants, broken=("+6",))
    variants = tuple(one for one in variants if one.failing[0][""] != "+6")  # a call outside of assertions
    for seed in range(20):
        drawn = draw(ChangeableTests((replace(function, variants=variants),)), 1.0, random.Random(seed))
        alone = [changes for changes in drawn.versions["t.py::test_a"] if [one for one, _ in changes] == [broken]]
        assert alone, "in some version nothing else is changed"
        assert all(drawn.failing["t.py::test_a", changes] == {"": {"+7"}} for changes in alone)


def test_tests_without_copies_are_changed_or_not() -> None:
    text = "".join(f"def test_{n}():\n    assert f({n}) == {n + 1}\n\n\n" for n in range(4))
    tests = checked(text, [f"t.py::test_{n}" for n in range(4)])
    single = ChangeableTests(tuple(replace(one, copies=False) for one in tests.functions))
    counts = set()
    for seed in range(40):
        drawn = draw(single, 1.0, random.Random(seed))
        assert all(len(versions) == 1 for versions in drawn.versions.values())
        counts.add(sum(is_changed(versions[0]) for versions in drawn.versions.values()))
    assert counts == {1, 2, 3}, "some are changed, never all"
    alone = ChangeableTests(single.functions[:1])
    pairs = [
        [is_changed(one.versions["t.py::test_0"][0]) for one in draws(alone, 1.0, random.Random(n))] for n in range(9)
    ]
    assert all({*pair} == {False, True} for pair in pairs), "one test is changed in one of two draws"
    assert len({*map(tuple, pairs)}) == 2
    without = [[*drawn.versions.values()] for drawn in draws_without_copies(tests, random.Random(0))]
    without.remove([[()]] * 4)
    assert len(without) == 3, "three values at the only place"
    assert all(len(versions) == 1 and versions[0] for drawn in without for versions in drawn)


def test_a_slow_test_has_one_copy_and_many_tests_have_few() -> None:
    text = "def test_it():\n" + "".join(f"    assert f({n}) == {n}\n" for n in range(9))
    (function,) = checked(text, ["t.py::test_it"]).functions
    slow = replace(function, seconds=10.0)
    assert len(draw(ChangeableTests((slow,)), 15.0, random.Random(0)).versions["t.py::test_it"]) == 2
    two = ChangeableTests((slow, replace(slow, test="t.py::test_other", definition="other")))
    assert all(len(versions) == 1 for versions in draw(two, 25.0, random.Random(0)).versions.values())
    assert len(draw(ChangeableTests((function,)), 15.0, random.Random(0)).versions["t.py::test_it"]) == 6
    for count, versions in ((60, 6), (90, 4), (999, 2)):
        rows = replace(function, passing=tuple(map(str, range(count))))
        assert len(draw(ChangeableTests((rows,)), 15.0, random.Random(0)).versions["t.py::test_it"]) == versions
    many = "".join(f"def test_{n}():\n    assert f() == 1\n    assert f() == 2\n\n\n" for n in range(40))
    drawn = draw(checked(many, [f"t.py::test_{n}" for n in range(40)]), 1.0, random.Random(0))
    assert sum(len(versions) - 1 for versions in drawn.versions.values()) <= 60


def test_tests_that_inherit_a_method_share_its_versions() -> None:
    text = "class A:\n    def test_it(self):\n        assert f() == 2\n\n\nclass B(A):\n    pass\n"
    tests = checked(text, ["t.py::A::test_it", "t.py::B::test_it"])
    tests = ChangeableTests(tuple(replace(function, definition="t.py:2") for function in tests.functions))
    first = set()
    for seed in range(20):
        drawn = draw(tests, 1.0, random.Random(seed))
        edition = make_edition({"t.py": text.encode()}, drawn.versions, random.Random(seed))
        names = [version.test.partition("::")[2] for version in edition.versions]
        mine = [name.removeprefix("A::") for name in names if name.startswith("A::")]
        assert mine == [name.removeprefix("B::") for name in names if name.startswith("B::")]
        assert len({*mine}) == len(mine) == edition.files["t.py"].count(b"def test_it")
        first.add(is_changed(drawn.versions["t.py::A::test_it"][0]))
    assert first == {True, False}, "chance decides whether the test's own name is changed"
    for drawn in draws_without_copies(tests, random.Random(0)):
        assert drawn.versions["t.py::A::test_it"] == drawn.versions["t.py::B::test_it"]


COPIED = [
    "def test_it():\n    assert add(2, 3) == 5\n    assert add(1, 3) == 4  # comment\n",
    "def test_it():\n    assert add(2, 3) == 5; assert add(1, 1)\n",
    "@staticmethod\n@(\n    lambda one: one\n)\ndef test_it():\n    assert add(2, 3) == 5\n",
    "if add:\n    def test_it():\n        'def it'\n        assert add(2, 3) == 5\n",
]


@pytest.mark.parametrize("text", COPIED)
def test_copies_lie_below_the_test_that_stays_as_it_is(text: str) -> None:
    variants = found(text)
    changes: list[Changes] = [(), (), *(((variant, 0),) for variant in variants if variant.kind not in WEAK)]
    edition = make_edition({"t.py": text.encode()}, {"t.py::test_it": changes}, random.Random(0))
    content = edition.files["t.py"]
    assert len(edition.versions) == len(changes)
    for version in edition.versions:
        name = version.test.partition("::")[2]
        alone = content if name == "test_it" else content.replace(b"def test_it(", b"def left_out(")
        alone = alone.replace(f"def {name}(".encode(), b"def test_it(")
        assert passes(alone) is not version.is_changed, alone


@pytest.mark.parametrize("text", [b"print 'two'\n", b"\xff", b"a\rb", b"x"])
def test_a_file_that_cannot_be_parsed_has_no_variants(text: bytes) -> None:
    assert variants_of({"t.py": text}, ["t.py::test_it"], random.Random(0)) == {}


def test_a_snapshot_is_changed_in_its_own_part() -> None:
    snapshot = b"# serializer version: 1\n# name: test_a\n  'abc'\n# ---\n# name: test_it[x]\n  'def'\n# ---\n"
    files = {
        "tests/test_x.py": b"def test_it(snapshot):\n    f(snapshot)\n",
        "tests/__snapshots__/test_x.ambr": snapshot,
    }
    (variant, *_) = variants_of(files, ["tests/test_x.py::test_it"], random.Random(0))["tests/test_x.py::test_it"]
    assert (variant.kind, variant.path) == (Kind.SNAPSHOT, "tests/__snapshots__/test_x.ambr")
    after = apply_edits(snapshot, [variant.edit(0)])
    assert after[: snapshot.index(b"'def'")] == snapshot[: snapshot.index(b"'def'")]
    assert after != snapshot


@pytest.mark.slow
def test_our_own_tests_stay_well_formed() -> None:
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        content = file.read_bytes()
        tree = ast.parse(content)
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        tests = [f"x.py::{name}" for name in names if name.startswith("test_")]
        variants = variants_of({"x.py": content}, tests, random.Random(0))
        assert set(variants) == set(tests)
        wanted: dict[str, list[Changes]] = {test: [((one, 0),) for one in each[:5]] for test, each in variants.items()}
        edition = make_edition({"x.py": content}, wanted, random.Random(0))
        assert {version.original for version in edition.versions} == {test for test, each in wanted.items() if each}


# --- collection ------------------------------------------------------------------------------------------------------

TABLE = b"""import pytest

ROWS = [(1, "a"), pytest.param(2, f(), id="x"), (3, "c")]


@pytest.mark.parametrize(("n", "text"), ROWS)
def test_it(n, text):
    pass


@pytest.mark.parametrize("n", [1, 2])
def test_two(n):
    pass
"""
ROW_1: Parameters = {"n": "1", "text": "'a'"}
ROW_3: Parameters = {"n": "3", "text": "'c'"}
COLLECTED: dict[str, tuple[Mapping[str, Parameters], str]] = {
    "as written": ({"t.py::test_it[1-a]": ROW_1, "t.py::test_it[3-c]": ROW_3}, ""),
    "another value": ({"t.py::test_it[1-a]": {"n": "1", "text": "'b'"}}, "no row of its table has n=1, text='b'"),
    "the value of another row": ({"t.py::test_it[1-a]": {"n": "1", "text": "'c'"}}, "no row of its table has"),
    "no literal in the file": ({"t.py::test_it[x]": {"n": "2", "text": "'b'"}}, ""),
    "no literal when collected": ({"t.py::test_it[1-a]": {"n": None, "text": "'a'"}}, ""),
    "another test": ({"u.py::test_it[1-a]": {"n": "7", "text": "8"}}, ""),
    "one row twice": (
        {"t.py::test_two[a]": {"n": "1"}, "t.py::test_two[b]": {"n": "1"}}, "collected [0, 2] times"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("collected", "expected"), COLLECTED.values(), ids=COLLECTED)
def test_collected_parameters_are_those_of_the_file(collected: Mapping[str, Parameters], expected: str) -> None:
    found = mismatches({"t.py": TABLE}, collected)
    assert len(found) == bool(expected)
    assert expected in "".join(found)


@pytest.mark.parametrize("text", ["1", "'é'", "[1, (2.5, None)]", "{'b': 1, 'a': {True}}", "{3, 1, 2}", "b'x'", "-1"])
def test_values_are_spelled_as_by_the_reporter(text: str) -> None:
    namespace: dict[str, object] = {"__name__": "plugin_lines"}
    plugin = Path("src/minisandbox/grade/inside/report_plugin.py")
    tree = ast.parse((Path(__file__).parents[2] / plugin).read_text())
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "_spelled"]
    exec(compile(ast.Module([function], []), "plugin", "exec"), namespace)
    assert spelled(ast.parse(text, mode="eval").body) == namespace["_spelled"](eval(text))  # type: ignore[operator]
