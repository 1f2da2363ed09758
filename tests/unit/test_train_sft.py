"""Fine-tuning of a tiny model."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.tiny_model import save_tiny_model, tiny_tokenizer, torch, transformers

from minisandbox.errors import DiskFull, MissingExtra, RunError, TrainingError
from minisandbox.train.config import Checkpoints, Lora, Optimizer, SftConfig
from minisandbox.train.options import store
from minisandbox.train.rows import StoredRows, TrainingRow

for _name in ("accelerate", "peft"):
    pytest.importorskip(_name, reason="the extra [train] is not installed")

from minisandbox.train.running import TrainingRun  # noqa: E402 - after what it needs
from minisandbox.train.sft import FineTuning, SftData, train_sft  # noqa: E402 - the same

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("default"),
]  # those of torch and transformers are theirs

Load = Callable[[SftConfig], SftData]
TEXTS = [
    ("the tests fail", "return a + b"),
    ("add a and b", "def add(a, b):"),
    ("the module", "the tests of the module"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    tokenizer, found = tiny_tokenizer(), list[dict[str, object]]()
    for number, (question, answer) in enumerate(TEXTS * 4):
        prompt = tokenizer(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        reply = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
        rest = tokenizer("\n<|im_start|>user\nand now<|im_end|>\n")["input_ids"]
        mask = [0] * len(prompt) + [1] * len(reply) + [0] * len(rest)
        found.append({"input_ids": [*prompt, *reply, *rest], "loss_mask": mask,
                      "instance_id": f"t{number % 6}", "traj_id": f"t{number % 6}.{number}"})  # fmt: skip
    return found


@pytest.fixture
def config(model: Path, rows: list[dict[str, object]], tmp_path: Path) -> SftConfig:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SftConfig(
        model=str(model), data=(str(tmp_path / "rows.jsonl"),), out=str(tmp_path / "run"), held_out_share=0.2,
        max_length=128, epochs=50, max_steps=10, batch_size=4, device="cpu", evaluate_every=5,
        optimizer=Optimizer(learning_rate=5e-3, warmup_steps=0, schedule="constant"), checkpoints=Checkpoints(every=5),
    )  # fmt: skip


@pytest.fixture
def load() -> Iterator[Load]:
    with contextlib.ExitStack() as stack:

        def loaded(config: SftConfig) -> SftData:
            data = SftData.load(config)
            stack.callback(data.train.close)
            return data

        yield loaded


def test_the_loss_falls_and_a_model_comes_of_it(config: SftConfig) -> None:
    said: list[str] = []
    result = train_sft(config, tell=said.append)
    assert result.steps == 10
    assert result.first_loss is not None
    assert result.last_loss is not None
    assert result.held_out_loss is not None
    assert result.last_loss < 0.7 * result.first_loss
    assert (result.model / "config.json").is_file()
    assert (result.model / "tokenizer.json").is_file()
    assert (Path(config.out) / "config.yaml").is_file()
    assert said[0] == "training on 10 rows"
    assert not any("warning" in one for one in said)
    assert any(one.startswith("step 10 of 10: loss ") for one in said)


def test_tasks_that_are_trained_on_and_held_out_are_told(
    config: SftConfig, rows: list[dict[str, object]], tmp_path: Path
) -> None:
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (rows[1], rows[2])))
    said: list[str] = []
    train_sft(replace(config, held_out=(str(tmp_path / "held.jsonl"),), max_steps=1), tell=said.append)
    assert said[1].startswith("warning: 2 tasks, such as t1, are trained on and held out")


def gradient(config: SftConfig, rows: Sequence[TrainingRow], out: Path, *, packing: bool = False) -> dict[str, Any]:
    """The gradient of a step of rows, in one batch; packed rows are one sequence."""
    config = replace(config, out=str(out), batch_size=len(rows), packing=packing, max_length=1024)
    out.mkdir()
    with (out / "rows").open("w+b") as file, TrainingRun(out, config) as run:
        stored = StoredRows(file)
        for row in rows:
            stored.append(row)
        tuning = FineTuning(config, SftData(stored, StoredRows(file), 0, 1, "a"), run)
        (batch,) = tuning.learner.batches(tuning.rows_of(0), len(rows))
        assert batch.tensors["mask"].sum() == sum(row.loss_tokens for row in rows)
        assert (len(batch.rows), "positions" in batch.tensors) == ((1, True) if packing else (len(rows), False))
        tuning.learner.backward(-tuning.learner.scorer(*batch.inputs)[0].sum() / 100)
        return {name: one.grad.clone() for name, one in tuning.learner.model.named_parameters()}


def changed(row: TrainingRow, position: int) -> TrainingRow:
    ids = array("i", row.ids)
    ids[position] = (ids[position] + 1) % 300 + 2
    return replace(row, ids=ids)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.allclose(one[name], other[name], atol=1e-6, rtol=1e-4) for name in one)


def test_only_sampled_tokens_carry_loss(config: SftConfig, load: Load, tmp_path: Path) -> None:
    """What comes after the last answer is read for no prediction that counts: as another text it changes nothing."""
    row = load(replace(config, held_out_share=0.0)).train[0]
    plain = gradient(config, [row], tmp_path / "plain")
    last = row.mask.rindex(1)
    assert len(row.ids) > last + 2
    for position in (last + 1, len(row.ids) - 1):
        assert same(plain, gradient(config, [changed(row, position)], tmp_path / f"context-{position}"))
    assert not same(plain, gradient(config, [changed(row, last)], tmp_path / "sampled"))


def test_a_step_is_that_of_transformers_loss(config: SftConfig, load: Load, model: Path) -> None:
    """Labels with -100 outside the mask, and the mean over all tokens of the step with loss."""
    config = replace(config, accumulation=2, batch_size=3, held_out_share=0.5)
    data = load(config)
    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    with TrainingRun(Path(config.out), config) as run:
        tuning = FineTuning(config, data, run)
        rows = tuning.rows_of(0)
        losses = [
            plain(input_ids=torch.tensor([row.ids.tolist()]), labels=torch.tensor([row.labels])).loss * row.loss_tokens
            for row in rows
        ]
        expected = sum(losses) / sum(row.loss_tokens for row in rows)
        expected.backward()
        norm = torch.stack([one.grad.norm() for one in plain.parameters()]).norm()
        held = [plain(input_ids=torch.tensor([row.ids.tolist()]), labels=torch.tensor([row.labels])).loss for row in
                data.held_out]  # fmt: skip
        weights = torch.tensor([float(row.loss_tokens) for row in data.held_out])
        mean = (torch.stack(held).detach() * weights).sum() / weights.sum()
        assert tuning.held_out_loss() == pytest.approx(float(mean))
        stats = tuning.step(0)
    assert len(rows) == 6
    assert (stats["loss"], stats["grad_norm"]) == pytest.approx((expected.item(), norm.item()), rel=1e-4)


def test_an_epoch_has_every_row_once(config: SftConfig, load: Load) -> None:
    config = replace(config, held_out_share=0.0, batch_size=5)
    with TrainingRun(Path(config.out), config) as run:
        tuning = FineTuning(config, load(config), run)
        epochs = [[[row.rollout for row in tuning.rows_of(epoch * 3 + n)] for n in range(3)] for epoch in range(2)]
        again = [row.rollout for row in tuning.rows_of(1)]
    assert [[len(step) for step in epoch] for epoch in epochs] == [[5, 5, 2]] * 2
    assert [len({name for step in epoch for name in step}) for epoch in epochs] == [12, 12]
    assert again == epochs[0][1] != epochs[1][1]


def test_rows_stay_on_disk(config: SftConfig, load: Load, rows: list[dict[str, object]]) -> None:
    """The memory of thousands of rows is that of their positions, lengths and tasks."""
    body = {**rows[0], "input_ids": list(range(2000)), "loss_mask": [0] + [1] * 1999}
    Path(config.data[0]).write_text("".join(json.dumps({**body, "traj_id": f"t{n}"}) + "\n" for n in range(300)))
    long = replace(config, max_length=4000, held_out_share=0.0)
    load(long)  # fill the caches of all modules that it uses
    tracemalloc.start(8)
    data = load(long)
    _, peak = tracemalloc.get_traced_memory()
    gc.collect()
    ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/train/*", all_frames=True)])
    tracemalloc.stop()
    size = sum(trace.size for trace in ours.traces)
    assert len(data.train) == 300
    assert size < 300 * 300  # of 600,000 tokens
    assert peak < 1_000_000
    assert data.train[299].ids[-1] == 1999


@pytest.mark.parametrize("option", ["lora.dropout", "model"])
def test_a_resumed_run_has_the_same_dropout(config: SftConfig, option: str, tmp_path: Path) -> None:
    lora = Lora(rank=2, dropout=0.3) if option == "lora.dropout" else Lora()
    config = replace(config, lora=lora, max_steps=3, held_out_share=0.0, checkpoints=Checkpoints(every=1, keep=0))
    whole = train_sft(replace(config, out=str(tmp_path / "whole")))
    train_sft(replace(config, max_steps=2))
    assert train_sft(config).last_loss == whole.last_loss


def test_packed_rows_do_not_see_each_other(config: SftConfig, load: Load, tmp_path: Path) -> None:
    rows = list(load(replace(config, held_out_share=0.0)).train)[:3]
    assert same(gradient(config, rows, tmp_path / "apart"), gradient(config, rows, tmp_path / "packed", packing=True))


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(config: SftConfig, tmp_path: Path) -> None:
    whole = train_sft(replace(config, out=str(tmp_path / "whole")))
    part = replace(config, out=str(tmp_path / "part"))
    train_sft(replace(part, max_steps=5))
    cut_off = Path(part.out, "checkpoints", "checkpoint-7")  # by kill -9 while it was written
    cut_off.mkdir()
    result = train_sft(part)
    assert not cut_off.exists()
    assert result.steps == 10
    assert result.last_loss == pytest.approx(whole.last_loss, abs=1e-6)
    steps = [line["step"] for line in TrainingRun(Path(part.out), part).lines() if "loss" in line]
    assert steps == list(range(1, 11))


TERMINATED = """
import os, signal, sys
import torch
from transformers import PreTrainedModel
from minisandbox.cli import main, train
from minisandbox.train.sft import FineTuning

