"""The original's two guides, from a data set to the official report, as one run of the commands that replace theirs.

Ten rows, three nodes of Ray with 43 sandboxes each, a scripted model to learn from and a small model that learns. Every
step is a command as typed, in the order of the guides (docs/from-the-original.md); what it wrote is compared with what
it has to be. The first wrong result ends the run. `make test-journey` runs it; with JOURNEY=DIR the files stay, and the
same command resumes.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests import waiting
from tests.cluster.cluster_tools import ROOT, clean_hosts, results
from tests.cluster.hosts import Command, Hosts, missing
from tests.journey import teacher

from minisandbox.errors import MiniSandboxError
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import TaskSet

PLACE = os.environ.get("MINISANDBOX_TEST_JOURNEY", "")
pytestmark = [
    pytest.mark.kernel, pytest.mark.index, pytest.mark.slow, pytest.mark.once, pytest.mark.alone,
    pytest.mark.skipif(not PLACE, reason="it takes 7 minutes: make test-journey"),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]  # fmt: skip
for _name in ("ray", "peft", "pyarrow", "swebench"):
    pytest.importorskip(_name, reason="it takes all extras: make test-journey")

SANDBOXES = 43
"""Of each of three nodes: 129, and the guides have 128."""
WIDE = 15
"""Attempts at each task, so that there are more rollouts than sandboxes."""
PROJECTS = "toolz|click|boltons|cachetools|schema"
ROWS, VALID, IMAGES = 10, 9, 5
INVALID = "pytoolz__toolz-1.0.0.wrong_test"
DEADLINE = 1200.0
SFT = """\
model: student
data: [sft.parquet]
out: runs/sft
max_length: 1024
epochs: 60
batch_size: 7
optimizer: {learning_rate: 3e-3, schedule: cosine, weight_decay: 0.0}
device: cpu
log_every: 10
"""
RL = """\
model: runs/sft/model
tasks: [data/train.parquet]
out: runs/rl
steps: 3
groups: {tasks: 3, size: 4, refill: 0}
policy: {agent: bash, prompt: prompts, steps: 8, max_tokens: 300, temperature: 0.5, seconds: 300, deadline: 600}
optimizer: {learning_rate: 1e-5, schedule: constant, warmup_steps: 0, weight_decay: 0.0}
micro_batch: 4
workers: 8
device: cpu
tolerance: 1e-3
checkpoints: {every: 1}
"""
"""A model that knows its answers by heart has large logits, divided by the temperature: float32 rounds them by 2e-4."""


@dataclass
class Journey:
    """The steps, in a directory of their own that is the current one."""

    cluster: Hosts

    def start(self, *words: str, name: str) -> Command:
        """Start a command on the head; its output is in ``NAME.out`` and ``NAME.err``."""
        with open(f"{name}.out", "w") as out, open(f"{name}.err", "w") as err:
            return self.cluster.all[0].popen(*_command(words), out=out, err=err)

    def run(self, *words: str, name: str, status: int = 0) -> None:
        """Run a command on the head to its end."""
        with self.start(*words, name=name) as process:
            found = process.wait(DEADLINE)
        assert found == status, f"{' '.join(words)}: {found}\n{_last(f'{name}.err')}"

    def online(self, *words: str, host: int = 0) -> str:
        """Run a command on a host's store (the head's), in this machine's own network; returns what it prints."""
        done = subprocess.run(
            _command(words), env=self.cluster.all[host].environment, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=DEADLINE, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(words)}: {done.returncode}\n{done.stderr[-3000:]}"
        return done.stdout

    @contextmanager
    def serving(self, *words: str, port: int) -> Iterator[str]:
        """Serve a model on the head, during a block; yields its address."""
        address = self.cluster.all[0].address
        name = f"server-{port}"
        with self.start(*words, "--host", address, "--port", str(port), name=name) as server:
            try:
                url = f"http://{address}:{port}/v1"
                waiting.until(lambda: url in Path(f"{name}.out").read_text() or server.poll() is not None, 300)
                assert server.poll() is None, _last(f"{name}.err")
                yield url
            finally:
                server.terminate()

    # --- the steps, in the order of the guides -------------------------------------------------------------------

    def nodes(self) -> None:
        """Ray: three nodes"""
        status = json.loads(self.online_status())
        assert [one["sandboxes"] for one in status] == [SANDBOXES] * 3
        assert {one["node"] for one in status} == {host.address for host in self.cluster.all}

    def online_status(self) -> str:
        self.run("cluster", "status", "--address", self.cluster.head, "--json", name="status")
        return Path("status.out").read_text()

    def data_set(self) -> None:
        """Data set: ten rows, one of which names a test that passes anyway"""
        self.online(
            "tasks", "filter", "quickstart", "--id", "toolz|click|boltons|cachetools|schema", "-o", "bugs.jsonl"
        )
        lines = Path("bugs.jsonl").read_text().splitlines()
        row = next(row for row in map(json.loads, lines) if row["instance_id"] == "pytoolz__toolz-1.0.0.update_in")
        row |= {
            "instance_id": INVALID,
            "FAIL_TO_PASS": row["PASS_TO_PASS"][:1],
            "PASS_TO_PASS": row["PASS_TO_PASS"][1:],
        }
        Path("rows.jsonl").write_text("\n".join([*lines, json.dumps(row)]) + "\n")
        assert len(_ids("rows.jsonl")) == ROWS

    def unique_images(self) -> None:
        """Unique images"""
        self.online("tasks", "unique-images", "rows.jsonl", "-o", "unique.jsonl")
        assert len(_ids("unique.jsonl")) == IMAGES

    def environments(self) -> None:
        """Environment cache: an image for each, which the other rows share"""
        for host, rows in itertools.product(range(3), ("unique.jsonl", "rows.jsonl")):  # hosts reach no package index
            self.online("image", "build", rows, host=host)
            listed = json.loads(self.online("image", "ls", "--json", host=host))
            assert set(_ids(rows)) <= {one["name"] for one in listed}

    def validation(self) -> None:
        """Validate all rows, on three nodes"""
        words = ("validate", "rows.jsonl", "--cluster", self.cluster.head, "-o", "validation", "--json")
        self.run(*words, name="validate", status=1)
        report = json.loads(Path("validation/report.json").read_text())
        assert report["counts"] == {"valid": VALID, "invalid": 1, "error": 0}
        assert [one["instance_id"] for one in report["results"] if one["verdict"] == "invalid"] == [INVALID]

    def passed(self) -> None:
        """Filter the passed rows"""
        self.online(
            "tasks", "filter", "rows.jsonl", "--statuses", "validation", "--status", "passed", "-o", "passed.jsonl"
        )  # fmt: skip
        assert _ids("passed.jsonl") == [name for name in _ids("rows.jsonl") if name != INVALID]

    def trajectories(self) -> None:
        """Four rollouts of each, with a scripted model"""
        tasks = list(TaskSet.load("passed.jsonl"))
        Path("answers.json").write_text(json.dumps(teacher.script(tasks)))
        Path("prompts").mkdir(exist_ok=True)
        Path("prompts/system.md").write_text("")
        Path("prompts/task.md").write_text("{problem_statement}\n")
        with self.serving("-m", "tests.scripted_server", "--script", "answers.json", port=8100) as url:
            self.run(*self._rollout("teacher", url, "golden"), "--temperature", "0.8", "--attempts",
                     str(teacher.ATTEMPTS), name="golden")  # fmt: skip
        found = {key: one[2] for key, one in results(Path("runs/golden")).items()}
        assert found == teacher.rewards(tasks)

    def many(self) -> None:
        """128 sandboxes at once"""
        shutil.rmtree("runs/wide", ignore_errors=True)  # an earlier call's rollouts need no sandboxes
        Path("wait.json").write_text(json.dumps({"*": [teacher.WAIT, teacher.SUBMIT]}))
        with self.serving("-m", "tests.scripted_server", "--script", "wait.json", port=8101) as url:
            words = (*self._rollout("waiting", url, "wide"), "--attempts", str(WIDE))
            with self.start(*words, "--command-timeout", "1000", name="wide") as process:
                most, deadline = 0, time.monotonic() + DEADLINE
                while process.poll() is None and most < 128 and time.monotonic() < deadline:
                    most = max(most, len(self._own(json.loads(self.online("sandbox", "ls", "--json")))))
                assert most >= 128, f"{most} sandboxes\n{_last('wide.err')}"
                waiting.until(lambda: self._go_on() or process.poll() is not None, DEADLINE)
                assert process.wait() == 0, _last("wide.err")
        found = results(Path("runs/wide"))
        assert len(found) == VALID * WIDE
        assert {one[:3] for one in found.values()} == {("submitted", "failed", 0.0)}

    def collected(self) -> None:
        """Collect the golden trajectories, and balance them"""
        self.online("trajectories", "collect", "runs/golden", "--no-tokens", "-o", "golden.jsonl")
        assert len(_lines("golden.jsonl")) == sum(teacher.SOLVED)
        self.online("trajectories", "balance", "golden.jsonl", "--max-per-instance", "2", "-o", "balanced.jsonl")
        assert len(_lines("balanced.jsonl")) == sum(min(solved, 2) for solved in teacher.SOLVED)

    def fine_tuning(self) -> None:
        """SFT of a small model"""
        Path("sft.yaml").write_text(SFT)
        if not Path("student/model.safetensors").exists():
            self.online("-m", "tests.journey.student", "balanced.jsonl", "-o", "student")
        self.online("trajectories", "export", "balanced.jsonl", "--to", "tokens", "--tokenizer", "student",
                    "-o", "sft.parquet")  # fmt: skip
        self.online("train", "sft", "sft.yaml")
        losses = [one["loss"] for one in _lines("runs/sft/log.jsonl") if "loss" in one]
        assert losses[-1] < 0.2 < losses[0]

    def rl_data(self) -> None:
        """RL data"""
        split = ("--split", "train=0.75", "--split", "test=0.25")
        self.online("tasks", "filter", "passed.jsonl", *split, "-o", "valid.jsonl")
        self.online("tasks", "export", "valid-train.jsonl", "--to", "skyrl", "--validation", "valid-test.jsonl", "-o",
                    "data")  # fmt: skip
        train, test = _ids("data/train.parquet"), _ids("data/validation.parquet")
        assert (len(train), len(test)) == (7, 2)
        assert sorted(train + test) == sorted(_ids("passed.jsonl"))

    def reinforcement_learning(self) -> None:
        """Three steps of RL, on three nodes"""
        Path("rl.yaml").write_text(RL)
        self.run("train", "rl", "rl.yaml", "--cluster", self.cluster.head, name="rl")
        steps = [one for one in _lines("runs/rl/log.jsonl") if "reward" in one]
        assert [one["step"] for one in steps] == [1, 2, 3]
        assert any(one["groups"] and one["grad_norm"] > 0 for one in steps), steps
        found = results(Path("runs/rl/rollouts"))
        assert len(found) == 3 * 3 * 4
        assert {one[2] for one in found.values()} == {0.0, 1.0}
        assert Path("runs/rl/model/model.safetensors").exists()

    def inference(self) -> None:
        """Inference with the trained model, served over HTTP"""
        with self.serving("model", "serve", "--model", "runs/rl/model", "--name", "student", port=8102) as url:
            self.run(*self._rollout("student", url, "inference"), "--temperature", "0", "--step-limit", "8",
                     "--max-tokens", "300", name="inference")  # fmt: skip
        found = results(Path("runs/inference"))
        taught = {name for name, solved in zip(_ids("passed.jsonl"), teacher.SOLVED, strict=True) if solved}
        solved = {name for (name, _), one in found.items() if one[2] == 1.0}
        assert solved <= taught
        assert len(solved) >= len(taught) / 2, found

    def evaluation(self) -> None:
        """Evaluate its predictions"""
        self.run("evaluate", "rows.jsonl", "-p", "runs/inference/preds.json", "--cluster", self.cluster.head,
                 "-o", "evaluation", name="evaluate")  # fmt: skip
        report = json.loads(Path("evaluation/report.json").read_text())
        found = results(Path("runs/inference"))
        assert report["resolved_ids"] == sorted(name for (name, _), one in found.items() if one[2] == 1.0)
        assert report["empty_patch_ids"] == sorted(name for (name, _), one in found.items() if not one[3])
        assert report["incomplete_ids"] == [INVALID]
        assert report["error_ids"] == []

    def official_report(self) -> None:
        """The official report: swebench's own code on our logs"""
        self.online("-m", "tests.journey.official", "rows.jsonl", "runs/inference/preds.json", "evaluation")
        official = json.loads(Path("evaluation/official.json").read_text())
        about_containers = {"unstopped_instances": 0, "unstopped_containers": [], "unremoved_images": []}
        assert official == json.loads(Path("evaluation/report.json").read_text()) | about_containers

    def _own(self, boxes: Sequence[Mapping[str, object]]) -> list[str]:
        """Return the ids of those sandboxes that nodes of this cluster own."""
        owners = {pid for host in self.cluster.all for pid in host.namespace.processes()}
        return [str(one["id"]) for one in boxes if one["owner"] in owners]

    def _go_on(self) -> bool:
        """Let the commands end that wait in sandboxes; returns false."""
        for name in self._own([{"id": box.id, "owner": box.owner} for box in Sandbox.list()]):
            with suppress(MiniSandboxError), Sandbox.attach(name) as box:
                box.exec("touch /tmp/go")
        return False

    def _rollout(self, model: str, url: str, run: str) -> tuple[str, ...]:
        return (
            "rollout", "passed.jsonl", "--agent", "bash", "--prompt", "prompts", "--model", model, "--api-base", url,
            "--cluster", self.cluster.head, "-o", f"runs/{run}", "--json",
        )  # fmt: skip


