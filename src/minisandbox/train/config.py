"""What an experiment is: every option of fine-tuning and of reinforcement learning, each defined here and only here."""

from __future__ import annotations

from dataclasses import dataclass

from minisandbox.agents import FORMATS
from minisandbox.errors import InvalidValue
from minisandbox.train.options import option, positive, required, reward_or_none
from minisandbox.train.rows import BFLOAT16, Tolerance

REPORTS = ("none", "tensorboard", "trackio", "wandb")
SCHEDULES = ("constant", "constant_with_warmup", "cosine", "linear")
CHECKS = ("all", "sample", "off")
COMPARISONS = ("auto", "token", "statistics")


@dataclass(frozen=True, slots=True)
class Lora:
    """Which weights are trained: all, or small matrices beside them."""

    rank: int = option(0, help="of the matrices that are trained in place of the weights; 0: the weights themselves")
    alpha: int = option(32, help="their scale, over the rank")
    dropout: float = option(0.0, help="part of their inputs that is left out while training")
    modules: str = option("all-linear", help="which layers have them, as peft names them")


@dataclass(frozen=True, slots=True)
class Optimizer:
    """AdamW, and how its step size changes."""

    learning_rate: float = option(1e-4, help="the largest step size")
    schedule: str = option("cosine", help="how it changes over the steps", choices=SCHEDULES)
    warmup_steps: int = option(5, help="steps over which it rises from 0")
    weight_decay: float = option(0.01, help="AdamW's")
    beta2: float = option(0.999, help="AdamW's memory of the gradients' squares")
    max_grad_norm: float = option(1.0, help="longer gradients are shortened to this")

    def __post_init__(self) -> None:
        positive(learning_rate=self.learning_rate, max_grad_norm=self.max_grad_norm)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """What an interrupted run goes on from."""

    every: int = option(30, help="steps between two")
    keep: int = option(2, help="how many of the latest are kept; 0: all")

    def __post_init__(self) -> None:
        positive(every=self.every)
        if self.keep < 0:
            raise InvalidValue(f"checkpoints.keep is {self.keep}", hint="give how many, or 0 for all")


@dataclass(frozen=True, slots=True)
class SftConfig:
    """Fine-tuning on rows of tokens."""

    model: str = required("the directory of a model, or its name on the Hugging Face hub")
    data: tuple[str, ...] = required("files or folders of rows, as `trajectories export --to tokens` writes them")
    out: str = required("the run's directory")
    held_out: tuple[str, ...] = option((), help="files of rows that are not trained on; their loss is measured")
    held_out_share: float = option(0.0, help="without such files: the part of the tasks whose rows are held out")
    max_length: int = option(32768, help="tokens of a row at most; longer rows are left out, and counted")
    packing: bool = option(False, help="put several rows into one sequence; none sees another")
    epochs: float = option(2.0, help="how often each row is trained on")
    max_steps: int = option(0, help="steps after which it ends anyway; 0: no such limit")
    batch_size: int = option(1, help="sequences at once on each device")
    accumulation: int = option(1, help="such batches for one step")
    optimizer: Optimizer = Optimizer()
    lora: Lora = Lora()
    precision: str = option("float32", help="of the computation", choices=("float32", "bfloat16"))
    gradient_checkpointing: bool = option(False, help="compute activations twice instead of keeping them")
    device: str = option("auto", help="cpu, or what accelerate finds", choices=("auto", "cpu"))
    checkpoints: Checkpoints = Checkpoints()
    evaluate_every: int = option(50, help="steps between two measurements of the held-out loss")
    log_every: int = option(1, help="steps between two lines of the log")
    report_to: str = option("none", help="where else the log goes", choices=REPORTS)
    seed: int = option(0, help="of the rows' order, of what is held out, of new weights")

    def __post_init__(self) -> None:
        positive(
            max_length=self.max_length, epochs=self.epochs, batch_size=self.batch_size, accumulation=self.accumulation,
            evaluate_every=self.evaluate_every, log_every=self.log_every,
        )  # fmt: skip
        if not self.data:
            raise InvalidValue("data is empty", hint="name a file of rows")
        if not 0 <= self.held_out_share < 1:
            raise InvalidValue(f"held_out_share is {self.held_out_share!r}", hint="give 0 or more, less than 1")


