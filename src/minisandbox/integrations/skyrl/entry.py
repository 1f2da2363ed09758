"""Train with SkyRL on rollouts in sandboxes, in place of SkyRL's own entry point."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict  # noqa: UP035 - SkyRL reads annotations of dataclasses

import ray
from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface
from skyrl.train.config import SkyRLTrainConfig, get_config_as_yaml_str
from skyrl.train.config.config import overrides_dict_to_dotlist
from skyrl.train.dataset import PromptDataset
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray
from transformers import PreTrainedTokenizerBase

from minisandbox.errors import InvalidValue
from minisandbox.integrations.skyrl.config import SECTION, SandboxOptions, read_arguments
from minisandbox.integrations.skyrl.generator import SandboxGenerator
from minisandbox.tasks.dialects.skyrl import inner_row
from minisandbox.train.options import from_mapping


@dataclass(slots=True)
class SandboxTrainConfig(SkyRLTrainConfig):
    """SkyRL's configuration with the additional section ``minisandbox``, whose keys are in :class:`.SandboxOptions`."""

    minisandbox: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006 - SkyRL reads this annotation


class SandboxExperiment(BasePPOExp):
    """A SkyRL experiment whose rollouts run in sandboxes."""

    def get_train_dataset(self) -> PromptDataset:
        """Return the training tasks.

        Raises:
            InvalidValue: a task is listed twice.
        """
        return _each_once(super().get_train_dataset())

    def get_eval_dataset(self) -> PromptDataset | None:
        """Return the evaluation tasks, or None if there are none.

        Raises:
            InvalidValue: a task is listed twice.
        """
        dataset = super().get_eval_dataset()
        return None if dataset is None else _each_once(dataset)

    def get_generator(
        self,
        cfg: SandboxTrainConfig,
        tokenizer: PreTrainedTokenizerBase,
        inference_engine_client: InferenceEngineInterface,
    ) -> SandboxGenerator:
        """Return the generator that runs the rollouts."""
        return SandboxGenerator(cfg, inference_engine_client, pad_token=int(tokenizer.eos_token_id))


def _each_once(dataset: PromptDataset) -> PromptDataset:
    ids = Counter(_id(dataset[number][2]) for number in range(len(dataset)))
    repeated = sorted(name for name, count in ids.items() if count > 1)
    if repeated:
        raise InvalidValue(
            f"{repeated[0]} is {ids[repeated[0]]} times in the data",
            reason="a task's rollouts in a step form one group",
            hint="list each task once, as minisandbox tasks export does",
        )
    return dataset


def _id(row: Mapping[str, object]) -> str:
    return str(inner_row(row).get("instance_id"))


def read_config(arguments: Sequence[str]) -> SandboxTrainConfig:
    """Read the configuration from a command line and its configuration file.

    Args:
        arguments: SkyRL's ``key=value`` arguments, which override the file that ``minisandbox.config`` names.

    Raises:
        NotFound: there is no such file.
        InvalidValue: the section ``minisandbox`` has an unknown key or an invalid value.
        ValueError: SkyRL rejects a key or value of its own sections.
    """
    table, remaining = read_arguments(arguments)
    config = SandboxTrainConfig.from_cli_overrides([*overrides_dict_to_dotlist(table), *remaining])
    assert isinstance(config, SandboxTrainConfig)
    from_mapping(SandboxOptions, config.minisandbox, place=SECTION)
    return config


@ray.remote(num_cpus=1)
def train(cfg: SandboxTrainConfig) -> None:
    """Train on the node that Ray selects."""
    SandboxExperiment(cfg).run()


def main() -> None:
    """Train with the configuration of the command line."""
    cfg = read_config(sys.argv[1:])
    validate_cfg(cfg)
    out = Path(from_mapping(SandboxOptions, cfg.minisandbox, place=SECTION).out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.yaml").write_text(get_config_as_yaml_str(cfg), encoding="utf-8")
    initialize_ray(cfg)
    ray.get(train.remote(cfg))
