"""Run a task's tests in a grading sandbox: on clean code, with a change and the task's own test files."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from minisandbox.errors import FileAccessError, InvalidValue
from minisandbox.grade.graders.carry import carried_files
from minisandbox.grade.graders.log import LOG_LIMIT, LogRunner
from minisandbox.grade.graders.pytest import PytestRunner, files_of
from minisandbox.grade.graders.script import ScriptRunner, solve
from minisandbox.grade.judging import Doubt, SuiteRun, log_of
from minisandbox.grade.names import located
from minisandbox.grade.startup import task_sandbox
from minisandbox.grade.submission import CodePatch
from minisandbox.grade.testfiles import HIDDEN, prepare_files
from minisandbox.grade.verdict import Reason
from minisandbox.patches import removed_files
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.cancellation import Cancellation
from minisandbox.tasks import LogGrader, PytestGrader, ScriptGrader, Task, file_of
from minisandbox.types import ExecResult, Limits, Network, Outcome
from minisandbox.values import MiB

if TYPE_CHECKING:
    from minisandbox.images import Image

_STEP_TIMEOUT = 120.0
_PATIENCE = 3.0
_MOST_FILES = 500
_LARGEST_FILE = 64 * MiB
# Do not preserve the modification time: stale byte-code would match a file with an old one.
_RESTORE = ("cp", "-R", "--remove-destination", "--preserve=mode", "-T", str(HIDDEN))
_MOST_EXCLUDED = 1 << 20
"""The maximum size in bytes of the names that git excludes, as JSON, the encoding of arguments."""
_APPLY = ("git", "apply", "--apply", "--numstat", "-z", "--whitespace=nowarn")
# With -R, --numstat lists the original files of a patch; newer versions of git list the last file first.
# Without --apply, nothing is changed.
_SOURCES = ("git", "apply", "-R", "--numstat", "-z", "-")
# Prints the symbolic links among the given names, each with its target.
_LIST_LINKS = 'for f; do if [ -L "./$f" ]; then printf "%s\\0" "$f"; readlink -n "./$f"; printf "\\0"; fi; done'
_LINKS = ("xargs", "-0", "-r", "sh", "-c", _LIST_LINKS, "sh")
_GIT_REFUSED = frozenset({1, 128})


@dataclass(frozen=True, slots=True)
class Workspace:
    """Runs a task's tests in grading sandboxes.

    Attributes:
        image: the task's image.
        task: the task.
        files: the test files to run; empty if the task's command chooses.
        timeout: the time limit of the tests in seconds.
        limits: the limits of each sandbox.
        cancellation: cancels the runs.
        hash_seed: the seed of Python's string hashes in the tests.
    """

    image: Image
    task: Task
    files: tuple[str, ...]
    timeout: float
    limits: Limits
    cancellation: Cancellation = field(default_factory=Cancellation)
    hash_seed: int = 0

    @classmethod
    def of(
        cls,
        task: Task,
        image: Image,
        *,
        files: Sequence[str] | None = None,
        timeout: float | None = None,
        limits: Limits | None = None,
        cancellation: Cancellation | None = None,
    ) -> Workspace:
        """Create a task's workspace.

        Args:
            task: the task.
            image: the task's image.
            files: the test files to run; None for those of the named tests.
            timeout: the time limit of the tests in seconds; None for the task's own.
            limits: the limits of each sandbox; None for the task's own.
            cancellation: cancels the runs.

        Raises:
            InvalidValue: the task has a pytest grader, but a test's name is not a pytest node id.
        """
        test_files = _test_files(task) if files is None else tuple(files)
        seconds = task.grader.timeout if timeout is None else timeout
        return cls(image, task, test_files, seconds, task.needs.limits(limits), cancellation or Cancellation())

    def run(
        self, change: CodePatch, edited_files: Mapping[str, bytes] | None = None, test_names: Sequence[str] = ()
    ) -> SuiteRun:
        """Run the tests on clean code with a change, in a fresh sandbox.

        Args:
            change: the patch.
            edited_files: new contents of test files, by path.
            test_names: the tests to run, by the reporter's names; empty for all. All tests are collected.

        Returns:
            The results; if a step before the tests failed, the run has a doubt.

        Raises:
            MiniSandboxError: the sandbox could not be created, or ended.
            CancelledError: the grading was cancelled.
        """
        self.cancellation.check()
        if isinstance(self.task.grader, ScriptGrader):
            return self._run_script(self.task.grader, change)
        runner = self._runner(self.task.grader)
        limits = replace(self.limits, output=LOG_LIMIT) if isinstance(self.task.grader, LogGrader) else self.limits
        with (
            prepare_files(self.image.tests_dir(), self.files, edited_files or {}, self.image.workdir) as tests,
            Sandbox.create(self.image.spec(), limits=limits, network=Network.off(), mounts=tests.mounts) as box,
            self.cancellation.running(box),
        ):
            runner.install(box)
            failed_run = _apply(box, change) or (_restore(box, self.task) if tests.copied else None)
            # read after the change: the reference may change a module whose docstrings are tests
            test_contents = {**_read(box, self.files[:_MOST_FILES]), **tests.checked}
            return failed_run or _doubt_if_changed(box, runner.run(box, test_names), test_contents)

    def _run_script(self, grader: ScriptGrader, change: CodePatch) -> SuiteRun:
        """Run a script grader; if a solution runs first, only its carried files are in the script's sandbox."""
        runner = ScriptRunner(grader, self.timeout)
        carries = change.script is not None and grader.mode == "fresh" and grader.carry
        needs = self.task.needs
        with ExitStack() as stack:
            with self.box(needs.network if change.script is not None else needs.grader_network) as box:
                failed_run = _apply(box, change) if change.script is None else solve(box, change.script)
                if failed_run is not None or not carries:
                    return failed_run or runner.run(box)
                carried = stack.enter_context(carried_files(box, grader.carry, self.image.workdir))
            with self.box(needs.grader_network) as clean_box:
                carried.put(clean_box)
                return runner.run(clean_box)

    def apply_problem(self, change: CodePatch) -> str:
        """Return why git rejects the complete patch, including the files that are left out, or "".

        The benchmarks' harnesses reject a patch if a hunk in any file does not fit. Files that are hidden from the
        agent are ignored, because a patch that was not made in our sandbox may change them.
        """
        hidden = [f"--exclude={_literal(path)}" for path in self.task.hidden_files]
        with self.box(Network.off()) as box:
            result = run_as_owner(box, ["git", "apply", "--check", *hidden, "-"], change.patch)
        return f"the patch does not apply: {_error_line(result)}" if result.exit_code in _GIT_REFUSED else ""

    @contextlib.contextmanager
    def box(self, network: Network) -> Iterator[Sandbox]:
        """Create a sandbox with clean code and without the hidden tests."""
        with (
            task_sandbox(self.task, self.image.spec(), self.limits, network) as box,
            self.cancellation.running(box),
        ):
            yield box

    def patient(self, needed: float = 0.0) -> Workspace:
        """Return a workspace with a longer time limit, because a loaded machine may have caused a timeout.

        Args:
            needed: the current duration of the reference's run in seconds, which is tripled; 0 triples the time limit.
        """
        return replace(self, timeout=max(self.timeout, _PATIENCE * (needed or self.timeout)))

    def reseeded(self) -> Workspace:
        """Return a workspace with another hash seed, because a test may hang for some orders of hashes."""
        return replace(self, hash_seed=self.hash_seed + 1)

    def _runner(self, grader: PytestGrader | LogGrader) -> LogRunner | PytestRunner:
        if isinstance(grader, LogGrader):
            return LogRunner(self.task, self.timeout, self.hash_seed)
        return PytestRunner(grader.command, self.files, self.timeout, self.hash_seed)


