"""Save a policy whose weights two processes share: ``python -m tests.unit.sharded_saving MODEL OUT KIND``.

accelerate shards on GPUs alone; here torch's FSDP 2 shards on processors, and accelerate is told so. FSDP 1 cannot:
what it gathers on processors lies in memory that it frees again.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoTokenizer

from minisandbox.train.config import Lora, SftConfig
from minisandbox.train.running import TrainingRun, open_policy
from minisandbox.train.sft import lora_of, save_policy


def adapted(model: Any) -> Any:
    """The model with matrices of LoRA that change what it says."""
    from peft import get_peft_model  # noqa: PLC0415 - an extra

    torch.manual_seed(1)
    found = get_peft_model(model, lora_of(Lora(rank=4)))
    for name, one in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(one, std=0.1)
    return found


def main(name: str, out: Path, kind: str) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=60), distributed.group.WORLD)
    inner = open_policy(name)[0]
    model = adapted(inner) if kind == "lora" else inner
    mesh = init_device_mesh("cpu", (2,))
    for layer in inner.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    accelerator.state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    trainer = SimpleNamespace(
        accelerator=accelerator, model=model, model_wrapped=model, processing_class=AutoTokenizer.from_pretrained(name),
        is_world_process_zero=lambda: accelerator.is_main_process,
    )  # fmt: skip
    config = SftConfig(model=name, data=("none",), out=str(out))
    with TrainingRun(out, config) as run:
        save_policy(cast("Any", trainer), run)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