train._EXIT_SECONDS = 600.0
owner, name, call = {
    "forward": (FineTuning, "rows_of", 4),
    "optimizer": (torch.optim.Optimizer, "zero_grad", 4),  # zero_grad follows the change of the weights
    "checkpoint": (PreTrainedModel, "save_pretrained", 1),
}[sys.argv[2]]
original, calls = getattr(owner, name), []


def terminated(*arguments, **options):
    calls.append(None)
    if len(calls) == call:
        os.kill(os.getpid(), signal.SIGTERM)
    return original(*arguments, **options)


setattr(owner, name, terminated)
sys.exit(main.main(["train", "sft", sys.argv[1]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "step"), [("forward", 3), ("optimizer", 4), ("checkpoint", 1)])
def test_after_sigterm_the_run_resumes_from_its_last_step(
    operation: str, step: int, config: SftConfig, tmp_path: Path
) -> None:
    from minisandbox.train.options import to_yaml  # noqa: PLC0415 - for this test alone

    (tmp_path / "experiment.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-c", TERMINATED, str(tmp_path / "experiment.yaml"), operation]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 143, ended.stderr
    assert f"resumes from the checkpoint of step {step}" in ended.stderr
    whole = train_sft(replace(config, out=str(tmp_path / "whole")))
    assert train_sft(config).last_loss == pytest.approx(whole.last_loss, abs=1e-5)


def test_a_run_that_is_done_is_not_trained_on(config: SftConfig) -> None:
    """Its ten steps end in the middle of an epoch: transformers would begin with another one."""
    first = train_sft(config)
    before = (first.model / "model.safetensors").read_bytes()
    shutil.rmtree(first.model)  # as if it had been killed before the model was written
    again = train_sft(config)
    assert again == first
    assert (again.model / "model.safetensors").read_bytes() == before


def test_killed_while_old_checkpoints_are_removed(config: SftConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is kept: until the next one is marked as whole there is no other, and what is half removed is not whole."""

    class Killed(BaseException):
        pass

    def half(path: Path | str, *_: object, **__: object) -> None:
        Path(path, "optimizer.pt").unlink()
        raise Killed

    config = replace(config, checkpoints=Checkpoints(every=5, keep=1))
    with monkeypatch.context() as patch:
        train_sft(replace(config, max_steps=5))
        patch.setattr(shutil, "rmtree", half)
        with pytest.raises(Killed):
            train_sft(config)
    with TrainingRun(Path(config.out), config, may_change=("checkpoints.keep",)) as run:
        last = run.last_checkpoint()
        assert last is not None
        assert last.name == "checkpoint-6"
    assert train_sft(config).steps == 10
    assert [one.name for one in Path(config.out, "checkpoints").glob("checkpoint-*")] == ["checkpoint-10"]


def test_a_model_is_written_whole_or_not_at_all(config: SftConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    write = transformers.PreTrainedTokenizerBase.save_pretrained

    def full(tokenizer: object, place: Path | str, **more: object) -> None:
        write(tokenizer, place, **more)
        if "checkpoints" not in str(place):
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", full)
        with pytest.raises(DiskFull):
            train_sft(replace(config, max_steps=1))
    assert sorted(one.name for one in Path(config.out).iterdir()) == ["checkpoints", "config.yaml", "lock", "log.jsonl"]


def test_two_processes_say_it_once(config: SftConfig, tmp_path: Path) -> None:
    from minisandbox.train.options import to_yaml  # noqa: PLC0415 - for this test alone

    (tmp_path / "experiment.yaml").write_text(to_yaml(replace(config, max_steps=4, held_out_share=0.0)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, "-m", "minisandbox", "train", "sft", str(tmp_path / "experiment.yaml"), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "FutureWarning" not in ended.stderr
    assert json.loads(ended.stdout)["steps"] == 4
    assert (Path(config.out) / "checkpoints" / "checkpoint-4" / "complete").exists()


def test_a_small_matrix_beside_the_weights(config: SftConfig) -> None:
    result = train_sft(replace(config, lora=Lora(rank=4), max_steps=2, held_out_share=0.0))
    assert (Path(config.out) / "adapter" / "adapter_config.json").is_file()
    assert (result.model / "model.safetensors").is_file()
    assert result.held_out_loss is None


def test_another_experiment_needs_another_directory(config: SftConfig) -> None:
    with TrainingRun(Path(config.out), config), pytest.raises(RunError, match="another process"):
        TrainingRun(Path(config.out), config)
    with pytest.raises(RunError, match=r"another configuration: optimizer\.learning_rate"):
        TrainingRun(Path(config.out), replace(config, optimizer=Optimizer(learning_rate=1e-3)))


def test_rows_of_another_tokenizer(config: SftConfig, tmp_path: Path) -> None:
    Path(config.data[0]).write_text(json.dumps({"input_ids": [1, 100_000], "labels": [-100, 100_000]}) + "\n")
    with pytest.raises(TrainingError, match="another tokenizer"):
        train_sft(replace(config, held_out_share=0.0))


def test_longer_rows_are_counted_and_none_left_is_an_error(config: SftConfig, load: Load) -> None:
    lengths = sorted(len(row.ids) for row in load(replace(config, held_out_share=0.0)).train)
    data = load(replace(config, held_out_share=0.0, max_length=lengths[0]))
    assert data.left_out == sum(one > lengths[0] for one in lengths)
    with pytest.raises(TrainingError, match="longer than max_length"):
        load(replace(config, max_length=3))


TRACKS = {
    "mlflow": "mlruns/*/*/metrics/loss", "tensorboard": "run/minisandbox/events.*", "trackio": "trackio/*.db",
    "wandb": "wandb/offline-run-*/*.wandb",
}  # fmt: skip
"""The files of experiment trackers that use no server."""


@pytest.mark.parametrize(("name", "pattern"), TRACKS.items(), ids=list(TRACKS))
def test_a_tracker_gets_the_log(config: SftConfig, name: str, pattern: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"pip install {name}")
    tracking = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
                "TRACKIO_DIR": str(tmp_path / "trackio"), "WANDB_MODE": "offline"}  # fmt: skip
    command_line(replace(config, max_steps=3, report_to=name), tmp_path, **tracking)
    assert any(file.stat().st_size for file in tmp_path.glob(pattern))


def command_line(config: SftConfig, directory: Path, **environment: str) -> str:
    """Run the command in a directory; return its output."""
    store(config, directory / "sft.yaml")
    run = subprocess.run(
        [sys.executable, "-m", "minisandbox", "train", "sft", "sft.yaml"], cwd=directory, check=True, text=True,
        env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return run.stdout


@pytest.mark.parametrize("name", TRACKS)
def test_a_tracker_that_is_not_installed_is_refused(
    config: SftConfig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    with pytest.raises(MissingExtra, match=f"report_to is {name}, but the package is not installed"):
        train_sft(replace(config, report_to=name))


def test_a_tracker_that_does_not_start_is_named(config: SftConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("accelerate.Accelerator.init_trackers", fail)
    with pytest.raises(TrainingError, match="report_to: wandb did not start") as raised:
        train_sft(replace(config, report_to="wandb"))
    assert raised.value.reason == "no route to host"


def test_warnings_of_other_packages_reach_no_user(config: SftConfig, tmp_path: Path) -> None:
    text = command_line(replace(config, max_steps=2, gradient_checkpointing=True), tmp_path)
    assert "step 2 of 2" in text
    assert "Warning" not in text


def test_a_full_disk_is_said_so(config: SftConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoints lie on a file system without room, or, where none can be mounted, seem to."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    train_sft(replace(config, max_steps=5))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(DiskFull, match="resumes from the checkpoint of step 5"):
            train_sft(config)
    assert train_sft(config).steps == 10


def test_the_command_prints_the_mask_and_trains(
    config: SftConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from minisandbox.cli.main import main  # noqa: PLC0415 - the outermost layer
    from minisandbox.train.options import to_yaml  # noqa: PLC0415 - for this test alone

    (tmp_path / "experiment.yaml").write_text(to_yaml(replace(config, max_steps=2)))
    assert main(["train", "sft", str(tmp_path / "experiment.yaml"), "--show-mask", "1"]) == 0
    shown = capsys.readouterr().out
    assert "LOSS" in shown
    loss = "".join(line.split(": ", 1)[1] for line in shown.splitlines() if line.startswith("  LOSS"))
    assert "<|im_end|>" in loss
    assert "user" not in loss
    assert main(["train", "sft", str(tmp_path / "experiment.yaml"), "-o", str(tmp_path / "other")]) == 0
    assert (tmp_path / "other" / "model" / "config.json").is_file()
    assert main(["train", "sft", str(tmp_path / "experiment.yaml"), "--set", "optimizer.learning_rat=1"]) == 3
    assert "learning_rate" in capsys.readouterr().err
    assert main(["train", "options", "sft"]) == 0
    assert "\nmax_length " in capsys.readouterr().out
