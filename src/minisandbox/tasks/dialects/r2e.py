"""R2E-Gym: commits with the tests that were run before and after them.

A row has ``repo_name``, ``docker_image``, ``commit_hash`` (the fix), ``problem_statement`` and three columns of JSON:
``parsed_commit_content`` (each file before and after), ``execution_result_content`` (the hidden tests and what they
printed) and ``expected_output_json`` (each test's outcome after the fix, by names that leave out the file).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import unified_diff

from minisandbox.errors import TaskFileError
from minisandbox.tasks.builds import PythonBuild, SourceSpec
from minisandbox.tasks.context import LoadContext
from minisandbox.tasks.dialects.official import chosen_build
from minisandbox.tasks.dialects.pinning import exported, specified
from minisandbox.tasks.dialects.values import commands, full_commit, object_of
from minisandbox.tasks.graders import PytestGrader
from minisandbox.tasks.rows import RowFields, TestLists
from minisandbox.tasks.task import Task

_COLUMNS = {"docker_image", "commit_hash", "parsed_commit_content"}
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


def matches(row: Mapping[str, object]) -> bool:
    """Whether a row has a parsed commit."""
    return row.keys() >= _COLUMNS


def convert(row: Mapping[str, object], context: LoadContext) -> Task:
    """Make a task of a row.

    Raises:
        TaskFileError: a field is missing or wrong, or the tests' output is not pytest's.
        PatchError: a patch that was made of the row is unsafe.
    """
    fields = RowFields(row)
    name, fix = fields.text("repo_name"), fields.text("commit_hash")
    repo = name if "/" in name else _REPOSITORIES.get(name.lower(), "")
    if not repo:
        raise TaskFileError(
            f"field 'repo_name' is {name!r}", field="repo_name", hint="write it as OWNER/NAME: whose it is is not known"
        )
    parsed, execution = object_of(row, "parsed_commit_content"), object_of(row, "execution_result_content")
    revision = str(parsed.get("old_commit_hash") or f"{fix}^")
    lists = _tests(object_of(row, "expected_output_json"), execution)
    export = exported(context.pins, name, fix)

    def commit() -> str:
        return full_commit(repo, revision, context.repo_mirrors, "commit_hash")

    def pinned() -> PythonBuild:
        packages = export or specified(_PYTHON, ("pytest",), ())
        return PythonBuild(
            python=packages.python,
            requirements=packages.requirements,
            complete=packages.complete,
            source=SourceSpec.on_github(repo, commit()),
            install=commands(row, "install") or ("python -m pip install -e .",),
        )

    identity = fields.text("instance_id", default="") or f"{name.replace('/', '__')}__{fix}"
    statement = _without_tags(fields.text("problem_statement"))
    build = chosen_build("r2e", row, context, pinned, exact=export is not None)
    return fields.task(
        build,
        PytestGrader(),
        lists=lists,
        instance_id=identity,
        repo=repo,
        base_commit=commit() if isinstance(build, PythonBuild) else revision,
        problem_statement=statement,
        patch="".join(_fix(parsed)),
        test_patch="".join(_hidden_tests(execution)),
    )


def _without_tags(statement: str) -> str:
    return statement.replace("[ISSUE]", "").replace("[/ISSUE]", "").strip() + "\n"


def _fix(parsed: Mapping[str, object]) -> Iterator[str]:
    """The commit's patch, without its tests: those that count come with the row."""
    changes = parsed.get("file_diffs")
    for change in changes if isinstance(changes, list) else ():
        header = change.get("header") if isinstance(change, dict) else None
        file = header.get("file") if isinstance(header, dict) else None
        path = file.get("path") if isinstance(file, dict) else None
        if not isinstance(path, str):
            raise TaskFileError(
                "field 'parsed_commit_content' has a change without a path", field="parsed_commit_content"
            )
        if not _is_test(path) and not change.get("is_binary_file"):
            yield from _diff(path, str(change.get("old_file_content") or ""), str(change.get("new_file_content") or ""))


def _is_test(path: str) -> bool:
    *folders, name = path.lower().split("/")
    return any(folder in {"test", "tests", "testing"} for folder in folders) or name.startswith("test_")


def _hidden_tests(execution: Mapping[str, object]) -> Iterator[str]:
    names, codes = execution.get("test_file_names"), execution.get("test_file_codes")
    if not isinstance(names, list) or not isinstance(codes, list) or len(names) != len(codes) or not names:
        raise TaskFileError(
            "field 'execution_result_content' has no test files",
            field="execution_result_content",
            hint="leave the row out: there is nothing to grade by",
        )
    for name, code in zip(names, codes, strict=True):
        yield from _diff(f"{_FOLDER}/{str(name).rpartition('/')[2]}", "", str(code))


def _diff(path: str, old: str, new: str) -> Iterator[str]:
    """A change of one file as git writes it; text is parted by line feeds alone."""
    if old == new:
        return
    yield f"diff --git a/{path} b/{path}\n"
    if not old:
        yield "new file mode 100644\n"
    if not new:
        yield "deleted file mode 100644\n"
    names = (f"a/{path}" if old else "/dev/null", f"b/{path}" if new else "/dev/null")
    for line in unified_diff(re.findall(r"[^\n]*\n|[^\n]+\Z", old), re.findall(r"[^\n]*\n|[^\n]+\Z", new), *names):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _tests(expected: Mapping[str, object], execution: Mapping[str, object]) -> TestLists:
    """FAIL_TO_PASS and PASS_TO_PASS: what the commit's runs printed, as far as the row expects it to pass."""
    after, before = (_outcomes(execution, f"{when}_commit_res_stdout") for when in ("new", "old"))
    wanted = {_COLOUR.sub("", name).partition(" - ")[0] for name, outcome in expected.items() if outcome == "PASSED"}
    passed = [test for test, outcome in after.items() if outcome == "PASSED" and _short(test) in wanted]
    if not passed:
        raise TaskFileError(
            "field 'execution_result_content' has none of the tests that should pass",
            field="execution_result_content",
            reason="'new_commit_res_stdout' is not what pytest -rA prints",
            hint="leave the row out",
        )
    return TestLists(
        tuple(test for test in passed if before.get(test) != "PASSED"),
        tuple(test for test in passed if before.get(test) == "PASSED"),
    )


def _outcomes(execution: Mapping[str, object], key: str) -> dict[str, str]:
    """Each test's outcome in a summary of ``pytest -rA``, by its id."""
    text = _COLOUR.sub("", str(execution.get(key) or ""))
    _, _, summary = text.rpartition("short test summary info")
    lines = filter(None, map(_OUTCOME.fullmatch, summary.splitlines()))
    return {match[2].partition(" - ")[0].strip(): match[1] for match in lines}


def _short(test: str) -> str:
    """A test's name in ``expected_output_json``: classes and function, without the file."""
    return ".".join(test.split("::")[1:])
