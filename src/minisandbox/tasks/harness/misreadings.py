"""Find the results that a log parser misreads, by comparison with the runner's own result lines.

Each result line of the log states a name and an outcome. The parser, given this line alone, must return the same.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

Parse = Callable[[str], Mapping[str, str]]
Found = list[tuple[str, list[str]]]
"""Descriptions of misread results, each with the names of the tests."""

PASSED, FAILED, SKIPPED, TODO = "PASSED", "FAILED", "SKIPPED", "TODO"
_MOST = 20_000
"""The maximum number of result lines to compare."""
_CROSS = "\u00d7"
_VITEST_FILE = re.compile(rf"\s*[✓{_CROSS}\u276f] (\S+) \(\d+ tests?\b.*\)")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one test, as the runner printed it.

    Attributes:
        name: the test's name, without the runner's decorations.
        outcome: PASSED, FAILED, SKIPPED or TODO.
        text: the log lines with the result.
        parsed: the name that the parser must return; "" if any name is accepted.
    """

    name: str
    outcome: str
    text: str
    parsed: str = ""


def _by_line(pattern: str, result_of: Callable[[re.Match[str]], Result]) -> Callable[[list[str]], Iterator[Result]]:
    """Return a function that reads results from the lines that match a pattern; each line has one result."""
    compiled = re.compile(pattern)

    def read(lines: list[str]) -> Iterator[Result]:
        return (result_of(match) for line in lines if (match := compiled.match(line)))

    return read


def _tap_result(match: re.Match[str]) -> Result:
    directive = {"TODO": TODO, "SKIP": SKIPPED}.get((match[3] or "").upper())
    return Result(match[2], directive or (FAILED if match[1] else PASSED), match.string)


def _go(lines: list[str]) -> Iterator[Result]:
    started = {line.split()[2] for line in lines if re.match(r"=== RUN\s+\S", line)}
    for line in lines:
        match = re.match(r".*?--- (PASS|FAIL|SKIP): (\S+) \(\d+\.\d+s\)$", line)
        if match and match[2] in started:  # other lines come from a test that runs `go test`
            yield Result(match[2], {"PASS": PASSED, "FAIL": FAILED, "SKIP": SKIPPED}[match[1]], line, match[2])


def _phpunit(lines: list[str]) -> Iterator[Result]:
    marks = {"✔": PASSED, "✘": FAILED, "↩": SKIPPED, "☢": PASSED, "⚠": PASSED}
    header = ""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        match = re.match(r" ([✔✘↩☢⚠]) (.*)$", line)
        if match:
            header_match = re.match(r"(\w.+) \(.+\)$", header)
            suite = header_match[1] if header_match else header
            excerpt = f"Another (Another)\n{header}\n{line}"
            yield Result(f"{suite} > {match[2]}", marks[match[1]], excerpt, f"{suite} > {match[2]}")
        elif re.match(r"\w", line) and re.match(r" [✔✘↩☢⚠∅] ", following):
            header = line


_MINITEST = {".": PASSED, "F": FAILED, "E": FAILED, "S": SKIPPED}
_VITEST = {"✓": PASSED, _CROSS: FAILED, "↓": SKIPPED}
_vitest_tests = _by_line(
    rf"\s*([✓{_CROSS}↓]) (.+?)(?: \d+ms| \[skipped\])?$",
    lambda match: Result(match[2], _VITEST[match[1]], match.string, match[2]),
)
_pytest = _by_line(
    r"(PASSED|FAILED) (\S.*)$",
    lambda match: Result(match[2].split(" - ")[0] if match[1] == FAILED else match[2], match[1], match.string),
)

