"""Draw at random which tests a confirming run changes, and how.

Code under test can read all versions of a test. So at each position every value occurs in equally many versions:
otherwise the most frequent value would reveal the original.
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
"""The maximum number of versions of one test."""
_MOST_COPIES = 60
"""The maximum number of copies in one run, over all tests."""
_MOST_ITEMS = 360
"""The maximum number of items of one test in a run, over its versions; each set of parameters is an item."""
_MOST_RUNS = 5
"""The maximum number of runs with changes if tests run without copies."""
_SHARE = 0.1
"""The share of the first run's duration that copies may take. Slower tests are changed in place, or not at all."""


@dataclass(frozen=True, slots=True)
class VersionDraw:
    """The versions of the tests in one run.

    Attributes:
        wanted: the versions of each test; the first version keeps the test's name.
        failing: for each changed version of a test, the items that must fail, with the allowed positions.
        passing: for each test, the items that must pass unchanged.
        definitions: new values for definitions that no version reads.
    """

    wanted: dict[str, list[Changes]] = field(default_factory=dict)
    failing: dict[tuple[str, Changes], Mapping[str, frozenset[str]]] = field(default_factory=dict)
    passing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    definitions: list[Change] = field(default_factory=list)


def draws(tests: ChangeableTests, seconds: float, dice: random.Random) -> Iterator[VersionDraw]:
    """Yield the draws that confirm a pass, each with several versions of every test that can be copied.

    Some of the other tests are changed in place. If there is only one such test, one of two draws changes it.

    Args:
        tests: the changeable tests.
        seconds: the duration of the first run.
        dice: the random generator.
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
    """Return the number of versions of each test that the time allows; 1 for a test that is not copied."""
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
    """Yield draws with one version of each test: first all unchanged, then with a change at each position in turn.

    Args:
        tests: the changeable tests.
        dice: the random generator.
    """
    groups = _groups(tests)
    changes = [_changes(group[0], dice)[:_MOST_RUNS] for group in groups]
    for turn in range(-1, max(map(len, changes))):
        drawn = VersionDraw()
        for group, mine in zip(groups, changes, strict=True):
            _add(drawn, group, [_version(group[0], mine[turn % len(mine)] if mine and turn >= 0 else None)])
        yield _with_definitions(drawn, dice)


def _groups(tests: ChangeableTests) -> list[list[Changeable]]:
    """Group the tests that inherit the same method, because an edit of the method changes them all."""
    groups: dict[str, list[Changeable]] = {}
    for function in tests.functions:
        groups.setdefault(function.definition or function.test, []).append(function)
    return list(groups.values())


def _has_copies(group: Sequence[Changeable]) -> bool:
    return all(function.copies for function in group) and bool(_local(group[0]))


def _places(function: Changeable) -> list[CheckedVariant]:
    """Return the changeable values, or conditions if there are none: a forged object can satisfy any condition."""
    values = [checked for checked in function.variants if checked.variant.kind not in WEAK]
    return values or list(function.variants)


def _ordered(checked: Sequence[CheckedVariant], function: Changeable, dice: random.Random) -> list[Variant]:
    """Return variants in random order, except that the variant next to the original failure comes first.

    A submission that fixes nothing must cheat where the test fails on the untouched code. The first variant is at that
    line, or is the next one after it.
    """
    shuffled = dice.sample(checked, len(checked))
    first = min(shuffled, key=lambda candidate: _lines_until(function, candidate))
    return [first.variant, *(candidate.variant for candidate in shuffled if candidate is not first)]


def _changes(function: Changeable, dice: random.Random) -> list[Change]:
    """Return changes of a test: first one at each position, then other values at the same positions."""
    if not function.variants:
        return []
    places = [
        (variant, dice.sample(range(len(variant.texts)), len(variant.texts)))
        for variant in _ordered(_places(function), function, dice)
    ]
    rounds = range(max(len(numbers) for _, numbers in places))
    return [(variant, numbers[turn]) for turn in rounds for variant, numbers in places if turn < len(numbers)]


def _versions(function: Changeable, count: int, dice: random.Random) -> list[Changes]:
    """Return versions of a test that combine some values at up to two positions, in random order."""
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
    """Return a version of a test with these changes, and with values in place of all unchanged names."""
    edited = [change for change in changes if change]
    named = [checked.variant for checked in function.variants if checked.variant.own and function.copies]
    values = inlined(name for name in named if not any(name.overlaps(variant) for variant, _ in edited))
    return (*values, *((variant, number) for variant, number in edited if number >= 0 or variant.own))


def _with_definitions(drawn: VersionDraw, dice: random.Random) -> VersionDraw:
    """Draw a value for each definition from a version of a test; for a single version, perhaps another value."""
    values: dict[tuple[str, tuple[int, int]], Change] = {}
    for versions in drawn.wanted.values():
        for variant, number in dice.choice(versions):
            if variant.definition:
                other = number if len(versions) > 1 else -1 if number >= 0 else dice.randrange(len(variant.texts))
                values[variant.path, variant.definition] = (variant, dice.choice((number, other)))
    drawn.definitions.extend(values.values())
    return drawn


def _local(function: Changeable) -> list[CheckedVariant]:
    """Return the variants that a copy of the test can contain."""
    return [checked for checked in _places(function) if checked.variant.is_local]


def _lines_until(function: Changeable, checked: CheckedVariant) -> float:
    """Return the smallest line distance from an original failure down to the variant's failure; infinite if above."""
    lines = [math.inf]
    for broken, position in itertools.product(
        function.broken, {position for items in checked.failing for position in items.values()}
    ):
        (label, _, start), (other, _, end) = broken.rpartition("+"), position.rpartition("+")
        if label == other and start and end and int(end) >= int(start):
            lines.append(int(end) - int(start))
    return min(lines)


def _add(drawn: VersionDraw, group: Sequence[Changeable], versions: list[Changes]) -> None:
    for function in group:
        drawn.wanted[function.test] = versions
        drawn.passing[function.test] = function.passing
        failing_of = {checked.variant: checked.failing for checked in function.variants}
        for changes in versions:
            places: dict[str, frozenset[str]] = {}
            for variant, number in changes:
                failing = failing_of[variant][number] if number >= 0 and variant in failing_of else {}
                for item, line in failing.items():
                    places[item] = places.get(item, frozenset()) | {line}
            drawn.failing[function.test, changes] = places
