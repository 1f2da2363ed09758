"""Trajectories: what is written is what is read, and nothing else is taken for one."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisandbox.errors import TrajectoryError
from minisandbox.grade import Flag, Grade, Reason, Verdict
from minisandbox.models import Message, TokenRow, TokenUsage, ToolCall
from minisandbox.trajectories import VERSION, Failure, PatchRecord, StepRecord, Timings, Trajectory, TurnRecord
from minisandbox.trajectories.codec import row_from_json, row_to_json

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
GOLDEN = Path(__file__).parents[1] / "golden" / "trajectories"
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


def test_what_a_model_said_survives() -> None:
    row = TokenRow(array("i", [1, 2, 3, 2**31 - 1]), array("d", [0.0, -0.1, -1e-300, -0.0]), b"\0\1\0\1", (0, 1))
    call = ToolCall("c1", "bash", "not json \ud800")
    one = replace(
        TRAJECTORY,
        model="m",
        sampling={"temperature": 1.0, "stop": ["a"], "extra": {"x": [1, None]}},
        configuration={"prompt": "p"},
        messages=(Message("user", "hi"), Message("assistant", "", (call,), None, "hm"), Message("tool", "é", (), "c1")),
        turns=(TurnRecord(1, 0.5, 2.0, 2, TokenUsage(100, 20, 60), "tool_calls", 0.25),),
        rows=(replace(row, versions=((-1, 1), (7, 1), (-1, 1), (8, 1))), TokenRow(array("i"), array("d"), b"", ())),
        patches=(PatchRecord(1, b"diff \xff"), PatchRecord(2, None, "it has 70000 bytes")),
        tries=(Failure("model", "ModelUnavailable", "503"),),
    )
    for indent in (None, 1):
        again = Trajectory.from_text(one.to_text(indent=indent))
        assert again == one
        assert again.rows[0].logprobs.tobytes() == row.logprobs.tobytes(), "to the bit"


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(max_value=0, allow_nan=False), st.booleans())))
def test_any_tokens_survive(tokens: list[tuple[int, float, bool]]) -> None:
    ids, logprobs = array("i", [one for one, _, _ in tokens]), array("d", [p for _, p, _ in tokens])
    row = TokenRow(ids, logprobs, bytes(loss for _, _, loss in tokens), (0,))
    assert row_from_json(json.loads(json.dumps(row_to_json(row))), "row") == row


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("length", 3), ("ids", "!"), ("ids", ""), ("logprobs", None), ("turns", ["0"]), ("loss", [[0, 9]]),
        ("loss", [[1, 1]]), ("loss", [[1, 2], [0, 1]]), ("loss", "x"), ("more", 1), ("versions", [[3, 1]]),
        ("versions", [[3, 0], [3, 2]]), ("versions", [3, 2]),
    ],
)  # fmt: skip
def test_damaged_tokens_are_named(field: str, value: object) -> None:
    row = row_to_json(TokenRow(array("i", [1, 2]), array("d", [0.0, -1.0]), b"\0\1", (0,)))
    assert isinstance(row, dict)
    with pytest.raises(TrajectoryError, match=r"x\.rows\[0\]"):
        row_from_json(row | {field: value}, "x.rows[0]")


def test_rewards_of_trajectories() -> None:
    assert (TRAJECTORY.reward, replace(TRAJECTORY, grade=None).reward) == (0.0, None)
    assert replace(TRAJECTORY, failure=Failure("grade", "infrastructure", "x")).reward is None
    assert replace(TRAJECTORY, grade=replace(GRADE, verdict=Verdict.RESOLVED)).reward == 1.0


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
        (changed(submission="\ud800"), "unpaired surrogates"),
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


def golden(version: int) -> str:
    """What MiniSandbox wrote when this was its version."""
    return (GOLDEN / f"version_{version}.json").read_text()


def test_each_version_is_read() -> None:
    reads = {version: Trajectory.from_text(golden(version)) for version in range(1, VERSION + 1)}
    assert reads[4].to_text() == golden(4)
    without = replace(reads[4], patches=(), turns=tuple(replace(turn, queued=0.0) for turn in reads[4].turns))
    assert replace(without, rows=tuple(replace(row, versions=()) for row in without.rows)) == reads[3]
    assert reads[3].turns[0].queued == 0.0
    steps = tuple(replace(step, turn=0, began=0.0, stateful=False) for step in reads[3].steps)
    timings = replace(reads[3].timings, queued=0.0, image=0.0, model=0.0, commands=0.0)
    bare = replace(reads[3], steps=steps, timings=timings, agent="replay", minisandbox="0.0.2")
    bare = replace(bare, model="", sampling={}, configuration={}, messages=(), turns=(), rows=(), tries=())
    assert reads[2] == bare
    assert reads[1].grade is not None
    assert reads[2].grade is not None
    unexplained = replace(reads[2].grade, flags=tuple(replace(flag, detail="") for flag in reads[2].grade.flags))
    assert reads[1] == replace(reads[2], minisandbox="0.0.1", grade=unexplained)


def test_only_the_current_version_is_written() -> None:
    for version in range(1, VERSION):
        assert json.loads(Trajectory.from_text(golden(version)).to_text())["version"] == VERSION


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
    body: Any = json.loads(golden(1))
    body["grade"] |= {"verdict": old, "reason": reason}
    grade = Trajectory.from_text(json.dumps(body)).grade
    assert grade is not None
    assert (grade.verdict, grade.reason) == (new, Reason(reason))


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
