"""Harbor's task directories: what is read, and what is refused with its place before anything runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.builds import container_build, reference_of

from minisandbox.errors import TaskFileError
from minisandbox.spec import DockerfileBase
from minisandbox.tasks import ContainerBuild, Needs, ScriptGrader, TaskSet
from minisandbox.types import Network
from minisandbox.values import MiB

DATA = Path(__file__).parents[1] / "data" / "harbor"
Change = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A task directory that a test may change."""
    shutil.copytree(DATA / "count-lines", tmp_path / "count-lines")
    return tmp_path / "count-lines"


def write(name: str, text: str, *, old: str | None = None) -> Change:
    """A change of a task directory: a file that it gets, or a part of one that it gets in place of another."""

    def apply(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text if old is None else path.read_text().replace(old, text))

    return apply


def setting(text: str, section: str = "[environment]") -> Change:
    """A change of a section of task.toml."""
    return write("task.toml", f"{section}\n{text}", old=section)


def test_a_directory_of_tasks() -> None:
    tasks = TaskSet.load(f"harbor:{DATA}")
    assert (tasks.name, tasks.ids) == ("harbor", ("count-lines", "publish-answer"))
    shared, separate = tasks
    assert (shared.repo, separate.repo) == ("count-lines", "minisandbox/publish-answer")
    assert shared.problem_statement == "Write the number of lines of /app/poem.txt into /app/answer.txt.\n"
    environment = DATA / "count-lines/environment"
    assert shared.build == ContainerBuild(
        DockerfileBase(environment / "Dockerfile", environment),
        environment=(("GREETING", "hello"),),
        cut=False,
        reset=False,
    )
    logs = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
    off = Network.off()
    assert shared.needs == Needs(1024 * MiB, 512 * MiB, off, off, 120.0, entrypoint=True, directories=logs)
    assert isinstance(shared.grader, ScriptGrader)
    assert (shared.grader.mode, shared.grader.timeout) == ("live", 60.0)
    assert (shared.grader.files, shared.grader.carry) == (DATA / "count-lines/tests", (".", "/logs/artifacts"))
    assert shared.solution is not None
    assert (shared.solution.files, shared.solution.timeout) == (DATA / "count-lines/solution", 120.0)
    assert isinstance(separate.grader, ScriptGrader)
    assert (separate.grader.mode, separate.grader.carry) == ("fresh", ("/logs/artifacts", "/app/report.txt"))
    assert separate.grader.environment == (("EXPECTED", "forty-two"),)
    assert separate.solution is not None
    assert ("ANSWER", "forty-two") in separate.solution.environment


def test_one_task_and_rows_of_it(tmp_path: Path) -> None:
    tasks = TaskSet.load(f"harbor:{DATA / 'publish-answer'}")
    assert tasks.ids == ("publish-answer",)
    tasks.save(tmp_path / "rows.jsonl")
    assert TaskSet.load(tmp_path / "rows.jsonl", allow_local_sources=True) == tasks
    own = tmp_path / "own.jsonl"
    own.write_text(TaskSet.load(f"harbor:{DATA}").to_jsonl())
    assert TaskSet.load(own, allow_local_sources=True) == TaskSet.load(f"harbor:{DATA}")
    with pytest.raises(TaskFileError, match="outside of"):
        TaskSet.load(own)


@pytest.mark.parametrize(
    ("text", "granted", "asked"),
    [
        ("", Network.off(), Network.allow("*")),
        ('network_mode = "public"', Network.off(), Network.allow("*")),
        ('network_mode = "no-network"', Network.off(), Network.off()),
        ('network_mode = "allowlist"\nallowed_hosts = ["*.example.org"]', *[Network.allow("*.example.org")] * 2),
    ],
)
def test_networks(folder: Path, text: str, granted: Network, asked: Network) -> None:
    write("task.toml", text, old="allow_internet = false")(folder)
    (task,) = TaskSet.load(f"harbor:{folder}")
    assert task.needs.network == task.needs.grader_network == granted
    (task,) = TaskSet.load(f"harbor:{folder}", public_network=True)
    assert task.needs.network == asked


def test_a_prebuilt_image_unless_pins_are_asked_for(folder: Path) -> None:
    setting('docker_image = "example.org/app:1"')(folder)
    (task,) = TaskSet.load(f"harbor:{folder}")
    assert (reference_of(task), container_build(task).cut) == ("example.org/app:1", False)
    (task,) = TaskSet.load(f"harbor:{folder}", environment="pins")
    assert isinstance(container_build(task).base, DockerfileBase)


def test_variables_of_this_machine_are_for_trusted_tasks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_THIS_MACHINE", "secret")
    monkeypatch.setenv("GREETING", "secret")
    (task,) = TaskSet.load(f"harbor:{folder}")
    assert task.build.environment == (("GREETING", "hello"),)
    setting('TOKEN = "${TOKEN_OF_THIS_MACHINE}"', "[environment.env]")(folder)
    with pytest.raises(TaskFileError, match="needs the variable TOKEN_OF_THIS_MACHINE") as found:
        TaskSet.load(f"harbor:{folder}")
    assert (found.value.line, found.value.field) == (20, "environment.env.TOKEN")
    (task,) = TaskSet.load(f"harbor:{folder}", allow_local_sources=True)
    assert task.build.environment == (("TOKEN", "secret"), ("GREETING", "secret"))


