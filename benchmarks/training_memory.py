"""Peak memory and time of real training steps, next to what `train plan` computes.

    python -m benchmarks.training_memory [--tokens N] [--rows N]

Needs the extras [train] and [local]. Each step runs in a process of its own: the embedded model and a random small one,
fine-tuned and trained by reinforcement learning on random tokens. On a CPU the peak is the resident memory above that
of the imported packages; on a GPU, what torch allocated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from minisandbox.models import Model, TokenRow
from minisandbox.models.engine import fetch_model
from minisandbox.train.config import Checkpoints, Groups, Policy, RlConfig, SftConfig
from minisandbox.train.groups import Result, Rollouts, Wanted
from minisandbox.train.plan import Plan, plan_of

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false"}
SMALL = {
    "vocab_size": 49152, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RandomRollouts:
    """Rollouts of random tokens with random rewards, as an environment of the training loop."""

    tokens: int
    tasks: Sequence[str] = ("a", "b")
    held_out: Sequence[str] = ()

    def rollouts(self, model: Model, *, held_out: bool) -> Rollouts:  # noqa: ARG002 - of the protocol
        """Return this object."""
        return self

    async def run(self, wanted: Wanted) -> Result:
        """Return a row of random tokens, which all but the first carry loss, as the plan assumes."""
        sampled = self.tokens - 1
        row = TokenRow(random_ids(self.tokens), array("d", [0.0] + [-1.0] * sampled), b"\0" + b"\1" * sampled, (0,))
        return Result(wanted, float(wanted.attempt % 2), (row,))

    def close(self) -> None:
        """Do nothing."""


def random_ids(count: int) -> array[int]:
    """Return random token ids that every vocabulary has."""
    return array("i", random.choices(range(1000), k=count))


def config_of(kind: str, model: Path, out: Path, tokens: int, rows: int, **options: object) -> SftConfig | RlConfig:
    """Return the configuration of a run with two steps.

    Args:
        kind: ``sft`` or ``rl``.
        model: the model's directory.
        out: the run's directory.
        tokens: tokens per row.
        rows: rows per batch, and twice as many per step.
        options: further options.
    """
    checkpoints = Checkpoints(every=1000)
    if kind == "sft":
        data = out.parent / "rows.jsonl"
        lines = [
            {"input_ids": list(random_ids(tokens)), "loss_mask": [0] + [1] * (tokens - 1)} for _ in range(4 * rows)
        ]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        sft = SftConfig(str(model), (str(data),), str(out), max_length=tokens, max_steps=2, batch_size=rows,
                        accumulation=2, checkpoints=checkpoints)  # fmt: skip
        return replace(sft, **options)  # type: ignore[arg-type] # options of the configuration
    rl = RlConfig(str(model), ("random",), str(out), steps=2, groups=Groups(tasks=2, size=rows), micro_batch=rows,
                  policy=Policy(context=tokens), check_tokens=False, checkpoints=checkpoints,
                  engine_cache=0)  # fmt: skip
    return replace(rl, **options)  # type: ignore[arg-type] # options of the configuration


def measure(config: SftConfig | RlConfig, tokens: int) -> tuple[int, float]:
    """Train two steps; return the peak memory in bytes and the seconds of the second step."""
    import torch  # noqa: PLC0415 - an optional package

    from minisandbox.train import policy  # noqa: F401, PLC0415 - import all packages before the memory is measured
    from minisandbox.train.rl import train_rl  # noqa: PLC0415 - imports optional packages
    from minisandbox.train.running import require_training  # noqa: PLC0415 - the same
    from minisandbox.train.sft import train_sft  # noqa: PLC0415 - the same

    require_training()

    times: list[float] = []

    def tell(text: str) -> None:
        if text.startswith("step "):
            times.append(time.monotonic())

    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
    if isinstance(config, SftConfig):
        train_sft(config, tell=tell)
    else:
        train_rl(config, RandomRollouts(tokens), tell=tell)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident("VmHWM") - before
    return peak, times[1] - times[0]


def resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def small_model(directory: Path) -> Path:
    """Save a random small model with the embedded model's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - optional packages

    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(directory)
    AutoTokenizer.from_pretrained(fetch_model()).save_pretrained(directory)
    return directory


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512, help="tokens per row (default: 512)")
    parser.add_argument("--rows", type=int, default=2, help="rows per batch (default: 2)")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "MODEL"), help="measure one step in this process")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if options.one:
            kind, model = options.one
            config = config_of(kind, Path(model), Path(directory, "run"), options.tokens, options.rows)
            print(json.dumps(measure(config, options.tokens)))
            return
        print(f"{'':<24} {'measured':>10} {'planned':>10} {'ratio':>6} {'seconds':>8}")
        for name, model in (("135M", fetch_model()), ("random", small_model(Path(directory, "small")))):
            for kind in ("sft", "rl"):
                config = config_of(kind, model, Path(directory, "run"), options.tokens, options.rows)
                peak, seconds = measured(kind, model, options.tokens, options.rows)
                planned = memory_of(plan_of(config), options.tokens)
                ratio = planned / peak
                print(f"{name + ' ' + kind:<24} {peak / 1e9:9.2f}G {planned / 1e9:9.2f}G {ratio:6.2f} {seconds:8.1f}",
                      flush=True)  # fmt: skip


def measured(kind: str, model: Path, tokens: int, rows: int) -> tuple[int, float]:
    """Measure a step in a new process."""
    command = [sys.executable, "-m", "benchmarks.training_memory", "--one", kind, str(model),
               "--tokens", str(tokens), "--rows", str(rows)]  # fmt: skip
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True, check=True
    )
    peak, seconds = json.loads(run.stdout.splitlines()[-1])
    return peak, seconds


def memory_of(plan: Plan, tokens: int) -> int:
    """Return the planned memory of a step with rows of some length."""
    return plan.memory(tokens)


if __name__ == "__main__":
    main()
