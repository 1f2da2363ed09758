"""Harbor's task directories, built, solved and judged in real sandboxes over a base of bash and busybox."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.kernel.test_container_images import GROUP, PASSWD, static_busybox
from tests.unit.oci_tools import END, MadeImage, entry, folder, hard_link

from minisandbox.agents import Agent, Ending, OracleAgent, Session
from minisandbox.cli.main import main
from minisandbox.grade import LIVE, REGRADED, Cause, Reason, Status, Validation, Verdict, validate
from minisandbox.grade.check import check_set
from minisandbox.grade.verdict import NOT_CONFIRMED
from minisandbox.images import Image, build, pull
from minisandbox.rollouts import RunReader, Setup
from minisandbox.rollouts.rollout import rollout_async
from minisandbox.store import Store
from minisandbox.tasks import Task, TaskSet
from minisandbox.trajectories import Trajectory

pytestmark = pytest.mark.kernel

DATA = Path(__file__).parents[2] / "data" / "harbor"
APPLETS = (
    "cat", "chmod", "chown", "echo", "find", "grep", "head", "id", "ln", "ls", "mkdir", "mv", "rm", "sed", "sh",
    "sleep", "sort", "touch", "tr", "uniq", "wc", "xargs",
)  # fmt: skip


@pytest.fixture(scope="module")
def base() -> bytes:
    """The tar of a small root filesystem with bash, without its end."""
    program, bash = static_busybox(), shutil.which("bash")
    if program is None or bash is None:
        pytest.skip("no static busybox or no bash here (Debian's packages are busybox-static and bash)")
    needed = subprocess.run(["ldd", bash], check=True, capture_output=True, text=True).stdout.split()
    libraries = dict.fromkeys(word for word in needed if word.startswith("/"))
    parents = sorted({str(parent) for path in libraries for parent in Path(path).parents if str(parent) != "/"})
    return (
        folder("bin") + entry("bin/busybox", program, mode=0o755)
        + b"".join(hard_link(f"bin/{name}", "bin/busybox") for name in APPLETS)
        + entry("bin/bash", Path(bash).read_bytes(), mode=0o755)
        + b"".join(folder(path[1:]) for path in parents)
        + b"".join(entry(path[1:], Path(path).read_bytes(), mode=0o755) for path in libraries)
        + folder("etc") + entry("etc/passwd", PASSWD) + entry("etc/group", GROUP) + folder("tmp", mode=0o1777)
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path, base: bytes, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with an image ``harbor-base``."""
    found = Store.open(tmp_path / "store")
    monkeypatch.setenv("MINISANDBOX_STORE", str(tmp_path / "store"))
    layout = MadeImage([base + END], {"Env": ["PATH=/bin"]}).write_layout(tmp_path / "layout")
    pull(f"oci:{layout}", store=found, name="harbor-base")
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The directory of tasks, which a test may change."""
    shutil.copytree(DATA, tmp_path / "harbor")
    return tmp_path / "harbor"


def made(place: Path, name: str, store: Store) -> tuple[Task, Image]:
    task = TaskSet.load(f"harbor:{place}")[name]
    return task, build(task.recipe(), store=store, name=name)


def validated(place: Path, name: str, store: Store, confirm: str = "once") -> Validation:
    task, image = made(place, name, store)
    return validate(task, image, confirm=confirm)


def verifier(place: Path, text: str) -> None:
    (place / "count-lines/tests/test.sh").write_text(text)


def test_both_kinds_of_verifier_tell_the_solution_from_none(store: Store, place: Path) -> None:
    for name in ("count-lines", "publish-answer"):
        found = validated(place, name, store)
        assert (found.status, found.notes) == (Status.VALID, ()), found
        assert (found.reference[0].reward, found.empty[0].reward) == (1.0, 0.0)
    assert validated(place, "count-lines", store, "always").valid


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("#!/bin/bash\n", "wrote no /logs/verifier/reward.txt and no /logs/verifier/reward.json"),
        ("#!/bin/bash\necho good > /logs/verifier/reward.txt\n", "could not convert string to float"),
        ('#!/bin/bash\necho \'{"reward": "1"}\' > /logs/verifier/reward.json\n', "'1' is not a number"),
        ("#!/bin/bash\necho 1 > /logs/verifier/reward.txt; sleep 600\n", "timed out after 2."),
        ("#!/no/such/interpreter\n", "wrote no"),
    ],
)
def test_a_verifier_without_a_reward_is_an_error_with_its_cause(
    store: Store, place: Path, script: str, said: str
) -> None:
    verifier(place, script)
    config = place / "count-lines/task.toml"
    config.write_text(config.read_text().replace("timeout_sec = 60.0", "timeout_sec = 2.0"))
    found = validated(place, "count-lines", store)
    assert (found.status, found.cause) == (Status.ERROR, Cause.INFRASTRUCTURE), found
    assert said in found.detail
    assert {(one.verdict, one.reward) for one in found.reference + found.empty} == {(Verdict.INFRA_ERROR, None)}


@pytest.mark.parametrize("user", ["app", "1234", "app:app", "0:5"])
def test_an_image_with_a_user(store: Store, place: Path, user: str) -> None:
    """The solution and the verifier run as that user, and may write what Harbor's containers let every user write."""
    dockerfile = place / "count-lines/environment/Dockerfile"
    accounts = "RUN echo app:x:1000:1000::/:/bin/sh >> /etc/passwd && echo app:x:1000: >> /etc/group && chmod 777 /app"
    dockerfile.write_text(f"{dockerfile.read_text()}{accounts}\nUSER {user}\n")
    solution = place / "count-lines/solution/solve.sh"
    solution.write_text(solution.read_text() + "echo note > /logs/agent/notes\necho note > /logs/artifacts/notes\n")
    found = validated(place, "count-lines", store)
    assert (found.status, found.notes) == (Status.VALID, ()), found
    assert (found.reference[0].reward, found.empty[0].reward) == (1.0, 0.0)
    task, image = made(place, "count-lines", store)
    command = "wc -l < poem.txt > answer.txt && echo note > /logs/artifacts/notes && id -u > /logs/agent/notes"
    assert rolled(task, image, command, "always").reward == 1.0


