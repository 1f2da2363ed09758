"""Draws: which tests of a confirming run are changed, and how, chosen at random.

Code under test can read all versions of a test. So each value that some versions have at a place is there in as many
versions as any other, and what most versions share tells nothing of what the original expects.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from minisandbox.grade.confirm.changeable import Changeable, ChangeableTests, CheckedVariant, inlined
from minisandbox.grade.confirm.editions import Change, Changes
from minisandbox.grade.confirm.literals import spread
from minisandbox.grade.confirm.variants import WEAK, Variant

_MOST_VERSIONS = 6
"""Versions of one test."""
_MOST_COPIES = 60
"""Copies in one run, over all tests."""
_MOST_ITEMS = 360
"""Items of one test, over its versions, that are run: each set of parameters is one."""
_MOST_RUNS = 5
"""Runs with changes, if tests are run without copies."""
_SHARE = 0.1
"""The share of the first run's time that copies may take; a test that takes longer is changed in place, or not."""


@dataclass(frozen=True, slots=True)
class VersionDraw:
    """The versions of tests for one run.

    Attributes:
        wanted: the versions of each test. The first has the test's name.
        failing: for each changed version of a test, the items that it makes fail, with the places where they may.
        passing: for each test the items that must pass unchanged.
        definitions: the values of definitions that no version reads.
    """

    wanted: dict[str, list[Changes]] = field(default_factory=dict)
    failing: dict[tuple[str, Changes], Mapping[str, frozenset[str]]] = field(default_factory=dict)
    passing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    definitions: list[Change] = field(default_factory=list)


def draws(tests: ChangeableTests, seconds: float, dice: random.Random) -> Iterator[VersionDraw]:
    """Yield the draws that confirm a pass, each with several versions of every test of which copies can be made.

    Of the others some are changed. If there is only one, it is changed in one of two draws.

    Args:
        tests: what can be changed.
        seconds: how long the first run took.
        dice: decides.
    """
    groups = _groups(tests)
    counts = _counts(groups, seconds, dice)
    in_place = [number for number, group in enumerate(groups) if group[0].variants and counts[number] < 2]
    some = dice.sample(in_place, dice.randint(1, len(in_place) - 1)) if len(in_place) > 1 else []
    for changed in dice.sample(([], in_place), 2) if len(in_place) == 1 else (some,):
        drawn = VersionDraw()
        for number, group in enumerate(groups):
            if counts[number] > 1:
                _add(drawn, group, _versions(group[0], counts[number], dice))
            else:
                change = _changes(group[0], dice)[0] if number in changed else None
                _add(drawn, group, [_version(group[0], change)])
        yield _with_definitions(drawn, dice)


