"""The whole way: an unmodified agent, a bundled task, a scripted model, and the verdict on what was submitted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integrations.extras import needs_mini, needs_swerex
from tests.integrations.scripted_model import ScriptedModel, scripted_model

from minisandbox.tasks import Task, TaskSet

with contextlib.suppress(ImportError):  # then it is skipped
    from swerex.runtime.abstract import BashAction, CreateBashSessionRequest, ReadFileRequest

    from minisandbox.integrations.swerex import MiniSandboxDeployment

pytestmark = [pytest.mark.kernel, pytest.mark.index, pytest.mark.once, pytest.mark.slow]

IDS = ("pytoolz__toolz-1.0.0.update_in", "pytoolz__toolz-1.0.0.outer_join")
SECONDS = 600
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "use-swe-agent.md"


def solving(task: Task) -> list[str]:
    """What somebody would type who knows the answer: the change, the patch, the submission."""
    reverse = "-R " if task.reference.reverse else ""
    return [
        f"git apply {reverse}<<'EOF'\n{task.reference.patch}\nEOF",
        "git diff > patch.txt",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat patch.txt",
    ]


def minisandbox(*words: str) -> str:
    command = [sys.executable, "-m", "minisandbox", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def variables(model: ScriptedModel) -> dict[str, str]:
    """What lets litellm ask a model of our own, and mini-swe-agent work with one that has no price."""
    return {
        **os.environ, "OPENAI_API_BASE": model.url, "OPENAI_API_KEY": "none", "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_CONFIGURED": "true",
    }  # fmt: skip


def verdicts(predictions: Path) -> dict[str, str]:
    out = predictions.parent / "evaluation"
    only = [word for task in IDS for word in ("--only", task)]
    minisandbox("evaluate", "quickstart", *only, "--predictions", str(predictions), "-o", str(out))
    report = json.loads((out / "report.json").read_text())
    return dict.fromkeys(report["resolved_ids"], "resolved")


@pytest.fixture(scope="module", autouse=True)
def image() -> None:
    """The image of the first; the second's is built by who needs it."""
    minisandbox("image", "build", "quickstart", "--only", IDS[0])


@needs_mini
def test_mini_swe_agents_own_command_line(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    only = [word for task in IDS for word in ("--only", task)]
    minisandbox("tasks", "filter", "quickstart", *only, "-o", str(tmp_path / "data" / "test.jsonl"))
    bind = "run.env_startup_command=@bind {{instance_id}}"
    both = " || ".join(f"{{ {command}\n}}" for command in (solving(TaskSet.load("quickstart")[one])[0] for one in IDS))
    with scripted_model([both, *solving(TaskSet.load("quickstart")[IDS[0]])[1:]]) as model:
        environment = variables(model) | {"MINISANDBOX_TASKS": "quickstart", "HF_HOME": str(tmp_path / "hf")}
        done = subprocess.run(
            [
                sys.executable, "-m", "minisweagent.run.utilities.mini_extra", "swebench", "--subset", "data",
                "--split", "test", "-w", "2", "-m", "openai/scripted", "-o", "out", "-c", "swebench.yaml", "-c", bind,
                "--environment-class", "minisandbox.integrations.mini_swe_agent.SandboxEnvironment",
            ],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert verdicts(tmp_path / "out" / "preds.json") == dict.fromkeys(IDS, "resolved"), done.stdout
    trajectory = json.loads((tmp_path / "out" / IDS[0] / f"{IDS[0]}.traj.json").read_text())
    assert trajectory["info"]["exit_status"] == "Submitted"
    assert trajectory["info"]["sandbox"]["image"] == IDS[0]


@needs_mini
def test_mini_over_a_copy_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "greeting").write_text("hello\n")
    with scripted_model(["echo world >> greeting; pwd", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]) as model:
        done = subprocess.run(
            [
                sys.executable, "-m", "minisweagent.run.mini", "-y", "--exit-immediately", "-t", "greet the world",
                "-m", "openai/scripted", "-o", "../mini.traj.json", "-c", "mini.yaml", "-c", "environment.workspace=.",
                "-c", "environment.patch=../work.patch", "--environment-class",
                "minisandbox.integrations.mini_swe_agent.SandboxEnvironment",
            ],
            cwd=tmp_path / "work", env=variables(model), capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert (tmp_path / "work" / "greeting").read_text() == "hello\n"
    assert "+world" in (tmp_path / "work.patch").read_text()
    assert "/testbed" in (tmp_path / "mini.traj.json").read_text()


@needs_swerex
@pytest.mark.parametrize("block", re.findall(r"```py\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL))
def test_the_python_of_the_guide_runs(block: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@needs_swerex
def test_a_client_of_swe_rex(tmp_path: Path) -> None:
    async def solve() -> str:
        deployment = MiniSandboxDeployment(image=IDS[0])
        await deployment.start()
        await deployment.runtime.create_session(CreateBashSessionRequest())
        for command in solving(TaskSet.load("quickstart")[IDS[0]])[:2]:
            await deployment.runtime.run_in_session(BashAction(command=command, timeout=60))
        patch = await deployment.runtime.read_file(ReadFileRequest(path="/testbed/patch.txt"))
        await deployment.stop()
        return patch.content

    entry = {"instance_id": IDS[0], "model_name_or_path": "scripted", "model_patch": asyncio.run(solve())}
    (tmp_path / "preds.json").write_text(json.dumps({IDS[0]: entry}))
    assert verdicts(tmp_path / "preds.json") == {IDS[0]: "resolved"}
