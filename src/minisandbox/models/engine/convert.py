"""Convert a GGUF file to a directory of safetensors: ``python -m minisandbox.models.engine.convert FILE DIRECTORY``.

It runs in a process of its own because it takes twice the model's memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

from minisandbox.models.renderer import require


def convert(source: Path, target: Path) -> None:
    """Write a model and its tokenizer as ``save_pretrained`` does, in float32.

    Args:
        source: a GGUF file with a chat template.
        target: a directory, created if missing.

    Raises:
        MissingExtra: a package is not installed.
    """
    require("torch", "transformers", "gguf", "accelerate")
    import torch  # noqa: PLC0415 - an extra
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - the same
    from transformers.utils import logging  # noqa: PLC0415 - the same

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # No longer quantized, but still marked so, which prevents saving (transformers 5.23, save_pretrained).
    for mark in ("hf_quantizer", "quantization_method"):
        if hasattr(model, mark):
            delattr(model, mark)
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for file in target.iterdir():  # safetensors are readable only for their owner
        file.chmod((target / "config.json").stat().st_mode)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
