"""Find the literals of an expression, and draw other values of the same kind for them."""

from __future__ import annotations

import ast
import io
import math
import random
import re
import tokenize
from collections.abc import Iterator

_ESCAPE = re.compile(r"\\(N\{[^}]*\}|x..|u.{4}|U.{8}|[0-7]{1,3}|.)", re.DOTALL)
_STRING = re.compile(r"""(?P<prefix>[A-Za-z]*)(?P<quote>'''|\"\"\"|'|")(?P<body>.*)(?P=quote)""", re.DOTALL)
_MOST = 3
_BLOCK = 14
_COMMON = "0123456789etaoinshrdlc"
"""The characters that are replaced and inserted; a rare letter would reveal that the string was changed."""


def literals_in(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the literals of an expression, including those in containers."""
    if isinstance(node, ast.Constant):
        if node.value is not Ellipsis:
            yield node
    elif isinstance(node, ast.UnaryOp):
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            yield node
    elif isinstance(node, ast.List | ast.Tuple | ast.Set):
        for element in node.elts:
            yield from literals_in(element)
    elif isinstance(node, ast.Dict):
        for value in node.values:
            yield from literals_in(value)


def other_literals(literal: str, rng: random.Random) -> tuple[str, ...]:
    """Return up to three inconspicuous literals with other values, of the same kind and number of lines.

    Args:
        literal: the source text of the literal.
        rng: the random generator.

    Returns:
        The new texts; empty if there are no other values of this kind.
    """
    value = _value_of(literal)
    candidates: list[str] = []
    if isinstance(value, str | bytes):
        candidates = _other_strings(literal, rng)
    elif value is None or isinstance(value, bool):
        candidates = rng.sample([str(candidate) for candidate in (None, False, True) if candidate is not value], 2)
    elif isinstance(value, int):
        candidates = [str(value + step) for step in _steps(value, rng)]
    elif isinstance(value, float) and abs(value) > 1e9:
        candidates = [repr(value * (1 + step / 100)) for step in _steps(0, rng)]
    elif isinstance(value, float):
        decimals = len(re.sub(r"(?i)e.*|[^.]*\.?", "", literal, count=1))
        candidates = [repr(round(value + step, max(1, decimals))) for step in _steps(value, rng)]
    elif isinstance(value, complex):
        candidates = [repr(value + step) for step in _steps(0, rng)]
    return tuple(
        candidate
        for candidate in candidates
        if candidate.count("\n") == literal.count("\n") and _value_of(candidate) != value
    )


def spread(value_count: int, version_count: int, rng: random.Random) -> list[int]:
    """Assign values to the versions of a test as evenly as possible, so that frequencies do not reveal the original.

    Args:
        value_count: the number of values, without the original one.
        version_count: the number of versions.
        rng: the random generator.

    Returns:
        The index of each version's value; -1 stands for the original value, which at least the first version has.
    """
    slots = [version % (value_count + 1) for version in range(version_count)]
    rng.shuffle(slots)
    other_slots = sorted({*slots} - {slots[0]})
    value_indexes = dict(zip(other_slots, rng.sample(range(value_count), len(other_slots)), strict=True))
    return [value_indexes.get(slot, -1) for slot in slots]


def _steps(value: float, rng: random.Random) -> list[int]:
    """Return the differences between a number and random other numbers in the same block of 14 integers.

    The count of lower numbers is drawn first, so that the rank of the original among the others reveals nothing.
    """
    integer = math.floor(value)
    block_start = integer - integer % _BLOCK
    lower, higher = range(block_start, integer), range(integer + 1, block_start + _BLOCK)
    lower_count = rng.randint(max(0, _MOST - len(higher)), min(_MOST, len(lower)))
    neighbours = [*rng.sample(lower, lower_count), *rng.sample(higher, _MOST - lower_count)]
    return [neighbour - integer for neighbour in rng.sample(neighbours, _MOST)]


def _value_of(literal: str) -> object:
    try:
        return ast.literal_eval(f"({literal})")
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return Ellipsis


def _other_strings(literal: str, rng: random.Random) -> list[str]:
    """Replace one letter or digit of a string, outside of its escapes; an empty string gets a letter."""
    tokens = list(_string_tokens(literal))
    offsets = [offset for start, token in tokens for offset in _characters(start, token)]
    if offsets:
        offset = rng.choice([offset for offset in offsets if literal[offset].lower() in _COMMON] or offsets)
        kind = "0123456789" if literal[offset].isdigit() else _COMMON[10:]
        kind = kind.upper() if literal[offset].isupper() else kind
        characters = rng.sample(kind.replace(literal[offset], ""), _MOST)
        return [literal[:offset] + character + literal[offset + 1 :] for character in characters]
    if len(tokens) == 1 and (match := _STRING.fullmatch(tokens[0][1])):
        body_end = tokens[0][0] + match.end("body")
        return [literal[:body_end] + character + literal[body_end:] for character in rng.sample("abcdefgh", _MOST)]
    return []


def _string_tokens(literal: str) -> Iterator[tuple[int, str]]:
    """Yield the string tokens of an implicit concatenation, with their offsets."""
    lengths = [len(line) + 1 for line in f"({literal})".split("\n")]
    starts = [sum(lengths[:line_index]) for line_index in range(len(lengths))]
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(f"({literal})").readline))
    except (tokenize.TokenError, SyntaxError):
        return
    for token in tokens:
        if token.type == tokenize.STRING:
            yield starts[token.start[0] - 1] + token.start[1] - 1, token.string


def _characters(token_start: int, token: str) -> Iterator[int]:
    """Yield the offsets of a string's ASCII letters and digits, except those in escapes."""
    match = _STRING.fullmatch(token)
    if match is None:
        return
    body_start, body = match.start("body"), match["body"]
    is_raw = "r" in match["prefix"].lower()
    escaped = set() if is_raw else {index for escape in _ESCAPE.finditer(body) for index in range(*escape.span())}
    for index, character in enumerate(body):
        if character.isascii() and character.isalnum() and index not in escaped:
            yield token_start + body_start + index
