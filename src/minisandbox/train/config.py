"""Define all options of fine-tuning and reinforcement learning, with their defaults and documentation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from minisandbox.agents import FORMATS
from minisandbox.errors import InvalidValue
from minisandbox.grade import GradingOptions
from minisandbox.train.options import Options, option, required
from minisandbox.train.rows import BFLOAT16, Tolerance

REPORTS = ("none", "mlflow", "tensorboard", "trackio", "wandb")
SCHEDULES = ("constant", "constant_with_warmup", "cosine", "linear")
COMPARISONS = ("auto", "token", "statistics")
LOSSES = ("dr_grpo", "grpo", "dapo", "rloo", "gspo", "cispo")
LOGITS_AT_ONCE = 1024
"""Number of tokens whose logits are in memory at once: 0.6 GB in float32 for a vocabulary of 152,000."""


@dataclass(frozen=True, slots=True)
class Lora(Options):
    """Options of LoRA, which trains small adapter matrices instead of all weights."""

    rank: int = option(0, least=0, help="rank of the adapter matrices; 0: train all weights")
    alpha: int = option(32, help="their scale, divided by the rank")
    dropout: float = option(0.0, least=0, help="share of their inputs dropped during training")
    modules: str = option("all-linear", help="layers with adapters, in peft's notation")


@dataclass(frozen=True, slots=True)
class Optimizer(Options):
    """Options of AdamW and its learning rate schedule."""

    learning_rate: float = option(1e-4, help="the peak learning rate")
    schedule: str = option("cosine", help="the learning rate schedule", choices=SCHEDULES)
    warmup_steps: int = option(5, least=0, help="steps over which the learning rate rises from 0")
    weight_decay: float = option(0.01, least=0, help="AdamW's weight decay")
    beta2: float = option(0.999, least=0, help="AdamW's decay rate of squared gradients")
    max_grad_norm: float = option(1.0, help="gradients are clipped to this norm")


@dataclass(frozen=True, slots=True)
class Checkpoints(Options):
    """Options of checkpoints, from which an interrupted run resumes."""

    every: int = option(30, help="steps between two checkpoints")
    keep: int = option(2, least=0, help="number of latest checkpoints to keep; 0: all")


@dataclass(frozen=True, slots=True)
class SftConfig(Options):
    """Configuration of fine-tuning on token rows."""

    model: str = required("a model's directory, or its name on the Hugging Face hub")
    data: tuple[str, ...] = required("files or folders of rows, as written by `trajectories export --to tokens`")
    out: str = required("the run's directory")
    held_out: tuple[str, ...] = option((), help="files of rows to measure the loss on, not trained on")
    held_out_share: float = option(
        0.0, least=0, most=0.99, help="without `held_out`: share of tasks whose rows are held out"
    )
    max_length: int = option(32768, help="most tokens per row; longer rows are dropped and counted")
    packing: bool = option(False, help="pack several rows into one sequence, isolated from each other")
    epochs: float = option(2.0, help="passes over the rows")
    max_steps: int = option(0, least=0, help="most steps; 0: no limit")
    batch_size: int = option(1, help="sequences per batch and device")
    accumulation: int = option(1, help="batches per step")
    optimizer: Optimizer = Optimizer()
    lora: Lora = Lora()
    precision: str = option("float32", help="precision of the computation", choices=("float32", "bfloat16"))
    gradient_checkpointing: bool = option(False, help="recompute activations instead of storing them")
    device: str = option("auto", help="cpu, or the device that accelerate finds", choices=("auto", "cpu"))
    checkpoints: Checkpoints = Checkpoints()
    evaluate_every: int = option(50, help="steps between two measurements of the held-out loss")
    log_every: int = option(1, help="steps between two log lines")
    report_to: str = option("none", help="an experiment tracker that gets the log too", choices=REPORTS)
    seed: int = option(0, least=0, help="seed of the rows' order, the held-out tasks, and new weights")

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if not self.data:
            raise InvalidValue("data is empty", hint="name a file of rows")


@dataclass(frozen=True, slots=True)
class Policy(Options):
    """The agent of the rollouts, and its sampling options."""

    agent: str = option("bash", help="the agent, by name or as package.module:Class")
    action_format: str = option("text", help="the bash agent's action format", choices=tuple(FORMATS))
    prompt: str | None = option(None, help="a file or directory with the bash agent's prompts")
    steps: int = option(75, help="most answers of the model")
    context: int | None = option(None, help="most tokens of a prompt with its answer; null: the model's own limit")
    max_tokens: int = option(4096, help="most tokens per answer")
    temperature: float = option(1.0, help="sampling temperature, also applied to the trained distribution")
    seconds: float = option(300.0, help="seconds of the agent's loop; its changes so far are graded")
    deadline: float = option(1800.0, help="seconds after which an agent is stopped, whatever it waits for, and graded")


@dataclass(frozen=True, slots=True)
class Groups(Options):
    """Options of a step's rollouts, and of the replacement of failed rollouts and of groups with equal rewards."""

    tasks: int = option(16, help="tasks per step")
    size: int = option(8, least=2, help="rollouts per task: a group, whose mean reward is the baseline")
    redo: int = option(1, least=0, help="most repetitions of a rollout without a reward")
    refill: int = option(1, least=0, help="most rounds in which groups without signal are replaced by other tasks")
    unconfirmed_reward: float | None = option(None, least=0, most=1, help="reward of a submission whose pass could not "
                                              "be confirmed; null: no reward, and the rollout is left out")  # fmt: skip
    scale: str = option("none", help="divisor of a reward's distance from its group's mean: none, or the group's "
                        "standard deviation", choices=("none", "group"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Evaluation(Options):
    """Options of the evaluation, which measures the resolve rate on held-out tasks."""

    tasks: tuple[str, ...] = option((), help="task sets; empty: no evaluation")
    every: int = option(20, help="steps between two evaluations, in addition to one before and one after training")
    attempts: int = option(1, help="rollouts per task")
    temperature: float = option(0.0, least=0, help="sampling temperature; 0: the most likely token")


@dataclass(frozen=True, slots=True)
class Clip(Options):
    """The range of the ratio of new and old probability, from 1 - low to 1 + high."""

    low: float = option(0.2, help="distance of the lower bound from 1")
    high: float = option(0.2, help="distance of the upper bound from 1; DAPO has 0.28")


@dataclass(frozen=True, slots=True)
class Correction(Options):
    """Options of the importance correction between trainer and sampler."""

    by: str = option("auto", help="whether a token or a whole row has a ratio of the trainer's to the sampler's "
                     "probability; auto: token, or none if tokens are compared one by one (`agreement.by`)",
                     choices=("auto", "none", "token", "sequence"))  # fmt: skip
    above: str = option("truncate", help="ratios above the limit become the limit, or 0, which masks the token or row",
                        choices=("truncate", "mask"))  # fmt: skip
    limit: float = option(2.0, help="largest ratio")


@dataclass(frozen=True, slots=True)
class Reference(Options):
    """Options of the model from which `kl` measures the divergence: the initial model, or an older policy."""

    every: int = option(0, least=0, help="steps between two updates of the reference; 0: it stays the initial model")
    mix: float = option(1.0, most=1, help="the policy's share in an updated reference; 1: the policy replaces it")


@dataclass(frozen=True, slots=True)
class Vllm(Options):
    """Options of vLLM as the engine. TRL starts or finds vLLM, and sends it the weights before each step's rollouts."""

    mode: str = option("colocate", help="in this process on the same GPU, or as a separate server",
                       choices=("colocate", "server"))  # fmt: skip
    memory: float = option(0.3, help="colocate: share of the GPU's memory for vLLM")
    url: str = option("http://localhost:8000", help="server: address of `vllm serve`, without /v1")
    group_port: int = option(51216, help="server: port for the transfer of weights")


@dataclass(frozen=True, slots=True)
class Agreement(Options):
    """Options of the comparison between trainer's and sampler's log-probabilities (docs/design/tokens.md)."""

    by: str = option("auto", help="each token within `tolerance`, or a step's statistics, for bfloat16; auto: by "
                     "`precision`. Use statistics for vLLM in bfloat16", choices=COMPARISONS)  # fmt: skip
    mean: float = option(BFLOAT16.mean, help="statistics: largest mean difference of a step's tokens, in nats")
    p99: float = option(BFLOAT16.p99, help="statistics: largest 99th percentile of these differences")
    row_kl: float = option(BFLOAT16.row_kl, help="statistics: largest KL divergence of a row, per token")


@dataclass(frozen=True, slots=True)
class RlConfig(Options):
    """Configuration of on-policy reinforcement learning with rewards from hidden tests."""

    model: str = required("a model's directory, or its name on the Hugging Face hub")
    tasks: tuple[str, ...] = required("task sets to train on")
    out: str = required("the run's directory")
    steps: int = option(100, help="optimiser steps, each on fresh rollouts")
    groups: Groups = Groups()
    policy: Policy = Policy()
    optimizer: Optimizer = Optimizer(learning_rate=1e-6, schedule="constant_with_warmup", weight_decay=0.0)
    loss: str = option("dr_grpo", help="the loss: dr_grpo, grpo, rloo and gspo divide by all rollouts of a step, "
                       "including groups without signal; dapo and cispo divide by the tokens with loss; the baseline "
                       "of rloo is the mean of a group's other rewards", choices=LOSSES)  # fmt: skip
    loss_length: int = option(4096, help="dr_grpo's divisor of the sum over a rollout's tokens")
    kl: float = option(
        0.0, least=0, help="weight of the divergence from the initial model; 0: that model is not loaded"
    )
    reference: Reference = Reference()
    entropy: float = option(0.0, least=-math.inf, help="weight of the reward for the policy's entropy")
    iterations: int = option(1, help="optimiser steps on each step's rollouts")
    clip: Clip = Clip()
    correction: Correction = Correction()
    overlong: str = option("train", help="rollouts whose agent was stopped by a limit: mask leaves their tokens out of "
                           "the loss; their rewards count in the group's mean", choices=("train", "mask"))  # fmt: skip
    staleness: int = option(
        0, least=0, help="largest age of a row's policy, in steps; older rows are dropped and counted"
    )
    micro_batch: int = option(1, help="rows per batch and device")
    lora: Lora = Lora()
    precision: str = option("float32", help="precision of the computation", choices=("float32", "bfloat16"))
    gradient_checkpointing: bool = option(False, help="recompute activations instead of storing them")
    device: str = option("auto", help="cpu, or the device that accelerate finds", choices=("auto", "cpu"))
    workers: int = option(8, help="concurrent agents, each in a sandbox")
    gradings: int = option(0, least=0, help="concurrent gradings; 0: one per CPU")
    rollout_deadline: float = option(7200.0, help="seconds for a whole rollout, including grading and the wait for "
                                     "it; a later one has no reward")  # fmt: skip
    engine: str = option("transformers", help="the engine that samples: the trainer's own module, or vLLM",
                         choices=("transformers", "vllm"))  # fmt: skip
    engine_batch: int = option(8, help="answers per batch of the transformers engine")
    engine_cache: int = option(1 << 30, least=0, help="bytes of keys and values that the transformers engine caches "
                               "between turns: 20,000 tokens of a 3B model take about 0.7 GB")  # fmt: skip
    vllm: Vllm = Vllm()
    grading: GradingOptions = GradingOptions()  # noqa: RUF009 - a frozen default can be shared
    reuse_grades: bool = option(False, help="grade equal submissions to a task once per run; correct only if its "
                                "tests are deterministic")  # fmt: skip
    check_tokens: bool = option(True, help="compare the log-probabilities of all trained tokens with the sampler's "
                                "before the weights change")  # fmt: skip
    tolerance: float = option(1e-4, help="largest difference of one token's log-probability if both sides compute in "
                              "float32")  # fmt: skip
    agreement: Agreement = Agreement()
    deterministic: bool = option(False, help="seed all sampling by run, rollout and turn, and sample answers one by "
                                 "one; a resumed run takes the same next step as an uninterrupted one")  # fmt: skip
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    report_to: str = option("none", help="an experiment tracker that gets the log too", choices=REPORTS)
    seed: int = option(0, least=0, help="seed of the tasks' order and, if deterministic, of all sampling")

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.reference.every and (not self.kl or self.lora.rank):
            raise InvalidValue(
                f"reference.every is {self.reference.every}",
                reason="no reference model is loaded if kl is 0, and with LoRA it is the model without its adapters",
                hint="set reference.every: 0",
            )
        if self.rollout_deadline <= self.policy.deadline:
            raise InvalidValue(
                f"rollout_deadline {self.rollout_deadline:g} is not above policy.deadline",
                reason="no time would remain to grade an agent that is stopped",
                hint=f"give more than {self.policy.deadline:g}",
            )
        if self.lora.dropout:
            raise InvalidValue(
                f"lora.dropout is {self.lora.dropout!r}",
                reason="sampling uses no dropout, so training must not either",
                hint="set lora.dropout: 0",
            )

    @property
    def allowed_gaps(self) -> Tolerance:
        """The largest allowed differences between the trainer's and the sampler's log-probabilities."""
        if not self.check_tokens:
            return Tolerance()
        if self._compares_tokens:
            return Tolerance(token=self.tolerance)
        return Tolerance(mean=self.agreement.mean, p99=self.agreement.p99, row_kl=self.agreement.row_kl)

    @property
    def _compares_tokens(self) -> bool:
        by = self.agreement.by
        return by == "token" or (by == "auto" and self.precision == "float32")

    @property
    def used_correction(self) -> Correction:
        """The options of the importance correction, with ``auto`` resolved."""
        if self.correction.by != "auto":
            return self.correction
        return replace(self.correction, by="none" if self._compares_tokens else "token")