@pytest.mark.parametrize(
    ("change", "line", "said"),
    [
        (write("task.toml", "schema_version = 1.9", old='version = "1.0"'), 1, "'schema_version' is '1.9', which"),
        (write("task.toml", "schema_version = []", old='version = "1.0"'), 1, "'schema_version' is []"),
        (write("task.toml", "[oops", old="[agent]"), None, "is not TOML"),
        (lambda folder: (folder / "task.toml").write_bytes(b"\xff"), None, "is not TOML"),
        (lambda folder: (folder / "environment/Dockerfile").unlink(), None, "has no environment/Dockerfile"),
        (lambda folder: (folder / "tests/test.sh").unlink(), None, "has no tests/test.sh"),
        (lambda folder: (folder / "instruction.md").unlink(), None, "instruction.md cannot be read"),
        (write("instruction.md", "<!-- canary -->\n\n"), None, "is empty"),
        (write("environment/docker-compose.yaml", "services: {}"), None, "services are not supported"),
        (write("trajectory.json", "{}"), None, "prior context is not supported"),
        (setting("gpus = 1"), 14, "'environment.gpus' is not supported"),
        (setting('os = "Windows"'), 14, "'environment.os' is 'Windows'"),
        (setting('cpus = 1\n[[environment.mcp_servers]]\nname = "x"'), 15, "'environment.mcp_servers' is not"),
        (setting('[environment.healthcheck]\ncommand = "x"'), 14, "'environment.healthcheck' is not supported"),
        (setting('[[steps]]\nname = "one"'), 14, "'steps' is not supported"),
        (setting('user = "app"', "[agent]"), 8, "'agent.user' is not supported"),
        (setting("timeout_sec = -1\n#", "[verifier]"), None, "is not TOML"),
        (write("task.toml", "timeout_sec = -1", old="timeout_sec = 60.0"), 11, "'verifier.timeout_sec' is -1"),
        (write("task.toml", "timeout_sec = true", old="timeout_sec = 60.0"), 11, "'verifier.timeout_sec' is True"),
        (write("task.toml", "memory = 'much'", old='memory = "1G"'), 15, "'environment.memory' is 'much'"),
        (setting('environment_mode = "own"', "[verifier]"), 11, "'verifier.environment_mode' is 'own'"),
        (setting('network_mode = "public"', "[verifier]"), 11, "different networks in one sandbox"),
        (setting('network_mode = "some"'), 14, "'environment.network_mode' is 'some'"),
        (
            setting('network_mode = "allowlist"\nallowed_hosts = ["10.0.0.0/8"]'),
            15,
            "'environment.allowed_hosts' is wrong",
        ),
        (setting('[verifier.environment]\ndocker_image = "x"'), 14, "'verifier.environment' is not supported"),
        (
            write("task.toml", 'artifacts = [{source = "/x", service = "db"}]\nversion', old="version"),
            1,
            "of the service 'db'",
        ),
        (write("task.toml", 'artifacts = ["/x/../../y"]\nversion', old="version"), 1, "without '..'"),
    ],
)
def test_what_is_not_supported_or_wrong_has_its_place(
    folder: Path, change: Change, line: int | None, said: str
) -> None:
    change(folder)
    with pytest.raises(TaskFileError) as found:
        TaskSet.load(f"harbor:{folder}", public_network=True)
    assert said in str(found.value)
    assert found.value.line == line
    assert found.value.path is not None
    assert found.value.path.is_relative_to(folder)


def test_a_verifier_image_of_its_own_is_refused(folder: Path) -> None:
    setting('environment_mode = "separate"', "[verifier]")(folder)
    assert len(TaskSet.load(f"harbor:{folder}")) == 1
    write("tests/Dockerfile", "FROM scratch")(folder)
    with pytest.raises(TaskFileError, match="tests/ has a Dockerfile"):
        TaskSet.load(f"harbor:{folder}")


def test_nothing_outside_of_a_task_directory(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys/solve.sh").write_text("secret")
    shutil.rmtree(folder / "solution")
    (folder / "solution").symlink_to(tmp_path / "keys")
    with pytest.raises(TaskFileError, match="outside of"):
        TaskSet.load(f"harbor:{folder}")
    assert len(TaskSet.load(f"harbor:{folder}", allow_local_sources=True)) == 1


def test_directories_without_tasks(tmp_path: Path) -> None:
    for place, reason in ((tmp_path, "has a task.toml"), (tmp_path / "nowhere", "does not exist")):
        with pytest.raises(TaskFileError, match="has no Harbor task") as found:
            TaskSet.load(f"harbor:{place}")
        assert reason in str(found.value)
