"""Compute the memory and the time of a training step before training starts.

Activations are counted: the model runs on fake tensors, which have shapes but no contents, and the bytes that autograd
stores for the backward pass are added up. This works for every architecture and needs neither weights nor a GPU.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.errors import InvalidValue, TrainingError
from minisandbox.train.config import LOGITS_AT_ONCE, RlConfig, SftConfig
from minisandbox.train.running import is_first, keep_freed_memory, lora_of, model_path, set_threads
from minisandbox.values import human_size

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

QWEN2 = {
    "0.5B": (896, 4864, 24, 14, 2, True), "1.5B": (1536, 8960, 28, 12, 2, True), "3B": (2048, 11008, 36, 16, 2, True),
    "7B": (3584, 18944, 28, 28, 4, False),
}  # fmt: skip
"""Hidden size, intermediate size, layers, heads, key-value heads and tied embeddings of Qwen2.5's models, by size."""
_LOGITS = 5
"""Float32 copies of a chunk's logits in the backward pass: measured by benchmarks/training_memory.py."""
_SAMPLE = 128  # tokens of the counted rows


@dataclass(frozen=True, slots=True)
class Device:
    """A device's memory and speed.

    Attributes:
        name: the device's name.
        memory: bytes.
        float32: floating-point operations per second of large matrix products.
        bfloat16: the same in bfloat16.
        bandwidth: bytes per second that are read from memory.
        layer: seconds that a layer takes at least in one step of decoding.
    """

    name: str
    memory: int
    float32: float
    bfloat16: float
    bandwidth: float
    layer: float = 8e-4

    def speed(self, precision: str) -> float:
        """Return the operations per second that training reaches."""
        return _USED * (self.bfloat16 if precision == "bfloat16" else self.float32)


DEVICES = {
    "A100": Device("A100", 80 << 30, 19.5e12, 312e12, 2.0e12), "H100": Device("H100", 80 << 30, 67e12, 989e12, 3.3e12),
    "H200": Device("H200", 141 << 30, 67e12, 989e12, 4.8e12), "L40S": Device("L40S", 48 << 30, 91e12, 362e12, 0.86e12),
}  # fmt: skip
"""Manufacturers' figures. Training reaches :data:`_USED` of them."""
_USED = 0.4


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory of one device, and the work of a step.

    Attributes:
        parameters: number of parameters.
        trained: number of trained parameters.
        gpus: number of devices that share the states.
        states: bytes of weights, gradients and the optimiser's states, by name.
        constant: bytes of activations that do not depend on the rows' length.
        per_token: bytes of activations per token of a batch.
        per_square: bytes of masks, multiplied by the square of a row's tokens; 0 for batches of one row, which have no
            padding to mask.
        logits: bytes of logits per token of a chunk.
        chunk: most tokens of a chunk.
        rows: rows per batch and device.
        step_rows: rows per step.
        forward: floating-point operations of a forward pass, per token, without attention.
        attention: the same of attention, per token and token of the row.
        passes: forward passes that a step costs: 3 with the backward pass, 4 if activations are recomputed.
        layers: number of layers.
        precision: ``float32`` or ``bfloat16``.
        context: most tokens that the model can read.
    """

    parameters: int
    trained: int
    gpus: int
    states: Mapping[str, int]
    constant: int
    per_token: int
    per_square: float
    logits: int
    chunk: int
    rows: int
    step_rows: int
    forward: float
    attention: float
    passes: int
    layers: int
    precision: str
    context: int

    def memory(self, tokens: int) -> int:
        """Return a device's peak memory in a step whose rows have this many tokens."""
        batch = self.rows * tokens
        activations = self.constant + self.per_token * batch + int(self.per_square * tokens**2)
        return sum(self.states.values()) + activations + self.logits * min(batch, self.chunk)

    def longest_row(self, memory: int) -> int:
        """Return the most tokens per row with which a step fits into a device's memory; 0 if no step does."""
        low, high = 0, 1 << 20
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.memory(middle) <= memory else (low, middle - 1)
        return low

    def training_seconds(self, device: Device, tokens: int) -> float:
        """Return the seconds of a step without its rollouts, if all rows have this many tokens."""
        operations = self.passes * (self.forward + self.attention * tokens) * tokens * self.step_rows
        return operations / (device.speed(self.precision) * self.gpus)

    def sampling_seconds(self, device: Device, tokens: int, batch: int) -> float:
        """Return the seconds in which one device samples a step's rows.

        Args:
            device: the device.
            tokens: sampled tokens per row.
            batch: rows that are sampled at once.
        """
        width = 4 if self.precision == "float32" else 2
        computing = self.forward * batch / device.speed(self.precision)
        seconds = max(self.layers * device.layer, self.parameters * width / device.bandwidth, computing)
        return seconds * tokens * -(-self.step_rows // batch)


def plan_of(config: SftConfig | RlConfig, gpus: int = 1) -> Plan:
    """Compute the plan of a configuration.

    Args:
        config: the configuration.
        gpus: number of devices, which share weights, gradients and the optimiser's states (FSDP).

    Raises:
        InvalidValue: the model's shape is unknown.
    """
    from torch import nn  # noqa: PLC0415 - an optional package

    rows = config.micro_batch if isinstance(config, RlConfig) else config.batch_size
    step_rows = (
        config.groups.tasks * config.groups.size
        if isinstance(config, RlConfig)
        else config.batch_size * config.accumulation * gpus
    )
    shape = shape_of(config.model)
    counts = [_count(config, shape, rows, tokens) for tokens in (_SAMPLE, 2 * _SAMPLE, 3 * _SAMPLE)]
    first, second, third = (count.stored for count in counts)
    per_square = (third - 2 * second + first) / (2 * _SAMPLE**2)
    per_row_token = (second - first) / _SAMPLE - 3 * per_square * _SAMPLE
    constant = first - per_row_token * _SAMPLE - per_square * _SAMPLE**2
    text = shape.get_text_config(decoder=True)
    model = counts[0].model
    parameters, trained = (
        sum(weight.numel() for weight in model.parameters() if weight.requires_grad or not trained_only)
        for trained_only in (False, True)
    )
    embeddings = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding))
    head = 0 if text.tie_word_embeddings else embeddings
    heads = int(text.num_attention_heads)
    width = heads * int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return Plan(
        parameters, trained, gpus, _states(config, parameters, trained, gpus),
        max(0, int(constant)), int(per_row_token / rows), per_square if rows > 1 else 0.0,
        4 * _LOGITS * int(text.vocab_size), LOGITS_AT_ONCE, rows, step_rows,
        2.0 * (parameters - head),
        2.0 * text.num_hidden_layers * width, 3 + config.gradient_checkpointing, int(text.num_hidden_layers),
        config.precision, int(text.max_position_embeddings),
    )  # fmt: skip


