"""Seeded bugs of one word in the functions of Python projects, and the edits that take them out again.

A bug is one *edit*: on one line of a function, a word is replaced by another. Words are the tokens of Python's own
tokenizer, with pairs such as ``is not`` taken together, so that no edit reaches into a string or a comment. The inverse
of an edit is an edit: the whole grammar of an agent that repairs such bugs.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import io
import random
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from minisandbox.syntax import parse_python

GROUPS: tuple[tuple[str, ...], ...] = (
    ("<", "<=", ">", ">="),
    ("==", "!="),
    ("is", "is not"),
    ("in", "not in"),
    ("and", "or"),
    ("if", "if not"),
    ("elif", "elif not"),
    ("while", "while not"),
    ("and", "and not"),
    ("or", "or not"),
    ("True", "False"),
    ("+", "-"),
    ("*", "/", "//", "%"),
    ("+=", "-="),
    ("0", "1", "2"),
    ("continue", "break"),
    ("min", "max"),
    ("any", "all"),
    ("startswith", "endswith"),
    ("lower", "upper"),
    ("lstrip", "rstrip", "strip"),
    ("keys", "values", "items"),
    ("append", "extend", "add"),
    ("list", "set", "tuple"),
    ("int", "float", "str"),
    ("left", "right"),
    ("start", "end"),
    ("first", "last"),
    ("args", "kwargs"),
    ("key", "value"),
    ("find", "rfind"),
    ("isinstance", "issubclass"),
    ("KeyError", "IndexError", "ValueError", "TypeError", "AttributeError"),
)
"""Words of one group are mistaken for one another; a word may be in several."""

WORDS: tuple[str, ...] = tuple(dict.fromkeys(word for group in GROUPS for word in group))
"""Every word of the grammar."""

PAIRS = frozenset(tuple(word.split()) for word in WORDS if " " in word)
"""Words that are written as two."""

_NUMBER = re.compile(r"\d{1,4}")
_STATEMENT = (
    "`{name}` in {file} has a bug: one word of it is another than it should be, and tests fail because of it.\n"
)
_PLACE = re.compile(r"`([\w.]+)` in (\S+) has a bug")


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a line.

    Attributes:
        text: it.
        start: the column that it begins at, from 0.
        end: the column after it.
    """

    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class WordEdit:
    """Replace the first occurrence of a word on a line by another word.

    Attributes:
        line: the line, from 1, as an agent sees the function.
        old: the word that is there.
        new: the word that takes its place.
    """

    line: int
    old: str
    new: str

    @property
    def text(self) -> str:
        """The edit as an agent writes it: ``< -> <= 7``."""
        return f"{self.old} -> {self.new} {self.line}"

    @classmethod
    def parse(cls, text: str) -> WordEdit | None:
        """Return the edit that a text is; None where it is no edit, or has a word that is not of the grammar."""
        edit, _, line = text.rpartition(" ")
        old, _, new = edit.partition(" -> ")
        if old not in WORDS or new not in WORDS or not _NUMBER.fullmatch(line):
            return None
        return cls(int(line), old, new)


@dataclass(frozen=True, slots=True)
class Function:
    """A function as an agent sees it: without docstring, blank lines and lines of comments.

    Attributes:
        file: its module, relative to the repository.
        name: its name, qualified by its classes.
        rows: the module's line numbers, from 1, of the visible lines.
        lines: the visible lines, dedented.
    """

    file: str
    name: str
    rows: tuple[int, ...]
    lines: tuple[str, ...]

    @property
    def view(self) -> str:
        """What an agent is shown."""
        return view(self.lines)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A function with a bug in it.

    Attributes:
        function: without the bug.
        fix: the edit that takes it out.
        lines: of the function with the bug.
    """

    function: Function
    fix: WordEdit
    lines: tuple[str, ...]

    @property
    def view(self) -> str:
        """What an agent is shown."""
        return view(self.lines)

    @property
    def digest(self) -> str:
        """Eight digits that stand for this bug in this function."""
        text = f"{self.function.file}\n{self.function.name}\n{self.fix.text}"
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def patch(self, source: str) -> str:
        """Return the bug as a patch of the module.

        Args:
            source: the module's text, without the bug.
        """
        file, row = self.function.file, self.function.rows[self.fix.line - 1] - 1
        before = io.StringIO(source).readlines()  # not splitlines(): Python and git know no form feed there
        after = list(before)
        after[row] = in_place(before[row], self.lines[self.fix.line - 1])
        lines = difflib.unified_diff(before, after, f"a/{file}", f"b/{file}")
        ended = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
        return f"diff --git a/{file} b/{file}\n" + "".join(ended)


# --- words and edits -------------------------------------------------------------------------------------------------


def replacements(word: str) -> tuple[str, ...]:
    """Return the words that may stand where a word should, in a fixed order."""
    found = [other for group in GROUPS if word in group for other in group if other != word]
    return tuple(dict.fromkeys(found))


def split_words(line: str) -> list[Word]:
    """Split one line of code into words; strings and comments are left out. It may end inside brackets."""
    indent = len(line) - len(line.lstrip())
    return _paired([Word(one.string, one.start[1] + indent, one.end[1] + indent) for one in _tokens(line.strip())])


def _tokens(code: str) -> Iterator[tokenize.TokenInfo]:
    """The names, operators and numbers of a line, as far as it can be read."""
    with contextlib.suppress(tokenize.TokenError, IndentationError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(code + "\n").readline):
            if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
                yield token


def _paired(words: list[Word]) -> list[Word]:
    """Take together words that form one, such as ``is not``."""
    paired: list[Word] = []
    for word in words:
        last = paired[-1] if paired else None
        if last and (last.text, word.text) in PAIRS:
            paired[-1] = Word(f"{last.text} {word.text}", last.start, word.end)
        else:
            paired.append(word)
    return paired


def apply_edit(lines: tuple[str, ...], edit: WordEdit) -> tuple[str, ...] | None:
    """Return a function's lines after an edit, or None where the line has no such word."""
    if not 1 <= edit.line <= len(lines):
        return None
    line = lines[edit.line - 1]
    for word in split_words(line):
        if word.text == edit.old:
            changed = line[: word.start] + edit.new + line[word.end :]
            return (*lines[: edit.line - 1], changed, *lines[edit.line :])
    return None


