"""Compare the tests that pytest collected with the parameter tables in their source files.

The files are only parsed, never imported, so the code of a submission cannot change the result.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping

from minisandbox.grade.confirm.edits import Sources, Table
from minisandbox.grade.report import Parameters
from minisandbox.tasks import node_id


def mismatches(files: Mapping[str, bytes], collected: Mapping[str, Parameters]) -> tuple[str, ...]:
    """Compare the parameters of collected tests with the tables in their source files.

    Args:
        files: the contents of the test files, by path.
        collected: the parameters of each test, by node id, as the reporter sent them.

    Returns:
        A message for each test whose values are in no row of its table, and for each table of which some rows are
        collected more often than others. Only tables in the source, and only their literal values, are compared.
    """
    sources = Sources(files)
    functions: dict[str, dict[str, Parameters]] = {}
    for test, parameters in collected.items():
        functions.setdefault(node_id(test).partition("[")[0], {})[test] = parameters
    differences: list[str] = []
    for base, tests in functions.items():
        if (parsed := sources.find(base)) is not None:
            source, function = parsed
            for table in source.tables(function):
                differences += _of_table(base, table, tests)
    return tuple(differences)


def _of_table(base: str, table: Table, tests: Mapping[str, Parameters]) -> Iterator[str]:
    rows = [[spelled(cell) for cell in row] for row in table.rows]
    counts = Counter[int]()
    for test, parameters in tests.items():
        if not all(name in parameters for name in table.names):
            continue  # the table does not apply to this test, e.g. because a plugin replaces its parameters
        values = [parameters[name] for name in table.names]
        matching = [index for index, row in enumerate(rows) if _is_row(row, values)]
        if not matching:
            description = ", ".join(f"{name}={value}" for name, value in zip(table.names, values, strict=True))
            yield f"{test}: no row of its table has {description}"
        counts.update(matching[:1] if len(matching) == 1 else ())
    is_whole = all(None not in row for row in rows) and len({tuple(row) for row in rows}) == len(rows)
    if is_whole and counts and len({counts[index] for index in range(len(rows))}) > 1:
        yield f"{base}: rows of its table are collected {sorted(counts[index] for index in range(len(rows)))} times"


def _is_row(row: list[str | None], values: list[str | None]) -> bool:
    """Return whether values match a row; cells without a literal and values that were not sent always match."""
    cells = zip(row, values, strict=False)
    return len(row) != len(values) or all(cell is None or value is None or value == cell for cell, value in cells)


def spelled(node: ast.expr) -> str | None:
    """Return a literal's value as the reporter would write it, or None for other expressions."""
    try:
        spelling = _spelled(ast.literal_eval(node))
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
        return None
    return spelling if spelling is None or len(spelling) <= _LONGEST else None


_LONGEST = 200
"""The maximum length in characters of a compared value; the reporter does not send longer ones."""


def _spelled(value: object, depth: int = 0) -> str | None:
    kind = type(value)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return ascii(value)
    if depth > 9 or not isinstance(value, list | tuple | set | frozenset | dict):
        return None
    items = [element for pair in value.items() for element in pair] if isinstance(value, dict) else list(value)
    spellings = [_spelled(item, depth + 1) for item in items]
    strings = [element for element in spellings if element is not None]
    if len(strings) < len(spellings):
        return None
    return f"{kind.__name__}({','.join(sorted(strings) if isinstance(value, set | frozenset) else strings)})"
