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
"""The characters that are replaced, and that replace others. Rare letters would reveal the change."""


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


def other_literals(text: str, dice: random.Random) -> tuple[str, ...]:
    """Return up to three inconspicuous literals with other values, of the same kind and number of lines.

    Args:
        text: the source text of the literal.
        dice: the random generator.

    Returns:
        The new texts; empty if there are no other values of this kind.
    """
    value = _value_of(text)
    others: list[str] = []
    if isinstance(value, str | bytes):
        others = _other_strings(text, dice)
    elif value is None or isinstance(value, bool):
        others = dice.sample([str(other) for other in (None, False, True) if other is not value], 2)
    elif isinstance(value, int):
        others = [str(value + step) for step in _steps(value, dice)]
    elif isinstance(value, float) and abs(value) > 1e9:
        others = [repr(value * (1 + step / 100)) for step in _steps(0, dice)]
    elif isinstance(value, float):
        decimals = len(re.sub(r"(?i)e.*|[^.]*\.?", "", text, count=1))
        others = [repr(round(value + step, max(1, decimals))) for step in _steps(value, dice)]
    elif isinstance(value, complex):
        others = [repr(value + step) for step in _steps(0, dice)]
    return tuple(other for other in others if other.count("\n") == text.count("\n") and _value_of(other) != value)


def spread(values: int, versions: int, dice: random.Random) -> list[int]:
    """Distribute values over versions as evenly as possible; -1 stands for the first version's own value.

    The frequencies do not reveal the first version's value.

    Args:
        values: the number of values, without the first version's own.
        versions: the number of versions.
        dice: the random generator.

    Returns:
        The index of each version's value.
    """
    spots = [version % (values + 1) for version in range(versions)]
    dice.shuffle(spots)
    others = sorted({*spots} - {spots[0]})
    names = dict(zip(others, dice.sample(range(values), len(others)), strict=True))
    return [names.get(spot, -1) for spot in spots]


def _steps(value: float, dice: random.Random) -> list[int]:
    """Return steps from a number to random other numbers of the same block of numbers.

    How many of them are lower is drawn first, so that the rank of the original among them reveals nothing.
    """
    own = math.floor(value)
    start = own - own % _BLOCK
    lower, higher = range(start, own), range(own + 1, start + _BLOCK)
    count = dice.randint(max(0, _MOST - len(higher)), min(_MOST, len(lower)))
    others = [*dice.sample(lower, count), *dice.sample(higher, _MOST - count)]
    return [other - own for other in dice.sample(others, _MOST)]


def _value_of(text: str) -> object:
    try:
        return ast.literal_eval(f"({text})")
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return Ellipsis


def _other_strings(text: str, dice: random.Random) -> list[str]:
    """Replace one letter or digit of a string, outside of its escapes; an empty string gets a letter."""
    tokens = list(_string_tokens(text))
    places = [position for start, token in tokens for position in _characters(start, token)]
    if places:
        position = dice.choice([position for position in places if text[position].lower() in _COMMON] or places)
        kind = "0123456789" if text[position].isdigit() else _COMMON[10:]
        kind = kind.upper() if text[position].isupper() else kind
        signs = dice.sample(kind.replace(text[position], ""), _MOST)
        return [text[:position] + sign + text[position + 1 :] for sign in signs]
    if len(tokens) == 1 and (match := _STRING.fullmatch(tokens[0][1])):
        end = tokens[0][0] + match.end("body")
        return [text[:end] + sign + text[end:] for sign in dice.sample("abcdefgh", _MOST)]
    return []


def _string_tokens(text: str) -> Iterator[tuple[int, str]]:
    """Yield the string tokens of an implicit concatenation, with their offsets."""
    lengths = [len(line) + 1 for line in f"({text})".split("\n")]
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(f"({text})").readline))
    except (tokenize.TokenError, SyntaxError):
        return
    for token in tokens:
        if token.type == tokenize.STRING:
            yield starts[token.start[0] - 1] + token.start[1] - 1, token.string


def _characters(start: int, token: str) -> Iterator[int]:
    """Yield the offsets of a string's ASCII letters and digits, except those in escapes."""
    match = _STRING.fullmatch(token)
    if match is None:
        return
    begin, body = match.start("body"), match["body"]
    is_raw = "r" in match["prefix"].lower()
    escaped = set() if is_raw else {at for escape in _ESCAPE.finditer(body) for at in range(*escape.span())}
    for at, sign in enumerate(body):
        if sign.isascii() and sign.isalnum() and at not in escaped:
            yield start + begin + at
