"""Trajectories: what is written is what is read, and nothing else is taken for one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisandbox.errors import TrajectoryError
from minisandbox.grade import Flag, Grade, Reason, Verdict
from minisandbox.trajectories import VERSION, Failure, StepRecord, Timings, Trajectory

GRADE = Grade(
    "a__b-1",
    Verdict.FAILED,
    Reason.TESTS_NOT_PASSED,
    "1 test",
    (("t.py::a[\udcff]", "failed"),),
    ("t.py::a",),
    (),
    (Flag("pytest_config", "conftest.py"),),
    1,
    2.5,
    "log \ufffd",
)
STEPS = (
    StepRecord("make", "exited", 2, None, b"out \xff\x00", b"err", 0, 7, 0.25),
    StepRecord(("ls", "-l"), "timeout", None, 9, b"", b"", 0, 0, 1.0),
)
TRAJECTORY = Trajectory(
    instance_id="a__b-1",
    attempt=3,
    agent="replay",
    image="a__b-1",
    image_key="00",
    started="2025-01-01T00:00:00+00:00",
    minisandbox="0.1.0",
    exit_status="submitted",
    detail="",
    steps=STEPS,
    submission=b"diff \xe9\r\n",
    grade=GRADE,
    failure=None,
    timings=Timings(0.1, 1.0, 0.2, 3.0, 4.4),
)


def test_round_trip(tmp_path: Path) -> None:
    text = TRAJECTORY.to_text()
    assert text.isascii()
    assert Trajectory.from_text(text) == TRAJECTORY
    file = tmp_path / "t.json"
    file.write_text(text)
    assert Trajectory.load(file) == TRAJECTORY


@given(st.binary(), st.text(), st.floats(allow_nan=False, allow_infinity=False), st.none() | st.integers())
def test_any_content_survives(data: bytes, text: str, seconds: float, number: int | None) -> None:
    step = StepRecord(text, "exited", number, number, data, data, 0, 0, seconds)
    one = replace(TRAJECTORY, steps=(step,), submission=data, detail=text, failure=Failure("agent", "X", text))
    assert Trajectory.from_text(one.to_text()) == one


def test_missing_parts_survive() -> None:
    one = replace(TRAJECTORY, steps=(), submission=None, grade=None, failure=Failure("sandbox", "SandboxGone", "x"))
    assert Trajectory.from_text(one.to_text()) == one


def test_finished_means_a_verdict_about_the_work() -> None:
    assert TRAJECTORY.finished
    assert not replace(TRAJECTORY, grade=None).finished
    assert not replace(TRAJECTORY, grade=replace(GRADE, verdict=Verdict.INFRA_ERROR)).finished


def test_rewards() -> None:
    assert (GRADE.resolved, GRADE.reward) == (False, 0.0)
    assert replace(GRADE, verdict=Verdict.RESOLVED).reward == 1.0
    ours = replace(GRADE, verdict=Verdict.INFRA_ERROR)
    assert (ours.resolved, ours.reward) == (None, None)


Body = dict[str, object]


def changed(**fields: object) -> Callable[[Body], object]:
    return lambda body: {**body, **fields}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed(version=VERSION + 1), "reads up to"),
        (changed(version="1"), "version"),
        (changed(version=0), "version"),
        (changed(format="other"), "not a trajectory"),
        (changed(reward=1.0), "unknown field 'reward'"),
        (changed(attempt="3"), "attempt"),
        (changed(attempt=True), "attempt"),
        (changed(steps=None), "steps"),
        (changed(steps=[{"command": "x"}]), "steps[0]"),
        (changed(submission=5), "submission"),
        (changed(submission="\ud800"), "stand for no bytes"),
        (lambda body: {k: v for k, v in body.items() if k != "agent"}, "lacks the field 'agent'"),
        (lambda body: [body], "not a trajectory"),
    ],
)
def test_what_is_refused(change: Callable[[Body], object], words: str) -> None:
    text = json.dumps(change(json.loads(TRAJECTORY.to_text())))
    with pytest.raises(TrajectoryError) as caught:
        Trajectory.from_text(text, name="run/x.json")
    assert words in str(caught.value)
    assert "run/x.json" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "reason", "new"),
    [
        ("resolved", "resolved", Verdict.RESOLVED),
        ("unresolved", "tests_not_passed", Verdict.FAILED),
        ("unresolved", "patch_invalid", Verdict.PATCH_INVALID),
        ("unresolved", "report_damaged", Verdict.TAMPERED),
        ("unresolved", "timeout", Verdict.TIMEOUT),
        ("failed_to_grade", "infrastructure", Verdict.INFRA_ERROR),
    ],
)
def test_version_1_is_read(old: str, reason: str, new: Verdict) -> None:
    body = json.loads(TRAJECTORY.to_text())
    body["version"] = 1
    body["grade"] |= {"verdict": old, "reason": reason}
    for flag in body["grade"]["flags"]:
        del flag["detail"]
    read = Trajectory.from_text(json.dumps(body))
    assert read == replace(TRAJECTORY, grade=replace(GRADE, verdict=new, reason=Reason(reason)))


@pytest.mark.parametrize(
    "grade", [[], {"verdict": [], "reason": {}, "flags": 3}, {"verdict": "unresolved", "reason": "x"}]
)
def test_damage_in_version_1(grade: object) -> None:
    body = json.loads(TRAJECTORY.to_text()) | {"version": 1, "grade": grade}
    with pytest.raises(TrajectoryError):
        Trajectory.from_text(json.dumps(body))


def test_unknown_fields_below_are_refused() -> None:
    body = json.loads(TRAJECTORY.to_text())
    body["grade"]["verdict"] = "excellent"
    with pytest.raises(TrajectoryError, match=r"grade\.verdict is 'excellent'"):
        Trajectory.from_text(json.dumps(body))
    body["grade"] |= {"verdict": "resolved", "bonus": 1}
    with pytest.raises(TrajectoryError, match="unknown field 'bonus'"):
        Trajectory.from_text(json.dumps(body))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"version": 1}', "\ufffd"])
def test_damage(text: str) -> None:
    with pytest.raises(TrajectoryError):
        Trajectory.from_text(text)
