"""Unmodified Harbor over sandboxes: whole trials, and what its environment contract asks for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.extras import needs_harbor
from tests.kernel.test_container_images import base  # noqa: F401 - a fixture
from tests.unit.oci_tools import END, MadeImage, entry, hard_link
from tests.unit.test_atif import run as rollouts  # noqa: F401 - a fixture
from tests.waiting import PATIENCE

from minisandbox.errors import HostError, InvalidValue
from minisandbox.images import pull
from minisandbox.rollouts import export_harbor
from minisandbox.sandbox import live_sandboxes
from minisandbox.store import Store
from minisandbox.trajectories.sources import read_examples

with contextlib.suppress(ImportError):  # then all of this is skipped
    from fastapi.testclient import TestClient
    from harbor.environments.base import SandboxBuildFailedError
    from harbor.models.job.config import JobConfig
    from harbor.models.job.result import JobResult
    from harbor.models.task.config import EnvironmentConfig, NetworkPolicy
    from harbor.models.trajectories import Trajectory
    from harbor.models.trial.config import TrialConfig
    from harbor.models.trial.paths import TrialPaths
    from harbor.models.trial.result import ExceptionInfo, StepResult, TrialResult
    from harbor.models.verifier.result import VerifierResult
    from harbor.viewer.server import create_app

    from minisandbox.integrations.harbor import MiniSandboxEnvironment

pytestmark = [pytest.mark.kernel, needs_harbor, pytest.mark.filterwarnings("ignore")]

NAME = "minisandbox.integrations.harbor:MiniSandboxEnvironment"
ROOT = os.geteuid() == 0
MORE = ("awk", "dd", "env", "find", "grep", "head", "ps", "tail", "tar", "wget")

Make = Callable[..., contextlib.AbstractAsyncContextManager["MiniSandboxEnvironment"]]


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory, places: Store, base: bytes) -> str:  # noqa: F811 - the fixture
    """An image of one static program, as ``harbor-base`` in the store; the reference of its layout."""
    bash = entry("bin/bash", b'#!/bin/sh\nexec /bin/sh "$@"\n', mode=0o755)
    links = b"".join(hard_link(f"bin/{name}", "bin/busybox") for name in MORE)
    made = MadeImage([base + links + bash + END], {"Env": ["PATH=/bin"], "WorkingDir": "/d"})
    reference = f"oci:{made.write_layout(tmp_path_factory.mktemp('harbor') / 'layout')}"
    pull(reference, store=places, name="harbor-base")
    return reference


def write_task(
    place: Path, *, environment: str = "", dockerfile: str | None = "FROM harbor-base\nWORKDIR /app\n"
) -> Path:
    """A task: a file with a word is wanted."""
    files = {
        "task.toml": f'schema_version = "1.4"\n[task]\nname = "org/{place.name}"\n[environment]\n{environment}\n',
        "instruction.md": "Write hello into /app/word.\n",
        "solution/solve.sh": "#!/bin/bash\nmkdir -p /app && echo hello > /app/word\n",
        "tests/test.sh": "#!/bin/bash\n"
        "grep -q hello /app/word && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n",
        **({} if dockerfile is None else {"environment/Dockerfile": dockerfile}),
    }
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place


@pytest.fixture
def made(tmp_path: Path, layout: str) -> Make:
    """Starts an environment."""

    @contextlib.asynccontextmanager
    async def make(task: Path | None = None, **settings: Any) -> AsyncIterator[MiniSandboxEnvironment]:
        place = task or write_task(tmp_path / "task")
        options = {name: settings.pop(name) for name in list(settings) if name in EnvironmentConfig.model_fields}
        trial = TrialPaths(tmp_path / "trial")
        trial.mkdir()
        environment = MiniSandboxEnvironment(
            environment_dir=place / "environment",
            environment_name=place.name,
            session_id="trial__env",
            trial_paths=trial,
            task_env_config=EnvironmentConfig(**options),
            **settings,
        )
        try:
            await environment.start(force_build=False)
            yield environment
        finally:
            await environment.stop(delete=True)

    return make


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 3 * PATIENCE))


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_harbor_run_with_its_oracle(tmp_path: Path, layout: str) -> None:
    tasks = tmp_path / "tasks"
    write_task(tasks / "plain")
    write_task(
        tasks / "cut-off", environment='network_mode = "no-network"\ncpus = 1\nmemory_mb = 512\nstorage_mb = 256'
    )
    write_task(tasks / "prebuilt", environment=f'docker_image = "{layout}"\nworkdir = "/d"', dockerfile=None)
    (tasks / "prebuilt/environment").mkdir()
    (tasks / "prebuilt/environment/found").write_text("")  # it is uploaded to the workdir
    write_task(tasks / "broken", dockerfile="FROM harbor-base\nRUN exit 3\n")
    argv = [str(Path(sys.executable).with_name("harbor")), "run", "-p", str(tasks), "-a", "oracle", "--env", NAME, "-y"]
    options = ["--job-name", "job", "--jobs-dir", str(tmp_path / "jobs"), "-n", "2"]
    environment = {**os.environ, "HARBOR_TELEMETRY": "off", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*argv, *options], env=environment, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    results = [json.loads(path.read_text()) for path in (tmp_path / "jobs/job").glob("*/result.json")]
    found = {one["task_name"].removeprefix("org/"): one for one in results}
    broken = found.pop("broken")
    assert "exit status 3" in broken["exception_info"]["exception_message"]
    assert broken["exception_info"]["exception_type"] == "SandboxBuildFailedError"
    rewards = {name: one["verifier_result"] and one["verifier_result"]["rewards"] for name, one in found.items()}
    assert rewards == {name: {"reward": 1.0} for name in ("plain", "cut-off", "prebuilt")}
    assert live_sandboxes(labels={"by": "harbor"}) == ()


# --- what a task may ask for -----------------------------------------------------------------------------------------


def test_tasks_that_cannot_run_are_refused_before_they_start(tmp_path: Path, made: Make) -> None:
    several = write_task(tmp_path / "several")
    (several / "environment/docker-compose.yaml").write_text("services: {main: {}, db: {image: db}}\n")
    bad = write_task(tmp_path / "bad", dockerfile="FROM harbor-base\nFRY eggs\n")
    cases: tuple[tuple[Path | None, dict[str, Any], type[Exception], str], ...] = (
        (several, {}, InvalidValue, "several services"),
        (None, {"gpus": 1}, RuntimeError, "does not support GPU"),
        (None, {"os": "windows"}, RuntimeError, "does not support Windows"),
        (None, {"network_policy": NetworkPolicy(network_mode="allowlist", allowed_hosts=["10.0.0.0/8"])}, ValueError,
         "CIDR"),
        (None, {"mounts": [{"type": "bind", "source": "/srv", "target": "/srv"}]}, InvalidValue, "read-only"),
        (None, {"public": "bridge"}, InvalidValue, "public=proxy"),
        (bad, {}, SandboxBuildFailedError, "line 2"),
        (None, {"auto_mounting": True}, ValueError, "host mounts"),
        (write_task(tmp_path / "empty", dockerfile=None), {}, FileNotFoundError, "no environment definition"),
    )  # fmt: skip

    async def body(task: Path | None, settings: dict[str, Any]) -> None:
        async with made(task, **settings):
            pass

    for task, settings, kind, said in cases:
        with pytest.raises(kind, match=said):
            run(body(task, settings))


def test_limits(made: Make) -> None:
    async def body() -> None:
        async with made(memory_mb=64, storage_mb=32, cpus=0.5) as environment:
            wanted = environment._limits()
            assert (wanted.memory, wanted.disk) == (96 << 20, 32 << 20)  # files have room of their own
            held = "cpu" in dict((await environment.sandbox.info()).enforced)
            assert wanted.cpu == (0.5 if held else None)
            full = await environment.exec("dd if=/dev/zero of=/d/big bs=1M count=40 2>&1")
            assert (full.return_code, "No space left" in (full.stdout or "")) == (1, True)
        async with made(memory_mb=64, storage_mb=256, memory_enforcement_policy="limit") as environment:
            assert environment._limits().memory == 64 << 20
            killed = await environment.exec("head -c 200m /dev/zero | tail -c 190m > /dev/null; exit $?")
            assert killed.return_code != 0
        if not held:
            with pytest.raises(HostError, match=r"Limits\.cpu"):
                async with made(cpus=1, cpu_enforcement_policy="limit"):
                    pass

    run(body())


def test_networks(made: Make) -> None:
    modes: tuple[tuple[NetworkPolicy | None, str], ...] = (
        (None, "502"),  # every host has its name looked up
        (NetworkPolicy(network_mode="allowlist", allowed_hosts=["*.allowed.invalid"]), "403"),
        (NetworkPolicy(network_mode="no-network"), "refused"),
    )

    async def body() -> None:
        for policy, said in modes:
            async with made(network_policy=policy) as environment:
                done = await environment.exec(
                    "http_proxy=http://127.0.0.1:3128 wget -O- http://elsewhere.invalid/ 2>&1"
                )
                assert said in (done.stdout or ""), done
                assert (await environment.sandbox.exec("ls /proc/sys/net/ipv4/conf")).stdout.split()[-1] == "lo"

    run(body())


# --- commands and files ----------------------------------------------------------------------------------------------


def test_commands(made: Make) -> None:
    async def body() -> None:
        async with made(env={"FROM_TASK": "1"}, persistent_env={"FROM_JOB": "2"}) as environment:
            done = await environment.exec("echo $FROM_TASK$FROM_JOB$OWN; pwd; echo oops >&2; exit 3", env={"OWN": "3"})
            assert (done.stdout, done.stderr, done.return_code) == ("123\n/app\n", "oops\n", 3)
            assert (await environment.exec("pwd", cwd="/d")).stdout == "/d\n"
            assert (await environment.exec("kill -9 $$")).return_code == 137
            with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
                await environment.exec("sleep 1000", timeout_sec=1)
            wrongs: tuple[dict[str, Any], ...] = ({"cwd": "/nowhere"}, {"user": "stranger"})
            for wrong in wrongs:
                failed = await environment.exec("true", **wrong)
                assert (failed.return_code, bool(failed.stderr)) == (126, True)
            pieces: list[tuple[str, str]] = []

            async def listen(text: str, stream: str) -> None:
                pieces.append((text, stream))

            with environment.scoped_output_callback(listen):
                assert (await environment.exec("echo live; cat")).stdout == "live\n"
            assert pieces == [("live\n", "stdout")]

    run(body())


@pytest.mark.skipif(not ROOT, reason="an ordinary user's sandboxes may have one id")
def test_users(tmp_path: Path, made: Make) -> None:
    task = write_task(tmp_path / "user", dockerfile="FROM harbor-base\nWORKDIR /app\nUSER app\n")

    async def body() -> None:
        async with made(task) as environment:
            whose = "id -un"
            assert (await environment.exec(whose)).stdout == "app\n"
            assert (await environment.exec(whose, user="root")).stdout == "root\n"
            with environment.with_default_user(0):
                assert (await environment.exec(whose)).stdout == "root\n"
            await environment.ensure_dirs(["/logs/more"])  # as root, for everybody
            assert (await environment.exec("touch /logs/more/mine")).return_code == 0

    run(body())


def test_entrypoints_run_as_in_a_container(tmp_path: Path, made: Make) -> None:
    text = 'FROM harbor-base\nENTRYPOINT ["sh", "-c", "echo $0 $1 > /started; exec \\"$0\\" \\"$@\\""]\n'

    async def body() -> None:
        async with made(write_task(tmp_path / "served", dockerfile=text)) as environment:
            waiting = "while ! [ -s /started ]; do sleep 0.1; done; cat /started"
            assert (await environment.exec(waiting, timeout_sec=30)).stdout == "sh -c\n"
            assert "sleep infinity" in ((await environment.exec("ps")).stdout or "")

    run(body())


def test_files(tmp_path: Path, made: Make) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "sub").mkdir(parents=True)
    (source / "sub/run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "sub/run.sh").chmod(0o755)
    (source / "link").symlink_to("sub/run.sh")

    async def body() -> None:
        async with made() as environment:
            await environment.upload_dir(source, "/up/here")
            await environment.upload_file(source / "sub/run.sh", "/up/here/sub/again.sh")
            await environment.upload_file(source / "sub/run.sh", "/up")
            listed = await environment.exec(
                "/up/here/link; /up/here/sub/again.sh; /up/run.sh; id -u; cat /proc/1/loginuid"
            )
            assert (listed.stdout or "").startswith("ran\nran\nran\n0\n")
            await environment.exec("cd /up/here && ln -s /etc/passwd out && mkfifo pipe; rm sub/again.sh; echo 2 > new")
            (target / "sub").mkdir(parents=True)
            (target / "sub/kept").write_text("")
            (target / "new").symlink_to(tmp_path / "elsewhere")
            await environment.download_dir("/up/here", target)
            names = sorted(str(path.relative_to(target)) for path in target.rglob("*"))
            assert names == ["link", "new", "sub", "sub/kept", "sub/run.sh"]
            assert ((target / "new").read_text(), (tmp_path / "elsewhere").exists()) == ("2\n", False)
            await environment.download_dir("/up/here", target)  # over what is there
            await environment.download_file("/up/here/sub/run.sh", tmp_path / "down/run.sh")
            assert (tmp_path / "down/run.sh").read_text() == "#!/bin/sh\necho ran\n"
            assert list(tmp_path.glob(".download-*")) == []

    run(body())


def test_read_only_mounts(tmp_path: Path, made: Make) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_text("seen\n")
    mounts = [{"type": "bind", "source": str(tmp_path / "data"), "target": "/data", "read_only": True}]

    async def body() -> None:
        async with made(mounts=mounts) as environment:
            done = await environment.exec("cat /data/x; echo > /data/y")
            assert (done.stdout, done.return_code) == ("seen\n", 1)

    run(body())


def test_a_build_that_takes_too_long_is_ended(tmp_path: Path, made: Make) -> None:
    task = write_task(tmp_path / "long", dockerfile="FROM harbor-base\nRUN sleep 1000\n")

    async def body() -> None:
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(3), made(task):
                pass

    run(body())


# --- trajectories ----------------------------------------------------------------------------------------------------


def test_harbor_reads_what_we_export(tmp_path: Path, rollouts: Path) -> None:  # noqa: F811 - the fixture
    job = tmp_path / "jobs/job"
    names = list(export_harbor(rollouts, job))
    JobConfig.model_validate_json((job / "config.json").read_text())
    found = JobResult.model_validate_json((job / "result.json").read_text())
    results = [TrialResult.model_validate_json((job / name / "result.json").read_text()) for name in names]
    counted = type(found.stats).from_trial_results(results, n_total_trials=len(results))
    assert found.stats.evals.keys() == counted.evals.keys()
    for key, stats in counted.evals.items():
        assert found.stats.evals[key].model_dump(exclude={"metrics"}) == stats.model_dump(exclude={"metrics"})
    for name in names:
        TrialConfig.model_validate_json((job / name / "config.json").read_text())
        text = (job / name / "agent/trajectory.json").read_text()
        read = Trajectory.model_validate_json(text)
        assert read.to_json_dict() == json.loads(text), "Harbor drops nothing"


def test_harbors_viewer_shows_what_we_export(tmp_path: Path, rollouts: Path) -> None:  # noqa: F811 - the fixture
    names = list(export_harbor(rollouts, tmp_path / "jobs/job"))
    client = TestClient(create_app(tmp_path / "jobs"))
    [job] = client.get("/api/jobs").json()["items"]
    assert (job["name"], job["n_total_trials"], job["n_errored_trials"]) == ("job", 6, 1)
    assert (job["agents"], job["models"]) == (["bash", "replay"], ["m-1"])
    trials = client.get("/api/jobs/job/trials").json()["items"]
    assert sorted(one["name"] for one in trials) == names
    assert {one["name"]: one["reward"] for one in trials}["a__b-1"] == 1.0
    shown = client.get("/api/jobs/job/trials/a__b-1/trajectory").json()
    assert shown["steps"][2]["message"].startswith("I look.")


def test_we_read_the_results_that_harbor_writes(tmp_path: Path, rollouts: Path) -> None:  # noqa: F811 - the fixture
    trial = tmp_path / "job/a__b-1"
    list(export_harbor(rollouts, trial.parent))
    (trial / "agent/submission.patch").unlink()
    trajectory = json.loads((trial / "agent/trajectory.json").read_text())
    del trajectory["extra"]  # ours, which would win
    for name in ("build", "deploy"):
        (trial / "steps" / name / "agent").mkdir(parents=True)
        (trial / "steps" / name / "agent/trajectory.json").write_text(json.dumps(trajectory))
    shutil.rmtree(trial / "agent")
    result = TrialResult.model_validate_json((trial / "result.json").read_text())
    rewards = VerifierResult(rewards={"reward": 1.0})
    limited = ExceptionInfo(
        exception_type="ApiRateLimitError", exception_message="", exception_traceback="",
        occurred_at=datetime.now(UTC),
    )  # fmt: skip
    result.step_results = [
        StepResult(step_name="build", verifier_result=rewards),
        StepResult(step_name="deploy", verifier_result=rewards, exception_info=limited),
    ]
    (trial / "result.json").write_text(result.model_dump_json())
    outcomes = [(one.instance_id, one.reward, one.exit_status) for one in read_examples(trial)]
    assert outcomes == [("a__b-1", 1.0, "submitted"), ("a__b-1", None, "ApiRateLimitError")]
