"""Seeded one-word bugs in the functions of Python projects, and the edits that fix them.

A bug is one *edit*, which replaces a word on one line of a function. Words are the tokens of Python's own tokenizer;
pairs such as ``is not`` count as one word. Edits therefore never change strings or comments. The inverse of an edit is
an edit too, so an agent repairs such bugs with edits alone.
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
"""Groups of words that replace one another; a word may be in several groups."""

WORDS: tuple[str, ...] = tuple(dict.fromkeys(word for group in GROUPS for word in group))
"""All words of the grammar."""

PAIRS = frozenset(tuple(word.split()) for word in WORDS if " " in word)
"""Words of the grammar that consist of two tokens."""

_NUMBER = re.compile(r"\d{1,4}")
_STATEMENT = "`{name}` in {file} has a bug: one word of it is wrong, and the test `{test}` fails because of it.\n"
_FUNCTION = re.compile(r"`([\w.]+)` in (\S+) has a bug: .* the test `([^`\s]+)` fails")


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a line.

    Attributes:
        text: the word.
        start: the column of its first character, from 0.
        end: the column after its last character.
    """

    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class WordEdit:
    """Replace the first occurrence of a word on a line by another word.

    Attributes:
        line: the line, from 1, as an agent sees the function.
        old: the word to replace.
        new: the replacement.
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
        """Parse an edit; return None if the text is malformed or has a word outside the grammar."""
        edit, _, line = text.rpartition(" ")
        old, _, new = edit.partition(" -> ")
        if old not in WORDS or new not in WORDS or not _NUMBER.fullmatch(line):
            return None
        return cls(int(line), old, new)


@dataclass(frozen=True, slots=True)
class Function:
    """A function as an agent sees it, without docstring, blank lines and comment lines.

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
        """The numbered lines that an agent sees."""
        return view(self.lines)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A function with a bug.

    Attributes:
        function: the function without the bug.
        fix: the edit that fixes the bug.
        lines: the lines of the function with the bug.
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
        """A hash of the function and the bug, eight hexadecimal digits."""
        text = f"{self.function.file}\n{self.function.name}\n{self.fix.text}"
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def patch(self, source: str) -> str:
        """Return the bug as a patch of the module.

        Args:
            source: the module's text, without the bug.
        """
        file, row = self.function.file, self.function.rows[self.fix.line - 1] - 1
        old_lines = io.StringIO(source).readlines()  # unlike splitlines(), this does not split at form feeds
        new_lines = list(old_lines)
        new_lines[row] = in_place(old_lines[row], self.lines[self.fix.line - 1])
        diff = difflib.unified_diff(old_lines, new_lines, f"a/{file}", f"b/{file}")
        lines = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in diff)
        return f"diff --git a/{file} b/{file}\n" + "".join(lines)


# --- words and edits -------------------------------------------------------------------------------------------------


def replacements(word: str) -> tuple[str, ...]:
    """Return the words that can replace a word, in a fixed order."""
    words = [other_word for group in GROUPS if word in group for other_word in group if other_word != word]
    return tuple(dict.fromkeys(words))


def split_words(line: str) -> list[Word]:
    """Return the words of one line of code, without strings and comments. The line may end inside brackets."""
    indent = len(line) - len(line.lstrip())
    tokens = _tokens(line.strip())
    return _paired([Word(token.string, token.start[1] + indent, token.end[1] + indent) for token in tokens])


def _tokens(code: str) -> Iterator[tokenize.TokenInfo]:
    """Yield the names, operators and numbers of a line, up to the first syntax error."""
    with contextlib.suppress(tokenize.TokenError, IndentationError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(code + "\n").readline):
            if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
                yield token


def _paired(words: list[Word]) -> list[Word]:
    """Join the words of pairs such as ``is not``."""
    joined: list[Word] = []
    for word in words:
        previous = joined[-1] if joined else None
        if previous and (previous.text, word.text) in PAIRS:
            joined[-1] = Word(f"{previous.text} {word.text}", previous.start, word.end)
        else:
            joined.append(word)
    return joined


def apply_edit(lines: tuple[str, ...], edit: WordEdit) -> tuple[str, ...] | None:
    """Return a function's lines after an edit, or None if the line lacks the word."""
    if not 1 <= edit.line <= len(lines):
        return None
    line = lines[edit.line - 1]
    for word in split_words(line):
        if word.text == edit.old:
            new_line = line[: word.start] + edit.new + line[word.end :]
            return (*lines[: edit.line - 1], new_line, *lines[edit.line :])
    return None


def in_place(line: str, visible_line: str) -> str:
    """Return a module's line with its code replaced; its indentation and line end stay.

    Args:
        line: the line of the module.
        visible_line: the new code, dedented.
    """
    indent, line_end = line[: len(line) - len(line.lstrip())], line[len(line.rstrip()) :]
    return indent + visible_line.lstrip() + line_end


def view(lines: tuple[str, ...]) -> str:
    """Return a function's lines as an agent sees them, numbered from 1."""
    return "\n".join(f" {number} {line}" for number, line in enumerate(lines, 1))


