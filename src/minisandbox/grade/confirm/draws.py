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
_LEAST_BUDGET = 0.5
"""Copies may always take this many seconds, so that a loaded machine changes short tests as often as an idle one."""


@dataclass(frozen=True, slots=True)
class VersionDraw:
    """The versions of the tests in one run.

    Attributes:
        versions: the versions of each test; the first version keeps the test's name.
        failing: for each changed version of a test, the items that must fail, with the allowed positions.
        passing: for each test, the items that must pass unchanged.
        definitions: new values for the definitions of variables that no version reads.
    """

    versions: dict[str, list[Changes]] = field(default_factory=dict)
    failing: dict[tuple[str, Changes], Mapping[str, frozenset[str]]] = field(default_factory=dict)
    passing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    definitions: list[Change] = field(default_factory=list)


def draws(tests: ChangeableTests, seconds: float, rng: random.Random) -> Iterator[VersionDraw]:
    """Yield the draws that confirm a pass, each with several versions of every test that can be copied.

    Some of the other tests are changed in place. If there is only one such test, one of two draws changes it.

    Args:
        tests: the changeable tests.
        seconds: the duration of the first run.
        rng: the random generator.
    """
    groups = _groups(tests)
    counts, values = _counts(groups, seconds, rng), _DrawnValues(rng)
    in_place = [index for index, group in enumerate(groups) if group[0].variants and counts[index] < 2]
    sample = rng.sample(in_place, rng.randint(1, len(in_place) - 1)) if len(in_place) > 1 else []
    for changed_groups in rng.sample(([], in_place), 2) if len(in_place) == 1 else (sample,):
        draw = VersionDraw()
        for index, group in enumerate(groups):
            if counts[index] > 1:
                _add(draw, group, _versions(group[0], counts[index], values, rng))
            else:
                change = _changes(group[0], rng)[0] if index in changed_groups else None
                _add(draw, group, [_version(group[0], change)])
        yield _with_definitions(draw, rng)


