"""The table and the picture of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks.engines.results import Quantity, Results, paired_ratio, percentile, values

_REFERENCE = "minisandbox"
_HOURS = 1e6 / 3600  # of a million, per second of one


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table.

    Attributes:
        label: what is measured, with its unit.
        quantity: the quantity whose samples it reads.
        key: which numbers of a sample.
        factor: from seconds or bytes to the unit.
        percent: the percentile.
        drawn: whether the picture shows it.
        paired: whether it is the ratio to MiniSandbox as root in the same round, instead of a percentile.
    """

    label: str
    quantity: str
    key: str
    factor: float = 1.0
    percent: float = 50
    drawn: bool = False
    paired: bool = False

    def value(self, results: Results, engine: str) -> float | None:
        """Compute it for an engine; None if it was not measured."""
        samples = results.samples(engine, self.quantity)
        if self.paired:
            return paired_ratio(samples, results.samples(_REFERENCE, self.quantity), self.key)
        found = values(samples, self.key)
        return self.factor * percentile(found, self.percent) if found else None


def rows(plan: Sequence[Quantity]) -> list[Row]:
    """Return the table's rows."""
    found: list[Row] = []
    most = max((one.arguments["count"] for one in plan if one.kind == "at-once"), default=0)
    for name, kind, arguments in ((one.name, one.kind, one.arguments) for one in plan):
        count = arguments.get("count", 1)
        if kind == "creation":
            found += [
                Row("create to first result, p50, ms", name, "ready", 1e3, drawn=True),
                Row("create to first result, p90, ms", name, "ready", 1e3, 90),
                Row("the same / MiniSandbox, root; paired", name, "ready", paired=True),
                Row("stop, p50, ms", name, "teardown", 1e3),
                Row("CPU of create, `/bin/true` and stop, ms", name, "cpu", 1e3 / count),
            ]
        elif kind == "exec":
            found += [
                Row("`/bin/true` in a running one, p50, ms", name, "true", 1e3),
                Row("a shell command in a running one, p50, ms", name, "shell", 1e3),
            ]
        elif kind == "rollout":
            found += [
                Row(f"rollout of {arguments['commands']} shell commands, s", name, "wall", drawn=True),
                Row("the same / MiniSandbox, root; paired", name, "wall", paired=True),
                Row("CPU of a rollout, s", name, "cpu"),
                Row("a million rollouts, worker-hours", name, "wall", _HOURS),
                Row("a million rollouts, CPU hours", name, "cpu", _HOURS),
            ]
        elif kind == "at-once":
            found += [
                Row(f"{count} at once until all have run `/bin/true`, s", name, "ready", drawn=count == most),
            ]
            if count == most:
                found.append(Row(f"stop of {count} at once, s", name, "teardown"))
                found.append(Row(f"memory of each of {count}, MB", name, "memory", 1e-6))
        else:
            found += [
                Row(f"create, tests of {arguments['project']}, stop, s", name, "wall"),
                Row(f"of these the tests of {arguments['project']}, s", name, "suite"),
            ]
    return found


def table(results: Results, plan: Sequence[Quantity], titles: Mapping[str, str]) -> str:
    """Return the table as Markdown; below it engines that did not run, failures, and tests that ended differently.

    Args:
        results: the samples.
        plan: what was measured.
        titles: the engines' headings by name, in the order of the columns.
    """
    ran = [name for name in titles if "version" in results.status(name)]
    lines = [f"| | {' | '.join(titles[name] for name in ran)} |", f"|---|{'--:|' * len(ran)}"]
    for row in rows(plan):
        cells = [number(row.value(results, name)) for name in ran]
        if any(cells):
            lines.append(f"| {row.label} | {' | '.join(cells)} |")
    notes = [f"{titles[name]}: not run: {results.status(name).get('failed')}." for name in titles if name not in ran]
    for quantity in plan:
        samples = [(titles[name], one) for name in ran for one in results.samples(name, quantity.name)]
        notes += [f"{title} failed in {quantity.name}: {one['failed']}." for title, one in samples if "failed" in one]
        ends = {f"{title}: {one['tests']}": one["tests"] for title, one in samples if "tests" in one}
        if len(set(ends.values())) > 1:
            notes.append(f"{quantity.name}: the tests ended differently: {'; '.join(ends)}.")
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]).rstrip()


def number(value: float | None) -> str:
    """Return a number with three digits that count, and at most three decimals; empty for None."""
    if value is None:
        return ""
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{min(max(digits, 0), 3)}f}"


_WIDTH, _LEFT, _BAR = 760, 190, 16
_COLOURS = ("#9aa4ad", "#2a78b8")


def picture(results: Results, plan: Sequence[Quantity], titles: Mapping[str, str]) -> str:
    """Return an SVG with bars on logarithmic scales.

    Args:
        results: the samples.
        plan: what was measured.
        titles: the engines' headings by name, in the order of the bars.
    """
    parts, top = list[str](), 10
    for row in filter(lambda row: row.drawn, rows(plan)):
        bars = {name: value for name in titles if (value := row.value(results, name))}
        if not bars:
            continue
        parts.append(_text(12, top + 14, row.label.replace("`", ""), 'font-weight="bold"'))
        low = math.log10(min(bars.values())) - 0.3
        scale = (_WIDTH - _LEFT - 80) / max(math.log10(max(bars.values())) - low, 0.1)
        for name, value in bars.items():
            top += _BAR + 4
            length, colour = scale * (math.log10(value) - low), _COLOURS[name.startswith(_REFERENCE)]
            parts += [
                _text(_LEFT - 8, top + 14, titles[name], 'text-anchor="end"'),
                f'<rect x="{_LEFT}" y="{top + 2}" width="{length:.1f}" height="{_BAR}" fill="{colour}"/>',
                _text(_LEFT + length + 6, top + 14, number(value)),
            ]
        top += 2 * _BAR
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" height="{top}"'
    style = 'font-family="sans-serif" font-size="13" fill="#24292f" role="img"'
    title = "<title>Engines compared; the bars are logarithmic</title>"
    back = f'<rect width="{_WIDTH}" height="{top}" fill="#ffffff"/>'
    return "\n".join([f"{head} {style}>", title, back, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" {style}>{escape(text)}</text>'