@dataclass(frozen=True, slots=True)
class Policy:
    """How the model that is trained acts in a rollout."""

    agent: str = option("bash", help="the agent, by name or as package.module:Class")
    action_format: str = option("text", help="how the bash agent's model says its actions", choices=tuple(FORMATS))
    prompt: str | None = option(None, help="the bash agent's: a file, or a directory of prompts")
    steps: int = option(75, help="answers of the model at most")
    context: int | None = option(None, help="tokens of a prompt and its answer at most; the model's bound without")
    max_tokens: int = option(4096, help="tokens of one answer at most")
    temperature: float = option(1.0, help="of the sampling; the trained distribution is the same one")
    seconds: float = option(300.0, help="seconds of the agent's loop; what it has done until then is graded")
    deadline: float = option(
        1800.0, help="seconds after which an agent is cut off, whatever it waits for; it is graded"
    )

    def __post_init__(self) -> None:
        positive(steps=self.steps, max_tokens=self.max_tokens, temperature=self.temperature, seconds=self.seconds,
                 deadline=self.deadline)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Groups:
    """Which rollouts make a step, and what is done about those that fail on our side or say nothing."""

    tasks: int = option(16, help="tasks of a step")
    size: int = option(8, help="rollouts of each task: a group, whose mean is the baseline")
    redo: int = option(1, help="how often a rollout without a reward is done again")
    refill: int = option(1, help="how often groups that say nothing are replaced by groups of other tasks")
    unconfirmed_reward: float | None = option(None, help="reward of a submission whose pass could not be confirmed; "
                                              "null: it has none, and is left out")  # fmt: skip
    scale: str = option("none", help="what a reward's distance from its group's mean is divided by: "
                        "nothing, or the group's standard deviation", choices=("none", "group"))  # fmt: skip

    def __post_init__(self) -> None:
        positive(tasks=self.tasks)
        if self.size < 2:
            raise InvalidValue(f"groups.size is {self.size}", hint="give 2 or more: one rollout has no baseline")
        if self.redo < 0 or self.refill < 0:
            raise InvalidValue("groups.redo and groups.refill are numbers of tries", hint="give 0 or more")
        reward_or_none("groups.unconfirmed_reward", self.unconfirmed_reward)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The resolve rate on tasks that are not trained on."""

    tasks: tuple[str, ...] = option((), help="task sets; none: nothing is evaluated")
    every: int = option(20, help="steps between two; the first is before all steps, the last after them")
    attempts: int = option(1, help="rollouts of each task")
    temperature: float = option(0.0, help="of their sampling; 0: the likeliest token")

    def __post_init__(self) -> None:
        positive(every=self.every, attempts=self.attempts)


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM as the engine. TRL starts it or finds it, and gives it the weights before each step's rollouts."""

    mode: str = option("colocate", help="in this process, on the same GPU, or a server elsewhere",
                       choices=("colocate", "server"))  # fmt: skip
    memory: float = option(0.3, help="colocate: the part of the GPU's memory that it takes")
    url: str = option("http://localhost:8000", help="server: where `vllm serve` answers, without /v1")
    group_port: int = option(51216, help="server: the port over which the weights go")

    def __post_init__(self) -> None:
        positive(memory=self.memory, group_port=self.group_port)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a trainer's log-probabilities are compared with the sampler's (docs/design/tokens.md)."""

    by: str = option("auto", help="each token within `tolerance`, or a step's statistics, for bfloat16; auto: as "
                     "`precision` says. For vLLM in bfloat16: statistics", choices=COMPARISONS)  # fmt: skip
    mean: float = option(BFLOAT16.mean, help="statistics: the mean difference of a step's tokens, in nats")
    p99: float = option(BFLOAT16.p99, help="statistics: the 99th percentile of these differences")
    row_kl: float = option(BFLOAT16.row_kl, help="statistics: a row's KL divergence per token")

    def __post_init__(self) -> None:
        positive(mean=self.mean, p99=self.p99, row_kl=self.row_kl)


@dataclass(frozen=True, slots=True)
class RlConfig:
    """On-policy reinforcement learning (GRPO) with rewards from hidden tests."""

    model: str = required("the directory of a model, or its name on the Hugging Face hub")
    tasks: tuple[str, ...] = required("task sets to train on")
    out: str = required("the run's directory")
    steps: int = option(100, help="optimiser steps; each is on fresh rollouts")
    groups: Groups = Groups()
    policy: Policy = Policy()
    optimizer: Optimizer = Optimizer(learning_rate=1e-6, schedule="constant_with_warmup", weight_decay=0.0)
    loss: str = option(
        "dr_grpo",
        help="how tokens add up, in TRL's words: dr_grpo and grpo divide by all rollouts of "
        "a step, silent groups included, dapo by the tokens with loss",
        choices=("dr_grpo", "grpo", "dapo"),
    )
    loss_length: int = option(4096, help="dr_grpo divides a rollout's sum of tokens by this")
    kl: float = option(0.0, help="weight of the divergence from the first model; 0: that model is not loaded")
    entropy: float = option(0.0, help="weight of the policy's entropy, which is rewarded")
    micro_batch: int = option(1, help="rows at once on each device")
    lora: Lora = Lora()
    precision: str = option("float32", help="of the computation", choices=("float32", "bfloat16"))
    gradient_checkpointing: bool = option(False, help="compute activations twice instead of keeping them")
    device: str = option("auto", help="cpu, or what accelerate finds", choices=("auto", "cpu"))
    workers: int = option(8, help="sandboxes with an agent at once")
    gradings: int = option(0, help="submissions that are graded at once; 0: one for each CPU")
    rollout_deadline: float = option(7200.0, help="seconds of a whole rollout with its grading and the wait for it; "
                                     "later it has no reward")  # fmt: skip
    engine: str = option("transformers", help="what draws answers: the trainer's own module, or vLLM",
                         choices=("transformers", "vllm"))  # fmt: skip
    engine_batch: int = option(8, help="answers that transformers draws at once")
    engine_cache: int = option(1 << 30, help="bytes of keys and values that transformers keeps of conversations "
                               "that go on: one of 20,000 tokens takes about 0.7 GB with a model of 3B")  # fmt: skip
    vllm: Vllm = Vllm()
    reuse_grades: bool = option(False, help="grade equal submissions to a task once in a run: right where its tests "
                                "always do the same")  # fmt: skip
    check_tokens: str = option("sample", help="which rows' log-probabilities are computed a second time, alone and "
                               "without padding, and compared with the sampler's", choices=CHECKS)  # fmt: skip
    check_rows: int = option(4, help="how many rows of a step `sample` takes")
    tolerance: float = option(1e-4, help="how far one token's log-probabilities may differ where both sides compute in "
                              "float32")  # fmt: skip
    agreement: Agreement = Agreement()
    deterministic: bool = option(False, help="seed every draw by run, rollout and turn, and draw answers one by one: "
                                 "a resumed run's next step is what the undisturbed run's would have been")  # fmt: skip
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    report_to: str = option("none", help="where else the log goes", choices=REPORTS)
    seed: int = option(0, help="of the tasks' order and, where deterministic, of all sampling")

    def __post_init__(self) -> None:
        positive(
            steps=self.steps, loss_length=self.loss_length, micro_batch=self.micro_batch, workers=self.workers,
            engine_batch=self.engine_batch, tolerance=self.tolerance, check_rows=self.check_rows,
        )  # fmt: skip
        if self.engine_cache < 0:
            raise InvalidValue(f"engine_cache is {self.engine_cache}", hint="give bytes, or 0 to keep nothing")
        if self.gradings < 0:
            raise InvalidValue(f"gradings is {self.gradings}", hint="give how many at once, or 0 for one for each CPU")
        if self.rollout_deadline <= self.policy.deadline:
            raise InvalidValue(
                f"rollout_deadline {self.rollout_deadline:g} is not longer than policy.deadline",
                reason="an agent that is cut off could not be graded",
                hint=f"give more than {self.policy.deadline:g}",
            )
        if self.lora.dropout:  # TRL would turn it off without a word
            raise InvalidValue(
                f"lora.dropout is {self.lora.dropout!r}",
                reason="what is left out while training was not left out while sampling",
                hint="lora.dropout: 0",
            )
        if self.groups.tasks * self.groups.size % self.micro_batch:
            raise InvalidValue(
                f"micro_batch {self.micro_batch} does not divide the {self.groups.tasks * self.groups.size} rollouts "
                "of a step"
            )

    @property
    def allowed_gaps(self) -> Tolerance:
        """How far the loss's log-probabilities may differ from the sampler's."""
        if self.check_tokens == "off":
            return Tolerance()
        by = self.agreement.by
        if by == "token" or (by == "auto" and self.precision == "float32"):
            return Tolerance(token=self.tolerance)
        return Tolerance(mean=self.agreement.mean, p99=self.agreement.p99, row_kl=self.agreement.row_kl)
