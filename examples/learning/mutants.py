"""Make tasks from a project: one-word bugs, drawn by a seed, each with the tests that detected it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from examples.learning.mutations import Function, Mutant, draw_mutants, functions, mutants, share_of
from examples.learning.visible import with_visible_test

from minisandbox.errors import FileAccessError, GradingError, InvalidValue, SandboxGone
from minisandbox.grade import Measurement, Reason, derive_test_lists, measure
from minisandbox.images import Image
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import Form, PytestGrader, Task, file_of
from minisandbox.types import Network
from minisandbox.values import MiB

UNMEASURED = ("not measured",)
"""FAIL_TO_PASS of a task that was not measured. It names no file, so that no test is hidden."""

_PLUGIN = Path(__file__).with_name("calls_plugin.py")
_INSIDE = "/run/minisandbox-calls"
_EXCLUDED = frozenset(
    {"test", "tests", "testing", "doc", "docs", "examples", "example", "bench", "benchmarks", "vendor"}
)
_LARGEST_SOURCE = MiB
_DECORATORS = 6
_MAX_TESTS = 150
_CPU_SECONDS, _TIMEOUT_FACTOR = 10, 5
"""Limit of CPU seconds of one run of a task's tests, because bugs cause endless loops; and the factor by which the wall
time limit is raised, because tests are slow on busy machines."""
_SETUP_FAILURES = frozenset({Reason.PATCH_INVALID, Reason.PATCH_STEP_FAILED, Reason.RESTORE_FAILED})
"""Failures before the tests run, which no bug can cause."""
_REPORT_INTERVAL = 10
"""Number of functions between two progress reports."""


@dataclass(frozen=True, slots=True)
class Mutating:
    """Options of the bugs to make.

    Attributes:
        seed: seed of all random choices.
        per_function: maximum tasks per function.
        tries: bugs to try per function.
        lines: maximum visible lines of a function; the minimum is three.
        characters: maximum characters of the visible lines.
        shares: use only functions whose :func:`.share_of` is below this value.
    """

    seed: int = 0
    per_function: int = 2
    tries: int = 4
    lines: int = 20
    characters: int = 500
    shares: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.per_function <= self.tries:
            raise InvalidValue(
                f"{self.per_function} tasks of a function out of {self.tries} tries",
                hint="give 1 or more, and no fewer tries than tasks",
            )


@dataclass(frozen=True, slots=True)
class Survey:
    """Facts about a project without bugs.

    Attributes:
        sources: the text of each module by path, without tests.
        tests: the text of each test file by path.
        calls: the tests that called a function, by module and first line of the function.
        clean: the measured outcomes of the project's tests without a bug.
    """

    sources: Mapping[str, str]
    tests: Mapping[str, str]
    calls: Mapping[tuple[str, int], tuple[str, ...]]
    clean: Measurement

    def files_for(self, function: Function) -> tuple[str, ...]:
        """Return the test files that call a function, files with few tests first."""
        row = function.rows[0]  # the recorded line may be the one of the first decorator, above this line
        starts = ((function.file, row - offset) for offset in range(_DECORATORS))
        tests = next((self.calls[start] for start in starts if start in self.calls), ())
        sizes: dict[str, int] = {}
        for test in self.clean.passed:
            sizes[file_of(test)] = sizes.get(file_of(test), 0) + 1
        files = {file_of(test) for test in tests if test in self.clean.passed}
        return tuple(
            sorted((file for file in files if sizes[file] <= _MAX_TESTS), key=lambda file: (sizes[file], file))
        )


def clean_task(task: Task) -> Task:
    """Return a task for the project of another task, without its bug and with all tests.

    Raises:
        InvalidValue: the tests are not run by pytest, so there are no outcomes of single tests.
    """
    if not isinstance(task.grader, PytestGrader):
        raise InvalidValue(f"{task.instance_id}: its tests are not run by pytest", hint="name a task whose tests are")
    name = f"{task.repo.replace('/', '__')}-{task.version or task.base_commit[:12]}"
    return replace(
        task, instance_id=f"{name}.clean", form=Form.SWEBENCH, test_patch="", FAIL_TO_PASS=UNMEASURED, PASS_TO_PASS=()
    )


def bounded_task(task: Task) -> Task:
    """Limit the CPU time of a task's tests, so that endless loops end; allow more wall time, for busy machines."""
    command = f"ulimit -t {_CPU_SECONDS}; {task.grader.command}"
    return replace(task, grader=replace(task.grader, command=command, timeout=_TIMEOUT_FACTOR * task.grader.timeout))


