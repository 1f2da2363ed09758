"""Generate SkyRL's rollouts: the prompts of a training step are tasks, and its rollouts run as one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl.train.generators.utils import get_rollout_metrics

from minisandbox.agents import AgentLimits, AgentOptions, open_agent
from minisandbox.errors import InvalidValue, TrainingError
from minisandbox.integrations.settings import build_task
from minisandbox.integrations.skyrl.config import SECTION, SandboxOptions
from minisandbox.integrations.skyrl.output import Ended, metrics_of, output_of
from minisandbox.models import ModelOptions, Sampling, open_model
from minisandbox.rollouts import Batch, Budgets, ImageOf, Progress, RunReader, Setup, Summary
from minisandbox.rollouts.cluster import Cluster
from minisandbox.rollouts.executor import Crew
from minisandbox.store import Store
from minisandbox.tasks import Task, task_from_row
from minisandbox.train.options import from_mapping

_CONVERTED = frozenset({"temperature", "top_p", "top_k", "max_tokens", "stop", "logprobs", "min_p"})
"""The sampling parameters of SkyRL that have a field in :class:`.Sampling` or need special handling."""
_DRAIN = 60.0
_PAUSE = 1.0


@dataclass(frozen=True, slots=True)
class _Request:
    """SkyRL's request for the rollouts of a step: the tasks, and the number of rollouts per task."""

    tasks: tuple[Task, ...]
    attempts: int
    names: tuple[Any, ...]  # SkyRL's TrajectoryIDs, grouped by task

    @classmethod
    def of(cls, batch: GeneratorInput) -> _Request:
        """Read the prompts of a step, in which the rollouts of each group are adjacent.

        Raises:
            InvalidValue: the prompts are not tasks, or the groups differ in size.
        """
        names, rows = batch["trajectory_ids"], batch["env_extras"]
        if not names or not rows:
            raise InvalidValue("a step lacks trajectory_ids or tasks", hint="make data with minisandbox tasks export")
        tasks: dict[str, Task] = {}
        for name, row in zip(names, rows, strict=True):
            if name.instance_id not in tasks:
                tasks[name.instance_id] = task_from_row(row)
        attempts, remainder = divmod(len(names), len(tasks))
        expected = [prompt for prompt in tasks for _ in range(attempts)]
        if remainder or [name.instance_id for name in names] != expected:
            raise InvalidValue("a step's prompts are not groups of one size", reason="SkyRL repeats each one as often")
        if len({task.instance_id for task in tasks.values()}) < len(tasks):
            raise InvalidValue(
                "a step has the same task twice", hint="list each task once, as minisandbox tasks export does"
            )
        return cls(tuple(tasks.values()), attempts, tuple(names))


class SandboxGenerator(GeneratorInterface):
    """Run and grade the rollouts of a step in sandboxes, with SkyRL's engines as the model.

    Args:
        cfg: SkyRL's whole configuration, including the section ``minisandbox``.
        client: SkyRL's client for its engines.
        pad_token: a token of the policy's tokenizer, for rows without loss.
        image_of: returns a task's image; None builds images in the store.

    Raises:
        InvalidValue: the section ``minisandbox`` is invalid, or ``generator.step_wise_trajectories`` is off.
    """

    def __init__(self, cfg: Any, client: Any, *, pad_token: int, image_of: ImageOf | None = None) -> None:
        if not cfg.generator.step_wise_trajectories:
            raise InvalidValue(
                "generator.step_wise_trajectories is false",
                reason="a rollout whose history forks has several rows",
                hint="set generator.step_wise_trajectories=true",
            )
        self._options = from_mapping(SandboxOptions, cfg.minisandbox, place=SECTION)
        self._cfg, self._client, self._pad_token = cfg, client, pad_token
        self._image_of = image_of or _builder(self._options.repo_mirrors)
        self._model = ModelOptions(
            model=resolve_policy_model_name(cfg),
            api_base=f"{client.get_endpoint_url()}/v1",
            api_key_env="",
            tokens="yes",
            timeout=self._options.model_timeout,
            concurrency=max(256, self._options.workers),
        )
        options = AgentOptions(
            action_format=self._options.action_format,
            prompt=None if self._options.prompt is None else Path(self._options.prompt),
        )
        self._agent = open_agent(self._options.agent, options if self._options.agent == "bash" else None)

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:  # noqa: ARG002 - part of SkyRL's interface
        """Run the rollouts of a step.

        Args:
            input_batch: the prompts, one per rollout of each group.
            disable_tqdm: ignored; there is no progress bar.

        Raises:
            InvalidValue: a prompt is not a task.
            TrainingError: no rollout has a reward, so there is nothing to train on.
            MiniSandboxError: the run directory cannot be written, or the engines reject a request.
        """
        request = await asyncio.to_thread(_Request.of, input_batch)
        run_directory = await asyncio.to_thread(self._run_directory, input_batch["batch_metadata"])
        await self._run(request, run_directory, sampling_of(input_batch["sampling_params"] or {}))
        ended = await asyncio.to_thread(_ended, request, run_directory, self._options.unconfirmed_reward)
        if all(rollout.reward is None for rollout in ended):
            raise TrainingError(
                f"{run_directory}: none of {len(ended)} rollouts has a reward",
                reason=_first_failure(ended),
                hint="fix the cause and repeat the command: it resumes from the last checkpoint",
            )
        output = output_of(
            ended, pad_token=self._pad_token, drop_truncated=self._cfg.generator.apply_overlong_filtering
        )
        output["rollout_metrics"] = _metrics(ended, output)
        return GeneratorOutput(**output)

    def _crew(self, setup: Setup) -> Crew | None:
        """Return a crew of the cluster's nodes, each with its own client for the engines; None to run on this node."""
        options = self._options
        if options.cluster is None:
            return None
        mirrors = None if options.repo_mirrors is None else Path(options.repo_mirrors)
        cluster = Cluster(address=options.cluster, model=self._model, mirrors=mirrors)
        return cluster.crew(setup, _budgets(options), tries=options.tries, pause=_PAUSE)

    def _run_directory(self, metadata: Any) -> Path:
        """Return a new run directory for a step. Existing directories belong to interrupted runs with other weights."""
        phase, step = ("train", 0) if metadata is None else (metadata.training_phase, metadata.global_step or 0)
        base = Path(self._options.out, phase)
        base.mkdir(parents=True, exist_ok=True)
        names = (f"step-{step}" + (f".{number}" if number else "") for number in count())
        return next(base / name for name in names if not (base / name).exists())

    async def _run(self, request: _Request, run_directory: Path, sampling: Sampling) -> None:
        options = self._options
        model = open_model(self._model)
        endings: list[asyncio.Future[None]] = []

        def finish_session(progress: Progress[Summary]) -> None:
            """Finish the session of a rollout, for which a router has reserved an engine."""
            session = f"{progress.latest.instance_id}__{progress.latest.attempt}"
            endings.append(asyncio.ensure_future(self._client.finish_session(session)))

        setup = Setup(
            agent=self._agent,
            model=model,
            sampling=sampling,
            agent_limits=AgentLimits(steps=options.steps, seconds=options.seconds, context=options.context),
            timeout=options.grading.timeout,
            confirm=options.grading.confirm,
            deadline=options.deadline,
            configuration={"agent": options.agent, "action_format": options.action_format},
        )
        batch = Batch(
            request.tasks, setup, run_directory, image_of=self._image_of, attempts=request.attempts,
            budgets=_budgets(options), tries=options.tries, drain=_DRAIN, progress=finish_session,
            crew=self._crew(setup),
        )  # fmt: skip
        deadline = asyncio.get_running_loop().call_later(options.step_deadline, batch.drain)
        try:
            await batch.run()
        finally:
            deadline.cancel()
            await asyncio.gather(*endings, return_exceptions=True)
            await model.close()