def _counts(groups: Sequence[Sequence[Changeable]], seconds: float, rng: random.Random) -> list[int]:
    """Return the number of versions of each test that the time allows; 1 for a test that is not copied."""
    copyable = [index for index, group in enumerate(groups) if _has_copies(group)]
    counts, budget = [1] * len(groups), max(_LEAST_BUDGET, _SHARE * seconds)
    maximum = max(2, min(_MOST_VERSIONS, _MOST_COPIES // max(1, len(copyable)) + 1))
    for index in rng.sample(copyable, len(copyable)):
        item_count = sum(len(function.passing) for function in groups[index])
        duration = sum(function.seconds for function in groups[index])
        count = min(maximum, max(2, _MOST_ITEMS // max(1, item_count)))
        if duration:
            count = min(count, int(budget / duration) + 1)
        counts[index] = max(2, count) if len(copyable) == 1 else count
        budget -= (counts[index] - 1) * duration
    return counts


def draws_without_copies(tests: ChangeableTests, rng: random.Random) -> Iterator[VersionDraw]:
    """Yield draws with one version of each test: first all unchanged, then with a change at each position in turn.

    Args:
        tests: the changeable tests.
        rng: the random generator.
    """
    groups = _groups(tests)
    changes = [_changes(group[0], rng)[:_MOST_RUNS] for group in groups]
    for step in range(-1, max(map(len, changes))):
        draw = VersionDraw()
        for group, options in zip(groups, changes, strict=True):
            _add(draw, group, [_version(group[0], options[step % len(options)] if options and step >= 0 else None)])
        yield _with_definitions(draw, rng)


def _groups(tests: ChangeableTests) -> list[list[Changeable]]:
    """Group the tests that inherit the same method, because an edit of the method changes them all."""
    groups: dict[str, list[Changeable]] = {}
    for function in tests.functions:
        groups.setdefault(function.definition or function.test, []).append(function)
    return list(groups.values())


def _has_copies(group: Sequence[Changeable]) -> bool:
    return all(function.copies for function in group) and bool(_copyable(group[0]))


def _preferred(function: Changeable) -> list[CheckedVariant]:
    """Return the variants that change values; if there are none, those of conditions, which are easier to forge."""
    value_variants = [checked for checked in function.variants if checked.variant.kind not in WEAK]
    return value_variants or list(function.variants)


def _ordered(checked: Sequence[CheckedVariant], function: Changeable, rng: random.Random) -> list[Variant]:
    """Return variants in random order, except that the variant next to the original failure comes first.

    A submission that fixes nothing must cheat where the test fails on the untouched code. The first variant is at that
    line, or is the next one after it.
    """
    shuffled = rng.sample(checked, len(checked))
    nearest = min(shuffled, key=lambda candidate: _lines_until(function, candidate))
    return [nearest.variant, *(candidate.variant for candidate in shuffled if candidate is not nearest)]


def _changes(function: Changeable, rng: random.Random) -> list[Change]:
    """Return changes of a test: first one at each position, then other values at the same positions."""
    if not function.variants:
        return []
    variants = [
        (variant, variant.others.draw(variant.others.most_drawn, rng))
        for variant in _ordered(_preferred(function), function, rng)
    ]
    rounds = range(max(len(indexes) for _, indexes in variants))
    return [(variant, indexes[step]) for step in rounds for variant, indexes in variants if step < len(indexes)]


class _DrawnValues:
    """The values that one draw shows. Tests that share a definition show the same ones.

    Otherwise a value that two tests have in common would be the original.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._texts: dict[object, list[str]] = {}

    def indexes(self, variant: Variant, count: int) -> list[int]:
        """Return the indexes of some of a variant's values and -1 for the original, in random order.

        Args:
            variant: the variant.
            count: the number of values, with the original.
        """
        key = (variant.path, variant.own, variant.name) if variant.own else (variant.path, variant.start, variant.end)
        if key not in self._texts:
            drawn = variant.others.draw(variant.others.most_drawn, self._rng)
            self._texts[key] = [variant.texts[index] for index in drawn]
        shared = [variant.texts.index(text) for text in self._texts[key] if text in variant.texts]
        further = variant.others.draw(count - 1, self._rng) if len(shared) < count - 1 else []
        indexes = list(dict.fromkeys([*shared, *further]))[: count - 1]
        return self._rng.sample([-1, *indexes], len(indexes) + 1)


def _versions(function: Changeable, count: int, values: _DrawnValues, rng: random.Random) -> list[Changes]:
    """Return versions of a test that combine some values at up to two positions, in random order."""
    primary, *candidates = _ordered(_copyable(function), function, rng)
    candidates.sort(key=lambda candidate: len(candidate.texts) < 2)  # a single other value shows its rank in each run
    secondary = next((candidate for candidate in candidates if not candidate.overlaps(primary)), None)
    columns = 2 if secondary and count >= 4 else 1
    rows = min(count // columns, primary.others.most_drawn + 1)
    variants = [(primary, rows)]
    if secondary and columns > 1:
        variants.append((secondary, min(count // rows, secondary.others.most_drawn + 1)))
    indexes = [values.indexes(variant, value_count) for variant, value_count in variants]
    versions = [
        _version(function, *zip((variant for variant, _ in variants), combined, strict=True))
        for combined in itertools.product(*indexes)
    ]
    rng.shuffle(versions)
    return versions


def _version(function: Changeable, *changes: Change | None) -> Changes:
    """Return a version of a test with these changes, and with values in place of all unchanged names."""
    real_changes = [change for change in changes if change]
    name_variants = [checked.variant for checked in function.variants if checked.variant.own and function.copies]
    inlines = inlined(name for name in name_variants if not any(name.overlaps(variant) for variant, _ in real_changes))
    return (*inlines, *((variant, index) for variant, index in real_changes if index >= 0 or variant.own))


def _with_definitions(draw: VersionDraw, rng: random.Random) -> VersionDraw:
    """Give each variable definition the value of a random version; if there is one version, perhaps another value."""
    changes: dict[tuple[str, tuple[int, int]], Change] = {}
    for versions in draw.versions.values():
        for variant, index in rng.choice(versions):
            if variant.definition:
                alternative = index if len(versions) > 1 else -1 if index >= 0 else rng.randrange(len(variant.texts))
                changes[variant.path, variant.definition] = (variant, rng.choice((index, alternative)))
    draw.definitions.extend(changes.values())
    return draw


def _copyable(function: Changeable) -> list[CheckedVariant]:
    """Return the variants that a copy of the test can contain."""
    return [checked for checked in _preferred(function) if checked.variant.is_local]


def _lines_until(function: Changeable, checked: CheckedVariant) -> float:
    """Return how many lines below a failure on the untouched code the variant fails; infinity if it fails above."""
    distances = [math.inf]
    for failure, position in itertools.product(
        function.broken, {position for failures in checked.failing for position in failures.values()}
    ):
        (label, _, failure_line), (function_name, _, line) = failure.rpartition("+"), position.rpartition("+")
        if label == function_name and failure_line and line and int(line) >= int(failure_line):
            distances.append(int(line) - int(failure_line))
    return min(distances)


def _add(draw: VersionDraw, group: Sequence[Changeable], versions: list[Changes]) -> None:
    for function in group:
        draw.versions[function.test] = versions
        draw.passing[function.test] = function.passing
        failing_of = {checked.variant: checked.failing for checked in function.variants}
        for changes in versions:
            positions: dict[str, frozenset[str]] = {}
            for variant, index in changes:
                failing = failing_of[variant][index] if index >= 0 and variant in failing_of else {}
                for item, position in failing.items():
                    positions[item] = positions.get(item, frozenset()) | {position}
            draw.failing[function.test, changes] = positions
