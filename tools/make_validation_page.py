"""Write the tables of ``docs/validation.md`` from run directories, and keep the text around them.

    python -m tools.make_validation_page [VALIDATION... --rows FILE...] [--parity DIR]

VALIDATION is a directory of ``minisandbox validate -o``. FILE has the rows of the data set; a row with the column
``validation`` was validated elsewhere and should be valid here. ``--parity`` takes an output
directory of ``benchmarks/verdict_parity.py``. Each table is between the lines ``<!-- NAME: made -->`` and
``<!-- NAME: end -->``. The text must name every row with an unexpected verdict; otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.pages import with_part

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "validation.md"
MB = 1e6


def main() -> int:
    """Write the page; return 1 if the text does not explain an unexpected verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("validation", type=Path, nargs="*", help="directories of minisandbox validate -o")
    parser.add_argument("--rows", type=Path, nargs="+", default=[], help="the data's rows, JSON Lines")
    parser.add_argument("--parity", type=Path, help="a directory of benchmarks/verdict_parity.py")
    parser.add_argument("--page", type=Path, default=OUTPUT, help=argparse.SUPPRESS)
    options = parser.parse_args()
    page, unexplained_rows = options.page.read_text(), list[str]()
    if options.parity is not None:
        page = with_part(page, "parity", (options.parity / "report.md").read_text())
    if options.validation:
        reports = [json.loads((directory / "report.json").read_text()) for directory in options.validation]
        rows = [json.loads(line) for file in options.rows for line in file.read_text().splitlines() if line.strip()]
        expected = expectations(rows)
        page = with_part(page, "validation", "\n\n".join(validation_part(report, expected) for report in reports))
        results = [result for report in reports for result in report["results"]]
        missing = [row for row in expected if row not in {result["instance_id"] for result in results}]
        unexplained_rows = unexplained(page, [*exceptions(results, expected), *missing])
    options.page.write_text(page)
    for row in unexplained_rows:
        print(f"{row}: unexpected verdict; {options.page.name} does not explain it", file=sys.stderr)
    return 1 if unexplained_rows else 0


def expectations(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the expected verdict of each row by its id; an empty string if it is unknown."""
    return {row["instance_id"]: "valid" if row.get("validation") else "" for row in rows}


def validation_part(report: Mapping[str, Any], expected: Mapping[str, str]) -> str:
    """Return the table of a validation, with its totals.

    Args:
        report: the content of ``report.json``.
        expected: the expected verdict of each row, by id.
    """
    lines = [
        "| row | interpreter | build, s | unique, MB | shared, MB | validate, s | verdict | expected |",
        "|---|---|--:|--:|--:|--:|---|---|",
    ]
    lines += [_line(result, expected.get(result["instance_id"], "")) for result in report["results"]]
    return "\n".join([*lines, "", _totals(report, expected), ""])


def _line(result: Mapping[str, Any], expected: str) -> str:
    measured = result["measured"]
    verdict = result["verdict"] + (f": {result['cause']}" if result["cause"] else "")
    cells = (
        result["instance_id"],
        result["python"],
        f"{measured['build_seconds']:.1f}",
        f"{measured['unique_bytes'] / MB:.1f}",
        f"{measured['shared_bytes'] / MB:.1f}",
        f"{measured['validate_seconds']:.1f}",
        verdict if not expected or result["verdict"] == expected else f"**{verdict}**",
        expected,
    )
    return f"| {' | '.join(cells)} |"


def _totals(report: Mapping[str, Any], expected: Mapping[str, str]) -> str:
    measured, counts = report["measured"], report["counts"]
    valid_count = sum(expected.get(result["instance_id"]) == "valid" for result in report["results"])
    return (
        f"{counts.get('valid', 0)} of {report['tasks']} rows are valid, {counts.get('invalid', 0)} are invalid, "
        f"{counts.get('error', 0)} failed for an infrastructure reason. {valid_count} should be valid. The images take "
        f"{measured['layer_bytes'] / MB:.0f} MB, each layer counted once, and {measured['build_seconds']:.0f} s to "
        f"build. Validation took {measured['validate_seconds']:.0f} s, summed over the rows."
    )


def exceptions(results: Iterable[Mapping[str, Any]], expected: Mapping[str, str]) -> list[str]:
    """Return the ids of results with an unexpected verdict."""
    return [
        result["instance_id"]
        for result in results
        if (verdict := expected.get(result["instance_id"], "")) and result["verdict"] != verdict
    ]


def unexplained(page: str, rows: Sequence[str]) -> list[str]:
    """Return the rows that the text outside the tables does not name."""
    handwritten = re.sub(r"<!-- (\w+): made -->.*?<!-- \1: end -->", "", page, flags=re.DOTALL)
    return [row for row in rows if row not in handwritten]


if __name__ == "__main__":
    sys.exit(main())
