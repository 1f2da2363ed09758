"""The script grader: a script runs in a sandbox and writes the reward into a file."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import PurePosixPath

from minisandbox.errors import FileAccessError, MiniSandboxError
from minisandbox.grade.belief import Doubt
from minisandbox.grade.judging import judge
from minisandbox.grade.report import Report
from minisandbox.grade.runner import SuiteRun, log_of
from minisandbox.grade.verdict import Flag, Grade, Reason
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import ScriptGrader, Task
from minisandbox.types import ExecResult, KiB, Outcome

LIVE = "live_grading"
"""The kind of a flag: the reward is from the agent's own sandbox, whose every tool the agent could change."""

_LARGEST_REWARD = 64 * KiB
_STEP_TIMEOUT = 60.0
# No reward that the agent left is read, and no link of its leads elsewhere.
_CLEAR = """\
folder=$1 owner=$2; shift 2
rm -rf -- "$@"
[ ! -L "$folder" ] || rm -f -- "$folder"
mkdir -p -- "$folder"
[ -z "$owner" ] || chown -- "$owner" "$folder\""""


class ScriptRunner:
    """One run of a task's script.

    Args:
        grader: the task's grader.
        timeout: seconds the script may take.
    """

    def __init__(self, grader: ScriptGrader, timeout: float) -> None:
        self._grader = grader
        self._timeout = timeout
        path = PurePosixPath(grader.reward_file)
        self._places = tuple(dict.fromkeys((path, path.with_suffix(".json"))))

    def install(self, box: Sandbox) -> None:
        """Do nothing: the script's files come when the submission is applied, over whatever it put in their place."""

    def run(self, box: Sandbox) -> SuiteRun:
        """Run the script, and read the reward.

        Returns:
            The reward; or a doubt that says why it is missing.

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
        reward, problem = (None, "") if result.outcome is Outcome.TIMEOUT else self._read(box)
        return replace(run, reward=reward, doubt=None if reward is not None else _doubt(result, problem))

    def _clear(self, box: Sandbox) -> None:
        grader, places = self._grader, [str(place) for place in self._places]
        gone = places if grader.files is None else [*places, grader.files_at]
        folder = str(self._places[0].parent)
        box.exec(["sh", "-c", _CLEAR, "clear", folder, grader.user, *gone], user=0, timeout=_STEP_TIMEOUT, cwd="/")

    def _read(self, box: Sandbox) -> tuple[float | None, str]:
        """Return the reward, or None and the reason why."""
        for place in self._places:
            try:
                if not box.files.exists(place):
                    continue
                text = box.files.read_text(place, limit=_LARGEST_REWARD)
            except (FileAccessError, UnicodeDecodeError) as error:
                return None, f"{place} cannot be read: {error}"
            try:
                return parse_reward(text), ""
            except ValueError as error:
                return None, f"{place} holds {text.strip()[:100]!r}: {error}"
        return None, f"the script wrote no {' and no '.join(map(str, self._places))}"


def parse_reward(text: str) -> float:
    """Return the reward in a file: a number, or a JSON object with one number, or one under ``reward``.

    Raises:
        ValueError: it is neither, or the number is not finite.
    """
    try:
        found: object = float(text)
    except ValueError:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("neither a number nor JSON") from None
    if isinstance(found, dict):
        found = found.get("reward") if "reward" in found else next(iter(found.values())) if len(found) == 1 else None
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError("not one number; give one, or a JSON object with one under 'reward'")
    if not math.isfinite(found):
        raise ValueError("not a finite number")
    return float(found)


def grade_live(task: Task, box: Sandbox, *, timeout: float | None = None) -> Grade:
    """Grade the work in a sandbox where an agent has done it, whose processes go on: Harbor's ``shared`` verifier.

    The agent could change every tool that the script uses, and what it left running may still write. So the grade has
    the flag :data:`LIVE`; :func:`.grade` judges the patch in a fresh sandbox.

    Args:
        task: a task with a script grader.
        box: the agent's sandbox.
        timeout: seconds the script may take; the task's own if None.

    Returns:
        The grade. Failures of ours are grades too, with the verdict ``infra_error``.
    """
    assert isinstance(task.grader, ScriptGrader)
    started, flags = time.monotonic(), (Flag(LIVE, "", "judged in the agent's own sandbox"),)
    try:
        run = ScriptRunner(task.grader, task.grader.timeout if timeout is None else timeout).run(box)
        found = judge(task, run, flags)
    except (MiniSandboxError, OSError) as error:
        detail = f"{type(error).__name__}: {error}"
        found = Grade(task.instance_id, Reason.INFRASTRUCTURE.verdict, Reason.INFRASTRUCTURE, detail, flags=flags)
    return replace(found, duration=time.monotonic() - started)


def _doubt(result: ExecResult, problem: str) -> Doubt:
    fate = f"the script {result.fate}" if result.outcome is Outcome.TIMEOUT else f"{problem} ({result.fate})"
    return Doubt(Reason.NO_REWARD, f"{fate}; log: {result.stderr.strip()[-200:] or 'empty'}")
