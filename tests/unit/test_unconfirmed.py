"""An unconfirmed pass, wherever grades go: neither resolved nor failed, and without a reward by default."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from tests.unit.training_tools import trajectory

from minisandbox.agents import open_agent
from minisandbox.cli.main import main
from minisandbox.errors import InvalidValue
from minisandbox.grade import Evaluated, Evaluation, Grade, Prediction, Reason, Verdict, evaluation_report
from minisandbox.grade.sets.evaluations import harness_report, write_evaluation_reports
from minisandbox.images import Image
from minisandbox.integrations.skyrl.config import SandboxOptions
from minisandbox.integrations.skyrl.output import Ended, metrics_of, output_of
from minisandbox.models import Sampling
from minisandbox.rollouts import KnownGrades, RunDirectory, RunReader, Setup
from minisandbox.rollouts.database import Packed, pack
from minisandbox.rollouts.rollout import finish
from minisandbox.rollouts.setup import Draw
from minisandbox.rollouts.state import RolloutState
from minisandbox.rollouts.sweagent import report as sweagent_report
from minisandbox.tasks import Task, TaskSet
from minisandbox.train.config import Groups
from minisandbox.train.groups import Result, Wanted
from minisandbox.train.sandboxes import SandboxRollouts
from minisandbox.trajectories import Trajectory
from minisandbox.trajectories.choosing import Collect
from minisandbox.trajectories.example import example_of
from minisandbox.trajectories.published import reward_of

GRADE = Grade("a__b-1", Verdict.UNCONFIRMED, Reason.UNCONFIRMED, "every named test passed, but")
ROLLOUT = trajectory(grade=GRADE)


def test_it_has_no_reward_unless_one_is_asked_for() -> None:
    assert (GRADE.resolved, GRADE.reward) == (None, None)
    assert (ROLLOUT.unconfirmed, ROLLOUT.reward, ROLLOUT.finished) == (True, None, False)
    assert (ROLLOUT.reward_or(None), ROLLOUT.reward_or(0.5)) == (None, 0.5)
    for other in (trajectory(), trajectory(reward=0.0), trajectory(grade=None)):
        assert other.reward_or(0.5) == other.reward
    assert Trajectory.from_text(ROLLOUT.to_text()) == ROLLOUT


def test_a_run_keeps_it_and_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        run.write(ROLLOUT)
    with RunReader(tmp_path / "run") as reader:
        (summary,) = reader.summaries()
    assert (summary.verdict, summary.reward, summary.finished) == (Verdict.UNCONFIRMED, None, False)
    main(["trajectories", "ls", str(tmp_path / "run")])
    main(["trajectories", "show", str(tmp_path / "run"), "a__b-1"])
    said = capsys.readouterr().out
    assert "unconfirmed" in said
    assert "no reward: the pass is unconfirmed" in said


def test_training_data_has_it_neither_as_solved_nor_as_failed() -> None:
    example = example_of(ROLLOUT, source="run")
    assert example.reward is None
    refused = Collect().refuse(example)
    assert refused is not None
    assert refused[0] == "no_reward"
    exported = sweagent_report(ROLLOUT)
    assert (exported["resolved"], exported["reward"], exported["verdict"]) == (None, None, "unconfirmed")
    assert reward_of(exported) is None


def test_a_rollout_that_ends_so_is_no_failure_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is graded once, and no phase is said to have failed."""
    asked: list[bytes] = []

    def grade(_task: Task, _image: object, submission: bytes, **_: object) -> Grade:
        asked.append(submission)
        return GRADE

    monkeypatch.setattr(sys.modules["minisandbox.rollouts.rollout"], "grade", grade)
    task = next(iter(TaskSet.load("quickstart")))
    state = RolloutState(task, ("image", "key"), Setup(agent=open_agent("oracle")), 0)
    state.submission = b"diff"
    found = finish(state, cast("Image", None), tries=3)
    assert (found.unconfirmed, found.reward, found.failure, found.tries) == (True, None, None, ())
    assert asked == [b"diff"]