def survey(clean: Task, image: Image) -> Survey:
    """Read a project's modules, measure its tests twice, and record their calls.

    Args:
        clean: a task of :func:`clean_task`.
        image: the task's image.

    Raises:
        GradingError: the tests give no reliable result even without a bug.
        MiniSandboxError: a sandbox could not be created, or ended.
    """
    runs = [measure(clean, image, reference=False) for _ in range(2)]
    for run in runs:
        if not run.believed or not run.passed:
            raise GradingError(f"{clean.instance_id}: its tests cannot be used: {run.detail or 'none passes'}")
    always_passed = frozenset.intersection(*(run.passed for run in runs))
    outcomes = tuple((test, outcome) for test, outcome in runs[0].outcomes if test in always_passed)
    with Sandbox.create(image.spec(), network=Network.off()) as box:
        tests = dict(_texts(box, sorted({file_of(test) for test in always_passed})))
        return Survey(dict(sources(box)), tests, _calls(box, clean), replace(runs[0], outcomes=outcomes))


def sources(box: Sandbox) -> Iterator[tuple[str, str]]:
    """Yield path and text of a repository's modules, except tests, documents and examples.

    Args:
        box: a sandbox of the repository's image.
    """
    file_names = box.exec(["git", "ls-files", "-z", "--", "*.py"], timeout=60).stdout_bytes.split(b"\0")
    names = sorted(name.decode("utf-8", "surrogateescape") for name in file_names if name)
    yield from _texts(box, [name for name in names if _is_module(Path(name).parts)])


def _is_module(parts: Sequence[str]) -> bool:
    is_excluded = "test" in parts[-1] or parts[-1] in ("setup.py", "conftest.py")
    return not is_excluded and not _EXCLUDED & set(parts[:-1])