def _counts(groups: Sequence[Sequence[Changeable]], seconds: float, dice: random.Random) -> list[int]:
    """Return how many versions of each test the time allows; 1 for tests that are changed in place, or not at all."""
    able = [number for number, group in enumerate(groups) if _has_copies(group)]
    counts, budget = [1] * len(groups), _SHARE * seconds
    maximum = max(2, min(_MOST_VERSIONS, _MOST_COPIES // max(1, len(able)) + 1))
    for number in dice.sample(able, len(able)):
        items = sum(len(function.passing) for function in groups[number])
        duration = sum(function.seconds for function in groups[number])
        count = min(maximum, max(2, _MOST_ITEMS // max(1, items)))
        if duration:
            count = min(count, int(budget / duration) + 1)
        counts[number] = max(2, count) if len(able) == 1 else count
        budget -= (counts[number] - 1) * duration
    return counts


def draws_without_copies(tests: ChangeableTests, dice: random.Random) -> Iterator[VersionDraw]:
    """Yield draws in which every test has one version: first none is changed, then each place of each test in turn.

    Args:
        tests: what can be changed.
        dice: decides how.
    """
    groups = _groups(tests)
    changes = [_changes(group[0], dice)[:_MOST_RUNS] for group in groups]
    for turn in range(-1, max(map(len, changes))):
        drawn = VersionDraw()
        for group, mine in zip(groups, changes, strict=True):
            _add(drawn, group, [_version(group[0], mine[turn % len(mine)] if mine and turn >= 0 else None)])
        yield _with_definitions(drawn, dice)


def _groups(tests: ChangeableTests) -> list[list[Changeable]]:
    """Return the tests, with those together that inherit one method: an edit of it changes all."""
    groups: dict[str, list[Changeable]] = {}
    for function in tests.functions:
        groups.setdefault(function.definition or function.test, []).append(function)
    return list(groups.values())


def _has_copies(group: Sequence[Changeable]) -> bool:
    return all(function.copies for function in group) and bool(_local(group[0]))


def _places(function: Changeable) -> list[CheckedVariant]:
    """Return what can be changed; values rather than conditions, since an object can satisfy any condition."""
    values = [checked for checked in function.variants if checked.variant.kind not in WEAK]
    return values or list(function.variants)


def _ordered(checked: Sequence[CheckedVariant], function: Changeable, dice: random.Random) -> list[Variant]:
    """Return variants in a random order, but for the first.

    That is where the untouched code fails, or the next: there a submission that fixes nothing has to cheat.
    """
    shuffled = dice.sample(checked, len(checked))
    first = min(shuffled, key=lambda candidate: _lines_until(function, candidate))
    return [first.variant, *(candidate.variant for candidate in shuffled if candidate is not first)]


def _changes(function: Changeable, dice: random.Random) -> list[Change]:
    """Return changes of a test: first one of each place, then other values at the same places."""
    if not function.variants:
        return []
    places = [(one, _shuffled(len(one.texts), dice)) for one in _ordered(_places(function), function, dice)]
    rounds = range(max(len(numbers) for _, numbers in places))
    return [(variant, numbers[turn]) for turn in rounds for variant, numbers in places if turn < len(numbers)]


def _shuffled(count: int, dice: random.Random) -> list[int]:
    return dice.sample(range(count), count)


def _versions(function: Changeable, count: int, dice: random.Random) -> list[Changes]:
    """Return versions of a test with all combinations of some values at two places, in a random order."""
    first, *others = _ordered(_local(function), function, dice)
    second = next((other for other in others if not other.overlaps(first)), None)
    columns = 2 if second and count >= 4 else 1
    rows = min(count // columns, len(first.texts) + 1)
    if second and columns > 1:
        columns = min(count // rows, len(second.texts) + 1)
    numbers = [spread(len(first.texts), rows, dice), spread(len(second.texts) if second else 0, columns, dice)]
    edited = [variant for variant in (first, second if columns > 1 else None) if variant]
    versions = [_version(function, *zip(edited, pair, strict=False)) for pair in itertools.product(*numbers)]
    dice.shuffle(versions)
    return versions


def _version(function: Changeable, *changes: Change | None) -> Changes:
    """Return a version of a test, with own texts in place of all names that are not changed."""
    edited = [change for change in changes if change]
    named = [one.variant for one in function.variants if one.variant.own and function.copies]
    values = inlined(name for name in named if not any(name.overlaps(variant) for variant, _ in edited))
    return (*values, *((variant, number) for variant, number in edited if number >= 0 or variant.own))


def _with_definitions(drawn: VersionDraw, dice: random.Random) -> VersionDraw:
    """Draw the values of definitions among those that the versions have; of one version, its own or another."""
    values: dict[tuple[str, tuple[int, int]], Change] = {}
    for versions in drawn.wanted.values():
        for variant, number in dice.choice(versions):
            if variant.definition:
                other = number if len(versions) > 1 else -1 if number >= 0 else dice.randrange(len(variant.texts))
                values[variant.path, variant.definition] = (variant, dice.choice((number, other)))
    drawn.definitions.extend(values.values())
    return drawn


def _local(function: Changeable) -> list[CheckedVariant]:
    """Return what a copy of a test can carry."""
    return [checked for checked in _places(function) if checked.variant.is_local]


def _lines_until(function: Changeable, checked: CheckedVariant) -> float:
    """Return how many lines below the first failure on the untouched code a changed test fails; endless if above."""
    lines = [math.inf]
    for broken, position in itertools.product(
        function.broken, {position for each in checked.failing for position in each.values()}
    ):
        (label, _, start), (other, _, end) = broken.rpartition("+"), position.rpartition("+")
        if label == other and start and end and int(end) >= int(start):
            lines.append(int(end) - int(start))
    return min(lines)


def _add(drawn: VersionDraw, group: Sequence[Changeable], versions: list[Changes]) -> None:
    for function in group:
        drawn.wanted[function.test] = versions
        drawn.passing[function.test] = function.passing
        checked = {one.variant: one.failing for one in function.variants}
        for changes in versions:
            places: dict[str, frozenset[str]] = {}
            for variant, number in changes:
                failing = checked[variant][number] if number >= 0 and variant in checked else {}
                for item, line in failing.items():
                    places[item] = places.get(item, frozenset()) | {line}
            drawn.failing[function.test, changes] = places
