"""The environment that mini-swe-agent is given, as mini-swe-agent uses it."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.integrations.conftest import TASK
from tests.integrations.extras import needs_mini
from tests.waiting import until

from minisandbox.errors import InvalidValue, MiniSandboxError, NotFound
from minisandbox.sandbox import live_sandboxes

if TYPE_CHECKING:
    from minisandbox.integrations.mini_swe_agent import SandboxEnvironment

pytestmark = [pytest.mark.kernel, needs_mini]

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
Make = Callable[..., "SandboxEnvironment"]


@pytest.fixture
def make() -> Make:
    """Make an environment as mini-swe-agent does, by its name."""
    from minisweagent.environments import get_environment  # noqa: PLC0415 - it may not be installed

    path = "minisandbox.integrations.mini_swe_agent.SandboxEnvironment"
    return lambda **settings: get_environment({"environment_class": path, **settings})  # type: ignore[return-value]


def said(environment: SandboxEnvironment, command: str, **options: Any) -> tuple[object, object]:
    output = environment.execute({"command": command}, **options)
    return output["returncode"], output["output"]


def live() -> set[str]:
    return {info.id for info in live_sandboxes(labels={"by": "mini-swe-agent"})}


def sandbox_of(environment: SandboxEnvironment) -> str:
    info = environment.serialize()["info"]
    assert isinstance(info, dict)
    return str(info["sandbox"]["id"])


# --- which sandbox ---------------------------------------------------------------------------------------------------


def test_without_an_image_it_says_how_to_name_one(make: Make, tasks: str) -> None:
    environment = make(tasks=tasks)
    uses: tuple[Callable[[], object], ...] = (
        environment.get_template_vars,
        lambda: environment.execute({"command": "ls"}),
    )
    for use in uses:
        with pytest.raises(InvalidValue) as caught:
            use()
        for option in ("run.env_startup_command=@bind {{instance_id}}", "environment.image", "environment.workspace"):
            assert option in str(caught.value)
    assert environment.serialize()["info"]


def test_the_first_command_names_the_task_and_no_later_one(make: Make, tasks: str) -> None:
    environment = make(tasks=tasks, cwd="/testbed", env={"WHO": "agent"})
    assert said(environment, f"@bind {TASK}") == (0, "")
    assert said(environment, "git log --oneline | wc -l; cat calc.py; echo $WHO; ls tests >&2; pwd") == (
        0, "1\ndef add(a, b):\n    return a - b\nagent\ntest_calc.py\n/testbed\n",
    )  # fmt: skip
    status, output = said(environment, "@bind host")
    assert status == 127
    assert "@bind" in str(output)
    assert (
        environment.get_template_vars(task="t").items() >= {"task": "t", "cwd": "/testbed", "system": "Linux"}.items()
    )
    environment.close()


def test_lines_after_the_name_are_run(make: Make, tasks: str) -> None:
    environment = make(tasks=tasks)
    assert said(environment, f"@bind {TASK}\necho 1 > new\ncat new calc.py | wc -l") == (0, "3\n")
    assert said(environment, "cat /testbed/new") == (0, "1\n")


def test_an_instance_may_be_called_as_its_docker_image(make: Make, tasks: str) -> None:
    environment = make(tasks=tasks)
    assert said(environment, "@bind docker.io/swebench/sweb.eval.x86_64.example_1776_calc-1:latest\npwd")[0] == 0
    assert said(environment, "ls")[1] == "calc.py\ntests\n"


def test_an_image_of_the_store_needs_no_tasks(make: Make, tasks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("MINISANDBOX_TASKS", tasks)
        make(image=TASK).close()
    assert said(make(image=TASK), "cat calc.py | wc -l") == (0, "2\n")
    assert said(make(image="host"), "echo $((6 * 7))") == (0, "42\n")


def test_what_is_not_there_is_an_error_that_names_it(make: Make, tasks: str) -> None:
    with pytest.raises(NotFound, match="no image 'example__other-1'"):
        make(tasks=tasks).execute({"command": "@bind example__other-1"})
    with pytest.raises(MiniSandboxError, match="example__broken-1"):
        make(tasks=tasks, image="example__broken-1")
    with pytest.raises(NotFound, match="no tasks are named"):
        make(image="example__other-1")
    with pytest.raises(InvalidValue, match=r"environment\.patch"):
        make(workspace=".")
    assert live() == set()


def test_settings_are_checked(make: Make, tmp_path: Path) -> None:
    from pydantic import ValidationError  # noqa: PLC0415 - it may not be installed

    with pytest.raises(ValidationError, match="tasks_file"):
        make(tasks_file="x")
    with pytest.raises(InvalidValue, match=r"memry.*memory"):
        make(image="host", limits={"memry": "1G"})
    with pytest.raises(InvalidValue, match="allow"):
        make(image="host", network="host", allow=["example.org"])
    with pytest.raises(InvalidValue, match="is not a directory"):
        make(workspace=str(tmp_path / "none"), patch=str(tmp_path / "x.patch"))
    of_docker = {"executable": "docker", "run_args": ["--rm"], "container_timeout": "2h", "pull_timeout": 9}
    environment = make(image="host", limits={"disk": "16M"}, interpreter=["bash", "-ec"], **of_docker)
    assert said(environment, "head -c 32M /dev/zero > /tmp/x; echo not reached")[0] == 1
    assert live() == {sandbox_of(environment)}


def test_variables_of_the_host_stay_there_unless_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "1")
    monkeypatch.setenv("SECRET", "2")
    environment = make(image="host", forward_env=["GIVEN", "NOT_SET"])
    assert said(environment, "echo $GIVEN$SECRET$NOT_SET") == (0, "1\n")
    assert "SECRET" not in environment.get_template_vars()


# --- commands --------------------------------------------------------------------------------------------------------


def test_how_commands_end(make: Make) -> None:
    environment = make(image="host", timeout=30)
    assert said(environment, "exit 3") == (3, "")
    assert said(environment, "kill -9 $$") == (137, "")
    status, output = said(environment, "if")
    assert status == 2
    assert "syntax error" in str(output)
    late = environment.execute({"command": "echo begun; sleep 1000"}, timeout=0.5)
    assert (late["returncode"], late["output"]) == (-1, "begun\n")
    assert "timed out after 0.5 seconds" in str(late["exception_info"])
    assert said(environment, "cat; echo on") == (0, "on\n")


def test_a_directory_that_the_agent_removed_is_its_own_doing(make: Make) -> None:
    environment = make(image="host", cwd="/tmp/here/..")
    assert said(environment, "mkdir /tmp/here /tmp/there", cwd="/tmp")[0] == 0
    assert said(environment, "rmdir /tmp/here; pwd")[0] == 0
    output = environment.execute({"command": "pwd"})
    assert output["returncode"] == -1
    assert "/tmp/here" in str(output["exception_info"])


@pytest.mark.parametrize("command", ["echo a\0b", "echo \ud800"])
def test_a_command_that_no_program_can_get_is_its_own_doing(make: Make, command: str) -> None:
    environment = make(image="host")
    failed = environment.execute({"command": command})
    assert failed["returncode"] == -1
    assert "InvalidValue" in str(failed["extra"])
    assert environment.execute({"command": "echo fine"})["output"] == "fine\n"


def test_submitting(make: Make) -> None:
    from minisweagent.exceptions import Submitted  # noqa: PLC0415 - it may not be installed

    environment = make(image="host")
    assert said(environment, f"{SUBMIT}; exit 1")[0] == 1
    assert said(environment, f"echo first; {SUBMIT}")[0] == 0
    with pytest.raises(Submitted) as caught:
        environment.execute({"command": f"{SUBMIT} && printf 'diff\\n+x\\n'"})
    (message,) = caught.value.messages
    assert message["extra"] == {"exit_status": "Submitted", "submission": "diff\n+x\n"}
    assert message["role"] == "exit"


def test_a_sandbox_that_has_ended_is_no_output_of_a_command(make: Make) -> None:
    environment = make(image="host")
    environment.close()
    environment.close()
    with pytest.raises(MiniSandboxError, match="stopped"):
        environment.execute({"command": "true"})


def test_the_sandbox_ends_with_the_environment(make: Make) -> None:
    environment = make(image="host")
    name = sandbox_of(environment)
    assert name in live()
    del environment
    gc.collect()
    until(lambda: name not in live())


# --- a copy of a directory -------------------------------------------------------------------------------------------


def git(directory: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org", *words]
    return subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A work tree with a change that is not committed, a new file and an ignored one."""
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "-q")
    (root / "a.txt").write_text("one\n")
    (root / ".gitignore").write_text("cache\n")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    (root / "a.txt").write_text("one\ntwo\n")
    (root / "new.txt").write_text("new\n")
    (root / "cache").write_text("x\n")
    return root


