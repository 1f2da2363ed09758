"""Engines that sample responses during training: the trainer's own module, or vLLM with the trainer's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from minisandbox.errors import InvalidValue
from minisandbox.models import OpenAIModel
from minisandbox.models.renderer import Renderer, end_ids
from minisandbox.models.served import ServerPolicy
from minisandbox.train.config import RlConfig, Vllm
from minisandbox.train.running import missing_vllm

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from trl.generation.vllm_generation import VLLMGeneration

    from minisandbox.models.engine import TransformersEngine
    from minisandbox.train.policy import PolicyLearner


class PolicyEngine:
    """An engine that samples responses, but only within :meth:`drawing`.

    Args:
        model: the model that agents use: an engine in this process, or a server's client.
        module: the trainer's module, which also recomputes log-probabilities.
        sync: sends the weights to vLLM; None if the engine samples with the trainer's module.
    """

    def __init__(
        self, model: TransformersEngine | ServerPolicy, module: PreTrainedModel,
        sync: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.module, self._sync, self._synced = model, module, sync, -1
        self._paused = contextlib.ExitStack()
        self._pause()

    def _pause(self) -> None:
        """Wait until all requests in this process have ended, cancelled ones too, and prevent further ones."""
        if not isinstance(self.model, ServerPolicy):
            self._paused.enter_context(self.model.paused())

    @contextlib.contextmanager
    def drawing(self, version: int) -> Iterator[None]:
        """Allow sampling with the current weights during a block, then restore the module's training mode.

        Args:
            version: the weights' version: the number of finished steps.
        """
        training = self.module.training
        if self._sync is not None and version != self._synced:
            self._sync()
            self._synced = version
        self._paused.close()  # resume, without the caches of earlier weights
        if not isinstance(self.model, ServerPolicy):
            self.model.version = version
        try:
            yield
        except BaseException:  # also SIGTERM: otherwise _pause would wait for requests without a caller
            if not isinstance(self.model, ServerPolicy):
                self.model.cancel()
            raise
        finally:
            self._pause()
            self.module.train(training)

    async def close(self) -> None:
        """Close the engine; it cannot sample any more."""
        self._paused.close()
        await self.model.close()


def open_engine(learner: PolicyLearner, config: RlConfig) -> PolicyEngine:
    """Open the engine that samples responses for a trainer.

    Args:
        learner: has the weights.
        config: the experiment's configuration.
    """
    from minisandbox.models.engine import TransformersEngine  # noqa: PLC0415 - needs optional packages

    module, tokenizer, context = learner.sampler, learner.tokenizer, config.policy.context
    if config.engine == "transformers":
        batch, cache_bytes = (1, 0) if config.deterministic else (config.engine_batch, config.engine_cache)
        engine = TransformersEngine(
            module, tokenizer, name=config.model, max_batch=batch, context=context, cache_bytes=cache_bytes
        )
        return PolicyEngine(engine, module)
    generation = _open_vllm(learner, config)
    if config.vllm.mode == "server":
        client = OpenAIModel(module.name_or_path, f"{config.vllm.url.rstrip('/')}/v1", tokens="yes")
        renderer = Renderer(tokenizer, end_ids(module.generation_config.eos_token_id))
        policy = ServerPolicy(client, renderer, alias=True, context=context)
        return PolicyEngine(policy, module, generation.sync_weights)
    from minisandbox.models.engine.vllm import VllmDecoder  # noqa: PLC0415 - only vLLM in this process needs it

    inner = TransformersEngine(
        module, tokenizer, name=config.model, max_batch=config.workers, context=context,
        decoder=lambda ends: VllmDecoder(generation.llm.llm_engine, ends),
    )  # fmt: skip
    return PolicyEngine(inner, module, generation.sync_weights)


def _open_vllm(learner: PolicyLearner, config: RlConfig) -> VLLMGeneration:
    """Start vLLM in this process, or connect to the server, by TRL, which also sends the weights."""
    from trl.generation import vllm_generation  # noqa: PLC0415 - an optional package

    if learner.accelerator.num_processes > 1 and config.vllm.mode == "colocate":
        raise InvalidValue(
            "engine=vllm cannot share the GPUs of several processes", reason="only rank 0 samples",
            hint="start vllm serve on another GPU, and set vllm.mode=server",
        )  # fmt: skip
    options = vllm_arguments(config)
    with in_precision(config):
        return vllm_generation.VLLMGeneration(learner.sampler, learner.accelerator, learner.tokenizer, **options)


def vllm_arguments(config: RlConfig) -> dict[str, object]:
    """Return TRL's options for vLLM.

    Args:
        config: the experiment's configuration.
    """
    vllm: Vllm = config.vllm
    if vllm.mode == "server":
        return {"mode": "server", "server_base_url": vllm.url, "group_port": vllm.group_port}
    context = config.policy.context
    return {"mode": "colocate", "gpu_memory_utilization": vllm.memory, "max_model_length": context}


@contextlib.contextmanager
def in_precision(config: RlConfig) -> Iterator[None]:
    """Make TRL start vLLM in the precision of the training; by default, vLLM converts float32 to bfloat16.

    Args:
        config: the experiment's configuration.
    """
    from trl.generation import vllm_generation  # noqa: PLC0415 - an optional package

    llm = getattr(vllm_generation, "LLM", None)  # None without vLLM, which TRL reports
    if config.vllm.mode == "colocate" and llm is not None:
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
