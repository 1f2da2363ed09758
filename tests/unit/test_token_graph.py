"""Answers become training rows by their tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisandbox.errors import InvalidValue
from minisandbox.models import TokenGraph, Tokens


def tokens(prompt: Sequence[int], sampled: Sequence[int]) -> Tokens:
    return Tokens(array("i", prompt), array("i", sampled), array("d", [-float(one) for one in sampled]))


def test_a_conversation_that_grows_is_one_row() -> None:
    graph = TokenGraph()
    assert graph.add(tokens([1, 2], [3, 4])) == 0
    assert graph.add(tokens([1, 2, 3, 4, 5], [6])) == 1
    (row,) = graph.rows()
    assert list(row.ids) == [1, 2, 3, 4, 5, 6]
    assert list(row.mask) == [0, 0, 1, 1, 0, 1]
    assert list(row.logprobs) == [0, 0, -3, -4, 0, -6]
    assert (row.turns, row.prompt_length) == ((0, 1), 2)


def test_each_token_keeps_the_version_of_the_policy_that_sampled_it() -> None:
    graph = TokenGraph()
    graph.add(replace(tokens([1, 2], [3, 4]), versions=((7, 2),)))
    graph.add(replace(tokens([1, 2, 3, 4], [5]), versions=((7, 1),)))
    graph.add(replace(tokens([1, 2, 3, 4, 5, 6], [7, 8, 9]), versions=((8, 1), (9, 2))))  # changed meanwhile
    graph.add(tokens([1, 2, 30], [40]))  # of an unknown version
    grown, fork = graph.rows()
    assert grown.versions == ((-1, 2), (7, 3), (-1, 1), (8, 1), (9, 2))
    assert (grown.oldest_version, fork.oldest_version) == (7, None)
    assert fork.versions == ()
    assert replace(grown, mask=b"\0" * 7 + b"\1\1").oldest_version == 9
    with pytest.raises(InvalidValue, match="policy versions"):
        replace(tokens([1], [2]), versions=((7, 2),))


def test_other_tokens_for_the_same_text_are_a_row_of_their_own() -> None:
    """The first answer was [3, 4]; rendered anew, its text has become [34]."""
    graph = TokenGraph()
    graph.add(tokens([1, 2], [3, 4]))
    graph.add(tokens([1, 2, 34, 5], [6]))
    assert [(list(row.ids), list(row.mask)) for row in graph.rows()] == [
        ([1, 2, 3, 4], [0, 0, 1, 1]),
        ([1, 2, 34, 5, 6], [0, 0, 0, 0, 1]),
    ]


def test_a_fork_trains_what_its_branches_share_once() -> None:
    graph = TokenGraph()
    graph.add(tokens([1], [2]))
    graph.add(tokens([1, 2, 3], [4]))
    graph.add(tokens([1, 2, 5], [6]))
    assert [(list(row.ids), list(row.mask)) for row in graph.rows()] == [
        ([1, 2, 3, 4], [0, 1, 0, 1]),
        ([1, 2, 5, 6], [0, 0, 0, 1]),
    ]


def test_what_is_held_is_what_is_not_shared() -> None:
    graph = TokenGraph()
    held = []
    for prompt in ([1, 2], [1, 2, 3, 4], [1, 2], [9] * 100, [9] * 100):
        graph.add(tokens(prompt, [3]))
        held.append(graph.held)
    assert held == [3, 5, 8, 109, 210]


def test_a_prompt_that_ends_within_an_answer_does_not_follow_it() -> None:
    graph = TokenGraph()
    graph.add(tokens([1], [2, 3]))
    graph.add(tokens([1, 2], [9]))
    assert [list(row.ids) for row in graph.rows()] == [[1, 2, 3], [1, 2, 9]]


def test_the_same_answer_twice() -> None:
    """As where a client asks again because the first answer was lost on its way."""
    graph = TokenGraph()
    for _ in range(2):
        graph.add(tokens([1], [2]))
    graph.add(tokens([1, 2, 3], [4]))
    rows = graph.rows()
    assert sorted(list(row.ids) for row in rows) == [[1, 2], [1, 2, 3, 4]]
    assert sum(sum(row.mask) for row in rows) == 3


def test_nothing_is_no_row() -> None:
    assert TokenGraph().rows() == ()


tokens_of_a_few = st.lists(st.integers(0, 3), max_size=4)
turns = st.lists(st.tuples(st.integers(0, 30), tokens_of_a_few, tokens_of_a_few.filter(bool)), max_size=12)


@given(turns)
def test_every_sampled_token_carries_loss_once(steps: list[tuple[int, list[int], list[int]]]) -> None:
    graph = TokenGraph()
    done: list[tuple[list[int], list[int]]] = [([], [])]
    for origin, more, sampled in steps:
        before = done[origin % len(done)]
        prompt = before[0] + before[1] + more
        graph.add(tokens(prompt, sampled))
        done.append((prompt, sampled))
    rows = graph.rows()
    assert sum(sum(row.mask) for row in rows) == sum(len(sampled) for _, sampled in done)
    for row in rows:
        assert len(row.ids) == len(row.logprobs) == len(row.mask)
        prompt, sampled = done[row.turns[-1] + 1]
        assert list(row.ids) == prompt + sampled
    assert {turn for row in rows for turn in row.turns} == set(range(len(steps)))
