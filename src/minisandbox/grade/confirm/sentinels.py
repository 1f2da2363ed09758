"""Sentinels: the task's own tests, changed so that they have to fail.

A run in which everything passes says little where the code under test sits in the process that judges it. So whoever
seems to have solved a task is run once more, the same way, on test files in which tests expect something else: another
number, another word, the opposite. Nothing else differs, names and places are the same, and hidden tests are not known
to who wrote the submission. Objects that equal everything, values read from the stack, patched reports and patched
asserts let such a test pass, or keep it from being seen to fail; a solution does not.
"""

from __future__ import annotations

import ast
import random
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from minisandbox.grade.confirm.edits import Edit, Function, Source, apply_edits

_EQUALITIES = frozenset(
    {
        "assertEqual", "assertEquals", "assertListEqual", "assertDictEqual", "assertTupleEqual", "assertSetEqual",
        "assertSequenceEqual", "assertMultiLineEqual", "assertCountEqual", "assertItemsEqual", "assertAlmostEqual",
        "assert_equal", "eq_", "assert_array_equal", "assert_almost_equal", "assert_allclose",
    }
)  # fmt: skip
_PLAIN_EQUALITIES = frozenset({"assertEqual", "assertEquals", "eq_"})
"""Those that tell a value from a list of it; numpy's do not."""
_OPPOSITES = {
    "assertTrue": "assertFalse",
    "assertIn": "assertNotIn",
    "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone",
}
_OPPOSITES |= {after: before for before, after in _OPPOSITES.items()}
_EXPECTS_FAILURE = re.compile("raises|warns|suppress|fail|skip|patch", re.IGNORECASE)
_Dice = random.Random
_LETTERS = "abcdefghilmnoprstu"
_COPIES_OF_ONE = 5
"""Of a test with more assertions some are drawn, others each time."""
_COPIES = 60
"""For one file: what takes long should take not much longer for being confirmed."""


@dataclass(slots=True)
class Sentinels:
    """Test files with tests that have to fail.

    Attributes:
        files: their paths in the repository, with their content.
        changed: ids of the tests that have to fail under their own names.
        copies: for each id of a copy, that of the test that it is one of.
        same: likewise, of copies in which nothing was changed: they have to pass as the tests do.
        renamed: the files with nothing but that: these tests have the names of their copies.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, bytes] = field(default_factory=dict)

    @property
    def tests(self) -> tuple[str, ...]:
        """Ids of the tests that have to fail, copies of tests among them."""
        return (*self.changed, *self.copies)


def make_sentinels(files: Mapping[str, bytes], tests: Sequence[str], whole: Iterable[str] = ()) -> Sentinels:
    """Change tests so that they have to fail.

    Args:
        files: test files, by path, with their content.
        tests: pytest ids; those in other files are left alone.
        whole: those of which one assertion is not enough, for it need not be the one that tells: below each such test
            lie copies of it, under other names, with another assertion changed in each, and one with none.

    Returns:
        The changed files. Where no test of a file could be changed, the file has one more test.
    """
    dice = _Dice(secrets.randbits(64))
    found = Sentinels()
    whole = {_function_of(test) for test in whole}
    for path, content in files.items():
        mine = [test for test in tests if test.partition("::")[0] == path]
        if mine and path.endswith(".py"):
            _change(found, path, content, mine, whole, dice)
    return found


def _function_of(test: str) -> str:
    return test.partition("[")[0]


def _change(
    found: Sentinels, path: str, content: bytes, tests: Sequence[str], whole: Collection[str], dice: _Dice
) -> None:
    source = Source.read(content)
    functions = dict(source.functions()) if source else {}
    names = {function.name for function in functions.values()}
    edits: dict[str, Edit] = {}
    added: list[Edit] = []
    renamings: list[Edit] = []
    copies: dict[str, str] = {}
    same: dict[str, str] = {}
    for base in dict.fromkeys(map(_function_of, tests)):
        function = functions.get(base.partition("::")[2])
        if not source or not function or not (each := _sentinels(source, function, dice)):
            continue
        edits[base], *others = each
        mine = [test for test in tests if _function_of(test) == base]
        for edit in (None, *others) if base in whole else ():
            name = _new_name(function.name, names, dice)
            copy, kept = source.copied(function, name, edit), copies if edit else same
            if copy and len(kept) + len(mine) <= _COPIES:
                added.append(copy)
                renamings += [] if edit else [source.renamed(function, name)]
                kept |= {base.removesuffix(function.name) + name + test.removeprefix(base): test for test in mine}
    failing = [test for test in tests if _function_of(test) in edits]
    text = apply_edits(content, (*edits.values(), *added))
    if not Source.read(text):
        text, copies, same, renamings = apply_edits(content, edits.values()), {}, {}, []
    if not edits or not Source.read(text):
        name = f"test_{''.join(dice.choices(_LETTERS, k=7))}"
        text, failing = content + f"\n\ndef {name}():\n    assert {_false(dice)}\n".encode(), [f"{path}::{name}"]
    found.files[path], found.renamed[path] = text, apply_edits(content, renamings)
    found.changed += failing
    found.copies |= copies
    found.same |= same


def _new_name(name: str, taken: set[str], dice: _Dice) -> str:
    """Return, and take, a name for a copy of a function."""
    while name in taken:
        name += f"_{dice.choice(_LETTERS)}"
    taken.add(name)
    return name


_VALUE, _WRAPPED, _OPPOSITE, _APPENDED = 3, 2, 1, 0


def _sentinels(source: Source, function: Function, dice: _Dice) -> list[Edit]:
    """Return edits after each of which a test has to fail.

    The first is the strongest, and of those the last, so that most of the test runs; then come some of the others.
    """
    edits = [edit for statement in _straight(function.body) if (edit := _edit(source, statement, dice))]
    if not edits:
        return [edit] if (edit := _appended(source, function, dice)) else []
    first = max(reversed(edits), key=lambda edit: edit.strength)
    others = [edit for edit in edits if edit is not first]
    return [first, *dice.sample(others, min(len(others), _COPIES_OF_ONE))]


def _straight(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a test passes."""
    for statement in body:
        if isinstance(statement, ast.For) or (
            isinstance(statement, ast.With | ast.AsyncWith)
            and not any(_EXPECTS_FAILURE.search(ast.unparse(item.context_expr)) for item in statement.items)
        ):
            yield from _straight(statement.body)
        else:
            yield statement