STEPS: Sequence[Callable[[Journey], None]] = (
    Journey.nodes, Journey.data_set, Journey.unique_images, Journey.environments, Journey.validation, Journey.passed,
    Journey.trajectories, Journey.many, Journey.collected, Journey.fine_tuning, Journey.rl_data,
    Journey.reinforcement_learning, Journey.inference, Journey.evaluation, Journey.official_report,
)  # fmt: skip


def test_the_whole_journey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    place = Path(PLACE) if "/" in PLACE else tmp_path
    place.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(place)
    variables = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}  # a small model gains none by two
    start = time.monotonic()
    with clean_hosts(place, 3, SANDBOXES, extra=dict.fromkeys(range(3), variables)) as cluster, capsys.disabled():
        print(f"\n[{time.monotonic() - start:6.1f} s] three hosts")
        journey = Journey(cluster)
        for step in STEPS:
            start = time.monotonic()
            step(journey)
            print(f"[{time.monotonic() - start:6.1f} s] {step.__doc__}", flush=True)


def _command(words: Sequence[str]) -> list[str]:
    """A command of minisandbox, or a module of Python."""
    return [sys.executable, *words] if words[0] == "-m" else [sys.executable, "-m", "minisandbox", *words]


def _ids(path: str) -> list[str]:
    return list(TaskSet.load(path).ids)


def _lines(path: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _last(path: str) -> str:
    return Path(path).read_text()[-3000:]
