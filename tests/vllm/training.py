"""Reinforcement learning with vLLM in this process: ``python -m tests.vllm.training CONFIG [--server]``.

vLLM packs weights for processors in a way that TRL cannot write to: :func:`keep_weights` leaves that out. Everything
else is the product.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

from tests.unit.toy_setting import ToySetting

from minisandbox.cli import doctor
from minisandbox.cli.main import main as command
from minisandbox.train import rl
from minisandbox.train.config import RlConfig
from minisandbox.train.groups import Wanted
from minisandbox.train.options import load


def keep_weights() -> None:
    """Let vLLM multiply with the weights as they are loaded, and keep the parameters that TRL writes to."""
    import torch  # noqa: PLC0415 - heavy
    from vllm.model_executor.layers import utils  # noqa: PLC0415 - the same

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch


def setting() -> ToySetting:
    """Rollouts whose rewards differ within each group, whatever a random model says."""
    turns = itertools.count()

    def rule(_wanted: Wanted, _text: str) -> float:
        return float(next(turns) % 2)

    return ToySetting(rule=rule)


def train(config: RlConfig) -> int:
    """Train as `minisandbox train rl` does, with such rollouts."""
    result = rl.train_rl(config, setting(), tell=lambda line: print(line, flush=True))
    print(f"{result.steps} steps")
    return 0


def main() -> int:
    """Train through the command line's frame, which turns errors into messages."""
    keep_weights()
    config = load(RlConfig, sys.argv[1])
    if config.vllm.mode == "server":  # the check asks for a GPU; here TRL itself is to refuse
        vars(rl)["check_engine"] = lambda _config: None
    doctor.configure = lambda parser: parser.set_defaults(run=lambda _args: train(config))
    return command(["doctor", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
