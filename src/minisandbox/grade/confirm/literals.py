"""Find the literals of an expression, and draw other values of the same kind for them."""

from __future__ import annotations

import ast
import io
import math
import random
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

_ESCAPE = re.compile(r"\\(N\{[^}]*\}|x..|u.{4}|U.{8}|[0-7]{1,3}|.)", re.DOTALL)
_STRING = re.compile(r"""(?P<prefix>[A-Za-z]*)(?P<quote>'''|\"\"\"|'|")(?P<body>.*)(?P=quote)""", re.DOTALL)
_Item = TypeVar("_Item")

MOST_PER_SIDE = 3
"""How many other values of a number or string are drawn below it, and above it, if there are as many."""
MOST_OTHERS = 2 * MOST_PER_SIDE
"""The maximum number of other values of a literal."""
_BLOCK = 14
_COMMON = "0123456789etaoinshrdlc"
"""The characters that are replaced and inserted; a rare letter would reveal that the string was changed."""


@dataclass(frozen=True, slots=True)
class OtherValues:
    """Values that can replace one value.

    A confirming run shows the original value among a few of them, drawn anew for each run. There are as many on both
    sides of the original as possible, so that its rank among those that are drawn can vary.

    Attributes:
        replacements: the source texts: first those that sort before the original, then those after it, then
            the lookalikes.
        below: the number of texts that sort before the original; None if the values have no order.
        lookalikes: the number of texts that are values of other tests. A run that shows two values or more shows at
            least one of them.
    """

    replacements: tuple[str, ...] = ()
    below: int | None = None
    lookalikes: int = 0

    def within(self, before: str, after: str) -> OtherValues:
        """Return the values with text around each.

        Args:
            before: the text before each value.
            after: the text after it.
        """
        return replace(self, replacements=tuple(f"{before}{text}{after}" for text in self.replacements))

    def kept(self, indexes: Sequence[int]) -> OtherValues:
        """Return only some of the values.

        Args:
            indexes: the indexes of those values, ascending.
        """
        return OtherValues(
            tuple(self.replacements[index] for index in indexes),
            None if self.below is None else sum(index < self.below for index in indexes),
            sum(index >= self._sides[2].start for index in indexes),
        )

    @property
    def order(self) -> list[int]:
        """The indexes in the order in which they are tried: any first part has values of all sides."""
        sides = [side for side in reversed(self._sides) if side]
        return [side[step] for step in range(len(self.replacements)) for side in sides if step < len(side)]

    @property
    def most_drawn(self) -> int:
        """How many a run may show without showing all of both sides, which would fix the original's rank."""
        lower, higher, lookalikes = self._sides
        ordered = len(lower) + len(higher)
        if self.below is not None:
            ordered = max(1, ordered // 2) if ordered else 0
        return min(MOST_PER_SIDE, ordered + min(MOST_PER_SIDE - 1, len(lookalikes)))

    def draw(self, count: int, rng: random.Random) -> list[int]:
        """Draw some of the values; first how many are below the original, so that its rank reveals nothing.

        Args:
            count: the number of values, at most all.
            rng: the random generator.

        Returns:
            Their indexes, in random order.
        """
        lower, higher, lookalikes = self._sides
        similar = min(len(lookalikes), max(1, count - 1))
        similar = max(similar, count - len(lower) - len(higher))
        ordered = count - similar
        drawn = rng.sample(lookalikes, similar)
        if self.below is None:
            drawn += rng.sample(higher, ordered)
        else:
            lower_count = rng.randint(max(0, ordered - len(higher)), min(ordered, len(lower)))
            drawn += [*rng.sample(lower, lower_count), *rng.sample(higher, ordered - lower_count)]
        return rng.sample(drawn, count)

    @property
    def _sides(self) -> tuple[range, range, range]:
        """The indexes of the values below the original, above it, and of the lookalikes."""
        below, end = self.below or 0, len(self.replacements) - self.lookalikes
        return range(below), range(below, end), range(end, len(self.replacements))


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


def other_literals(literal: str, rng: random.Random) -> OtherValues:
    """Return up to six inconspicuous literals with other values, of the same kind and number of lines.

    Args:
        literal: the source text of the literal.
        rng: the random generator.

    Returns:
        The other values; none if there are none of this kind.
    """
    value = _value_of(literal)
    candidates: list[str] = []
    if isinstance(value, str | bytes):
        candidates = _other_strings(literal, rng)
    elif value is None or isinstance(value, bool):
        candidates = [str(candidate) for candidate in (None, False, True) if candidate is not value]
    elif isinstance(value, int):
        candidates = [str(value + step) for step in _steps(value, rng)]
    elif isinstance(value, float) and abs(value) > 1e9:
        candidates = [repr(value * (1 + step / 100)) for step in _steps(_BLOCK, rng)]
    elif isinstance(value, float):
        decimals = len(re.sub(r"(?i)e.*|[^.]*\.?", "", literal, count=1))
        candidates = [repr(round(value + step, max(1, decimals))) for step in _steps(value, rng)]
    elif isinstance(value, complex):
        candidates = [repr(value + step) for step in _steps(_BLOCK, rng)]
    others = [
        candidate
        for candidate in dict.fromkeys(candidates)
        if candidate.count("\n") == literal.count("\n") and _value_of(candidate) != value
    ]
    if value is None or isinstance(value, bool):
        return OtherValues(tuple(others))
    others.sort(key=_rank)
    return OtherValues(tuple(others), sum(_rank(other) < _rank(literal) for other in others))


def _steps(value: float, rng: random.Random) -> list[int]:
    """Return the differences between a number and other numbers of the same sign, within 14 integers around it."""
    integer = math.floor(value)
    start = integer - rng.randint(MOST_PER_SIDE, _BLOCK - 1 - MOST_PER_SIDE)
    lower = range(max(0, start) if integer >= 0 else start, integer)
    higher = range(integer + 1, min(0, start + _BLOCK) if integer < 0 else start + _BLOCK)
    return [neighbour - integer for neighbour in _of_both_sides(lower, higher, rng)]


def _of_both_sides(lower: Sequence[_Item], higher: Sequence[_Item], rng: random.Random) -> list[_Item]:
    """Draw three items from each side, and more from one side where the other has fewer."""
    lower_count = min(len(lower), max(MOST_PER_SIDE, MOST_OTHERS - len(higher)))
    return [*rng.sample(lower, lower_count), *rng.sample(higher, min(len(higher), MOST_OTHERS - lower_count))]


def _rank(literal: str) -> tuple[float, str]:
    """Return the sort key of a literal: its value if that is a real number, then its text."""
    value = _value_of(literal)
    number = value.real if isinstance(value, int | float | complex) else 0
    return number, literal


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
        lower = [character for character in kind if character < literal[offset]]
        higher = [character for character in kind if character > literal[offset]]
        characters = _of_both_sides(lower, higher, rng)
        return [literal[:offset] + character + literal[offset + 1 :] for character in characters]
    if len(tokens) == 1 and (match := _STRING.fullmatch(tokens[0][1])):
        body_end = tokens[0][0] + match.end("body")
        return [
            literal[:body_end] + character + literal[body_end:] for character in rng.sample("abcdefgh", MOST_OTHERS)
        ]
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
