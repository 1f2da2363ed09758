"""SkyRL itself: what it reads, what it checks, and what it trains on, with rollouts in real sandboxes. No GPU, no vLLM.

Skipped where SkyRL is not installed: `make test-skyrl` makes an environment with it.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.scripted_server import ScriptedServer
from tests.unit.training_tools import saved_tokenizer
from tests.waiting import until

from minisandbox.errors import BuildError, InvalidValue, ModelRefused, TrainingError
from minisandbox.host import reaper, registry
from minisandbox.images import Image
from minisandbox.models import client
from minisandbox.rollouts import Budgets, RunReader, Setup
from minisandbox.rollouts.cluster import Cluster
from minisandbox.rollouts.executor import Executor
from minisandbox.store import remove_tree
from minisandbox.tasks import Task, TaskSet
from minisandbox.tasks.dialects.skyrl import row_of
from minisandbox.tasks.formats.documents import Layout
from minisandbox.tasks.saving import write_rows

pytest.importorskip("skyrl", reason="SkyRL is not installed: make test-skyrl")

import torch
from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import apply_off_policy_correction
from skyrl.train.dataset import PromptDataset
from skyrl.train.entrypoints import main_base
from skyrl.train.evaluate import evaluate
from skyrl.train.generators.base import GeneratorInterface
from skyrl.train.generators.utils import prepare_generator_input
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.trainer_utils import build_dataloader, validate_generator_output
from transformers import AutoTokenizer

from minisandbox.integrations.skyrl import entry, generator
from minisandbox.integrations.skyrl.entry import SandboxExperiment, SandboxTrainConfig, read_config
from minisandbox.integrations.skyrl.generator import SandboxGenerator, sampling_of

pytestmark = [pytest.mark.kernel, pytest.mark.once, pytest.mark.filterwarnings("default")]

FIX = "The operator is wrong.\n\n```bash\nsed -i 's/a - b/a + b/' calc/core.py\n```"
LOOK = "```bash\ncat calc/core.py\n```"
SUBMIT = "Done.\n\n```submit\n```"
MIXED: Mapping[str, Sequence[object]] = {
    "calc__smith-1__0": [LOOK, FIX, SUBMIT],
    "calc__smith-1__1": [LOOK, SUBMIT],
    "calc__smith-1__2": [LOOK, {"fault": "empty_answer"}],
    "calc__smith-1__3": ["x" * 5000] * 3,
}
"""Resolved over three turns; not resolved; the engine fails; every answer is cut off."""


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return saved_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def tasks(smith: Task, tmp_path: Path) -> TaskSet:
    return TaskSet([smith, replace(smith, instance_id="calc__unbuilt-1")], name="calc")


@pytest.fixture
def config(tokenizer: str, tasks: TaskSet, tmp_path: Path) -> SandboxTrainConfig:
    rows = {task.instance_id: row_of(task, "calc") for task in tasks}
    write_rows(tmp_path / "train.parquet", rows, Layout.PARQUET)
    return read_config([
        "minisandbox.config=one-node", f"trainer.policy.model.path={tokenizer}", f"minisandbox.out={tmp_path}/run",
        f"data.train_data=['{tmp_path}/train.parquet']", f"data.val_data=['{tmp_path}/train.parquet']",
        f"trainer.export_path={tmp_path}/exports", "data.dataloader.num_workers=0", "minisandbox.tries=1",
        "trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2", "generator.n_samples_per_prompt=4",
        "generator.sampling_params.max_generate_length=1000", "minisandbox.context=null", "minisandbox.workers=4",
    ])  # fmt: skip


@pytest.fixture
def image_of(smith: Task, smith_image: Image) -> Callable[[Task], Image]:
    def found(task: Task) -> Image:
        if task.instance_id != smith.instance_id:
            raise BuildError(f"{task.instance_id} cannot be built")
        return smith_image

    return found


@pytest.fixture(scope="module", autouse=True)
def helpers() -> Iterator[None]:
    """SkyRL's imports begin a process that would end with this one."""
    yield
    util._run_finalizers()  # type: ignore[attr-defined] # what that process would otherwise be asked for at the end
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined] # there is no other way


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_FIRST_PAUSE", 0.01)


def asked(cfg: SandboxTrainConfig, tasks: int, step: int = 1) -> Any:
    """A step's prompts, as SkyRL reads and repeats them."""
    dataset = PromptDataset(
        cfg.data.train_data, AutoTokenizer.from_pretrained(cfg.trainer.policy.model.path),
        cfg.trainer.max_prompt_length, num_workers=1,
    )  # fmt: skip
    prompts = dataset.collate_fn([dataset[number] for number in range(tasks)])
    sampling = get_sampling_params_for_backend("vllm", cfg.generator.sampling_params)
    return prepare_generator_input(prompts, cfg.generator.n_samples_per_prompt, sampling, "minisandbox", "train", step)