def test_a_workspace_is_a_copy_and_its_changes_are_a_patch(make: Make, project: Path, tmp_path: Path) -> None:
    from minisweagent.exceptions import Submitted  # noqa: PLC0415 - it may not be installed

    before = git(project, "status", "--short")
    environment = make(workspace=str(project), patch=str(tmp_path / "work.patch"))
    status = "git log --format=%s; git status --short; cat cache a.txt"
    assert said(environment, status) == (0, f"first\n{before}x\none\ntwo\n")
    said(environment, "echo three >> a.txt; echo more > more.txt; rm new.txt cache")
    with pytest.raises(Submitted):
        environment.execute({"command": SUBMIT})
    patch = (tmp_path / "work.patch").read_text()
    assert "+three" in patch
    assert "+two" not in patch
    assert "cache" not in patch
    said(environment, "echo four >> a.txt")
    environment.close()
    assert "+four" in (tmp_path / "work.patch").read_text()
    assert git(project, "status", "--short") == before
    git(project, "apply", str(tmp_path / "work.patch"))
    assert (project / "a.txt").read_text() == "one\ntwo\nthree\nfour\n"
    assert not (project / "new.txt").exists()


def test_changes_inside_submodules_of_a_workspace_are_in_the_patch(make: Make, project: Path, tmp_path: Path) -> None:
    """What was changed in them before is not, as for other files."""
    library = tmp_path / "library"
    git(tmp_path, "clone", "-q", str(project), str(library))
    git(project, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library), "lib")
    git(project, "commit", "-qm", "with a submodule")
    for name in ("a.txt", "cache"):
        (project / "lib" / name).write_text("one\ntwo\n")
    environment = make(workspace=str(project), patch=str(tmp_path / "work.patch"))
    assert said(environment, "echo three >> lib/a.txt; echo x >> lib/cache")[0] == 0
    environment.close()
    git(project, "apply", str(tmp_path / "work.patch"))
    assert (project / "lib/a.txt").read_text() == "one\ntwo\nthree\n"
    assert "cache" not in (tmp_path / "work.patch").read_text()


@pytest.mark.parametrize("kind", ["worktree", "plain"])
def test_workspaces_without_a_repository_of_their_own(make: Make, project: Path, tmp_path: Path, kind: str) -> None:
    directory = tmp_path / kind
    if kind == "worktree":
        git(project, "worktree", "add", "-q", str(directory))
    else:
        directory.mkdir()
        (directory / "a.txt").write_text("one\n")
    environment = make(workspace=str(directory), patch=str(tmp_path / "work.patch"))
    assert said(environment, "echo two >> a.txt")[0] == 0
    environment.close()
    assert (tmp_path / "work.patch").read_text().count("\n+two\n") == 1


def test_the_patch_is_written_when_the_process_ends(project: Path, tmp_path: Path) -> None:
    script = (
        "from minisandbox.integrations.mini_swe_agent import SandboxEnvironment\n"
        f"kept = SandboxEnvironment(workspace={str(project)!r}, patch='work.patch')\n"
        "print(kept.execute({'command': 'echo three >> a.txt'})['returncode'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "+three" in (tmp_path / "work.patch").read_text()