def _edit(source: Source, statement: ast.stmt, dice: _Dice) -> Edit | None:
    if isinstance(statement, ast.Assert):
        return _contradicted(source, statement.test, dice)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return _call(source, statement.value, dice)
    return None


def _contradicted(source: Source, test: ast.expr, dice: _Dice) -> Edit:
    """Have an expression that was true be false."""
    part = test.values[-1] if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else test
    if isinstance(part, ast.Compare) and isinstance(part.ops[-1], ast.Eq):
        left = part.comparators[-2] if len(part.comparators) > 1 else part.left
        return _unequal(source, part.comparators[-1], left, dice) or _wrapped(source, part.comparators[-1])
    return Edit(*source.span(part), f"not ({source.text(part)})", _OPPOSITE)


def _wrapped(source: Source, node: ast.expr) -> Edit:
    return Edit(*source.span(node), f"[{source.text(node)}]", _WRAPPED)


def _unequal(source: Source, right: ast.expr, left: ast.expr, dice: _Dice) -> Edit | None:
    """Change a literal on either side of an equality."""
    for side in (right, left):
        literals = list(_literals(side))
        if literals:
            node = dice.choice(literals)
            return Edit(*source.span(node), _other(source.text(node), ast.literal_eval(node), dice), _VALUE)
    return None


def _literals(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the values written out in an expression, those in lists and the like too."""
    if isinstance(node, ast.Constant):
        if node.value is not Ellipsis:
            yield node
    elif isinstance(node, ast.UnaryOp):
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            yield node
    elif isinstance(node, ast.List | ast.Tuple | ast.Set):
        for element in node.elts:
            yield from _literals(element)
    elif isinstance(node, ast.Dict):
        for value in node.values:
            yield from _literals(value)


def _other(text: str, value: object, dice: _Dice) -> str:
    """Return a literal of the same kind with another value, which looks no odder than the first."""
    if isinstance(value, str):
        return (text[0] if text[:1] in ("u", "U") else "") + repr(_respelled(value, dice))
    if isinstance(value, bytes):
        return repr(_respelled(value.decode("latin-1"), dice).encode("latin-1"))
    other: object = 0  # in place of None
    if isinstance(value, bool):
        other = not value
    elif isinstance(value, int):
        other = value + dice.choice((1, 2, 3))
    elif isinstance(value, float | complex):
        other = value * 1.25 + 1.5 if abs(value) < 1e300 else 1.5
    return repr(other)


def _respelled(text: str, dice: _Dice) -> str:
    """Change a letter or a digit of a text."""
    places = [place for place, sign in enumerate(text) if sign.isascii() and sign.isalnum()]
    if not places:
        return text + dice.choice("abcdefgh")
    place = dice.choice(places)
    kind = "0123456789" if text[place].isdigit() else "abcdefghijklmnopqrstuvwxyz"
    kind = kind.upper() if text[place].isupper() else kind
    return text[:place] + dice.choice(kind.replace(text[place], "")) + text[place + 1 :]


def _call(source: Source, call: ast.Call, dice: _Dice) -> Edit | None:
    """Change a call of an assertion method."""
    name = getattr(call.func, "attr", None) or getattr(call.func, "id", "")
    if not call.args or any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    if name in _EQUALITIES and len(call.args) > 1:
        edit = _unequal(source, call.args[1], call.args[0], dice)
        return edit or (_wrapped(source, call.args[1]) if name in _PLAIN_EQUALITIES else None)
    if name == "assertTrue" and isinstance(call.args[0], ast.Compare):
        return _contradicted(source, call.args[0], dice)
    if name in _OPPOSITES:
        end = source.span(call.func)[1]
        return Edit(end - len(name), end, _OPPOSITES[name], _OPPOSITE)
    return None


def _appended(source: Source, function: Function, dice: _Dice) -> Edit | None:
    """Have a test assert something false at its end."""
    indent = source.indent(function.body[0])
    if indent is None:
        return None
    end = source.line_end(source.span(function.body[-1])[1])
    return Edit(end, end, f"\n{indent}assert {_false(dice)}", _APPENDED)


def _false(dice: _Dice) -> str:
    word = "".join(dice.choices("abcdefgh", k=dice.randrange(3, 9)))
    return f'len("{word}") == {len(word) + dice.choice((1, 2))}'
