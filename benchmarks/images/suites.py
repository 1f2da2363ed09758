"""The outcomes of pytest's tests, read from what it prints."""

from __future__ import annotations

import re
from collections import Counter

_LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (.*)$", re.MULTILINE)
_VARYING = re.compile(r" at 0x[0-9a-f]+|\b\d\d:\d\d:\d\d\b")
"""Addresses, and the time of collection, which marshmallow has in names of tests."""

Outcomes = Counter[tuple[str, str]]
"""How often each test had each outcome; skipped tests are told by their place."""


def outcomes(text: str) -> Outcomes:
    """Read outcomes from ``pytest -rA``."""
    found: Outcomes = Counter()
    for outcome, rest in _LINE.findall(text):
        found[outcome, _VARYING.sub("", rest.partition(" - ")[0] if outcome != "SKIPPED" else rest)] += 1
    return found


def summary(found: Outcomes) -> str:
    """Return how many tests had each outcome, such as ``12 passed, 1 skipped``."""
    totals: Counter[str] = Counter()
    for (outcome, name), count in found.items():
        number = re.match(r"\[(\d+)\]", name)
        totals[outcome.lower()] += int(number[1]) if outcome == "SKIPPED" and number else count
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(totals.items())) or "none"
