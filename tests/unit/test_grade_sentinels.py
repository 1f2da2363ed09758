"""Sentinels: a test that passed fails once it is changed, whatever it looks like."""

from __future__ import annotations

import ast
import textwrap
import unittest
from pathlib import Path

import pytest

from minisandbox.grade.confirm import checks
from minisandbox.grade.confirm.sentinels import make_sentinels
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
    "pass; pass",
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


def outcome(text: bytes, method: bool) -> str:
    names: dict[str, object] = {"add": add, "unittest": unittest}
    exec(compile(text, "test_x.py", "exec"), names)
    if not method:
        try:
            names["test_it"]()  # type: ignore[operator] # a function
        except AssertionError:
            return "failed"
        return "passed"
    case = names["TestIt"]("test_it")  # type: ignore[operator] # a class
    result = unittest.TestResult()
    case.run(result)
    assert not result.errors, result.errors
    return "failed" if result.failures else "passed"


@pytest.mark.parametrize("body", BODIES + METHODS)
def test_what_passed_fails(body: str) -> None:
    method = body in METHODS
    if method:
        head = "class TestIt(unittest.TestCase):\n    def test_it(self):\n"
        text = (head + textwrap.indent(body, "        ") + "\n").encode()
        test = "tests/test_x.py::TestIt::test_it"
    else:
        text = ("def test_it():\n" + textwrap.indent(body, "    ") + "\n").encode()
        test = "tests/test_x.py::test_it"
    assert outcome(text, method) == "passed"
    for _ in range(20):  # there are dice in it
        made = make_sentinels({"tests/test_x.py": text}, [test])
        assert made.tests == (test,)
        assert outcome(made.files["tests/test_x.py"], method) == "failed", made.files


COPIED = [
    "def test_it():\n    assert add(2, 3) == 5\n    assert add(1, 1) in (2, 3)\n    assert add(1, 3) == 4  # comment\n",
    "def test_it():\n    assert add(2, 3) == 5; assert add(1, 1)\n    for n in [1]:\n        assert add(n, 1) == n + 1",
    "@staticmethod\n@(\n    lambda one: one\n)\ndef test_it():\n    assert add(2, 3) == 5\n    assert add(1, 1) == 2\n",
    "if add:\n    def test_it():\n        'def it'\n        assert add(2, 3) == 5\n        assert add(1, 1) == 2\n",
]


@pytest.mark.parametrize("text", COPIED)
def test_each_assertion_of_some_tests_is_changed_in_a_copy(text: str) -> None:
    assertions = text.count("assert")
    made = make_sentinels({"t.py": text.encode()}, ["t.py::test_it[a]", "t.py::test_it[b]"], ["t.py::test_it[b]"])
    assert len(made.tests) == 2 * assertions
    assert set(made.copies.values()) == {"t.py::test_it[a]", "t.py::test_it[b]"}
    content = made.files["t.py"]
    assert outcome(content, method=False) == "failed"
    functions = {test.partition("::")[2].partition("[")[0] for test in made.tests}
    assert len(functions) == assertions
    for function in functions:
        other = content.replace(b"def test_it(", b"def left_out(").replace(f"def {function}(".encode(), b"def test_it(")
        assert function == "test_it" or outcome(other, method=False) == "failed", other
    defined = [node for node in ast.walk(ast.parse(content)) if isinstance(node, ast.FunctionDef)]
    assert len({"".join(map(ast.unparse, node.body)) for node in defined}) == assertions + 1
    alone = make_sentinels({"t.py": text.encode()}, ["t.py::test_it"])
    assert (alone.copies, alone.same, alone.renamed) == ({}, {}, {"t.py": text.encode()})


