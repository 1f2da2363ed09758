"""Engines that sample responses during training: the trainer's own module, or vLLM with the trainer's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol

from minisandbox.errors import InvalidValue
from minisandbox.models import Model, OpenAIModel
from minisandbox.models.renderer import Renderer, end_ids
from minisandbox.models.served import ServerPolicy
from minisandbox.train.config import RlConfig, Vllm
from minisandbox.train.running import missing_vllm

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from trl import GRPOTrainer

    from minisandbox.models.engine import TransformersEngine


class PolicyEngine(Protocol):
    """The interface of an engine that samples responses, but only within :meth:`drawing`."""

    @property
    def model(self) -> Model:
        """The model that agents use."""
        ...

    @property
    def module(self) -> PreTrainedModel:
        """The trainer's module, which also recomputes log-probabilities."""
        ...

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Allow sampling with the current weights during a block, then restore the module's training mode."""
        ...

    async def close(self) -> None:
        """Close the engine; it cannot sample any more."""
        ...


class OwnEngine:
    """An engine in this process.

    Args:
        engine: the engine. It is paused from now on, except within :meth:`drawing`.
        trainer: the trainer, which sends its weights to vLLM; None if the engine shares the trainer's module.
    """

    def __init__(self, engine: TransformersEngine, trainer: GRPOTrainer | None = None) -> None:
        self.model, self.module, self._trainer = engine, engine.model, trainer
        self._pause = engine.paused()  # prevent sampling during training
        self._pause.__enter__()

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Allow sampling with the current weights during a block."""
        training = self.module.training
        if self._trainer is not None:
            sync(self._trainer)
        self._pause.__exit__(None, None, None)  # resume, without the caches of earlier weights
        try:
            yield
        except BaseException:  # also SIGTERM: otherwise paused() would wait for requests without a caller
            self.model.cancel()
            raise
        finally:
            self._pause = self.model.paused()
            self._pause.__enter__()  # wait until all requests have ended, cancelled ones too
            self.module.train(training)

    async def close(self) -> None:
        """Close the engine; it cannot sample any more."""
        self._pause.__exit__(None, None, None)
        await self.model.close()


class ServedEngine:
    """A vLLM server, to which TRL sends the weights.

    Args:
        model: the server's client.
        trainer: the trainer, which sends its weights to the server.
    """

    def __init__(self, model: Model, trainer: GRPOTrainer) -> None:
        self.model, self._trainer = model, trainer
        self.module: PreTrainedModel = trainer.accelerator.unwrap_model(trainer.model)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Allow sampling with the current weights during a block."""
        training = self.module.training
        sync(self._trainer)
        try:
            yield
        finally:
            self.module.train(training)

    async def close(self) -> None:
        """Close the client."""
        await self.model.close()


def sync(trainer: GRPOTrainer) -> None:
    """Send the trainer's weights to vLLM once per step. TRL sends them before rollouts, but not before evaluations."""
    if trainer._last_loaded_step != trainer.state.global_step:
        trainer.vllm_generation.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step


def open_engine(trainer: GRPOTrainer, config: RlConfig) -> PolicyEngine:
    """Open the engine that samples responses for a trainer.

    Args:
        trainer: TRL's trainer.
        config: the experiment's configuration.
    """
    from minisandbox.models.engine import TransformersEngine  # noqa: PLC0415 - needs optional packages

    module = trainer.accelerator.unwrap_model(trainer.model)
    if config.engine == "transformers":
        batch, cache_bytes = (1, 0) if config.deterministic else (config.engine_batch, config.engine_cache)
        own = TransformersEngine(
            module, trainer.processing_class, name=config.model, max_batch=batch, context=config.policy.context,
            cache_bytes=cache_bytes,
        )  # fmt: skip
        return OwnEngine(own)
    if config.vllm.mode == "server":
        client = OpenAIModel(trainer.model.name_or_path, f"{config.vllm.url.rstrip('/')}/v1", tokens="yes")
        renderer = Renderer(trainer.processing_class, end_ids(module.generation_config.eos_token_id))
        return ServedEngine(ServerPolicy(client, renderer, alias=True, context=config.policy.context), trainer)
    from minisandbox.models.engine.vllm import VllmDecoder  # noqa: PLC0415 - only vLLM in this process needs it

    llm = trainer.vllm_generation.llm
    inner = TransformersEngine(
        module, trainer.processing_class, name=config.model, max_batch=config.workers, context=config.policy.context,
        decoder=lambda ends: VllmDecoder(llm.llm_engine, ends),
    )  # fmt: skip
    return OwnEngine(inner, trainer)


def vllm_arguments(config: RlConfig) -> dict[str, object]:
    """Return TRL's options for vLLM, or no options if vLLM is not used.

    Args:
        config: the experiment's configuration.
    """
    if config.engine != "vllm":
        return {}
    vllm: Vllm = config.vllm
    common: dict[str, object] = {
        "use_vllm": True,
        "vllm_mode": vllm.mode,
        # Truncate the ratio of each token. The product of all ratios of a long rollout is far from 1, so that TRL would
        # drop the rollout.
        "vllm_importance_sampling_mode": "token_truncate",
    }
    if vllm.mode == "server":
        return common | {"vllm_server_base_url": vllm.url, "vllm_group_port": vllm.group_port}
    return common | {"vllm_gpu_memory_utilization": vllm.memory, "vllm_max_model_length": config.policy.context}


@contextlib.contextmanager
def in_precision(config: RlConfig) -> Iterator[None]:
    """Make TRL start vLLM in the precision of the training; by default, vLLM converts float32 to bfloat16.

    Args:
        config: the experiment's configuration.
    """
    if config.engine != "vllm" or config.vllm.mode != "colocate":
        yield
        return
    from trl.generation import vllm_generation  # noqa: PLC0415 - an optional package

    llm = getattr(vllm_generation, "LLM", None)
    if llm is None:  # vLLM is not installed, which TRL reports
        yield
        return
    vllm_generation.LLM = partial(llm, dtype=config.precision)
    try:
        yield
    finally:
        vllm_generation.LLM = llm


def check_engine(config: RlConfig) -> None:
    """Check that the engine supports the configuration.

    Raises:
        InvalidValue: the engine does not support the configuration.
        MissingExtra: vLLM is not installed.
    """
    if config.engine != "vllm":
        return
    if config.deterministic:
        raise InvalidValue(
            "deterministic cannot be combined with engine=vllm", reason="batching changes the results",
            hint="set engine=transformers",
        )  # fmt: skip
    platform = _vllm_platform()
    if platform is None:
        raise missing_vllm()
    if _has_cuda() and config.device == "auto":
        return
    if config.vllm.mode == "server":
        raise InvalidValue(
            "engine=vllm in server mode needs a CUDA device for the trainer",
            reason="the weights are sent to the server over NCCL",
            hint="use a machine with a GPU and device=auto, or engine=transformers",
        )
    if platform != "cpu":
        raise InvalidValue(
            f"engine=vllm needs a CUDA device: this vLLM is built for {platform}",
            hint="use a machine with a GPU and device=auto, vLLM's build for CPUs, or engine=transformers",
        )


def _has_cuda() -> bool:
    import torch  # noqa: PLC0415 - an optional package

    return bool(torch.cuda.is_available())


def _vllm_platform() -> str | None:
    """Return the device type of the installed vLLM, for instance ``cuda``, or None if vLLM is not installed."""
    try:
        from vllm.platforms import current_platform  # noqa: PLC0415 - an optional package
    except ImportError:
        return None
    return str(current_platform.device_type)