def generate(
    cfg: SandboxTrainConfig, script: Any, image_of: Callable[[Task], Image], *, tasks: int, step: int = 1
) -> Any:
    """A step's rollouts, with answers of a script behind SkyRL's own client."""

    async def do() -> Any:
        async with ScriptedServer(script) as server:
            root = server.url.removesuffix("/v1")
            engines = RemoteInferenceClient(proxy_url=root, server_urls=[root], data_parallel_size=1)
            made = SandboxGenerator(cfg, engines, pad_token=1, image_of=image_of)
            assert isinstance(made, GeneratorInterface)
            try:
                output = await made.generate(asked(cfg, tasks, step)[0])
            finally:
                await engines.aclose()
            sent = server.received[-1].body
            assert (sent["temperature"], sent["max_tokens"], sent["return_token_ids"]) == (0.8, 1000, True)
            return output

    return asyncio.run(do())


def trainer_of(cfg: SandboxTrainConfig) -> Any:
    """SkyRL's trainer, as far as it needs no GPU."""
    found = object.__new__(RayPPOTrainer)
    found.cfg, found.all_metrics = cfg, {}
    found.tokenizer = AutoTokenizer.from_pretrained(cfg.trainer.policy.model.path)
    found.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 4)
    return found


def test_a_step_passes_skyrl_s_own_checks_and_trains_on_what_was_sampled(
    config: SandboxTrainConfig, image_of: Callable[[Task], Image], tmp_path: Path
) -> None:
    output = generate(config, MIXED, image_of, tasks=2)
    metrics = output.pop("rollout_metrics")
    validate_generator_output(8, output, step_wise=True)
    assert output["stop_reasons"] == ["stop", "stop", "error", "length", *["error"] * 4]
    assert output["rewards"] == [1.0, 0.0, pytest.approx(1 / 3), 0.0, *[0.0] * 4]
    assert [any(mask) for mask in output["loss_masks"]] == [True, True, False, True, *[False] * 4]
    assert metrics["sandbox/rollouts_failed"] == 5
    assert metrics["sandbox/rollouts_truncated"] == 1
    assert metrics["sandbox/reward_mean"] == pytest.approx(1 / 3)
    assert metrics["generate/avg_num_tokens"] > 0

    with RunReader(tmp_path / "run" / "train" / "step-1") as run:
        record = run.trajectory("calc__smith-1", 0)
    assert record is not None
    (row,) = record.rows
    assert row.turns == (0, 1, 2)
    assert output["prompt_token_ids"][0] + output["response_ids"][0] == row.ids.tolist()
    start = len(output["prompt_token_ids"][0])
    assert output["rollout_logprobs"][0] == row.logprobs.tolist()[start:]

    trainer = trainer_of(config)
    uids = [one.instance_id for one in output["trajectory_ids"]]
    output, uids = trainer.postprocess_generator_output(output, uids)
    assert trainer.all_metrics["reward/avg_pass_at_4"] == 0.5
    batch = trainer.convert_to_training_input(output, uids)
    batch["values"] = None  # what SkyRL's own forward pass leaves there without a critic
    batch = trainer.compute_advantages_and_returns(batch)
    assert batch.metadata["policy_mini_batch_boundaries"] == [(0, 8)]
    carried = (batch["advantages"] * batch["loss_mask"]).sum(dim=-1) / batch["loss_mask"].sum(dim=-1).clamp(min=1)
    first, second, failed, cut, *unbuilt = carried.tolist()
    assert first > 0 > second
    assert second == pytest.approx(cut)
    assert [failed, *unbuilt] == [0.0] * 5
    assert first == pytest.approx(-2 * second)  # the baseline is that of the three with a reward
    assert float(batch["rollout_logprobs"][0][batch["loss_mask"][0].bool()].max()) < 0

    loss_mask, drawn = batch["loss_mask"].float(), batch["rollout_logprobs"]
    loss, _, found = apply_off_policy_correction(
        torch.ones_like(drawn), drawn + math.log(1.25), drawn, loss_mask, config.trainer.algorithm.off_policy_correction
    )
    assert loss[loss_mask > 0].tolist() == pytest.approx([1.25] * int(loss_mask.sum()))
    assert found["tis_token_clip_high_ratio"] == 0