@pytest.mark.parametrize("text", COPIED)
def test_a_copy_in_which_nothing_is_changed_passes_under_another_name(text: str) -> None:
    test = "t.py::test_it[a]"
    made = make_sentinels({"t.py": text.encode()}, [test], [test])
    assert list(made.same.values()) == [test]
    assert not made.same.keys() & {test, *made.tests}
    name = next(iter(made.same)).partition("::")[2].partition("[")[0]
    for content in (made.files["t.py"], made.renamed["t.py"]):
        other = content.replace(b"def test_it(", b"def left_out(").replace(f"def {name}(".encode(), b"def test_it(")
        assert outcome(other, method=False) == "passed", other
    assert made.renamed["t.py"] == text.replace("def test_it(", f"def {name}(").encode()


@pytest.mark.parametrize(
    ("original", "name", "called"),
    [
        ("tests/test_it.py::test_it[a]", "tests/test_it.py::test_it[a]", "tests/test_it.py::test_it_x[a]"),
        ("tests/a/test_it.py::C::test_it", "test_it (a.test_it.C)", "test_it_x (a.test_it.C)"),
        ("tests/a/tests.py::C::test_it", "test_it (a.tests.C.test_it)", "test_it_x (a.tests.C.test_it_x)"),
        ("sympy/core/tests/test_it.py::test_it", "test_it", "test_it_x"),
    ],
)
def test_copies_have_the_names_that_a_runner_gives_them(original: str, name: str, called: str) -> None:
    copy = original.replace("::test_it", "::test_it_x")
    assert checks._called(copy, {copy: original}, {original: name}) == called
    assert checks._called(original, {copy: original}, {original: name}) == name


def test_copies_are_not_without_bound() -> None:
    text = "\n".join(f"def test_{n}():\n" + "    assert 1 == 1\n" * 40 for n in range(40))
    tests = [f"t.py::test_{n}" for n in range(40)]
    made = make_sentinels({"t.py": text.encode()}, tests, tests)
    assert len(made.copies) == 60
    assert max(list(made.copies.values()).count(test) for test in tests) == 5
    many = [f"t.py::test_0[{n}]" for n in range(70)]
    assert make_sentinels({"t.py": text.encode()}, many, many).copies == {}


def test_one_test_is_changed_and_the_rest_is_as_it_was() -> None:
    text = b"# caf\xc3\xa9\ndef test_a():\n    assert 1 == 1\n\n\ndef test_b():\n    assert '\xc3\xa9' == '\xc3\xa9'\n"
    made = make_sentinels(
        {"t.py": text, "u.py": text, "v.txt": b""}, ["t.py::test_b[x]", "t.py::test_b[y]", "v.txt::a"]
    )
    assert made.tests == ("t.py::test_b[x]", "t.py::test_b[y]")
    assert list(made.files) == ["t.py"]
    before, after = text.splitlines(), made.files["t.py"].splitlines()
    assert before[:-1] == after[:-1]
    assert before[-1] != after[-1]


@pytest.mark.parametrize(
    "text",
    [
        b"print 'two'\n",
        b"\xef\xbb\xbfdef test_it():\n    assert 1\n",
        b"def test_it():\r\n    assert 1\r\n",
        b"\xff",
        b"",
        b"x",
    ],
)
def test_what_cannot_be_changed_gets_one_more_test(text: bytes) -> None:
    made = make_sentinels({"t.py": text}, ["t.py::test_it"])
    assert made.files["t.py"].startswith(text)
    [name] = made.tests
    assert name.startswith("t.py::test_")
    assert name != "t.py::test_it"
    assert f"def {name.removeprefix('t.py::')}():".encode() in made.files["t.py"]


@pytest.mark.slow
def test_our_own_tests_stay_well_formed() -> None:
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        content = file.read_bytes()
        tree = parse_python(content.decode())
        assert tree is not None
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        tests = [f"x.py::{name}" for name in names if name.startswith("test_")]
        made = make_sentinels({"x.py": content}, tests)
        assert set(made.tests) == set(tests)
        assert parse_python(made.files["x.py"].decode()) is not None