def with_entrypoint(place: Path, script: str) -> None:
    folder = place / "count-lines/environment"
    (folder / "entrypoint").write_text(f"#!/bin/sh\n{script}")
    dockerfile = folder / "Dockerfile"
    dockerfile.write_text(f'{dockerfile.read_text()}COPY --chmod=755 entrypoint /\nENTRYPOINT ["/entrypoint", "-v"]\n')


SERVICE = """\
mkfifo /ask /reply
(cat /ask > /dev/null; wc -l < /app/poem.txt > /reply) &
echo "$@" > /started
shift
exec "$@"
"""
ASK = "echo > /ask && cat /reply > answer.txt"


def test_an_entrypoint_prepares_every_sandbox(store: Store, place: Path) -> None:
    """The agent and all verifiers find its files, the agent also the service that it left running."""
    with_entrypoint(place, SERVICE)
    (place / "count-lines/solution/solve.sh").write_text(f"#!/bin/bash\n{ASK}\n")
    judge = place / "count-lines/tests/test.sh"
    judge.write_text(
        judge.read_text() + '[ "$(cat /started)" = "-v sh -c sleep infinity" ] || echo 0 > /logs/verifier/reward.txt\n'
    )
    found = validated(place, "count-lines", store)
    assert (found.status, found.notes) == (Status.VALID, ()), found
    task, image = made(place, "count-lines", store)
    assert seen(rolled(task, image, ASK, "always")) == (1.0, [LIVE, REGRADED])