def _test_files(task: Task) -> tuple[str, ...]:
    """Return the test files that run and that must stay unchanged."""
    tests = task.FAIL_TO_PASS + task.PASS_TO_PASS
    if isinstance(task.grader, ScriptGrader):
        return ()
    if task.grader.reporter == "none":
        return tuple(file for file in task.test_files if not file.endswith(".snap"))  # Jest rewrites its snapshots
    if isinstance(task.grader, LogGrader):
        return tuple(sorted({*map(file_of, located(task, tests))}))
    return files_of(tests)


def run_as_owner(box: Sandbox, command: Sequence[str], stdin: bytes = b"") -> ExecResult:
    """Run a command as the repository's owner: others cannot write there, and git refuses to work for them."""
    owner = box.files.stat(".").uid
    with contextlib.suppress(InvalidValue):  # a sandbox with a single user id has only root
        return box.exec(command, stdin=stdin, timeout=_STEP_TIMEOUT, user=owner)
    return box.exec(command, stdin=stdin, timeout=_STEP_TIMEOUT, user=0)


def _apply(box: Sandbox, change: CodePatch) -> SuiteRun | None:
    """Apply a patch completely or not at all; return the failed run, or None."""
    if change.is_empty:
        return None
    if (failed_run := _refuse_other_sources(box, change)) is not None:
        return failed_run
    excluded = [f"--exclude={_literal(path)}" for path in change.leave_out]
    if len(json.dumps(excluded)) > _MOST_EXCLUDED:
        return SuiteRun.not_run(Doubt(Reason.PATCH_INVALID, "it changes more protected files than git can be told"))
    command = [*_APPLY, *(["-R"] if change.reverse else []), *excluded, "-"]
    result = run_as_owner(box, command, change.patch)
    doubt = _doubt_about_patch(result, change)
    return _refuse_other_links(box, change) if doubt is None else SuiteRun.not_run(doubt, log_of(result))


