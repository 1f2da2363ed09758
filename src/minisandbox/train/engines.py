"""What draws a policy's answers while it is trained: the trainer's own module, or vLLM with its weights."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol

from minisandbox.errors import InvalidValue
from minisandbox.models import Model, OpenAIModel
from minisandbox.models.endpoint import check_base, proxy_for
from minisandbox.train.config import RlConfig, Vllm
from minisandbox.train.running import missing_vllm

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from trl import GRPOTrainer

    from minisandbox.models.engine import TransformersEngine

_ASKING = 20.0


class PolicyEngine(Protocol):
    """Draws answers, in :meth:`drawing` and at no other time."""

    @property
    def model(self) -> Model:
        """What agents ask."""
        ...

    @property
    def module(self) -> PreTrainedModel:
        """The trainer's module; log-probabilities are computed with it once more."""
        ...

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Let answers be drawn with the weights that there are now; the module's mode is as before after it."""
        ...

    async def close(self) -> None:
        """Draw nothing any more."""
        ...


class OwnEngine:
    """An engine in this process.

    Args:
        engine: it. It stands still from now on, but in :meth:`drawing`.
        trainer: whose weights it has; None where it shares them, else vLLM's are brought up to date.
    """

    def __init__(self, engine: TransformersEngine, trainer: GRPOTrainer | None = None) -> None:
        self.model, self.module, self._trainer = engine, engine.model, trainer
        self._pause = engine.paused()  # while it is trained nothing may be drawn
        self._pause.__enter__()

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """As :meth:`PolicyEngine.drawing`."""
        training = self.module.training
        if self._trainer is not None:
            sync(self._trainer)
        self._pause.__exit__(None, None, None)  # forgets what earlier weights have computed
        try:
            yield
        finally:
            self._pause = self.model.paused()
            self._pause.__enter__()  # until what was cut off has ended, too
            self.module.train(training)

    async def close(self) -> None:
        """As :meth:`PolicyEngine.close`."""
        self._pause.__exit__(None, None, None)
        await self.model.close()


class ServedEngine:
    """A server of vLLM, to which TRL sends the weights.

    Args:
        model: its client.
        trainer: whose weights it gets.
    """

    def __init__(self, model: Model, trainer: GRPOTrainer) -> None:
        self.model, self._trainer = model, trainer
        self.module: PreTrainedModel = trainer.accelerator.unwrap_model(trainer.model)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """As :meth:`PolicyEngine.drawing`."""
        training = self.module.training
        sync(self._trainer)
        try:
            yield
        finally:
            self.module.train(training)

    async def close(self) -> None:
        """As :meth:`PolicyEngine.close`."""
        await self.model.close()


def sync(trainer: GRPOTrainer) -> None:
    """Give vLLM the trainer's weights, once for each step; TRL does so before rollouts, but not before evaluations."""
    if trainer._last_loaded_step != trainer.state.global_step:
        trainer.vllm_generation.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step


def open_engine(trainer: GRPOTrainer, config: RlConfig) -> PolicyEngine:
    """Return what draws a trainer's answers.

    Args:
        trainer: TRL's.
        config: the experiment.
    """
    from minisandbox.models.engine import TransformersEngine  # noqa: PLC0415 - an extra

    module = trainer.accelerator.unwrap_model(trainer.model)
    if config.engine == "transformers":
        batch, kept = (1, 0) if config.deterministic else (config.engine_batch, config.engine_cache)
        own = TransformersEngine(
            module, trainer.processing_class, name=config.model, max_batch=batch, context=config.policy.context,
            kept=kept,
        )  # fmt: skip
        return OwnEngine(own)
    if config.vllm.mode == "server":
        base = f"{config.vllm.url.rstrip('/')}/v1"
        return ServedEngine(OpenAIModel(served_name(base, trainer.model.name_or_path), base, tokens="yes"), trainer)
    from minisandbox.models.engine.vllm import VllmDecoder  # noqa: PLC0415 - for this alone

    llm = trainer.vllm_generation.llm
    inner = TransformersEngine(
        module, trainer.processing_class, name=config.model, max_batch=config.workers, context=config.policy.context,
        decoder=lambda ends: VllmDecoder(llm.llm_engine, ends),
    )  # fmt: skip
    return OwnEngine(inner, trainer)