def test_merging_changes_nothing(config: SandboxTrainConfig, image_of: Callable[[Task], Image]) -> None:
    """SkyRL's merging of turns finds each rollout merged already."""
    output = generate(config, MIXED, image_of, tasks=1)
    before = [list(one) for one in output["response_ids"]]
    config.generator.merge_stepwise_output = True
    uids = [one.instance_id for one in output["trajectory_ids"]]
    merged, _ = trainer_of(config).postprocess_generator_output(output, uids)
    assert merged["response_ids"] == before


def test_an_evaluation(config: SandboxTrainConfig, image_of: Callable[[Task], Image], tmp_path: Path) -> None:
    script = {"calc__smith-1": [FIX, SUBMIT]}

    async def do() -> Any:
        async with ScriptedServer(script) as server:
            root = server.url.removesuffix("/v1")
            engines = RemoteInferenceClient(proxy_url=root, server_urls=[root], data_parallel_size=1)
            made = SandboxGenerator(config, engines, pad_token=1, image_of=image_of)
            tokenizer = AutoTokenizer.from_pretrained(config.trainer.policy.model.path)
            dataset = PromptDataset(config.data.val_data, tokenizer, config.trainer.max_prompt_length, num_workers=1)
            try:
                return await evaluate(build_dataloader(config, dataset, is_train=False), made, config, 3, tokenizer)
            finally:
                await engines.aclose()

    found = asyncio.run(do())
    assert found["eval/all/sandbox/reward_mean"] == 1.0
    assert found["eval/all/sandbox/rollouts_failed"] == 1
    assert found["eval/calc/pass_at_1"] == 0.5
    assert (tmp_path / "run" / "eval" / "step-3" / "rollouts.sqlite").is_file()


def test_rollouts_that_hang_are_cut_off(config: SandboxTrainConfig, image_of: Callable[[Task], Image]) -> None:
    config.minisandbox |= {"deadline": 3.0}
    config.generator.n_samples_per_prompt = 2
    output = generate(config, {"calc__smith-1": [{"fault": "timeout"}]}, image_of, tasks=1)
    validate_generator_output(2, output, step_wise=True)
    assert output["rollout_metrics"]["sandbox/rollouts_without_tokens"] == 2
    assert output["rewards"] == [0.0, 0.0]  # it was graded: nothing was changed


