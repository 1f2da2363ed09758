"""``minisandbox sweagent``: SWE-agent finds our deployment in its configuration.

SWE-agent is on no package index. What stands for it here has its name, takes SWE-ReX's list of deployments into a class
when it is imported as it does, and uses the deployment in its way: each request in an event loop of its own. What the
whole of it does is said in docs/how-to/use-swe-agent.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integrations.conftest import TASK
from tests.integrations.extras import needs_swerex

from minisandbox.errors import HostError, InvalidValue, MissingExtra

pytestmark = [pytest.mark.kernel, pytest.mark.slow, needs_swerex]

STAND_IN = """
import asyncio, json, sys
from pydantic import BaseModel
from swerex.deployment.config import DeploymentConfig, get_deployment
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest


class Instances(BaseModel):
    deployment: DeploymentConfig


def main(arguments):
    print(sys.argv[0], arguments[0])
    if arguments[0] == "fail":
        raise RuntimeError("of the agent's own")
    if arguments[0] == "leave":
        sys.exit(9)
    given = dict(zip(arguments[1::2], arguments[2::2]))
    config = Instances.model_validate({"deployment": {"type": given["--type"]}}).deployment.model_copy(deep=True)
    config.image = given["--image"]
    deployment = get_deployment(config)
    asyncio.run(deployment.start())
    asyncio.run(deployment.runtime.create_session(CreateBashSessionRequest(startup_source=["/root/.bashrc"])))
    for command in ("cd /testbed && x=1", "ls; echo $x"):
        seen = asyncio.run(deployment.runtime.run_in_session(BashAction(command=command, timeout=60)))
        print("seen:", json.dumps(seen.output))
    asyncio.run(deployment.stop())
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A directory with something called sweagent."""
    package = tmp_path / "sweagent" / "run"
    package.mkdir(parents=True)
    (tmp_path / "sweagent" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "run.py").write_text(STAND_IN)
    return tmp_path


def launch(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "minisandbox", "sweagent", *words],
        env={**os.environ, "PYTHONPATH": str(path)}, cwd=path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_its_deployments_have_ours(stand_in: Path, tasks: str) -> None:
    done = launch(stand_in, "--tasks", tasks, "--", "run-batch", "--type", "minisandbox", "--image", TASK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sweagent run-batch\n")
    seen = [json.loads(line.removeprefix("seen: ")) for line in done.stdout.splitlines() if line.startswith("seen: ")]
    assert seen == ["", "calc.py\ntests\n1\n"]


def test_its_failures_are_its_own(stand_in: Path) -> None:
    failed = launch(stand_in, "--", "fail")
    assert failed.returncode == 1
    assert "RuntimeError: of the agent's own" in failed.stderr
    assert "a bug in MiniSandbox" not in failed.stderr
    assert launch(stand_in, "--", "leave").returncode == 9
    unknown = launch(stand_in, "--", "run", "--type", "minisandbox", "--image", "example__other-1")
    assert unknown.returncode == 1
    assert "MINISANDBOX_TASKS" in unknown.stderr


def test_what_is_missing_is_said(stand_in: Path) -> None:
    without = launch(stand_in)
    assert without.returncode == InvalidValue.exit_code
    assert "minisandbox sweagent --tasks TASKS -- run-batch" in without.stderr
    assert launch(stand_in, "run").returncode == InvalidValue.exit_code
    (stand_in / "sweagent" / "__init__.py").write_text("assert False, '/nowhere/config'\n")
    halfway = launch(stand_in, "--", "run")
    assert halfway.returncode == HostError.exit_code
    assert "SWE_AGENT_CONFIG_DIR" in halfway.stderr
    (stand_in / "sweagent" / "run" / "run.py").unlink()
    (stand_in / "sweagent" / "__init__.py").write_text("")
    old = launch(stand_in, "--", "run")
    assert old.returncode == MissingExtra.exit_code
    assert "pip install -e CHECKOUT" in old.stderr


def test_its_command_line_reaches_it_as_it_was_typed(stand_in: Path) -> None:
    words = ["fail", "--help", "--tasks", "x", "--", json.dumps({"a b": None})]
    (stand_in / "sweagent" / "run" / "run.py").write_text("def main(arguments):\n    print(repr(arguments))\n")
    assert launch(stand_in, "--", *words).stdout == repr(words) + "\n"
