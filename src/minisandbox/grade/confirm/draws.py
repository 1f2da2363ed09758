"""Draws: which tests of a confirming run are changed, and how, chosen at random."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from minisandbox.grade.confirm.changeable import Changeable, ChangeableTests, CheckedVariant
from minisandbox.grade.confirm.editions import Change
from minisandbox.grade.confirm.variants import WEAK

_MOST_CHANGED = 5
"""Changed versions of one test."""
_MOST_COPIES = 60
"""Copies in one run, over all tests."""
_MOST_ITEMS = 120
"""Items of one test, over its versions, that are run: each set of parameters is one."""
_SHARE = 0.1
"""The share of the first run's time that copies may take; a test that takes longer is changed in place, or not."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The versions of tests for one run.

    Attributes:
        wanted: the versions of each test: how each is changed, None for unchanged ones. The first has the test's name.
        failing: for each change of a test, the items that it makes fail, with the place.
        passing: for each test the items that must pass unchanged.
    """

    wanted: dict[str, list[Change | None]] = field(default_factory=dict)
    failing: dict[tuple[str, Change], Mapping[str, str]] = field(default_factory=dict)
    passing: dict[str, tuple[str, ...]] = field(default_factory=dict)


def draw(tests: ChangeableTests, seconds: float, dice: random.Random) -> Draw:
    """Draw versions of every test: at least one unchanged, and others that are each changed at another place.

    A test of which no copy can be made has one version, changed or not.

    Args:
        tests: what can be changed.
        seconds: how long the first run took.
        dice: decides.
    """
    drawn = Draw()
    copies = _copies(tests, seconds, dice)
    definitions = Counter(function.definition for function in tests.functions)
    in_place = [function for function in tests.functions if function.variants and not copies[function.test]]
    changed = set(dice.sample(range(len(in_place)), _some_of(len(in_place), dice)))
    for number, function in enumerate(in_place):
        _add(drawn, function, _changes(function, dice)[:1] if number in changed else [], dice, unchanged=0)
    for function in tests.functions:
        if not function.variants:
            _add(drawn, function, [], dice)
        elif most := copies[function.test]:
            chosen = _changes(function, dice)[:most]
            _add(drawn, function, chosen, dice, unchanged=2 if len(chosen) == 1 < most else 1)
            if definitions[function.definition] > 1:  # what is changed in place would be changed for the others, too
                drawn.wanted[function.test].sort(key=bool)
    return drawn


def _copies(tests: ChangeableTests, seconds: float, dice: random.Random) -> dict[str, int]:
    """Return how many copies of each test the time allows; 0 for tests that are changed in place, or not at all."""
    able = [function for function in tests.functions if function.variants and function.copies]
    definitions = Counter(function.definition for function in able)
    copies = dict.fromkeys((function.test for function in tests.functions), 0)
    most = max(1, min(_MOST_CHANGED, _MOST_COPIES // max(1, len(able))))
    budget = _SHARE * seconds
    for function in dice.sample(able, len(able)):
        count = min(most, max(1, _MOST_ITEMS // max(1, len(function.passing)) - 1))
        if function.seconds:
            count = min(count, int(budget / function.seconds))
        if len(able) == 1 or definitions[function.definition] > 1:
            count = max(1, count)
        copies[function.test] = count
        budget -= count * function.seconds
    return copies


def draws_without_copies(tests: ChangeableTests, dice: random.Random) -> Iterator[Draw]:
    """Yield draws in which every test has one version: first none is changed, then each place of each test in turn.

    Args:
        tests: what can be changed.
        dice: decides how.
    """
    functions = list({function.definition: function for function in tests.functions}.values())
    changes = {function.test: _changes(function, dice)[:_MOST_CHANGED] for function in functions}
    for turn in range(-1, max(map(len, changes.values()))):
        drawn = Draw()
        for function in functions:
            mine = changes[function.test]
            _add(drawn, function, [mine[turn % len(mine)]] if mine and turn >= 0 else [], dice, unchanged=0)
        yield drawn


def _some_of(count: int, dice: random.Random) -> int:
    """Return how many tests without copies are changed: some, but not all; a single one half of the time."""
    return dice.randint(1, count - 1) if count > 1 else dice.randint(0, count)


def _changes(function: Changeable, dice: random.Random) -> list[tuple[CheckedVariant, int]]:
    """Return changes of a test in a random order: first one of each place, then other values at the same places.

    Values come before conditions, since an object can satisfy any condition.
    """
    values = [checked for checked in function.variants if checked.variant.kind not in WEAK]
    places = [(checked, _shuffled(len(checked.variant.texts), dice)) for checked in values or function.variants]
    dice.shuffle(places)
    rounds = range(max((len(numbers) for _, numbers in places), default=0))
    return [(checked, numbers[turn]) for turn in rounds for checked, numbers in places if turn < len(numbers)]


def _shuffled(count: int, dice: random.Random) -> list[int]:
    return dice.sample(range(count), count)


def _add(
    drawn: Draw, function: Changeable, chosen: list[tuple[CheckedVariant, int]], dice: random.Random, unchanged: int = 1
) -> None:
    versions: list[Change | None] = [None] * (unchanged if chosen else 1)
    for checked, number in chosen:
        change = (checked.variant, number)
        versions.append(change)
        drawn.failing[function.test, change] = checked.failing[number]
    dice.shuffle(versions)
    drawn.wanted[function.test] = versions
    drawn.passing[function.test] = function.passing
