"""Grade with a script: run it in a sandbox, and read the reward from a file."""

from __future__ import annotations

import json
import math
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import PurePosixPath

from minisandbox.errors import FileAccessError, MiniSandboxError
from minisandbox.grade.graders.carry import Carried, carried_files
from minisandbox.grade.judging import Doubt, SuiteRun, infrastructure_grade, judge, log_of
from minisandbox.grade.options import ONCE, GradingOptions, is_confirmed
from minisandbox.grade.report import Report
from minisandbox.grade.startup import task_sandbox
from minisandbox.grade.verdict import NOT_CONFIRMED, Flag, Grade, Reason
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import ScriptGrader, Solution, Task
from minisandbox.types import ExecResult, ImageSpec, Limits, Outcome
from minisandbox.values import KiB

LIVE = "live_grading"
"""Flag kind: the reward comes from the agent's own sandbox, where the agent could change every tool."""
REGRADED = "regraded"
"""Flag kind: a clean sandbox with only the task's carried files passes as well."""

_LARGEST_REWARD = 64 * KiB
_STEP_TIMEOUT = 60.0
# Removes rewards and links that the agent may have left.
_CLEAR = """\
folder=$1; shift
rm -rf -- "$@"
[ ! -L "$folder" ] || rm -f -- "$folder"
mkdir -p -- "$folder" && chmod a+rwx -- "$folder\""""


class ScriptRunner:
    """One run of a task's script.

    Args:
        grader: the task's grader.
        timeout: the script's time limit in seconds.
    """

    def __init__(self, grader: ScriptGrader, timeout: float) -> None:
        self._grader = grader
        self._timeout = timeout
        path = PurePosixPath(grader.reward_file)
        self._reward_files = tuple(dict.fromkeys((path.with_suffix(".json"), path)))  # Harbor's order

    def run(self, box: Sandbox) -> SuiteRun:
        """Run the script and read the reward.

        Returns:
            The reward, or a doubt that explains why there is none.

        Raises:
            MiniSandboxError: the sandbox has ended, or the script's files cannot be put into it.
        """
        grader = self._grader
        self._clear(box)
        if grader.files is not None:
            box.files.upload(grader.files, grader.files_at)
        result = box.exec(
            ["bash", "-c", grader.command],
            timeout=self._timeout,
            cwd=grader.workdir or None,
            env=dict(grader.environment),
            user=grader.user or None,
        )
        run = SuiteRun(Report(), None, result.exit_code, result.duration, log_of(result))
        # do not read the file of a killed script: code under test can write a reward, and then kill the script
        reward, problem = self._reward(box, result) if result.outcome is Outcome.EXITED else (None, "")
        return replace(run, reward=reward, doubt=None if reward is not None else _doubt(result, problem))

    def _reward(self, box: Sandbox, result: ExecResult) -> tuple[float | None, str]:
        """Return the reward from a plug-in grader's method or from the file; without a reward, None and the reason."""
        judge_result = getattr(self._grader, "reward", None)
        if judge_result is None:
            return self._read(box)
        try:
            return _finite(judge_result(box, result)), ""
        except MiniSandboxError:
            raise
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
            return None, f"the grader {self._grader.kind!r} failed: {type(error).__name__}: {error}"

    def _clear(self, box: Sandbox) -> None:
        grader, paths = self._grader, [str(path) for path in self._reward_files]
        removed_paths = paths if grader.files is None else [*paths, grader.files_at]
        folder = str(self._reward_files[0].parent)
        box.exec(["sh", "-c", _CLEAR, "clear", folder, *removed_paths], user=0, timeout=_STEP_TIMEOUT, cwd="/")

    def _read(self, box: Sandbox) -> tuple[float | None, str]:
        """Return the reward in the file, or None and the reason why it has no reward."""
        for path in self._reward_files:
            try:
                if not box.files.exists(path):
                    continue
                content = box.files.read_text(path, limit=_LARGEST_REWARD)
            except (FileAccessError, UnicodeDecodeError) as error:
                return None, f"{path} cannot be read: {error}"
            try:
                return parse_reward(content, is_json=path.suffix == ".json"), ""
            except ValueError as error:
                return None, f"{path} holds {content.strip()[:100]!r}: {error}"
        return None, f"the script wrote no {' and no '.join(map(str, reversed(self._reward_files)))}"


def parse_reward(text: str, *, is_json: bool) -> float:
    """Parse a reward file as Harbor 0.26 does (verifier.py, and ``_primary_reward`` of cli/jobs.py).

    Args:
        text: the content of the file.
        is_json: whether the file is an object of rewards, of which ``reward`` or the only one counts; otherwise a
            number.

    Raises:
        ValueError: the file is malformed, a reward is not finite, or none of several rewards is named ``reward``.
    """
    if not is_json:
        return _finite(float(text))
    try:
        rewards = json.loads(text)
    except RecursionError:
        raise ValueError("too deeply nested") from None
    if not isinstance(rewards, dict) or not rewards:
        raise ValueError('not a JSON object such as {"reward": 1}')
    numbers = {name: _finite(value) for name, value in rewards.items()}
    if "reward" not in numbers and len(numbers) > 1:
        raise ValueError("several rewards, none of which is called 'reward'")
    return numbers.get("reward", next(iter(numbers.values())))