def in_place(line: str, shown: str) -> str:
    """Return a module's line with the code of a line as it is shown: its indentation and its end stay.

    Args:
        line: of the module.
        shown: of the function.
    """
    indent, end = line[: len(line) - len(line.lstrip())], line[len(line.rstrip()) :]
    return indent + shown.lstrip() + end


def view(lines: tuple[str, ...]) -> str:
    """Return a function's lines as an agent sees them: numbered from 1."""
    return "\n".join(f" {number} {line}" for number, line in enumerate(lines, 1))


# --- functions -------------------------------------------------------------------------------------------------------


def functions(source: str, file: str) -> Iterator[Function]:
    """Yield the functions and methods of a module that can be shown, in their order.

    One that is nested belongs to the outer one; of several with one name none is taken.

    Args:
        source: the module's text.
        file: its path in the repository.
    """
    tree = parse_python(source)
    if tree is None:
        return
    found = list(_definitions(tree, ""))
    names = [name for name, _ in found]
    lines = source.split("\n")
    for name, node in found:
        if names.count(name) == 1 and (function := _function(lines, file, name, node)) is not None:
            yield function


def find_function(source: str, file: str, name: str) -> Function | None:
    """Return a module's function by its name, or None if no such function can be shown."""
    return next((one for one in functions(source, file) if one.name == name), None)


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{prefix}{child.name}.")


def _function(source: list[str], file: str, name: str, node: ast.FunctionDef) -> Function | None:
    """Return a function's visible lines, or None where they are no code by themselves."""
    hidden: set[int] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) and isinstance(part.value.value, str):
            hidden.update(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    rows = [row for row in range(node.lineno, (node.end_lineno or 0) + 1) if row not in hidden]
    rows = [row for row in rows if source[row - 1].strip() and not source[row - 1].lstrip().startswith("#")]
    lines = tuple(source[row - 1][node.col_offset :].rstrip() for row in rows)
    cut = any(source[row - 1][: node.col_offset].strip() for row in rows)  # a text that begins farther to the left
    if len(rows) < 2 or cut or _tree(lines) is None:
        return None
    return Function(file, name, tuple(rows), lines)


def _tree(lines: tuple[str, ...]) -> str | None:
    """The syntax tree as text, or None where the lines are no code."""
    tree = parse_python("\n".join(lines))
    return None if tree is None else ast.dump(tree)


# --- bugs ------------------------------------------------------------------------------------------------------------


def mutants(function: Function) -> list[Mutant]:
    """Return every bug of the grammar that a function can have: it is still code, and one edit takes it out."""
    original = _tree(function.lines)
    found: dict[WordEdit, Mutant] = {}
    for number, line in enumerate(function.lines, 1):
        words = split_words(line)
        for before, word in zip([None, *words], words, strict=False):
            named = before is not None and before.text == "def"  # problem statements name the function
            for wrong in () if named else replacements(word.text):
                fix = WordEdit(number, wrong, word.text)
                changed = line[: word.start] + wrong + line[word.end :]
                lines = (*function.lines[: number - 1], changed, *function.lines[number:])
                undone = apply_edit(lines, fix) == function.lines
                if undone and fix not in found and _tree(lines) not in (None, original):
                    found[fix] = Mutant(function, fix, lines)
    return list(found.values())


def draw_mutants(function: Function, count: int, seed: object) -> list[Mutant]:
    """Draw bugs of a function; each exchange of two words comes once before any comes twice.

    Args:
        function: it.
        count: how many at most.
        seed: of the choice.
    """
    every = mutants(function)
    random.Random(f"{seed} {function.file} {function.name}").shuffle(every)
    seen: dict[tuple[str, str], int] = {}
    ranked: list[tuple[int, int]] = []
    for index, mutant in enumerate(every):
        kind = (mutant.fix.new, mutant.fix.old)
        ranked.append((seen.get(kind, 0), index))
        seen[kind] = seen.get(kind, 0) + 1
    return [every[index] for _, index in sorted(ranked)[:count]]


def share_of(repo: str, file: str, name: str, seed: object = 0) -> float:
    """Return a number in [0, 1) that depends on the function alone: parts of a task set are ranges of it.

    Args:
        repo: the function's project, as tasks call it.
        file: its module.
        name: its name.
        seed: of the division.
    """
    digest = hashlib.sha256(f"{seed} {repo} {file} {name}".encode()).digest()
    return int.from_bytes(digest[:6]) / (1 << 48)


# --- what a task says ------------------------------------------------------------------------------------------------


def statement(function: Function) -> str:
    """Return the problem statement of a task whose bug is in a function."""
    return _STATEMENT.format(name=function.name, file=function.file)


def place_of(problem_statement: str) -> tuple[str, str] | None:
    """Return the file and the name of the function that a problem statement names, or None where it names none."""
    found = _PLACE.search(problem_statement)
    return None if found is None else (found[2], found[1])
