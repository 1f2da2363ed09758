"""Tasks made of a project: bugs of one word, drawn by a seed, each with the tests that were seen to find it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from examples.learning.mutations import Function, Mutant, draw_mutants, functions, mutants, share_of, statement

from minisandbox.errors import FileAccessError, GradingError, InvalidValue, SandboxGone
from minisandbox.grade import Measurement, Reason, derive_test_lists, measure
from minisandbox.images import Image
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import Form, PytestGrader, Task, file_of
from minisandbox.types import MiB, Network

UNMEASURED = ("not measured",)
"""Stands for FAIL_TO_PASS where it is not known; it names no file, so that nothing is hidden."""

_PLUGIN = Path(__file__).with_name("calls_plugin.py")
_INSIDE = "/run/minisandbox-calls"
_APART = frozenset({"test", "tests", "testing", "doc", "docs", "examples", "example", "bench", "benchmarks", "vendor"})
_LARGEST_SOURCE = MiB
_DECORATORS = 6
_MOST_TESTS = 150
_CPU_SECONDS, _PATIENCE = 10, 5
"""What one run of a task's tests may take of a processor: wrong words make loops endless. So bounded they can have
several times as many seconds of the clock, of which busy machines take many."""
_OURS = frozenset({Reason.PATCH_INVALID, Reason.PATCH_STEP_FAILED, Reason.RESTORE_FAILED})
"""What no bug can cause: it happens before its tests run."""
_TOLD = 10
"""After so many functions progress is reported."""


@dataclass(frozen=True, slots=True)
class Mutating:
    """Which bugs are made.

    Attributes:
        seed: of every choice.
        per_function: tasks of one function at most.
        tries: bugs of one function that are tried for these.
        lines: visible lines of a function, at most; at least there are three.
        characters: of these, at most.
        shares: the functions whose :func:`.share_of` is below this.
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
    """What is known of a project before bugs are made.

    Attributes:
        sources: the text of each module, by its path; no tests among them.
        calls: the tests that called a function, by its module and the line that its code begins at.
        clean: what its tests do without a bug.
    """

    sources: Mapping[str, str]
    calls: Mapping[tuple[str, int], tuple[str, ...]]
    clean: Measurement

    def files_for(self, function: Function) -> tuple[str, ...]:
        """Return the test files that call a function, those with fewest tests first."""
        row = function.rows[0]  # its code begins at the first decorator
        starts = ((function.file, row - above) for above in range(_DECORATORS))
        tests = next((self.calls[start] for start in starts if start in self.calls), ())
        sizes: dict[str, int] = {}
        for test in self.clean.passed:
            sizes[file_of(test)] = sizes.get(file_of(test), 0) + 1
        files = {file_of(test) for test in tests if test in self.clean.passed}
        return tuple(sorted((file for file in files if sizes[file] <= _MOST_TESTS), key=lambda one: (sizes[one], one)))


def clean_task(task: Task) -> Task:
    """Return a task whose image is the project of another one, without its bug and with all of its tests.

    Raises:
        InvalidValue: its tests are not pytest's, so that nothing of ours says what each of them did.
    """
    if not isinstance(task.grader, PytestGrader):
        raise InvalidValue(f"{task.instance_id}: its tests are not run by pytest", hint="name a task whose tests are")
    name = f"{task.repo.replace('/', '__')}-{task.version or task.base_commit[:12]}"
    return replace(
        task, instance_id=f"{name}.clean", form=Form.SWEBENCH, test_patch="", FAIL_TO_PASS=UNMEASURED, PASS_TO_PASS=()
    )


def bounded_task(task: Task) -> Task:
    """Return a task whose tests end although a wrong word has made a loop endless, on a busy machine no sooner."""
    command = f"ulimit -t {_CPU_SECONDS}; {task.grader.command}"
    return replace(task, grader=replace(task.grader, command=command, timeout=_PATIENCE * task.grader.timeout))


def survey(clean: Task, image: Image) -> Survey:
    """Look at a project: its modules, what its tests do, and what they call.

    Args:
        clean: of :func:`clean_task`.
        image: its image.

    Raises:
        GradingError: its tests cannot be believed without any bug.
        MiniSandboxError: a sandbox could not be made, or ended.
    """
    runs = [measure(clean, image, reference=False) for _ in range(2)]
    for one in runs:
        if not one.believed or not one.passed:
            raise GradingError(f"{clean.instance_id}: its tests cannot be used: {one.detail or 'none passes'}")
    steady = frozenset.intersection(*(one.passed for one in runs))
    outcomes = tuple(pair for pair in runs[0].outcomes if pair[0] in steady)
    with Sandbox.create(image.spec(), network=Network.off()) as box:
        return Survey(dict(sources(box)), _calls(box, clean), replace(runs[0], outcomes=outcomes))