def _refuse_other_links(box: Sandbox, change: CodePatch) -> SuiteRun | None:
    """Reject a patch that creates other symbolic links than the policy judged: a patch may omit file modes."""
    if change.only is None:
        return None
    names = b"".join(path.encode("utf-8", "surrogateescape") + b"\0" for path in sorted(change.only))
    result = run_as_owner(box, _LINKS, names)
    if not result.ok:
        return SuiteRun.not_run(Doubt(Reason.PATCH_STEP_FAILED, f"looking for links: {result.fate}"), log_of(result))
    fields = result.stdout_bytes.split(b"\0")
    links = dict(zip((name.decode("utf-8", "surrogateescape") for name in fields[::2]), fields[1::2], strict=False))
    if links == change.links and not result.dropped_stdout:
        return None
    detail = f"it changes symbolic links without telling so: {sorted(links.items() ^ change.links.items())[:3]}"
    return SuiteRun.not_run(Doubt(Reason.PATCH_INVALID, detail), log_of(result))


def _refuse_other_sources(box: Sandbox, change: CodePatch) -> SuiteRun | None:
    """Reject a patch if git reads other original paths from it than the policy judged.

    The policy judged renamed files by the paths that our own parser found.
    """
    if change.only is None:
        return None
    result = run_as_owner(box, _SOURCES, change.patch)
    if not result.ok:
        doubt = _doubt_about_patch(result, change)
    elif result.dropped_stdout:
        doubt = Doubt(Reason.PATCH_INVALID, "the patch changes more files than can be listed")
    elif tuple(_paths(result.stdout_bytes)) not in (change.sources, change.sources[::-1]):
        doubt = Doubt(Reason.PATCH_INVALID, "git reads other files in the patch, as those that it changes")
    else:
        return None
    return None if doubt is None else SuiteRun.not_run(doubt, log_of(result))


def _doubt_about_patch(result: ExecResult, change: CodePatch) -> Doubt | None:
    message = _error_line(result)
    if result.outcome is Outcome.EXITED and result.exit_code in _GIT_REFUSED:
        return Doubt(Reason.PATCH_INVALID, f"the patch does not apply: {message}")
    if not result.ok:
        return Doubt(Reason.PATCH_STEP_FAILED, f"git apply: {result.fate}: {message}")
    if change.only is not None:
        # git and the policy must read the same files from the patch
        unexpected = set(_paths(result.stdout_bytes)) - change.only
        if unexpected or result.dropped_stdout:
            return Doubt(Reason.PATCH_INVALID, f"git reads other files in the patch: {sorted(unexpected)[:3]}")
    return None


def _paths(numstat: bytes) -> list[str]:
    """Return the paths of ``git apply --numstat -z``: NUL-terminated records of added, removed, path, split by tabs."""
    fields = (record.split(b"\t", 2) for record in numstat.split(b"\0") if record)
    return [field[-1].decode("utf-8", "surrogateescape") for field in fields]


def _literal(path: str) -> str:
    r"""Escape a path for git's wildmatch, in which * ? [ and \ are special characters."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", path)


def _restore(box: Sandbox, task: Task) -> SuiteRun | None:
    """Restore the task's own test files, and delete those that the test patch deletes."""
    result = box.exec([*_RESTORE, str(box.image.workdir)], timeout=_STEP_TIMEOUT, user=0)
    if result.ok and (removed := removed_files(task.test_patch)):
        result = box.exec(["rm", "-f", "--", *removed], timeout=_STEP_TIMEOUT, user=0)
    if result.ok:
        return None
    doubt = Doubt(Reason.RESTORE_FAILED, f"test files: {result.fate}: {_error_line(result)}")
    return SuiteRun.not_run(doubt, log_of(result))


def _error_line(result: ExecResult) -> str:
    """Return the start of a command's stderr as one line."""
    return result.stderr.strip().replace("\n", "; ")[:500]


def _doubt_if_changed(box: Sandbox, run: SuiteRun, files: Mapping[str, bytes]) -> SuiteRun:
    """Return the run, with a doubt if a test file was changed."""
    if run.doubt is not None:
        return run
    current_contents = _read(box, tuple(files))
    changed_path = next((path for path, content in files.items() if current_contents.get(path) != content), None)
    if changed_path is None:
        return run
    return replace(run, doubt=Doubt(Reason.TESTS_CHANGED, f"{changed_path} was changed while the tests ran"))


def _read(box: Sandbox, names: Sequence[str]) -> dict[str, bytes]:
    """Return the content of the named files that exist in the repository."""
    files = {}
    for name in names:
        with contextlib.suppress(FileAccessError):
            files[name] = box.files.read_bytes(box.image.workdir / name, limit=_LARGEST_FILE)
    return files
