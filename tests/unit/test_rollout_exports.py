"""Runs in the files of the field, read by the programs of others; and as a person reads them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from minisandbox.cli.main import main
from minisandbox.cli.rollout_display import BackgroundReporter
from minisandbox.errors import NotFound
from minisandbox.grade import Grade, Reason, Verdict, read_predictions
from minisandbox.models import Message, TokenUsage, ToolCall
from minisandbox.rollouts import Progress, RunDirectory, Summary, export_overview, export_sweagent
from minisandbox.rollouts.sweagent import trajectory_file
from minisandbox.tasks import read_statuses
from minisandbox.trajectories import Failure, PatchRecord, StepRecord, Timings, Trajectory, TurnRecord

CALL = ToolCall("c1", "bash", '{"command": "ls"}')
GRADE = Grade("a__b-1", Verdict.RESOLVED, Reason.RESOLVED, "every named test passed", (("t.py::a", "passed"),))
DONE = Trajectory(
    instance_id="a__b-1",
    attempt=0,
    agent="bash",
    image="a__b-1",
    image_key="00",
    started="2025-01-01T00:00:00+00:00",
    minisandbox="0.1.0",
    exit_status="submitted",
    detail="",
    steps=(StepRecord("ls", "exited", 0, None, b"x \x1b[2J\n", b"", 0, 0, 0.5, 1, 2.0),),
    submission=b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b \xff\n",
    grade=GRADE,
    failure=None,
    timings=Timings(0.1, 5.0, 0.2, 3.0, 8.4),
    model="m-1",
    messages=(
        Message("system", "You are"),
        Message("user", "Solve \x1b]0;owned\x07this"),
        Message("assistant", "I look.\n\n```bash\nls\n```", (CALL,)),
        Message("tool", "x", (), "c1"),
        Message("assistant", "Done.\n\n```submit\n```"),
    ),
    turns=(
        TurnRecord(2, 0.0, 2.0, 1, TokenUsage(10, 5), "tool_calls", 0.01),
        TurnRecord(4, 2.5, 1.5, 3, TokenUsage(20, 5), "stop", 0.01),
    ),
)
FAILED = replace(
    DONE, instance_id="a__b-2", exit_status="exit_api", grade=None, submission=None,
    failure=Failure("model", "ModelUnavailable", "503"), tries=(Failure("sandbox", "HostError", "no"),),
)  # fmt: skip
WITHOUT_MODEL = replace(DONE, instance_id="a__b-3", model="", agent="replay", messages=(), turns=())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunDirectory.open(tmp_path / "run", {}) as directory:
        for one in (DONE, FAILED, WITHOUT_MODEL):
            directory.write(one)
    return tmp_path / "run"


def test_predictions_and_statuses(run: Path) -> None:
    export_overview(run, run)
    predictions = {one.instance_id: one for one in read_predictions(run / "preds.json")}
    assert predictions.keys() == {"a__b-1", "a__b-3"}, "nothing could be taken of the other one"
    assert (predictions["a__b-1"].model, predictions["a__b-3"].model) == ("m-1", "replay")
    assert predictions["a__b-1"].patch == DONE.submission
    statuses = {"a__b-1": "submitted", "a__b-2": "exit_api", "a__b-3": "submitted"}
    assert read_statuses(run) == statuses
    assert yaml.safe_load((run / "run_batch_exit_statuses.yaml").read_text())["instances_by_exit_status"] == {
        "submitted": ["a__b-1", "a__b-3"],
        "exit_api": ["a__b-2"],
    }


def test_several_attempts_have_files_of_their_own(run: Path, tmp_path: Path) -> None:
    with RunDirectory.open(run, {}) as directory:
        directory.write(replace(DONE, attempt=1, submission=b"other\n"))
    names = list(export_sweagent(run, tmp_path / "out"))
    assert names == ["a__b-1_0", "a__b-1_1", "a__b-2_0", "a__b-3_0"]
    assert json.loads((tmp_path / "out" / "preds.json").read_text())["a__b-1"]["model_patch"].startswith("diff")
    assert json.loads((tmp_path / "out" / "preds.1.json").read_text())["a__b-1"]["model_patch"] == "other\n"
    assert (tmp_path / "out" / "a__b-1_1" / "a__b-1_1.patch").read_bytes() == b"other\n"
    assert read_statuses(tmp_path / "out")["a__b-1_1"] == "submitted"


def test_the_layout_of_swe_agent(run: Path, tmp_path: Path) -> None:
    assert list(export_sweagent(run, tmp_path / "out")) == ["a__b-1", "a__b-2", "a__b-3"]
    place = tmp_path / "out" / "a__b-1"
    assert (place / "a__b-1.patch").read_bytes() == DONE.submission
    traj = json.loads((place / "a__b-1.traj").read_text())
    assert traj.keys() == {"trajectory", "history", "info", "replay_config", "environment"}
    assert [one["action"] for one in traj["trajectory"]] == ["ls", "submit"]
    assert [one["thought"] for one in traj["trajectory"]] == ["I look.", "Done."]
    assert [one["observation"] for one in traj["trajectory"]] == ["x", ""]
    assert [len(one["query"]) for one in traj["trajectory"]] == [2, 4]
    assert [one["role"] for one in traj["history"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert traj["info"]["exit_status"] == "submitted"
    with_patch = trajectory_file(replace(DONE, patches=(PatchRecord(2, b"diff\n"),)))
    assert [one["state"] for one in with_patch["trajectory"]] == [{}, {"diff": "diff\n"}]  # type: ignore[attr-defined] # a list
    stopped = trajectory_file(replace(DONE, exit_status="submitted (exit_steps)"))
    assert stopped["info"]["exit_status"] == "submitted (exit_cost)"  # type: ignore[index] # SWE-agent's word for it
    assert traj["info"]["model_stats"] == {
        "instance_cost": 0.02, "tokens_sent": 30, "tokens_received": 10, "api_calls": 2,
    }  # fmt: skip
    assert not (tmp_path / "out" / "a__b-2" / "a__b-2.patch").exists()
    report = json.loads((tmp_path / "out" / "a__b-2" / "report.json").read_text())
    assert report["a__b-2"]["reward"] is None
    replayed = json.loads((tmp_path / "out" / "a__b-3" / "a__b-3.traj").read_text())
    assert [one["action"] for one in replayed["trajectory"]] == ["ls"]
    assert {one.instance_id for one in read_predictions(tmp_path / "out")} == {"a__b-1", "a__b-2", "a__b-3"}


COLLECT = """
import sys
from pathlib import Path
import swesmith
swesmith.REPO_DIR = Path(sys.argv[2])  # the wheel lacks the prompt that is read from there
from swesmith.train.traj_mgr.collect_trajs import main
main(out_dir=Path(sys.argv[2]), traj_dir=Path(sys.argv[1]), eval_dir=Path(sys.argv[1]), style=sys.argv[3], workers=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("style", ["ticks", "tool", "xml"])
def test_swe_smiths_own_collection_reads_it(run: Path, tmp_path: Path, style: str) -> None:
    out = tmp_path / "out"
    with RunDirectory.open(run, {}) as directory:  # it reads patches as UTF-8
        directory.write(replace(DONE, submission=b"diff --git a/x b/x\n"))
    assert len(list(export_sweagent(run, out))) == 3
    (tmp_path / "agent").mkdir()
    prompt = {"agent": {"templates": {"system_template": "SWE-smith's"}}}
    (tmp_path / "agent" / "swesmith_infer.yaml").write_text(yaml.safe_dump(prompt))
    command = [sys.executable, "-c", COLLECT, str(out), str(tmp_path), style]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = [json.loads(line) for line in (tmp_path / f"out.{style}.jsonl").read_text().splitlines()]
    found = {one["instance_id"]: one for one in lines}
    assert found.keys() >= {"a__b-1", "a__b-2"}, done.stdout + done.stderr
    assert [found[name]["resolved"] for name in ("a__b-1", "a__b-2")] == [True, None]
    assert found["a__b-1"]["model"] == "m-1"
    assert found["a__b-1"]["patch"].startswith("diff --git")
    assert [one["role"] for one in found["a__b-1"]["messages"]][:3] == ["system", "user", "assistant"]


# --- read in the terminal --------------------------------------------------------------------------------------------


def test_a_rollout_turn_by_turn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trajectories", "show", str(run), "b-1"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0] == "a__b-1 #0: submitted, reward 1"
    assert "2 turns, 30 tokens read, 10 sampled, no token ids, $0.0200" in lines
    assert "--- turn 1  at 0 ms, answered in 2.0 s: 10 tokens read, 5 sampled" in lines
    assert "--- turn 2  at 2.5 s, answered in 1.5 s: 20 tokens read, 5 sampled, 3 tries" in lines
    assert "  ran: 500 ms, exit status 0" in lines
    assert "+++ b/x" in lines
    assert "  passed       t.py::a" in lines
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_a_rollout_that_failed_says_where(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trajectories", "show", str(run), "a__b-2"]) == 0
    shown = capsys.readouterr().out
    assert "no reward: infrastructure error" in shown
    assert "earlier try: sandbox: no" in shown
    assert "infrastructure error in model: ModelUnavailable: 503" in shown
    assert main(["trajectories", "show", str(run), "a__b-3#0"]) == 0
    assert "--- step 1  500 ms, exit status 0" in capsys.readouterr().out


def test_long_texts_are_cut_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = replace(DONE, messages=(*DONE.messages, Message("user", "\n".join(f"line {n}" for n in range(500)))))
    with RunDirectory.open(tmp_path, {}) as directory:
        directory.write(long)
    assert main(["trajectories", "show", str(tmp_path), "a__b-1"]) == 0
    assert "[... 460 lines; --full shows them ...]" in capsys.readouterr().out
    assert main(["trajectories", "show", "--full", str(tmp_path), "a__b-1"]) == 0
    assert "line 250" in capsys.readouterr().out


def test_lists(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trajectories", "ls", str(run)]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "3 rollouts; mean reward 1.000 over 2"
    assert main(["trajectories", "ls", str(run), "--status", "exit", "--json"]) == 0
    assert [one["instance_id"] for one in json.loads(capsys.readouterr().out)] == ["a__b-2"]
    assert main(["trajectories", "show", str(run), "a__b-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exit_status"] == "submitted"


@pytest.mark.parametrize("name", ["nobody", "a__b", "a__b-1#7"])
def test_what_is_not_there(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trajectories", "show", str(run), name]) == NotFound.exit_code
    assert name.partition("#")[0] in capsys.readouterr().err


# --- reports while rollouts run ---------------------------------------------------------------------------------------


def test_a_slow_reader_blocks_no_rollout() -> None:
    may, told = threading.Event(), []

    def tell(news: Progress[Summary]) -> None:
        assert may.wait(60)
        told.append(news.done)

    reporter = BackgroundReporter(tell)
    for number in range(100):
        reporter(Progress(number, 100, Summary.of(DONE)))
    assert told == []
    may.set()
    reporter.close(60)
    assert told == list(range(100))


def test_a_closed_output_is_reported() -> None:
    def tell(news: Progress[Summary]) -> None:
        raise BrokenPipeError

    reporter = BackgroundReporter(tell)
    reporter(Progress(1, 2, Summary.of(DONE)))
    reporter.close(60)
    with pytest.raises(BrokenPipeError):
        reporter(Progress(2, 2, Summary.of(DONE)))