def served_name(base: str, model: str) -> str:
    """Return the name that a server knows a model by: with ``--served-model-name`` it is not the model's own.

    Args:
        base: the address of the server's API.
        model: the model's own name or directory; it is also returned where the server does not tell its models.

    Raises:
        InvalidValue: the server has several models, and none of this name.
    """
    try:
        address = f"{check_base(base)}/models"
        proxies = urllib.request.ProxyHandler(None if proxy_for(address) else {})
        with urllib.request.build_opener(proxies).open(address, timeout=_ASKING) as answer:
            listed = [one for one in json.load(answer)["data"] if isinstance(one, dict) and one.get("id")]
    except (OSError, ValueError, KeyError, TypeError):
        return model  # the first request says what is wrong
    names = [str(one["id"]) for one in listed]
    same = [str(one["id"]) for one in listed if model in (one["id"], one.get("root"))]
    if not (same or len(names) == 1):
        raise InvalidValue(
            f"{base} does not serve {model}", reason=f"it serves {', '.join(names) or 'nothing'}",
            hint=f"vllm serve {model}",
        )  # fmt: skip
    return (same or names)[0]


def vllm_arguments(config: RlConfig) -> dict[str, object]:
    """Return what TRL is told of vLLM, in its names; nothing where it is not used.

    Args:
        config: the experiment.
    """
    if config.engine != "vllm":
        return {}
    vllm: Vllm = config.vllm
    common: dict[str, object] = {
        "use_vllm": True,
        "vllm_mode": vllm.mode,
        # of a long rollout the product of all tokens' ratios is far from 1, and TRL would leave it out
        "vllm_importance_sampling_mode": "token_truncate",
    }
    if vllm.mode == "server":
        return common | {"vllm_server_base_url": vllm.url, "vllm_group_port": vllm.group_port}
    return common | {"vllm_gpu_memory_utilization": vllm.memory, "vllm_max_model_length": config.policy.context}


@contextlib.contextmanager
def in_precision(config: RlConfig) -> Iterator[None]:
    """Have TRL start vLLM in the precision of the training; TRL names none, and vLLM makes bfloat16 of float32.

    Args:
        config: the experiment.
    """
    if config.engine != "vllm" or config.vllm.mode != "colocate":
        yield
        return
    from trl.generation import vllm_generation  # noqa: PLC0415 - an extra

    llm = getattr(vllm_generation, "LLM", None)
    if llm is None:  # there is no vLLM: TRL says so
        yield
        return
    vllm_generation.LLM = partial(llm, dtype=config.precision)
    try:
        yield
    finally:
        vllm_generation.LLM = llm


def check_engine(config: RlConfig) -> None:
    """Check that what is asked of an engine is what it can do.

    Raises:
        InvalidValue: it is not.
        MissingExtra: vLLM is not installed.
    """
    if config.engine != "vllm":
        return
    if config.deterministic:
        raise InvalidValue(
            "deterministic with the engine vllm", reason="what shares its batches changes its sums",
            hint="engine=transformers",
        )  # fmt: skip
    platform = _vllm_platform()
    if platform is None:
        raise missing_vllm()
    if _has_cuda() and config.device == "auto":
        return
    if config.vllm.mode == "server":
        raise InvalidValue(
            "the engine vllm in server mode, without a CUDA device for the trainer",
            reason="the weights go to the server over NCCL",
            hint="a machine with a GPU and device=auto, or engine=transformers",
        )
    if platform != "cpu":
        raise InvalidValue(
            f"the engine vllm without a CUDA device: this vLLM is built for {platform}",
            hint="a machine with a GPU and device=auto, vLLM's build for CPUs, or engine=transformers",
        )


def _has_cuda() -> bool:
    import torch  # noqa: PLC0415 - an extra

    return bool(torch.cuda.is_available())


def _vllm_platform() -> str | None:
    """What the vLLM that is installed computes on: ``cuda``, ``cpu`` ...; None if it is not installed."""
    try:
        from vllm.platforms import current_platform  # noqa: PLC0415 - not ours to install
    except ImportError:
        return None
    return str(current_platform.device_type)