@pytest.mark.parametrize(("script", "status"), [("exit 3\n", 3), ('exec "$2"\n', 0)])
def test_an_entrypoint_that_exits_is_an_error_with_a_hint(store: Store, place: Path, script: str, status: int) -> None:
    with_entrypoint(place, f"echo broken >&2\n{script}")
    found = validated(place, "count-lines", store)
    assert (found.status, found.cause) == (Status.ERROR, Cause.INFRASTRUCTURE), found
    assert f"exit status {status}" in found.detail
    assert "broken" in found.detail
    assert "ENTRYPOINT" in found.detail
    task, image = made(place, "count-lines", store)
    assert rolled(task, image, "true").failure is not None


def test_what_a_task_can_get_wrong(store: Store, place: Path) -> None:
    (place / "count-lines/solution/solve.sh").write_text("#!/bin/bash\necho 4 > answer.txt\n")
    found = validated(place, "count-lines", store)
    assert (found.status, found.cause) == (Status.INVALID, Cause.REFERENCE_FAILS), found
    assert "0.5" in found.detail
    verifier(place, "echo 1 > /logs/verifier/reward.txt\n")
    assert validated(place, "count-lines", store).cause is Cause.EMPTY_RESOLVES
    shutil.rmtree(place / "count-lines/solution")
    assert "no patch, no solution" in validated(place, "count-lines", store).detail


def test_a_solution_that_hangs_or_is_in_the_image(store: Store, place: Path) -> None:
    config = place / "count-lines/task.toml"
    config.write_text(config.read_text().replace("timeout_sec = 120.0", "timeout_sec = 2.0"))
    (place / "count-lines/solution/solve.sh").write_text("#!/bin/bash\nsleep 600\n")
    found = validated(place, "count-lines", store)
    assert (found.status, found.cause) == (Status.INVALID, Cause.REFERENCE_FAILS), found
    assert "the solution" in found.detail
    shutil.copytree(place / "publish-answer/tests", place / "publish-answer/environment/copy")
    dockerfile = place / "publish-answer/environment/Dockerfile"
    dockerfile.write_text(dockerfile.read_text() + "COPY copy/test.sh /app/left/\n")
    found = validated(place, "publish-answer", store)
    assert (found.status, found.cause) == (Status.INVALID, Cause.LEAK), found
    assert "/app/left/test.sh" in found.detail


def test_check_finds_a_verifier_that_an_agent_can_change(store: Store, place: Path) -> None:
    """And nothing at two honest ones but their image, which is named by a tag."""

    def found() -> dict[str, list[tuple[str, str]]]:
        tasks = tuple(TaskSet.load(f"harbor:{place}"))
        checked = check_set(tasks, lambda task: build(task.recipe(), store=store, name=task.instance_id), repeat=1)
        return {one.instance_id: [(f.check, f.where) for f in one.findings] for one in checked}

    plain = [("unpinned", "Dockerfile")]
    assert found() == {"count-lines": plain, "publish-answer": plain}
    judge = place / "count-lines/tests/test.sh"
    judge.rename(place / "count-lines/environment/judge.sh")
    verifier(place, "#!/bin/bash\n/app/tools/judge.sh\n")
    dockerfile = place / "count-lines/environment/Dockerfile"
    dockerfile.write_text(dockerfile.read_text() + "COPY --chmod=777 judge.sh tools/\n")
    assert found()["count-lines"] == [*plain, ("writable_verifier", "/app/tools/judge.sh")]


def test_work_outside_of_the_working_directory_is_noted(store: Store, place: Path) -> None:
    (place / "count-lines/solution/solve.sh").write_text("#!/bin/bash\necho 3 > /etc/answer\n")
    verifier(place, '[ "$(cat /etc/answer)" = 3 ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n')
    found = validated(place, "count-lines", store)
    assert found.status is Status.VALID, found
    assert "does not pass in a clean sandbox" in found.notes[0]


# --- rollouts --------------------------------------------------------------------------------------------------------


