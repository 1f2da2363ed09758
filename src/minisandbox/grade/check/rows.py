"""Checks of rows: what can be seen without an image."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from minisandbox.grade.check.evidence import Evidence, Problem
from minisandbox.grade.leaks import telling_lines
from minisandbox.images.oci.reference import Remote, parse_reference
from minisandbox.patches import touched_files
from minisandbox.spec import DockerfileBase, GitSource, OciBase, PythonRecipe, is_commit
from minisandbox.tasks import ContainerBuild, Form, Task, file_of

_FROM = re.compile(r"^\s*FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?", re.IGNORECASE | re.MULTILINE)
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_ENOUGH = 0.95


def empty_instruction(seen: Evidence) -> Iterator[Problem]:
    """The instruction is empty."""
    if not seen.task.problem_statement.strip():
        yield Problem("the instruction is empty", "problem_statement")


def solution_in_instruction(seen: Evidence) -> Iterator[Problem]:
    """The instruction contains the lines of the reference."""
    wanted = {line.strip() for one in telling_lines(seen.task) if one.kind == "reference" for line in one.lines}
    told = {form for line in seen.task.problem_statement.splitlines() for form in (line.strip(), line[1:].strip())}
    if wanted and len(wanted & told) >= _ENOUGH * len(wanted):
        yield Problem(
            f"it has {len(wanted & told)} of {len(wanted)} telling lines of the reference", "problem_statement"
        )


def duplicate(seen: Evidence) -> Iterator[Problem]:
    """An earlier task asks for the same."""
    if seen.twin:
        yield Problem(seen.twin)


def twins(tasks: Iterable[Task]) -> dict[str, str]:
    """Return the tasks that ask for the same as an earlier one, each with the reason.

    Tasks ask for the same if they apply the same patch to the same commit, or give the same instruction for the same
    code. In SWE-smith's form each patch makes other code.
    """
    known: dict[tuple[str, ...], str] = {}
    found: dict[str, str] = {}
    for task in tasks:
        code = (task.repo, task.base_commit or repr(task.build), task.form)
        keys = {("patch", *code, task.patch.strip()): "patch"} if task.patch.strip() else {}
        if task.form is not Form.SWESMITH and (told := task.problem_statement.strip()):
            keys |= {("instruction", *code, told): "instruction"}
        for key, what in keys.items():
            if (other := known.setdefault(key, task.instance_id)) != task.instance_id:
                found.setdefault(task.instance_id, f"{other} has the same {what} for the same code")
    return found


def unpinned(seen: Evidence) -> Iterator[Problem]:
    """The image may be another one tomorrow."""
    match seen.task.build:
        case ContainerBuild(base=OciBase(reference=reference)):
            if _is_floating(reference):
                yield Problem(f"{reference} names no digest", "build.image")
        case ContainerBuild(base=DockerfileBase(dockerfile=path)):
            text = path.read_text("utf-8", "replace") if path.is_file() else ""
            stages = {"scratch", *(name.lower() for _, name in _FROM.findall(text) if name)}
            for base in dict.fromkeys(base for base, _ in _FROM.findall(text)):
                if base.lower() not in stages and "@sha256:" not in base:
                    yield Problem(f"FROM {base} names no digest", path.name)
        case PythonRecipe() as build:
            yield from _unpinned_python(build)


def _is_floating(reference: str) -> bool:
    parsed = parse_reference(reference)
    return isinstance(parsed, Remote) and not parsed.digest


def _unpinned_python(build: PythonRecipe) -> Iterator[Problem]:
    if isinstance(build.source, GitSource) and not is_commit(build.source.commit):
        yield Problem(f"{build.source.commit!r} is not a whole commit id", "build.source")
    loose = [one for one in build.requirements if "==" not in one and " @ " not in one]
    if loose and not build.exclude_newer:
        yield Problem(f"{len(loose)} requirements have no version, such as {loose[0]!r}", "build.requirements")


def tests_in_patch(seen: Evidence) -> Iterator[Problem]:
    """Named tests are in a file that the solution changes, so that a submission may rewrite them."""
    task = seen.task
    touched = set(touched_files(task.patch)) - set(touched_files(task.test_patch))
    named = tuple(test for test in task.FAIL_TO_PASS + task.PASS_TO_PASS if file_of(test) in touched)
    if named:
        files = ", ".join(sorted({file_of(test) for test in named}))
        yield Problem(
            f"{len(named)} named tests are in a file of the patch: a submission may rewrite them", files, named
        )


def no_reference(seen: Evidence) -> Iterator[Problem]:
    """Nothing shows that the task can be solved."""
    if not seen.task.patch.strip() and seen.task.solution is None:
        yield Problem("it has no patch and no solution")
