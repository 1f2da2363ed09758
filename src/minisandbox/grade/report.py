"""Parse the report of the plugin inside a grading sandbox, without trusting it."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PASSED = "passed"
MISSING = "missing"
CONFLICTING = "conflicting"
INCOMPLETE = "incomplete"
UNCOLLECTED = "uncollected"
FAILING = frozenset({"failed", "error"})

Parameters = Mapping[str, str | None]
"""The parameters of a test by name: the text of a plain value, or None for other values."""
_PHASES = frozenset({"setup", "call", "teardown", "subtest", "collect"})


@dataclass(frozen=True, slots=True)
class ReportLine:
    """One line of a report.

    Attributes:
        test: pytest's node id.
        when: the phase: setup, call, teardown, subtest or collect.
        outcome: passed, failed, skipped, xfailed, xpassed, rerun, or an outcome of another plugin.
    """

    test: str
    when: str
    outcome: str


@dataclass(frozen=True, slots=True)
class End:
    """The last line of a report.

    Attributes:
        exit_status: the status with which pytest was about to exit.
        records: the number of lines before this one, as counted by the plugin.
    """

    exit_status: int
    records: int


@dataclass(frozen=True, slots=True)
class Report:
    """The plugin's report.

    Attributes:
        records: the lines about tests and collection, in order.
        started: whether pytest started its session.
        end: the last line, or None if the run ended before it was written.
        damage: how the text differs from what the plugin can have written, or None.
        versions: the versions of Python and pytest in the sandbox, for display only.
        places: the line of the test's own file at which the test failed first, by node id.
        seconds: the durations of tests by node id, unless they are negligible.
        parameters: the parameters of tests by node id.
    """

    records: tuple[ReportLine, ...] = ()
    started: bool = False
    end: End | None = None
    damage: str | None = None
    versions: str = ""
    places: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    parameters: Mapping[str, Parameters] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: bytes, key: bytes) -> Report:
        """Parse a report.

        Args:
            data: the lines.
            key: the secret of this run, on which every line's hash depends.

        Returns:
            The report up to its first damaged line; ``damage`` describes the fault of that line.
        """
        draft, damage = _Draft(key), None
        for line_number, line in enumerate(io.BytesIO(data), start=1):
            if not line.endswith(b"\n"):  # the plugin was killed while it wrote this line
                break
            if problem := draft.take(line):
                damage = f"line {line_number} of the report {problem}"
                break
        damage = damage or draft.miscount()
        return cls(
            tuple(draft.records), draft.started, draft.end, damage, draft.versions, draft.places, draft.seconds,
            draft.parameters,
        )  # fmt: skip

    @property
    def failures(self) -> tuple[str, ...]:
        """Node ids with a failure in any phase, collection included, in order and without duplicates."""
        return tuple(dict.fromkeys(record.test for record in self.records if record.outcome == "failed"))

    @property
    def uncollected(self) -> tuple[str, ...]:
        """Node ids of files and classes that could not be collected."""
        return tuple(record.test for record in self.records if record.when == "collect" and record.outcome == "failed")

    def absence(self, test: str) -> str:
        """Return the outcome of a test that was not reported.

        Returns:
            ``uncollected`` if its file or class could not be collected, otherwise ``missing``.
        """
        is_uncollected = any(test == node or test.startswith(node + "::") for node in self.uncollected if node)
        return UNCOLLECTED if is_uncollected else MISSING

    def outcomes(self) -> dict[str, str]:
        """Return each test's outcome, in order of appearance.

        Returns:
            ``passed``, ``failed``, ``error`` (in setup or teardown), ``skipped``, ``xfailed``, ``xpassed``,
            ``conflicting`` (two results for the same phase that differ) or ``incomplete`` (no result).
        """
        phases: dict[str, dict[str, set[str]]] = {}
        for record in self.records:
            if record.when != "collect" and record.outcome != "rerun":
                phases.setdefault(record.test, {}).setdefault(record.when, set()).add(record.outcome)
        return {test: _outcome(phase_outcomes) for test, phase_outcomes in phases.items()}


def _outcome(phase_outcomes: dict[str, set[str]]) -> str:
    """Reduce the phases of one test to an outcome; the worst one wins."""
    if any(len(outcomes) > 1 for phase, outcomes in phase_outcomes.items() if phase != "subtest"):
        return CONFLICTING
    if "failed" in phase_outcomes.get("call", ()) or "failed" in phase_outcomes.get("subtest", ()):
        return "failed"
    if any("failed" in outcomes for outcomes in phase_outcomes.values()):
        return "error"
    ordered_outcomes = [outcome for phase in ("setup", "call", "teardown") for outcome in phase_outcomes.get(phase, ())]
    other_outcome = next((outcome for outcome in ordered_outcomes if outcome != PASSED), None)
    if other_outcome is not None:
        return other_outcome
    return PASSED if "call" in phase_outcomes else INCOMPLETE


class _Draft:
    """The state of the report parser."""

    def __init__(self, key: bytes) -> None:
        self.state = key
        self.places: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.parameters: dict[str, Parameters] = {}
        self.records: list[ReportLine] = []
        self.started = False
        self.end: End | None = None
        self.versions = ""
        self.lines = 0

    def take(self, line: bytes) -> str:
        """Add a line; return its fault, or ""."""
        mark, _, text = line.removesuffix(b"\n").partition(b" ")
        if mark != hashlib.sha256(b"line" + self.state + text).hexdigest().encode():
            return "is not the plugin's"
        self.state = hashlib.sha256(b"next" + self.state + text).digest()
        try:
            test, when, value = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            return "is not a record"
        if self.end is not None:
            return "comes after its end"
        if not self._add_line(test, when, value):
            return "makes no sense"
        self.lines += 1
        return ""

    def _add_line(self, test: object, when: object, value: object) -> bool:
        if test is None:
            return self._add_event(when, value)
        if not (isinstance(test, str) and isinstance(when, str) and isinstance(value, str)):
            return False
        if self.started and when in ("place", "seconds"):
            return self._add_measurement(test, when, value)
        if not self.started or when not in _PHASES:
            return False
        self.records.append(ReportLine(test, when, value))
        return True

    def _add_measurement(self, test: str, when: str, value: str) -> bool:
        try:
            if when == "place":
                self.places.setdefault(test, int(value))
            else:
                self.seconds[test] = float(value)
        except ValueError:
            return False
        return True

    def _add_event(self, when: object, value: object) -> bool:
        if not isinstance(value, dict):
            return False
        if when == "collected":
            self.parameters |= {test: _parameters(parameters) for test, parameters in value.items()}
            return self.started
        if when == "start" and not self.started:
            self.started = True
            self.versions = f"Python {value.get('python')}, pytest {value.get('pytest')}"[:100]
            return True
        status, records = value.get("exit_status"), value.get("records")
        if when != "end" or not self.started or not isinstance(status, int) or not isinstance(records, int):
            return False
        self.end = End(status, records)
        return True

    def miscount(self) -> str | None:
        """Return a message if the plugin counted other lines than we did, else None; the last line is not counted."""
        if self.end is None or self.end.records == self.lines - 1:
            return None
        return f"the report has {self.lines - 1} lines before its end, and the plugin wrote {self.end.records}"


def _parameters(values: object) -> Parameters:
    """Return a test's parameters; malformed values become None."""
    if not isinstance(values, dict):
        return {}
    return {name: spelling if isinstance(spelling, str) else None for name, spelling in values.items()}


def not_passed(outcomes: dict[str, str], tests: Iterable[str]) -> tuple[str, ...]:
    """Return the tests that did not explicitly pass, in the given order."""
    return tuple(test for test in tests if outcomes.get(test, MISSING) != PASSED)
