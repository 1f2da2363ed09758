"""Link responses by their token ids, never by their text, and build training rows from them.

A response continues an earlier response if its prompt starts with all tokens of the earlier response, prompt and
sampled. A conversation that only grows becomes one row. A fork, a summary or a different tokenization starts another
row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

from minisandbox.models.protocol import Tokens

NO_VERSION = -1
"""The version of a token that was not sampled, or whose version is unknown."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One training sequence. Across all rows of a rollout, each sampled token carries loss at most once.

    Attributes:
        ids: the token ids (``array('i')``).
        logprobs: natural logarithms of the sampling probabilities; 0.0 for context (``array('d')``).
        mask: per token, 1 if it carries loss. It is 0 for context, for tokens that carry loss in an earlier row, and
            for tokens sampled under a constraint.
        turns: the numbers of the row's responses in the rollout, in order, from 0.
        versions: the policy versions of all tokens, run-length encoded as pairs of a version and a number of tokens.
            The version is :data:`NO_VERSION` for context and for tokens of an unknown version. Empty if no version is
            known.
    """

    ids: array[int]
    logprobs: array[float]
    mask: bytes
    turns: tuple[int, ...]
    versions: tuple[tuple[int, int], ...] = ()

    @property
    def prompt_length(self) -> int:
        """The number of tokens before the first token that carries loss."""
        length = self.mask.find(1)
        return len(self.mask) if length < 0 else length

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version of the tokens that carry loss; None if the version of such a token is unknown."""
        return oldest_version(self.versions, self.mask)


def oldest_version(versions: Iterable[tuple[int, int]], mask: bytes) -> int | None:
    """Return the oldest policy version of a row's tokens that carry loss, or None if such a token's is unknown.

    Args:
        versions: the row's :attr:`TokenRow.versions`.
        mask: the row's mask.
    """
    start, trained = 0, set()
    for version, count in versions:
        if any(mask[start : start + count]):
            trained.add(version)
        start += count
    return None if not trained or NO_VERSION in trained else min(trained)


def versions_between(versions: Iterable[tuple[int, int]], start: int, end: int) -> tuple[tuple[int, int], ...]:
    """Return the policy versions of a part of a row's tokens.

    Args:
        versions: the row's :attr:`TokenRow.versions`.
        start: the index of the first token.
        end: the index after the last token.
    """
    version_of = [version for version, count in versions for _ in range(count)]
    return _joined((version, 1) for version in version_of[start:end])


@dataclass(slots=True, eq=False)
class _Node:
    """One response: the part of its prompt that follows the tokens of the previous node, and its sampled tokens."""

    turn: int
    context: array[int]
    sampled: array[int]
    logprobs: array[float]
    versions: tuple[tuple[int, int], ...]
    before: _Node | None
    trained: bool
    after: list[_Node] = field(default_factory=list)

    def is_at(self, prompt: array[int], start: int) -> int:
        """Return the end of this node's tokens in a prompt if they occur at ``start``, or -1."""
        middle = start + len(self.context)
        end = middle + len(self.sampled)
        matches = prompt[start:middle] == self.context and prompt[middle:end] == self.sampled
        return end if matches else -1


class TokenGraph:
    """The responses of one rollout, each linked to the response that it continues.

    Attributes:
        held: the number of stored tokens. The part of a prompt that repeats an earlier response is stored only once.
    """

    def __init__(self) -> None:
        self.held = 0
        self._roots: list[_Node] = []
        self._nodes: list[_Node | None] = []

    def add(self, tokens: Tokens | None, *, trained: bool = True) -> int:
        """Add a response; return its number, from 0.

        Args:
            tokens: the tokens read and sampled; None if they are unknown, so that the response is in no row.
            trained: whether the sampled tokens carry loss; False if they were sampled under a constraint.
        """
        if tokens is None:
            self._nodes.append(None)
            return len(self._nodes) - 1
        before, start = self._latest_before(tokens.prompt)
        context = tokens.prompt[start:]
        versions = tokens.versions or ((NO_VERSION, len(tokens.sampled)),)
        node = _Node(len(self._nodes), context, tokens.sampled, tokens.logprobs, versions, before, trained)
        (self._roots if before is None else before.after).append(node)
        self._nodes.append(node)
        self.held += len(node.context) + len(node.sampled)
        return node.turn

    def previous(self, turn: int) -> int | None:
        """Return the number of the response that a response continues, or None."""
        node = self._nodes[turn]
        return None if node is None or node.before is None else node.before.turn

    def rows(self) -> tuple[TokenRow, ...]:
        """Return one row for each response that no later response continues, in order."""
        trained: set[int] = set()
        return tuple(_row(node, trained) for node in self._nodes if node and not node.after)

    def _latest_before(self, prompt: array[int]) -> tuple[_Node | None, int]:
        """Return the node whose path is the longest prefix of a prompt, or None, and the length of the prefix."""
        best: tuple[_Node | None, int] = (None, 0)
        waiting = [(node, 0) for node in self._roots]
        while waiting:
            node, start = waiting.pop()
            end = node.is_at(prompt, start)
            if end < 0:
                continue
            if end > best[1]:
                best = (node, end)
            waiting.extend((child, end) for child in node.after)
        return best


def _row(leaf: _Node, trained: set[int]) -> TokenRow:
    path: list[_Node] = []
    node: _Node | None = leaf
    while node is not None:
        path.append(node)
        node = node.before
    ids, logprobs, mask = array("i"), array("d"), bytearray()
    runs: list[tuple[int, int]] = []
    for part in reversed(path):
        ids += part.context + part.sampled
        values = part.logprobs if part.trained else array("d", bytes(8 * len(part.sampled)))
        logprobs += array("d", bytes(8 * len(part.context))) + values
        carries = part.trained and part.turn not in trained
        mask += bytes(len(part.context)) + bytes([carries]) * len(part.sampled)
        trained.add(part.turn)
        runs += (NO_VERSION, len(part.context)), *part.versions
    versions = _joined(runs) if any(version != NO_VERSION for version, _ in runs) else ()
    return TokenRow(ids, logprobs, bytes(mask), tuple(part.turn for part in reversed(path)), versions)


def _joined(runs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Merge adjacent runs of the same version, and drop empty runs."""
    groups = groupby((run for run in runs if run[1]), key=lambda run: run[0])
    return tuple((version, sum(count for _, count in group)) for version, group in groups)
