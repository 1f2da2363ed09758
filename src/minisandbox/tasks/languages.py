"""Reject rows in other languages, for layouts that support only Python."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from minisandbox.errors import TaskFileError
from minisandbox.tasks.fields import bad_field

NOT_PYTHON = "this layout and pytest are for Python alone"
_COLUMNS = ("language", "repo_language", "programming_language", "lang")
# Accept other values, because the column may contain a natural language: that of the text.
_LANGUAGES = frozenset(
    {
        "c", "c#", "c++", "clojure", "cpp", "csharp", "dart", "elixir", "erlang", "f#", "fsharp", "go", "golang",
        "haskell", "java", "javascript", "js", "julia", "kotlin", "lua", "ocaml", "perl", "php", "r", "ruby", "rust",
        "scala", "shell", "swift", "ts", "typescript", "zig",
    }
)  # fmt: skip
_RUNNERS = frozenset(
    {
        "bazel", "bundle", "cargo", "ctest", "deno", "dotnet", "go", "gotestsum", "gradle", "gradlew", "jest", "lein",
        "mix", "mocha", "mvn", "mvnw", "node", "npm", "npx", "phpunit", "pnpm", "rake", "rspec", "sbt", "stack",
        "swift", "vitest", "yarn", "zig",
    }
)  # fmt: skip
_BETWEEN = re.compile(r"&&|\|\||[;|&\n]")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=\S*")


def not_python(field: str, problem: str) -> TaskFileError:
    """Create the error for a row in another language than Python.

    Args:
        field: the field that shows the language.
        problem: the problem, as a continuation of "field 'x'".
    """
    hint = "give the row a grader of kind log (docs/reference/graders.md), or leave it out: --skip-unusable"
    return bad_field(field, problem, reason=NOT_PYTHON, hint=hint)


def check_language(row: Mapping[str, object]) -> None:
    """Reject a row with a column that names another language.

    Raises:
        TaskFileError: a column names another language.
    """
    for name in _COLUMNS:
        value = row.get(name)
        if isinstance(value, str) and value.strip().lower() in _LANGUAGES:
            raise not_python(name, f"is {value!r}")


def check_command(command: str) -> None:
    """Reject a test command whose last program does not run Python tests, e.g. ``go test`` or ``npm``.

    Raises:
        TaskFileError: the last program runs tests in another language.
    """
    commands = [segment.split() for segment in _BETWEEN.split(command) if segment.strip()]
    words = [word for word in commands[-1] if not _VARIABLE.fullmatch(word)] if commands else []
    program = words[0].rpartition("/")[2] if words else ""
    if program in _RUNNERS:
        raise not_python("test.command", f"runs {program!r}")


def check_ids(tests: Iterable[str], field: str) -> None:
    """Reject test ids if none of them is in a Python file, because pytest cannot run them.

    Raises:
        TaskFileError: no test is in a Python file.
    """
    names = list(tests)
    if names and not any(re.search(r"\.py(?:::|$|\s)", name) for name in names):
        raise not_python(field, f"names no pytest test: {names[0][:80]!r}")