class Commands(Agent):
    """An agent that runs one command."""

    name = "commands"
    needs_model = False

    def __init__(self, command: str) -> None:
        self._command = command

    async def run(self, task: Task, session: Session) -> Ending:
        """Run it."""
        await session.perform(self._command, timeout=20.0)
        return Ending("submitted")


def rolled(task: Task, image: Image, command: str | None, confirm: str = "once") -> Trajectory:
    agent = OracleAgent() if command is None else Commands(command)
    return asyncio.run(rollout_async(task, image, Setup(agent=agent, confirm=confirm)))


def seen(found: Trajectory) -> tuple[float | None, list[str]]:
    assert found.grade is not None, found.failure
    return found.reward, [flag.kind for flag in found.grade.flags]


def test_a_live_verdict_and_its_re_grade(store: Store, place: Path) -> None:
    task, image = made(place, "count-lines", store)
    solved = rolled(task, image, None)
    assert (seen(solved), solved.finished) == ((1.0, [LIVE, NOT_CONFIRMED]), True)
    assert solved.submission is None, "files, not a patch: equal patches would be taken for equal submissions"
    assert seen(rolled(task, image, None, "always")) == (1.0, [LIVE, REGRADED])
    assert seen(rolled(task, image, "echo 7 > answer.txt", "always")) == (0.5, [LIVE])
    forged = "mv /bin/cat /bin/real; printf '#!/bin/bash\\necho 3\\n' > /bin/cat; chmod +x /bin/cat"
    assert seen(rolled(task, image, forged)) == (1.0, [LIVE, NOT_CONFIRMED])
    found = rolled(task, image, forged, "always")
    assert found.grade is not None
    assert (found.grade.verdict, found.reward) == (Verdict.UNCONFIRMED, None)
    assert "in a clean sandbox: tests_not_passed" in found.grade.detail


def test_only_what_is_published_is_judged_by_a_separate_verifier(store: Store, place: Path) -> None:
    task, image = made(place, "publish-answer", store)
    assert seen(rolled(task, image, None)) == (1.0, [NOT_CONFIRMED])
    assert seen(rolled(task, image, "echo no > report.txt")) == (0.0, [])
    assert seen(rolled(task, image, "ln -s /etc/passwd report.txt")) == (0.0, [])
    large = rolled(task, image, "mkdir report.txt; for i in 1 2 3; do head -c 1G /dev/zero > report.txt/$i; done")
    assert large.grade is not None
    assert (large.grade.reward, large.grade.reason in (Reason.PATCH_INVALID, Reason.TESTS_NOT_PASSED)) == (0.0, True)


def test_limits_of_the_task_hold(store: Store, place: Path) -> None:
    config = place / "count-lines/task.toml"
    config.write_text(config.read_text().replace("storage_mb = 512", "storage_mb = 8").replace("120.0", "1.0"))
    task, image = made(place, "count-lines", store)
    late = rolled(task, image, "head -c 20M /dev/zero > big || echo 3 > answer.txt; sleep 15")
    assert late.exit_status.endswith("(exit_total_execution_time)") or "exit_total" in late.exit_status, late
    full = rolled(task, image, "head -c 20M /dev/zero > big || { rm big; echo 3 > answer.txt; }")
    assert seen(full)[0] == 1.0, full


@pytest.mark.slow
def test_the_commands(store: Store, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = f"harbor:{place}"
    assert main(["validate", source, "--out", str(tmp_path / "validated")]) == 0
    assert main(["rollout", source, "--agent", "oracle", "--out", str(tmp_path / "run")]) == 0
    with RunReader(tmp_path / "run") as run:
        assert [one.reward for one in run.summaries()] == [1.0, 1.0]
    predictions = tmp_path / "predictions.jsonl"
    predictions.write_text(json.dumps({"instance_id": "count-lines", "model_patch": "", "model_name_or_path": "none"}))
    main(["evaluate", source, "--predictions", str(predictions), "--out", str(tmp_path / "evaluated")])
    assert "count-lines" in capsys.readouterr().out