def _finite(value: object) -> float:
    """Return a finite number as a float; ``true`` is 1 and ``false`` is 0."""
    if not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return number


def solve(box: Sandbox, solution: Solution) -> SuiteRun | None:
    """Run a task's solution; return a doubtful run if it timed out, else None. Its exit status is ignored.

    Raises:
        MiniSandboxError: the sandbox has ended, or the solution's files cannot be put into it.
    """
    box.files.upload(solution.files, solution.files_at)
    result = box.exec(["bash", "-c", solution.shell], timeout=solution.timeout)
    if result.outcome is not Outcome.TIMEOUT:
        return None
    return SuiteRun.not_run(Doubt(Reason.TIMEOUT, f"the solution {result.fate}"), log_of(result))


def grade_work(
    task: Task,
    box: Sandbox,
    image: ImageSpec,
    *,
    timeout: float | None = None,
    limits: Limits | None = None,
    confirm: str = ONCE,
) -> Grade:
    """Grade the work in an agent's sandbox.

    In ``live`` mode, the script runs in that sandbox, next to the agent's processes, like Harbor's ``shared`` verifier.
    The agent could have changed every tool that the script uses, so the grade has the flag :data:`LIVE`. With
    ``always``, and for the share of ``share(P)``, a clean sandbox with the carried files is graded, too. If it fails,
    the grade is unconfirmed.

    In ``fresh`` mode, the script runs only in the clean sandbox, like Harbor's ``separate`` verifier. A pass that is
    not graded twice has the flag :data:`.NOT_CONFIRMED`.

    Args:
        task: a task with a script grader.
        box: the agent's sandbox, which may be attached.
        image: the sandbox's image, from which the clean sandbox is created, too.
        timeout: the script's time limit in seconds; None for the task's own.
        limits: the limits of the clean sandbox; None for the task's own.
        confirm: which passes are confirmed, as for :func:`.grade`.

    Returns:
        The grade. Infrastructure errors become grades with the verdict ``infra_error``.
    """
    assert isinstance(task.grader, ScriptGrader)
    grader, started = task.grader, time.monotonic()
    runner = ScriptRunner(grader, grader.timeout if timeout is None else timeout)
    live = grader.mode == "live"
    flags = (Flag(LIVE, "", "judged in the agent's own sandbox"),) if live else ()
    # by default, do not grade in a clean sandbox as well: work outside of the carried files would lose its reward
    requested = confirm != GradingOptions().confirm and is_confirmed(confirm, flagged=False)
    regraded = live and bool(grader.carry) and requested
    try:
        with carried_files(box, grader.carry, image.workdir) if regraded or not live else nullcontext() as carried:
            run = runner.run(box) if live else _run_clean(task, image, carried, runner, limits)
            result = judge(task, run, flags)
            if result.resolved and regraded:
                clean_grade = judge(task, _run_clean(task, image, carried, runner, limits))
                result = _compared(result, clean_grade)
            elif result.resolved:
                result = replace(result, flags=(*flags, Flag(NOT_CONFIRMED, "", "only the script reports it")))
    except FileAccessError as error:  # the agent left a file that cannot be carried
        detail = f"what it left cannot be carried to a clean sandbox: {error}"
        result = Grade(task.instance_id, Reason.PATCH_INVALID.verdict, Reason.PATCH_INVALID, detail, flags=flags)
    except (MiniSandboxError, OSError) as error:
        result = infrastructure_grade(task, error, flags)
    return replace(result, duration=time.monotonic() - started)


def _run_clean(
    task: Task, image: ImageSpec, carried: Carried | None, runner: ScriptRunner, limits: Limits | None
) -> SuiteRun:
    """Run the script in a clean sandbox that has the files carried from the agent's."""
    assert carried is not None
    with task_sandbox(task, image, limits, task.needs.grader_network) as clean_box:
        carried.put(clean_box)
        return runner.run(clean_box)


def _compared(live_grade: Grade, clean_grade: Grade) -> Grade:
    """Compare a live pass with the grade of a clean sandbox; if the clean one fails, the pass is unconfirmed."""
    detail = f"in a clean sandbox: {clean_grade.reason}: {clean_grade.detail}"
    if clean_grade.resolved:
        return replace(live_grade, flags=(*live_grade.flags, Flag(REGRADED, "", detail)))
    reason = Reason.UNCONFIRMED
    return replace(live_grade, verdict=reason.verdict, reason=reason, detail=f"{live_grade.detail}; {detail}")


def _doubt(result: ExecResult, problem: str) -> Doubt:
    fate = f"{problem} ({result.fate})" if problem else f"the script did not end by itself: {result.fate}"
    return Doubt(Reason.NO_REWARD, f"{fate}; log: {result.stderr.strip()[-200:] or 'empty'}")
