"""Collection: the tests that pytest collected, compared with what their files say.

This process only parses the files. It never imports code of a submission, so a submission cannot change its result.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from minisandbox.grade.confirm.edits import Source
from minisandbox.grade.report import Parameters
from minisandbox.tasks import node_id


def mismatches(files: Mapping[str, bytes], collected: Mapping[str, Parameters]) -> tuple[str, ...]:
    """Compare the parameters of collected tests with the tables in their files.

    Args:
        files: test files by path, with their content.
        collected: for each node id the parameters, as the reporter sent them.

    Returns:
        A sentence for each test that has another value than its table, or a row that its table lacks. Only tables that
        are written out count, and of these only literal values.
    """
    sources: dict[str, Source | None] = {}
    found = []
    for test, parameters in collected.items():
        path, _, name = node_id(test).partition("[")[0].partition("::")
        if path not in sources:
            sources[path] = Source.read(files[path]) if path in files and path.endswith(".py") else None
        source = sources[path]
        function = source.function(name) if source else None
        tables = source.tables(function) if source and function else ()
        for table in tables:
            for column, parameter in enumerate(table.names):
                if parameter in parameters and (problem := _problem(table.rows, column, parameters[parameter])):
                    found.append(f"{test}: {parameter} {problem}")
    return tuple(found)


def _problem(rows: list[list[ast.expr]], column: int, collected: tuple[int, str | None]) -> str:
    """Return how a collected value differs from its table; "" if it does not, or if that cannot be told."""
    index, text = collected
    if index >= len(rows):
        return f"comes from row {index + 1} of a table with {len(rows)} rows"
    row = rows[index]
    written = spelled(row[column]) if column < len(row) else None
    if written is None or text is None or text == written:
        return ""
    return f"is {text}, and {written} in the file"


def spelled(node: ast.expr) -> str | None:
    """Return the text of a literal as the reporter spells its value; None for other expressions."""
    try:
        text = _spelled(ast.literal_eval(node))
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
        return None
    return text if text is None or len(text) <= _LONGEST else None


_LONGEST = 200
"""As in the reporter, which sends no longer ones."""


def _spelled(value: object, depth: int = 0) -> str | None:
    kind = type(value)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return ascii(value)
    if depth > 9 or not isinstance(value, list | tuple | set | frozenset | dict):
        return None
    items = [part for pair in value.items() for part in pair] if isinstance(value, dict) else list(value)
    parts = [_spelled(item, depth + 1) for item in items]
    texts = [part for part in parts if part is not None]
    if len(texts) < len(parts):
        return None
    return f"{kind.__name__}({','.join(sorted(texts) if isinstance(value, set | frozenset) else texts)})"