def _texts(box: Sandbox, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield path and text of files in the repository; skip links, large files and other encodings than UTF-8."""
    for name in names:
        with contextlib.suppress(FileAccessError, UnicodeDecodeError):
            yield name, box.files.read_bytes(box.image.workdir / name, limit=_LARGEST_SOURCE).decode()


def _calls(box: Sandbox, task: Task) -> dict[tuple[str, int], tuple[str, ...]]:
    """Run all tests once with the plugin that records calls; return an empty dictionary if the run fails."""
    box.files.write_bytes(f"{_INSIDE}/calls_plugin.py", _PLUGIN.read_bytes())
    python_path = dict(box.image.environment).get("PYTHONPATH")
    env = {
        "PYTHONPATH": f"{python_path}:{_INSIDE}" if python_path else _INSIDE,
        "MINISANDBOX_CALLS": f"{box.image.workdir}:{_INSIDE}/calls.json",
    }
    box.exec(
        f"{task.grader.command} -q -p calls_plugin -o cache_dir={_INSIDE}/cache",
        timeout=task.grader.timeout * 5,
        env=env,
    )
    try:
        calls = json.loads(box.files.read_bytes(f"{_INSIDE}/calls.json", limit=64 * MiB))
    except (FileAccessError, ValueError, RecursionError):
        return {}
    locations = {location.rpartition(":"): tuple(map(str, tests)) for location, tests in calls.items()}
    return {(file, int(row)): tests for (file, _, row), tests in locations.items()}


def usable(function: Function, options: Mutating) -> bool:
    """Return whether a function has a useful length, enough bugs, and no ``while`` loop, which may become endless."""
    text = "\n".join(function.lines)
    return (
        3 <= len(function.lines) <= options.lines
        and len(text) <= options.characters
        and not any(line.lstrip().startswith("while ") for line in function.lines)
        and len(mutants(function)) >= 4
    )


def mutated_tasks(
    clean: Task,
    image: Image,
    options: Mutating,
    *,
    workers: int = 1,
    report: Callable[[str], object] = lambda _: None,
) -> Iterator[Task]:
    """Make tasks from a project: bugs in functions that its tests call, if the tests detect them.

    A task has the tests of one file: of the files that detect the bug, the file with the fewest tests. The same seed
    and image give the same tasks.

    Args:
        clean: a task of :func:`clean_task`.
        image: the task's image.
        options: the options of the bugs.
        workers: number of bugs to try at once.
        report: called with a description of each step.

    Yields:
        The tasks, in the order of the functions.

    Raises:
        GradingError: the project's tests give no reliable result without a bug, or do not run with a bug.
        MiniSandboxError: a sandbox could not be created, or ended before the tests of a bug ran.
    """
    project = survey(clean, image)
    candidates = [
        function
        for file, text in project.sources.items()
        for function in functions(text, file)
        if share_of(clean.repo, function.file, function.name, options.seed) < options.shares
        and project.files_for(function)
        and usable(function, options)
    ]
    report(f"{clean.instance_id}: {len(project.clean.passed)} tests, {len(candidates)} functions to put bugs into")
    pool, task_count, function_count = ThreadPoolExecutor(workers), 0, 0
    try:
        task_lists = pool.map(lambda function: _tasks_of(function, clean, image, project, options), candidates)
        for number, tasks in enumerate(task_lists, start=1):
            yield from tasks
            task_count, function_count = task_count + len(tasks), function_count + bool(tasks)
            if number % _REPORT_INTERVAL == 0:
                report(f"{clean.instance_id}: {number} of {len(candidates)} functions, {task_count} tasks")
    finally:  # also on Ctrl-C: start no further function
        pool.shutdown(cancel_futures=True)
    report(f"{clean.instance_id}: {task_count} tasks of {function_count} functions")


def _tasks_of(function: Function, clean: Task, image: Image, project: Survey, options: Mutating) -> list[Task]:
    """Return the tasks of one function; try its bugs until there are enough tasks."""
    tasks: list[Task] = []
    for mutant in draw_mutants(function, options.tries, options.seed):
        if len(tasks) < options.per_function:
            tasks.extend(_task(mutant, clean, image, project))
    return tasks


def _task(mutant: Mutant, clean: Task, image: Image, project: Survey) -> Iterable[Task]:
    """Yield the task of a bug; yield nothing if no test detects the bug, or if no failing test can be isolated."""
    patch = mutant.patch(project.sources[mutant.function.file])
    files = project.files_for(mutant.function)[:2]
    bounded = bounded_task(clean)
    try:
        # the reference is applied, which here is the bug
        buggy = measure(replace(bounded, patch=patch), image, reference=True, files=files)
    except SandboxGone:  # a bug may end the sandbox
        return
    if buggy.reason in _SETUP_FAILURES:
        raise GradingError(
            f"{clean.instance_id}: the tests of a bug in {mutant.function.name} did not run: {buggy.detail}"
        )
    if not buggy.believed:
        return
    failing, passing = derive_test_lists([project.clean], [buggy])
    file = next((file for file in files if _tests_in(file, failing)), None)
    if file is not None:
        task = replace(
            bounded,
            instance_id=f"{clean.instance_id.removesuffix('clean')}{mutant.function.name}__{mutant.digest}",
            patch=patch,
            form=Form.SWESMITH,
            FAIL_TO_PASS=_tests_in(file, failing),
            PASS_TO_PASS=_tests_in(file, passing),
        )
        visible = with_visible_test(task, mutant.function.file, mutant.function.name, project.tests.get(file, ""))
        if visible is not None:
            yield visible


def _tests_in(file: str, tests: Sequence[str]) -> tuple[str, ...]:
    return tuple(test for test in tests if file_of(test) == file)