def test_equal_submissions_do_not_share_it() -> None:
    known = KnownGrades()
    assert known.of("i", "t", b"p", lambda: GRADE) is GRADE
    good = replace(GRADE, verdict=Verdict.RESOLVED, reason=Reason.RESOLVED)
    assert known.of("i", "t", b"p", lambda: good) is good


def evaluation() -> Evaluation:
    tasks = tuple(TaskSet.load("quickstart"))[:2]
    results = tuple(
        Evaluated(task.instance_id, task.repo, "m", verdict, verdict)
        for task, verdict in zip(tasks, (Verdict.RESOLVED, Verdict.UNCONFIRMED), strict=True)
    )
    return Evaluation(tasks, tuple(Prediction(one.instance_id, "m") for one in results), results)


def test_an_evaluation_reports_it_apart(tmp_path: Path) -> None:
    """SWE-bench has no word for it: an error there, not an instance whose tests were judged."""
    found = evaluation()
    one, two = (task.instance_id for task in found.tasks)
    theirs, ours = harness_report(found), evaluation_report(found)
    assert (theirs["completed_ids"], theirs["unresolved_ids"], theirs["error_ids"]) == ([one], [], [two])
    assert (ours["resolved"], ours["unconfirmed"]) == (1, 1)
    assert ours["verdicts"] == {"resolved": 1, "unconfirmed": 1}
    assert not found.results[1].finished
    (tmp_path / "logs").mkdir()
    write_evaluation_reports(tmp_path, found)
    assert (tmp_path / "logs" / one / "report.json").exists()
    assert not (tmp_path / "logs" / two / "report.json").exists()


def test_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("minisandbox.cli.evaluate.run_evaluation", lambda *_, **__: evaluation())
    monkeypatch.setenv("MINISANDBOX_STORE", str(tmp_path / "store"))
    assert main(["evaluate", "quickstart", "-p", "gold"]) == 30
    said = capsys.readouterr()
    assert "1 unconfirmed" in said.out
    assert "without a verdict: 1" in said.err


@pytest.mark.parametrize(("asked", "reward"), [(None, None), (0.0, 0.0), (1.0, 1.0)])
def test_training_leaves_it_out_by_default(asked: float | None, reward: float | None) -> None:
    class Thread:
        """Returns the rollout."""

        async def packed(self, task: Task, *, attempt: int, draw: Draw) -> Packed:
            assert draw.seed == 1
            return pack(ROLLOUT)

    tasks = cast("Mapping[str, Task]", {"a__b-1": None})
    rollouts = SandboxRollouts(tasks, Thread(), Sampling(), unconfirmed=asked)  # type: ignore[arg-type] # runs nothing
    result: Result = asyncio.run(rollouts.run(Wanted("a__b-1", 0, 1)))
    assert result.reward == reward
    assert result.detail.startswith("unconfirmed: ")


@pytest.mark.parametrize(("asked", "reward"), [(None, 1.0), (0.0, 0.0)])
def test_skyrl_gets_it_without_loss_by_default(asked: float | None, reward: float) -> None:
    class Name:
        instance_id = "a__b-1"

    ended = [Ended(Name(), trajectory()), Ended(Name(), ROLLOUT, asked)]
    output = output_of(ended, pad_token=0)
    assert output["rewards"] == [1.0, reward]  # without one of its own, the others' mean
    masks = cast("list[list[int]]", output["loss_masks"])
    assert any(masks[1]) is (asked is not None)
    metrics = metrics_of(ended)
    assert (metrics["sandbox/rollouts_failed"], metrics["sandbox/rollouts_unconfirmed"]) == (0, 1)


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_its_reward_is_one_that_others_can_have(value: float) -> None:
    for options in (Groups, SandboxOptions):
        assert options().unconfirmed_reward is None
        with pytest.raises(InvalidValue, match="unconfirmed_reward"):
            options(unconfirmed_reward=value)