def test_what_no_step_can_go_on_from_ends_it_with_the_reason(
    config: SandboxTrainConfig, image_of: Callable[[Task], Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    config.generator.n_samples_per_prompt = 2
    refused = {"calc__smith-1": [{"fault": "unknown_model"}]}
    with pytest.raises(ModelRefused, match="does not exist"):
        generate(config, refused, image_of, tasks=1)
    with pytest.raises(TrainingError, match=r"none of 2 rollouts has a reward.*empty"):
        generate(config, {"calc__smith-1": [{"fault": "empty_answer"}]}, image_of, tasks=1)
    monkeypatch.setattr(generator, "_DRAIN", 0.5)
    config.minisandbox |= {"step_deadline": 2.0}
    with pytest.raises(TrainingError, match="no rollout ended in time"):
        generate(config, {"calc__smith-1": [{"fault": "timeout"}]}, image_of, tasks=1)
    places = sorted(Path(config.minisandbox["out"], "train").iterdir())
    assert [place.name for place in places] == ["step-1", "step-1.1", "step-1.2"]  # a step that is done again


def test_a_cluster_s_nodes_do_the_rollouts(
    config: SandboxTrainConfig, image_of: Callable[[Task], Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a node does is done here; tests/cluster has the nodes."""
    joined: list[Any] = []

    class Node(Cluster):
        def crew(
            self, setup: Setup, budgets: Budgets, *, tries: int = 3, pause: float = 1.0, checks: bool = False
        ) -> Any:
            joined.append(self)
            return Executor(setup, budgets, image_of=image_of, tries=tries, pause=pause)

    monkeypatch.setattr(generator, "Cluster", Node)
    config.minisandbox |= {"cluster": "auto"}
    output = generate(config, MIXED, lambda _: pytest.fail("the driver builds nothing"), tasks=1)
    assert output["rewards"][:2] == [1.0, 0.0]
    (one,) = joined
    assert one.address == "auto"
    assert one.model.tokens == "yes"
    assert one.model.api_base.endswith("/v1")


def test_rollouts_over_ray_itself(config: SandboxTrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray cluster of one node, begun as SkyRL does: our actor on it asks the engines, builds, works and grades."""
    import ray  # noqa: PLC0415 - it comes with SkyRL

    monkeypatch.setenv("MINISANDBOX_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # 15 else: nothing moves beside what else a busy machine does
    config.minisandbox |= {"cluster": "auto"}
    ray.init(num_cpus=2, resources={"sandboxes": 4}, include_dashboard=False, log_to_driver=False)
    try:
        output = generate(config, MIXED, lambda _: pytest.fail("the driver builds nothing"), tasks=1)
    finally:
        ray.shutdown()
        wait_for_others_to_end()
        remove_tree(tmp_path / "store")
    validate_generator_output(4, output, step_wise=True)
    assert output["stop_reasons"] == ["stop", "stop", "error", "length"]
    assert output["rewards"][:2] == [1.0, 0.0]


def wait_for_others_to_end() -> None:
    """Remove what Ray's workers leave: it kills them and their launchers, whose control groups stay until one looks."""
    runtime = registry.runtime_directory()

    def are_gone() -> bool:
        reaper.reap(runtime)
        return set(os.listdir(runtime / "owners")) <= {registry.owner_name()}

    until(are_gone)
    reaper.reap(runtime)


def test_what_is_no_step_is_refused(config: SandboxTrainConfig, image_of: Callable[[Task], Image]) -> None:
    config.data.train_data = config.data.train_data * 2
    with pytest.raises(InvalidValue, match="the same task twice"):
        generate(config, MIXED, image_of, tasks=4)
    config.generator.step_wise_trajectories = False
    with pytest.raises(InvalidValue, match="step_wise_trajectories is false"):
        generate(config, MIXED, image_of, tasks=1)


def test_sampling_is_what_skyrl_says() -> None:
    cfg = read_config(["generator.sampling_params.top_k=40", "generator.sampling_params.stop=['END']",
                       "generator.sampling_params.additional_kwargs.repetition_penalty=1.1"])  # fmt: skip
    found = sampling_of(get_sampling_params_for_backend("vllm", cfg.generator.sampling_params))
    assert (found.temperature, found.top_k, found.stop, found.max_tokens) == (1.0, 40, ("END",), 1024)
    assert found.extra["repetition_penalty"] == 1.1
    assert found.extra["include_stop_str_in_output"] is True
    assert sampling_of({"stop": "END"}).stop == ("END",)


# --- the entry point -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one-node", "two-nodes"])
def test_the_packaged_configurations_are_valid(name: str) -> None:
    cfg = read_config([f"minisandbox.config={name}", "trainer.epochs=2"])
    validate_cfg(cfg)
    assert cfg.trainer.epochs == 2
    assert cfg.trainer.algorithm.temperature == cfg.generator.sampling_params.temperature
    assert cfg.generator.inference_engine.engine_init_kwargs["max_model_len"] == 20480
    assert cfg.trainer.algorithm.off_policy_correction.tis_ratio_type == "token"


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(InvalidValue, match="did you mean workers"):
        read_config(["minisandbox.worker=3"])
    with pytest.raises(ValueError, match="epoch"):
        read_config(["trainer.epoch=3"])


def test_skyrl_s_own_entry_point_calls_ours(
    config: SandboxTrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Any] = []
    monkeypatch.setattr(entry, "initialize_ray", lambda cfg: None)
    monkeypatch.setattr(entry, "ray", SimpleNamespace(get=trained.append))
    monkeypatch.setattr(entry, "train", SimpleNamespace(remote=lambda cfg: cfg))
    words = ["trainer.override_entrypoint=minisandbox.integrations.skyrl", "minisandbox.config=two-nodes"]
    monkeypatch.setattr(sys, "argv", ["main_base", *words, f"minisandbox.out={tmp_path}/run"])
    main_base.main()
    (cfg,) = trained
    assert cfg.trainer.placement.policy_num_nodes == 2
    stored = (tmp_path / "run" / "config.yaml").read_text()
    assert "policy_num_nodes: 2" in stored
    assert f"out: {tmp_path}/run" in stored
    experiment = object.__new__(SandboxExperiment)
    engines = SimpleNamespace(get_endpoint_url=lambda: "http://localhost:1")
    found = experiment.get_generator(cfg, SimpleNamespace(eos_token_id=2), engines)
    assert isinstance(found, GeneratorInterface)


def test_a_task_twice_in_the_data_is_refused_at_once(config: SandboxTrainConfig) -> None:
    tokenizer = AutoTokenizer.from_pretrained(config.trainer.policy.model.path)
    once = PromptDataset(config.data.train_data, tokenizer, 16384, num_workers=1)
    assert entry._each_once(once) is once
    twice = PromptDataset(config.data.train_data * 2, tokenizer, 16384, num_workers=1)
    with pytest.raises(InvalidValue, match="calc__smith-1 is 2 times in the data"):
        entry._each_once(twice)