_RUNNERS: Mapping[str, Callable[[list[str]], Iterator[Result]]] = {
    "cargo": _by_line(
        r"test (.+?) \.\.\. (?!ignored|bench:)(.+)$",
        lambda match: Result(match[1], FAILED if match[2].endswith("FAILED") else PASSED, match.string),
    ),
    "gotest": _go,
    "phpunit": _phpunit,
    "minitest": _by_line(
        r"(.+) = [\d.]+ s = ([.FES])$", lambda match: Result(match[1], _MINITEST[match[2]], match.string)
    ),
    "tap": _by_line(r"(?i)\s*(not )?ok\b(?: \d+)?(?: -)? ?(.*?)(?: # (TODO|SKIP)\b.*)?$", _tap_result),
    "jest": _by_line(
        r"\s*([✓✕]) (.+?)(?: \([\d.]+ m?s\))?$",
        lambda match: Result(match[2], PASSED if match[1] == "✓" else FAILED, match.string, match[2]),
    ),
    "vitest": lambda lines: _vitest_tests([line for line in lines if not _VITEST_FILE.match(line)]),
    "googletest": _by_line(
        r".*\[\s*(OK|FAILED)\s*\] (\S+?)(?:, where .*)? \(\d+ ms\)$",
        lambda match: Result(match[2], PASSED if match[1] == "OK" else FAILED, match.string, match[2]),
    ),
    **dict.fromkeys(("pytest", "pytest_options", "pytest_v2", "matplotlib", "seaborn"), _pytest),
}
"""The runners, by the suffix of the parser's name in swebench."""

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def misreadings(parse: Parse, function: str, log: str, named: Collection[str]) -> Found:
    """Return descriptions of the result lines that a parser misreads.

    Args:
        parse: the parser, which takes the text of a log.
        function: the parser's name, such as ``parse_log_cargo``.
        log: the log.
        named: the tests in the task's lists.
    """
    kind = function.removeprefix("parse_log_")
    runner, lines = _RUNNERS.get(kind), log.split("\n")
    if runner is None:
        return []
    problems = _compared(parse, runner(lines), named)
    if kind == "jest":
        problems += _jest_totals(lines)
    if kind == "vitest":
        problems += _some("file{s} read as a test: test.command lacks --reporter=verbose", _files(lines))
    return problems


def _compared(parse: Parse, results: Iterable[Result], named: Collection[str]) -> Found:
    unread, renamed, timed = [], [], []
    wrong_outcomes: dict[str, list[str]] = defaultdict(list)
    tests_by_name: dict[str, list[str]] = defaultdict(list)
    for result, _ in zip(results, range(_MOST), strict=False):
        statuses = parse(result.text)
        if not statuses:
            unread.append(result.name)
            continue
        name, status = list(statuses.items())[-1]
        tests_by_name[name].append(result.name)
        if result.parsed and name != result.parsed:
            renamed.append(result.name)
        if " # time=" in name:
            timed.append(result.name)
        if status != result.outcome and (result.outcome, status) != (TODO, PASSED):
            wrong_outcomes[f"{_WORDS[result.outcome]} test{{s}} taken for {status.lower()}"].append(result.name)
    shared_names = [name for name, tests in tests_by_name.items() if len(tests) > 1 and name in named]
    return [
        *_some("result{s} not read", unread),
        *(entry for description, tests in wrong_outcomes.items() for entry in _some(description, tests)),
        *_some("test{s} read under another name", renamed),
        *_some("name{s} with the time that the test took", timed),
        *_some("named test{s} that several tests share, of which the last one counts", shared_names),
    ]


_WORDS = {PASSED: "passed", FAILED: "failed", SKIPPED: "skipped", TODO: "TODO"}


def _some(description: str, tests: Iterable[str]) -> Found:
    names = list(dict.fromkeys(tests))
    return [(f"{len(names)} {description.format(s='' if len(names) == 1 else 's')}", names)] if names else []


def _files(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if match := _VITEST_FILE.match(line):
            yield match[1]


def _jest_totals(lines: list[str]) -> Found:
    """Report if Jest printed fewer tests than it ran."""
    totals = (re.match(r"Tests:\s.*?(\d+) total$", _ESCAPES.sub("", line)) for line in lines)
    ran = sum(int(match[1]) for match in totals if match)
    printed = sum(bool(re.match(r"\s*[✓✕○✎] ", line)) for line in lines)
    if printed >= ran:
        return []
    return [(f"Jest ran {ran} tests and printed {printed}: test.command lacks --verbose", [])]