def sampling_of(params: Mapping[str, object]) -> Sampling:
    """Convert SkyRL's sampling parameters for vLLM to :class:`.Sampling`.

    Args:
        params: vLLM's sampling parameters. Parameters without a field in :class:`.Sampling` are passed to the engine.
    """
    parameters: dict[str, Any] = dict(params)
    min_p = {"min_p": parameters["min_p"]} if parameters.get("min_p") else {}
    stop = parameters.get("stop") or ()
    extra = {key: value for key, value in parameters.items() if key not in _CONVERTED and value is not None} | min_p
    return Sampling(
        temperature=float(parameters.get("temperature", 1.0)),
        top_p=float(parameters.get("top_p", 1.0)),
        top_k=max(0, int(parameters.get("top_k", 0))),
        max_tokens=parameters.get("max_tokens"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        extra=extra,
    )


def _budgets(options: SandboxOptions) -> Budgets:
    limits = {"builds": options.builds, "starts": options.starts, "gradings": options.gradings}
    return Budgets(workers=options.workers, **{name: number for name, number in limits.items() if number})


def _builder(mirrors: str | None) -> ImageOf:
    """Return a function that builds images in the store, reusing existing layers."""
    store, path = Store.open(), None if mirrors is None else Path(mirrors)
    return lambda task: build_task(task, store, path).image


def _ended(request: _Request, run_directory: Path, unconfirmed: float | None) -> list[Ended]:
    keys = [(task.instance_id, attempt) for task in request.tasks for attempt in range(request.attempts)]
    with RunReader(run_directory) as run:
        return [Ended(name, run.trajectory(*key), unconfirmed) for name, key in zip(request.names, keys, strict=True)]


def _first_failure(ended: Sequence[Ended]) -> str:
    for trajectory in (rollout.trajectory for rollout in ended):
        if trajectory is not None and (failure := trajectory.failure) is not None:
            name = f"{trajectory.instance_id}__{trajectory.attempt}"
            return f"{name}: {failure.phase}: {failure.kind}: {failure.detail}"
    return "no rollout ended in time, or none has a verdict"


def _metrics(ended: Sequence[Ended], output: Mapping[str, Any]) -> dict[str, Any]:
    """Return SkyRL's metrics of the rows with loss, and the metrics of this package."""
    trained_rows = [index for index, mask in enumerate(output["loss_masks"]) if any(mask)]
    names = ("response_ids", "rewards", "loss_masks")
    responses, rewards, masks = ([output[name][index] for index in trained_rows] for name in names)
    times = [rollout.seconds for rollout in ended if rollout.trajectory is not None]
    if not trained_rows:
        return {**metrics_of(ended)}
    skyrl_metrics = get_rollout_metrics(responses, rewards, loss_masks=masks, trajectory_completion_times=times)
    return {**skyrl_metrics, **metrics_of(ended)}