def shape_of(name: str) -> PretrainedConfig:
    """Return the configuration of a model, without its weights.

    A model of the Hugging Face hub that is not in the cache has the shape of Qwen2.5's model of the size in its name.

    Raises:
        InvalidValue: the model is unknown, and its name has no such size.
    """
    from transformers import AutoConfig, Qwen2Config  # noqa: PLC0415 - an optional package

    path = model_path(name)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        size = next((size for size in QWEN2 if re.search(rf"(?<![\d.]){re.escape(size)}\b", name, re.IGNORECASE)), None)
        if size is None:
            raise InvalidValue(
                f"the shape of the model {name} is unknown", reason=str(error).partition("\n")[0],
                hint=f"give a model's directory, or a name with one of the sizes {', '.join(QWEN2)}",
            ) from error  # fmt: skip
    hidden, intermediate, layers, heads, shared_heads, is_tied = QWEN2[size]
    return Qwen2Config(
        vocab_size=151936, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=shared_heads, tie_word_embeddings=is_tied,
        max_position_embeddings=32768,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Count:
    model: PreTrainedModel
    stored: int


def _count(config: SftConfig | RlConfig, shape: PretrainedConfig, rows: int, tokens: int) -> _Count:
    """Run the model on fake tensors; return it, and the bytes of activations at the peak of the backward pass."""
    import torch  # noqa: PLC0415 - an optional package
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 - an optional package
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - an optional package

    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage  # its reference keeps the address unique
        return tensor

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype).train()
        if (lora := lora_of(config.lora)) is not None:
            from peft import get_peft_model  # noqa: PLC0415 - only adapters need it

            model = get_peft_model(model, lora)
    with FakeTensorMode():
        _make_fake(model)
        weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
        base = getattr(model, "get_base_model", lambda: model)()
        ids = torch.zeros((rows, tokens), dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = base.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    stored = sum(storage.nbytes() for address, storage in storages.items() if address not in weights)
    layers = int(shape.get_text_config(decoder=True).num_hidden_layers)
    if config.gradient_checkpointing:  # each layer's input, and all activations of one layer
        stored = stored // layers + layers * hidden.nbytes
    return _Count(model, stored)


def _make_fake(model: PreTrainedModel) -> None:
    """Replace a model's meta tensors by fake tensors on the CPU; tied weights stay tied."""
    import torch  # noqa: PLC0415 - an optional package

    fakes: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_weight = isinstance(tensor, torch.nn.Parameter)
                    fakes[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
                tensors[name] = fakes[id(tensor)]


def _states(config: SftConfig | RlConfig, parameters: int, trained: int, gpus: int) -> dict[str, int]:
    width = 2 if config.precision == "bfloat16" else 4
    states = {"weights": width * parameters // gpus}
    if width == 2:
        states["float32 copy of the weights"] = 4 * trained // gpus
    states |= {"gradients": 4 * trained // gpus, "optimizer": 8 * trained // gpus}
    if isinstance(config, RlConfig):
        if config.kl and not config.lora.rank:
            states["reference model"] = width * parameters // gpus
        if gpus > 1:
            states["weights of the sampler"] = width * parameters
        states["cached conversations"] = 0 if config.deterministic else config.engine_cache
    return states


def check_states(plan: Plan, memory: int, name: str, tokens: int = 1) -> None:
    """Check that a step fits into memory.

    Args:
        plan: the plan.
        memory: bytes of the device's memory.
        name: the device's name.
        tokens: tokens of each row; 1 checks little more than weights, gradients and the optimiser's states.

    Raises:
        TrainingError: the step does not fit.
    """
    needed = plan.memory(tokens)
    if needed <= memory:
        return
    parts = ", ".join(f"{what} {human_size(size)}" for what, size in plan.states.items() if size)
    raise TrainingError(
        f"training needs {human_size(needed)} of memory, and {name} has {human_size(memory)}",
        reason=f"{plan.parameters / 1e9:.2f} billion parameters: {parts}",
        hint="set lora.rank=16, precision=bfloat16, or use more GPUs: minisandbox train plan shows each",
    )


def prepare(config: SftConfig | RlConfig, tell: Callable[[str], object]) -> None:
    """Set up threads and memory; refuse weights that do not fit into memory, and warn if the longest row does not.

    Args:
        config: the configuration.
        tell: called with the warning.

    Raises:
        TrainingError: weights, gradients and the optimiser's states do not fit into the device's memory.
        InvalidValue: the model's shape is unknown.
    """
    set_threads(single=isinstance(config, RlConfig) and config.deterministic)
    keep_freed_memory()
    plan, (name, memory) = plan_of(config, int(os.environ.get("WORLD_SIZE", "1"))), free_memory(config)
    check_states(plan, memory, name)
    fitting, longest = plan.longest_row(memory), longest_allowed(config, plan)
    if fitting < longest and is_first():
        tell(f"warning: rows of more than {fitting:,} tokens will not fit into memory; {longest:,} are allowed")


def longest_allowed(config: SftConfig | RlConfig, plan: Plan) -> int:
    """Return the most tokens of a row that a configuration allows."""
    return (config.policy.context or plan.context) if isinstance(config, RlConfig) else config.max_length


def free_memory(config: SftConfig | RlConfig) -> tuple[str, int]:
    """Return the name and the free memory of the device on which this process would train."""
    import torch  # noqa: PLC0415 - an optional package

    if config.device == "auto" and torch.cuda.is_available():
        return torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    (available,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return "this machine's memory", available


def this_device(config: SftConfig | RlConfig) -> Device:
    """Return the device on which this process would train, with its free memory and its speed, measured on CPUs."""
    name, memory = free_memory(config)
    if name == "this machine's memory":
        speed = _matrix_speed() / _USED
        return Device(name, memory, speed, speed, 2e10, 0.0)
    device = next((device for key, device in DEVICES.items() if key in name), DEVICES["A100"])
    return replace(device, name=name, memory=memory)


def _matrix_speed() -> float:
    """Return the floating-point operations per second of a matrix product on the CPU."""
    import torch  # noqa: PLC0415 - an optional package

    matrix, times = torch.ones(1024, 1024), []
    for _ in range(3):
        began = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - began)
    return 2 * 1024**3 / min(times)