# --- functions -------------------------------------------------------------------------------------------------------


def functions(source: str, file: str) -> Iterator[Function]:
    """Yield the functions and methods of a module that can be shown, in order.

    Nested functions belong to the outer function. Functions that share a name are skipped.

    Args:
        source: the module's text.
        file: its path in the repository.
    """
    tree = parse_python(source)
    if tree is None:
        return
    definitions = list(_definitions(tree, ""))
    names = [name for name, _ in definitions]
    lines = source.split("\n")
    for name, node in definitions:
        if names.count(name) == 1 and (function := _function(lines, file, name, node)) is not None:
            yield function


def find_function(source: str, file: str, name: str) -> Function | None:
    """Return a module's function by its name, or None if no such function can be shown."""
    return next((function for function in functions(source, file) if function.name == name), None)


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{prefix}{child.name}.")


def _function(source: list[str], file: str, name: str, node: ast.FunctionDef) -> Function | None:
    """Return a function's visible lines, or None if they are not valid code on their own."""
    docstring_rows: set[int] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
            docstring_rows.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    rows = [row for row in range(node.lineno, (node.end_lineno or 0) + 1) if row not in docstring_rows]
    rows = [row for row in rows if source[row - 1].strip() and not source[row - 1].lstrip().startswith("#")]
    lines = tuple(source[row - 1][node.col_offset :].rstrip() for row in rows)
    # a line of a multi-line string may begin to the left of the function, so dedenting would cut it
    is_cut = any(source[row - 1][: node.col_offset].strip() for row in rows)
    if len(rows) < 2 or is_cut or _tree(lines) is None:
        return None
    return Function(file, name, tuple(rows), lines)


def _tree(lines: tuple[str, ...]) -> str | None:
    """Return the syntax tree as text, or None if the lines are not valid code."""
    tree = parse_python("\n".join(lines))
    return None if tree is None else ast.dump(tree)


# --- bugs ------------------------------------------------------------------------------------------------------------


def mutants(function: Function) -> list[Mutant]:
    """Return every possible bug of a function that leaves valid code and that one edit fixes."""
    original_tree = _tree(function.lines)
    mutants: dict[WordEdit, Mutant] = {}
    for number, line in enumerate(function.lines, 1):
        words = split_words(line)
        for previous, word in zip([None, *words], words, strict=False):
            is_name = previous is not None and previous.text == "def"  # problem statements name the function
            for wrong_word in () if is_name else replacements(word.text):
                fix = WordEdit(number, wrong_word, word.text)
                wrong_line = line[: word.start] + wrong_word + line[word.end :]
                lines = (*function.lines[: number - 1], wrong_line, *function.lines[number:])
                is_fixed = apply_edit(lines, fix) == function.lines
                if is_fixed and fix not in mutants and _tree(lines) not in (None, original_tree):
                    mutants[fix] = Mutant(function, fix, lines)
    return list(mutants.values())


def draw_mutants(function: Function, count: int, seed: object) -> list[Mutant]:
    """Draw bugs of a function; each pair of words is used once before any pair is used twice.

    Args:
        function: the function.
        count: maximum number of bugs.
        seed: seed of the draw.
    """
    all_mutants = mutants(function)
    random.Random(f"{seed} {function.file} {function.name}").shuffle(all_mutants)
    uses: dict[tuple[str, str], int] = {}
    ranks: list[tuple[int, int]] = []
    for index, mutant in enumerate(all_mutants):
        pair = (mutant.fix.new, mutant.fix.old)
        ranks.append((uses.get(pair, 0), index))
        uses[pair] = uses.get(pair, 0) + 1
    return [all_mutants[index] for _, index in sorted(ranks)[:count]]


def share_of(repo: str, file: str, name: str, seed: object = 0) -> float:
    """Return a number in [0, 1) that depends only on the function; parts of a task set are ranges of this number.

    Args:
        repo: the repository's name in tasks.
        file: the function's module.
        name: the function's name.
        seed: seed of the division.
    """
    digest = hashlib.sha256(f"{seed} {repo} {file} {name}".encode()).digest()
    return int.from_bytes(digest[:6]) / (1 << 48)


# --- problem statements ----------------------------------------------------------------------------------------------


def statement(file: str, name: str, test: str) -> str:
    """Return the problem statement of a task.

    Args:
        file: the module of the function with the bug.
        name: the function's name.
        test: the path of the visible test. Both paths are relative to the repository.
    """
    return _STATEMENT.format(name=name, file=file, test=test)


def function_of(problem_statement: str) -> tuple[str, str] | None:
    """Return file and name of the function in a problem statement, or None if the statement has another form."""
    match = _FUNCTION.search(problem_statement)
    return None if match is None else (match[2], match[1])


def visible_test_of(problem_statement: str) -> str | None:
    """Return the path of the visible test in a problem statement, or None if the statement has another form."""
    match = _FUNCTION.search(problem_statement)
    return None if match is None else match[3]
