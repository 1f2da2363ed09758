"""Convert R2E-Gym rows: each is a commit, with the output of its tests before and after the commit.

A row has ``repo_name``, ``docker_image``, ``commit_hash`` (the fix), ``problem_statement`` and three JSON columns:
``parsed_commit_content`` (each file before and after), ``execution_result_content`` (the hidden tests and their
output) and ``expected_output_json`` (each test's outcome after the fix; its test names omit the file).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import unified_diff

from minisandbox.spec import PythonRecipe
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects.environments import chosen_build, full_commit, of_repository, specified
from minisandbox.tasks.fields import bad_field
from minisandbox.tasks.graders import PytestGrader
from minisandbox.tasks.rows import RowFields, Tests
from minisandbox.tasks.task import Task

_FOLDER = "r2e_tests"
_REPOSITORIES = {
    "aiohttp": "aio-libs/aiohttp",
    "bokeh": "bokeh/bokeh",
    "coveragepy": "nedbat/coveragepy",
    "datalad": "datalad/datalad",
    "numpy": "numpy/numpy",
    "orange3": "biolab/orange3",
    "pandas": "pandas-dev/pandas",
    "pillow": "python-pillow/Pillow",
    "pyramid": "Pylons/pyramid",
    "scrapy": "scrapy/scrapy",
    "statsmodels": "statsmodels/statsmodels",
    "sympy": "sympy/sympy",
    "tornado": "tornadoweb/tornado",
}
_PYTHON = "3.9"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_OUTCOME = re.compile(r"(PASSED|FAILED|ERROR)\s+(\S.*)")


def convert(row: RowFields, context: LoadContext) -> Task:
    """Convert a row to a task; the pins are in ``REPOSITORY/COMMIT/*.yml``.

    Raises:
        TaskFileError: a field is missing or invalid, or the tests' output is not from pytest.
        PatchError: a patch built from the row is unsafe.
    """
    name, fix = row.text("repo_name"), row.text("commit_hash")
    repo = name if "/" in name else _REPOSITORIES.get(name.lower(), "")
    if not repo:
        raise bad_field("repo_name", f"is {name!r}", hint="write it as OWNER/NAME: whose it is is not known")
    parsed, execution = row.table("parsed_commit_content"), row.table("execution_result_content")
    revision = str(parsed.get("old_commit_hash") or f"{fix}^")
    lists = _tests(row.table("expected_output_json"), execution)

    def commit() -> str:
        return full_commit(repo, revision, context.repo_mirrors, "commit_hash")

    build = chosen_build(
        "r2e",
        row.row,
        context,
        (name, fix),
        lambda: specified(_PYTHON, ("pytest",), ()),
        lambda pins: of_repository(pins, repo, commit(), row.commands("install") or ("python -m pip install -e .",)),
    )
    return row.task(
        build,
        PytestGrader(),
        lists=lists,
        instance_id=row.text("instance_id", default="") or f"{name.replace('/', '__')}__{fix}",
        repo=repo,
        base_commit=commit() if isinstance(build, PythonRecipe) else revision,
        problem_statement=_without_tags(row.text("problem_statement")),
        patch="".join(_fix(parsed)),
        test_patch="".join(_hidden_tests(execution)),
    )


def _without_tags(statement: str) -> str:
    return statement.replace("[ISSUE]", "").replace("[/ISSUE]", "").strip() + "\n"


def _fix(parsed: Mapping[str, object]) -> Iterator[str]:
    """Yield the commit's diff without its changes to tests: the row contains the hidden tests separately."""
    changes = parsed.get("file_diffs")
    for change in changes if isinstance(changes, list) else ():
        try:
            path = change["header"]["file"]["path"]
        except (TypeError, KeyError):
            path = None
        if not isinstance(path, str):
            raise bad_field("parsed_commit_content", "has a change without a path")
        if not _is_test(path) and not change.get("is_binary_file"):
            yield from _diff(path, str(change.get("old_file_content") or ""), str(change.get("new_file_content") or ""))


def _is_test(path: str) -> bool:
    *folders, name = path.lower().split("/")
    return any(folder in {"test", "tests", "testing"} for folder in folders) or name.startswith("test_")


def _hidden_tests(execution: Mapping[str, object]) -> Iterator[str]:
    names, codes = execution.get("test_file_names"), execution.get("test_file_codes")
    if not isinstance(names, list) or not isinstance(codes, list) or len(names) != len(codes) or not names:
        hint = "leave the row out: there is nothing to grade by"
        raise bad_field("execution_result_content", "has no test files", hint=hint)
    for name, code in zip(names, codes, strict=True):
        yield from _diff(f"{_FOLDER}/{str(name).rpartition('/')[2]}", "", str(code))


def _diff(path: str, old: str, new: str) -> Iterator[str]:
    """Yield the diff of one file in git's format; only line feeds separate lines."""
    if old == new:
        return
    yield f"diff --git a/{path} b/{path}\n"
    if not old:
        yield "new file mode 100644\n"
    if not new:
        yield "deleted file mode 100644\n"
    names = (f"a/{path}" if old else "/dev/null", f"b/{path}" if new else "/dev/null")
    old_lines, new_lines = (re.findall(r"[^\n]*\n|[^\n]+\Z", content) for content in (old, new))
    for line in unified_diff(old_lines, new_lines, *names):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _tests(expected: Mapping[str, object], execution: Mapping[str, object]) -> Tests:
    """Return FAIL_TO_PASS and PASS_TO_PASS, derived from both outputs and limited to the tests that should pass."""
    new, old = (_outcomes(execution, f"{version}_commit_res_stdout") for version in ("new", "old"))
    expected_names = {
        _COLOUR.sub("", name).partition(" - ")[0] for name, outcome in expected.items() if outcome == "PASSED"
    }
    passed = [test for test, outcome in new.items() if outcome == "PASSED" and _short(test) in expected_names]
    if not passed:
        raise bad_field(
            "execution_result_content",
            "has none of the tests that should pass",
            reason="'new_commit_res_stdout' is not what pytest -rA prints",
            hint="leave the row out",
        )
    fixed = tuple(test for test in passed if old.get(test) != "PASSED")
    return fixed, tuple(test for test in passed if test not in fixed)


def _outcomes(execution: Mapping[str, object], key: str) -> dict[str, str]:
    """Return the outcome of each test, by id, from the summary of ``pytest -rA``."""
    output = _COLOUR.sub("", str(execution.get(key) or ""))
    _, _, summary = output.rpartition("short test summary info")
    lines = filter(None, map(_OUTCOME.fullmatch, summary.splitlines()))
    return {match[2].partition(" - ")[0].strip(): match[1] for match in lines}


def _short(test: str) -> str:
    """Return the name of a test in ``expected_output_json``: its classes and function, without the file."""
    return ".".join(test.split("::")[1:])