def sources(box: Sandbox) -> Iterator[tuple[str, str]]:
    """Yield the modules of a repository in which bugs can be put, tests and documents apart: path and text.

    Args:
        box: a sandbox of the repository's image.
    """
    listed = box.exec(["git", "ls-files", "-z", "--", "*.py"], timeout=60).stdout_bytes.split(b"\0")
    for name in sorted(name.decode("utf-8", "surrogateescape") for name in listed if name):
        parts = Path(name).parts
        if not _APART & set(parts[:-1]) and "test" not in parts[-1] and parts[-1] not in ("setup.py", "conftest.py"):
            try:
                yield name, box.files.read_bytes(box.image.workdir / name, limit=_LARGEST_SOURCE).decode()
            except (FileAccessError, UnicodeDecodeError):
                continue  # a link, too large, or of another encoding: no bug is put there


def _calls(box: Sandbox, task: Task) -> dict[tuple[str, int], tuple[str, ...]]:
    """Run all tests once with the plugin that notes calls; where that fails, nothing is known to be called."""
    box.files.write_bytes(f"{_INSIDE}/calls_plugin.py", _PLUGIN.read_bytes())
    known = dict(box.image.environment).get("PYTHONPATH")
    env = {
        "PYTHONPATH": f"{known}:{_INSIDE}" if known else _INSIDE,
        "MINISANDBOX_CALLS": f"{box.image.workdir}:{_INSIDE}/calls.json",
    }
    box.exec(
        f"{task.grader.command} -q -p calls_plugin -o cache_dir={_INSIDE}/cache",
        timeout=task.grader.timeout * 5,
        env=env,
    )
    try:
        found = json.loads(box.files.read_bytes(f"{_INSIDE}/calls.json", limit=64 * MiB))
    except (FileAccessError, ValueError, RecursionError):
        return {}
    places = {place.rpartition(":"): tuple(map(str, tests)) for place, tests in found.items()}
    return {(file, int(row)): tests for (file, _, row), tests in places.items()}


def usable(function: Function, options: Mutating) -> bool:
    """Whether a function is long enough to be a question, short enough to be read, and ends whatever is changed."""
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
    """Make tasks of a project: of each function that its tests call, bugs that these tests find.

    A task's tests are those of one file: of the files in which a bug shows, the one with fewest tests. With one seed
    the same image gives the same tasks.

    Args:
        clean: of :func:`clean_task`.
        image: its image.
        options: which bugs are made.
        workers: bugs that are tried at once.
        report: called with each step.

    Yields:
        The tasks, as they are found.

    Raises:
        GradingError: the project's tests cannot be believed without any bug, or cannot be run with one.
        MiniSandboxError: a sandbox could not be made, or ended before the tests of a bug ran.
    """
    project = survey(clean, image)
    chosen = [
        one
        for file, text in project.sources.items()
        for one in functions(text, file)
        if share_of(clean.repo, one.file, one.name, options.seed) < options.shares
        and project.files_for(one)
        and usable(one, options)
    ]
    report(f"{clean.instance_id}: {len(project.clean.passed)} tests, {len(chosen)} functions to put bugs into")
    pool, count, fruitful = ThreadPoolExecutor(workers), 0, 0
    try:
        made = pool.map(lambda one: _tasks_of(one, clean, image, project, options), chosen)
        for number, tasks in enumerate(made, start=1):
            yield from tasks
            count, fruitful = count + len(tasks), fruitful + bool(tasks)
            if number % _TOLD == 0:
                report(f"{clean.instance_id}: {number} of {len(chosen)} functions, {count} tasks")
    finally:  # a Ctrl-C too: what has not begun does not
        pool.shutdown(cancel_futures=True)
    report(f"{clean.instance_id}: {count} tasks of {fruitful} functions")


def _tasks_of(function: Function, clean: Task, image: Image, project: Survey, options: Mutating) -> list[Task]:
    """The tasks of one function: bugs are tried until there are enough."""
    found: list[Task] = []
    for mutant in draw_mutants(function, options.tries, options.seed):
        if len(found) < options.per_function:
            found.extend(_task(mutant, clean, image, project))
    return found


def _task(mutant: Mutant, clean: Task, image: Image, project: Survey) -> Iterable[Task]:
    """The task of a bug, or nothing where no test finds it."""
    patch = mutant.patch(project.sources[mutant.function.file])
    files = project.files_for(mutant.function)[:2]
    bounded = bounded_task(clean)
    try:
        # in this form the reference is what is applied: here the bug
        buggy = measure(replace(bounded, patch=patch), image, reference=True, files=files)
    except SandboxGone:  # a bug may end the sandbox: no task
        return
    if buggy.reason in _OURS:
        raise GradingError(
            f"{clean.instance_id}: the tests of a bug in {mutant.function.name} did not run: {buggy.detail}"
        )
    if not buggy.believed:
        return
    failing, passing = derive_test_lists([project.clean], [buggy])
    file = next((one for one in files if _of(one, failing)), None)
    if file is not None:
        yield replace(
            bounded,
            instance_id=f"{clean.instance_id.removesuffix('clean')}{mutant.function.name}__{mutant.digest}",
            problem_statement=statement(mutant.function),
            patch=patch,
            form=Form.SWESMITH,
            FAIL_TO_PASS=_of(file, failing),
            PASS_TO_PASS=_of(file, passing),
        )


def _of(file: str, tests: Sequence[str]) -> tuple[str, ...]:
    return tuple(test for test in tests if file_of(test) == file)
