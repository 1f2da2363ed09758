"""The experiment that anybody can repeat: its tokens, its commands, and the page that is made of its runs."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

for _name in ("torch", "transformers", "tokenizers", "matplotlib"):
    pytest.importorskip(_name, reason="the extra [train] is not installed")

from examples.learning import experiment as experiment_module  # noqa: E402 - after what they need
from examples.learning import results  # noqa: E402 - the same
from examples.learning.choose import best_temperature, rejection_rows  # noqa: E402 - the same
from examples.learning.experiment import ARMS, GROUPS, HERE, LLAMA, SMOLLM, TRAIN, Experiment, Subject  # noqa: E402 - the same
from examples.learning.model import Turn, encode, train_tokenizer  # noqa: E402 - the same
from examples.learning.mutations import WORDS, WordEdit  # noqa: E402 - the same
from examples.learning.oracle import TURNS  # noqa: E402 - the same
from examples.learning.results import Arm, Results, difference  # noqa: E402 - the same
from examples.learning.sample import chosen, finished, summary  # noqa: E402 - the same
from tools.pages import with_part  # noqa: E402 - the same

from minisandbox.cli.main import parser  # noqa: E402 - the same
from minisandbox.train.config import RlConfig, SftConfig  # noqa: E402 - the same
from minisandbox.train.groups import tasks_of_step  # noqa: E402 - the same
from minisandbox.train.options import load  # noqa: E402 - the same

PROMPT = " 1 def f(x):\n 2     if x is not None and x < 10:\n 3         return 12"


def test_an_edit_is_five_tokens_and_a_row_is_what_the_chat_template_makes() -> None:
    tokenizer = train_tokenizer([PROMPT] * 4)
    for number, word in enumerate(WORDS):
        answer = WordEdit(number % 20 + 1, word, WORDS[number - 1]).text
        ids, mask = encode(tokenizer, [Turn(PROMPT, answer)])
        assert sum(mask) == 5
        assert mask == sorted(mask)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": PROMPT}], add_generation_prompt=True, tokenize=False
        )
        assert list(tokenizer(text)["input_ids"]) == ids[: mask.index(1)]
        sampled = tokenizer.decode(ids[mask.index(1) :], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert sampled.strip() == answer


def test_a_conversation_is_what_the_chat_template_makes() -> None:
    tokenizer = train_tokenizer([PROMPT] * 4)
    turns = [Turn(PROMPT, "< -> <= 2", has_loss=False), Turn("fail", "skip"), Turn("pass", "submit")]
    ids, mask = encode(tokenizer, turns)
    pairs = [pair for turn in turns for pair in (("user", turn.prompt), ("assistant", f" {turn.answer}"))]
    messages = [{"role": role, "content": text} for role, text in pairs]
    assert list(tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]) == ids
    trained = [tokenizer.decode([token]) for token, has_loss in zip(ids, mask, strict=True) if has_loss]
    assert trained == [" skip", "<|end|>", " submit", "<|end|>"]


def test_the_configurations_are_whole() -> None:
    sft, rl = load(SftConfig, str(HERE / "sft.yaml")), load(RlConfig, str(HERE / "rl.yaml"))
    assert (rl.steps, rl.groups.tasks, rl.groups.size, rl.policy.steps) == (LLAMA.steps, GROUPS, LLAMA.size, TURNS)
    assert rl.workers >= GROUPS * LLAMA.size, "shuffled rewards wait for all rollouts of a step"
    assert (rl.groups.redo, rl.groups.refill, rl.entropy) == (0, 0, 0.0)
    assert [Path(path).resolve() for path in rl.tasks] == [TRAIN]
    assert sft.device == rl.device == "cpu"


class FakeProcess:
    """A stage that writes its result at once."""

    ran: ClassVar[list[list[str]]] = []
    returncode = 0
    pid = 0

    def __init__(self, command: list[str], **_: Any) -> None:
        words = command[2:]
        self.ran.append(words)
        if words[0] == "minisandbox":
            parser(words[1:]).parse_args(words[1:])
        out = Path(words[words.index("-o") + 1] if "-o" in words else words[1])
        made = {"examples.learning.base": "config.json"}.get(words[0], "model/config.json")
        path = out if out.suffix else out / made
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"temperature": 0.6}' if "temperature" in words else "")


def test_each_stage_is_a_command_and_finished_stages_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(FakeProcess, "ran", ran)
    monkeypatch.setattr(subprocess, "Popen", FakeProcess)
    monkeypatch.setattr(os, "wait4", lambda *_: (0, 0, resource.getrusage(resource.RUSAGE_SELF)))
    experiment = Experiment(tmp_path, seeds=(1, 2), parallel=2, llama=Subject(rl=("kl=0.01",)))
    experiment.run()
    trained, drawn, tried = 3, 3, 6
    assert len(ran) == 2 + 2 * (1 + trained + drawn + tried + len(ARMS))
    rl = [words for words in ran if words[0] == "examples.learning.rl"]
    rewards = Counter(words[words.index("--reward") + 1] for words in rl)
    assert rewards == {"hidden": 2, "shuffled": 2, "naive": 2}
    assert all("kl=0.01" in words for words in rl)
    tempered = next(words for words in ran if words[-1].endswith("eval-tempered-1.jsonl"))
    assert tempered[tempered.index("--temperature") + 1] == "0.6"
    count = len(ran)
    experiment.run()
    assert len(ran) == count
    stages = [json.loads(line)["stage"] for line in (tmp_path / "times.jsonl").read_text().splitlines()]
    assert (len(stages), stages[:2]) == (count, ["base", "warm-up"])


def test_the_embedded_model_has_stages_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(FakeProcess, "ran", ran)
    monkeypatch.setattr(subprocess, "Popen", FakeProcess)
    monkeypatch.setattr(os, "wait4", lambda *_: (0, 0, resource.getrusage(resource.RUSAGE_SELF)))
    monkeypatch.setattr(experiment_module, "fetch_model", lambda **_: tmp_path / "embedded")
    Experiment(tmp_path, seeds=(), smollm=True).run()
    stages = [json.loads(line)["stage"] for line in (tmp_path / "times.jsonl").read_text().splitlines()]
    assert stages == [
        "smollm-warm-up", "smollm-sft-1", "eval-smollm-sft-1", "smollm-rl-hidden-1", "eval-smollm-hidden-1",
        "smollm-drawn-1", "smollm-passes-1", "smollm-rejection-1", "eval-smollm-rejection-1",
    ]  # fmt: skip
    (sft,) = (words for words in ran if words[-1].endswith("smollm-sft-1"))
    assert f"model={tmp_path / 'embedded'}" in sft
    (rl,) = (words for words in ran if words[0] == "examples.learning.rl")
    config = load(RlConfig, rl[1], [rl[index + 1] for index, word in enumerate(rl) if word == "--set"])
    assert (config.steps, config.groups.size, config.policy.steps) == (SMOLLM.steps, SMOLLM.size, SMOLLM.turns)
    assert config.model == str(tmp_path / "smollm-sft-1" / "model")


# --- choosing --------------------------------------------------------------------------------------------------------


def test_rejection_sampling_draws_the_rollouts_of_reinforcement_learning() -> None:
    tasks = tuple(f"t{number}" for number in range(10))
    drawn = chosen(tasks, 8, 3, like_rl=(5, 4))
    expected = Counter(task for step in range(5) for task in tasks_of_step(tasks, 4, step, 3)[0])
    assert len(set(drawn)) == len(drawn) == 5 * 4 * 8
    assert Counter(task for task, _ in drawn) == {task: 8 * times for task, times in expected.items()}
    assert len(chosen(tasks, 4, 3, first=6)) == 24
    assert chosen(tasks, 2, 0) == [(task, attempt) for task in tasks for attempt in (0, 1)]


def rollout(task: str, honest: float | None, ids: list[int], *, cheated: bool = False) -> dict[str, object]:
    return {"task": task, "honest": honest, "cheated": cheated, "input_ids": ids, "loss_mask": [0, 1], "traj_id": task}


def test_rejection_sampling_keeps_each_honest_pass_once() -> None:
    passes = [rollout(task, 1.0, ids) for task, ids in (("a", [1, 2]), ("a", [1, 2]), ("a", [1, 3]), ("b", [1, 2]))]
    others = [rollout("b", 0.0, [1, 4]), rollout("b", None, [1, 5]), rollout("b", 1.0, [1, 6], cheated=True)]
    rollouts = [*passes, *others]
    assert [(row["traj_id"], row["input_ids"]) for row in rejection_rows(rollouts)] == [
        ("a", [1, 2]), ("a", [1, 3]), ("b", [1, 2]),
    ]  # fmt: skip


def test_the_best_temperature_has_the_highest_rate(tmp_path: Path) -> None:
    for name, rewards in (("a", [0.0, 1.0, None]), ("b", [1.0, 1.0, 0.0, 1.0]), ("c", [0.0, 0.0])):
        lines = [json.dumps(rollout("t", reward, [1, 2])) for reward in rewards]
        (tmp_path / name).write_text("\n".join(lines))
    files = {0.4: tmp_path / "a", 0.6: tmp_path / "b", 1.0: tmp_path / "c"}
    assert best_temperature(files) == {"temperature": 0.6, "pass@1": {"0.4": 0.5, "0.6": 0.75, "1.0": 0.0}}


def test_an_interrupted_command_keeps_its_whole_lines(tmp_path: Path) -> None:
    part = tmp_path / "rollouts.part"
    assert finished(part) == []
    part.write_text('{"task": "a"}\n{"task": "b"}\n{"ta')
    assert finished(part) == [{"task": "a"}, {"task": "b"}]
    assert part.read_text() == '{"task": "a"}\n{"task": "b"}\n', "a later line would continue the one that is cut"


def test_a_summary_has_pass_at_k_and_the_rate_of_cheats() -> None:
    rollouts = [
        rollout("a", 1.0, [1]),
        rollout("a", 0.0, [1], cheated=True),
        rollout("b", 0.0, [1]),
        rollout("b", 0.0, [1]),
    ]
    assert summary(rollouts, 2) == "4 rollouts: pass@1 25.0%, pass@2 50.0%; 25.0% cheated"


# --- results ---------------------------------------------------------------------------------------------------------


def arm(name: str, seed: int, *passes: tuple[int, int], cheats: int = 0) -> Arm:
    """An arm with these numbers of rollouts and passes of its tasks; a number of cheats that did not pass."""
    return Arm("llama", seed, name, tuple((total, count, cheats, count) for total, count in passes))


def test_a_difference_is_paired_by_task_and_seed() -> None:
    """By hand: the tasks' differences of pass@1 are 0.5, 0 and -0.25 in seed 1, and 0.5, 0.5 and 0.25 in seed 2."""
    ours = [
        arm("hidden", 1, (4, 4), (4, 2), (4, 0)),
        arm("hidden", 2, (4, 2), (4, 2), (4, 1)),
    ]
    theirs = [
        arm("sft", 1, (4, 2), (4, 2), (4, 1)),
        arm("sft", 2, (4, 0), (4, 0), (4, 0)),
    ]
    found = difference(ours, theirs, "1")
    assert found is not None
    assert found.mean == pytest.approx((0.5 + 0.25 + 0.0) / 3)
    # resamples of three tasks have 27 equally likely orders; the extreme means have 1/27 each, more than 2.5 %
    assert (found.low, found.high) == (0.0, 0.5)
    assert difference(ours, theirs, "1") == found
    first_seed = difference(ours, theirs[:1], "1")
    assert first_seed is not None
    assert first_seed.mean == pytest.approx((0.5 + 0.0 - 0.25) / 3)
    # pass@4 of seed 1: 1 - 1, 1 - 1, 0 - 1; of seed 2: 1 - 0 each
    at_four = difference(ours, theirs, "4")
    assert at_four is not None
    assert at_four.mean == pytest.approx((0.5 + 0.5 + 0.0) / 3)
    assert difference(ours, [arm("sft", 9, (4, 0))], "1") is None
    assert difference(ours, theirs, "16") is None, "no task has 16 rollouts"


def test_an_arms_numbers() -> None:
    one = Arm("llama", 1, "sft", ((4, 1, 2, 0), (4, 2, 1, 2)))  # one pass has also cheated
    assert one.pass_at() == {"1": 0.375, "2": pytest.approx(2 / 3), "4": 1.0}
    assert one.cheats == 0.375
    assert one.passes_without_cheats == 0.4


def write(path: Path, *lines: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_the_page_is_made_of_the_file_and_the_file_of_the_runs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tasks = [rollout(task, reward, []) for task in "ab" for reward in (1.0, 0.0) for _ in range(8)]
    write(run / "eval-sft-1.jsonl", *tasks)
    write(run / "eval-hidden-1.jsonl", *(one | {"honest": 1.0} for one in tasks))
    write(run / "rl-hidden-1" / "log.jsonl", {"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.5})
    outcomes: list[dict[str, object]] = [
        {"step": step, "attempt": 2 * step + number, **rollout("a", float(number), [], cheated=step == 0)}
        for step in (0, 1) for number in (0, 1)
    ]  # fmt: skip
    write(run / "rl-hidden-1" / "outcomes.jsonl", *outcomes[:3], *outcomes[2:])  # a step that a resumed run repeated
    times = (("base", 60, 3600), ("rl-hidden-1", 9, 9), ("rl-hidden-1", 7200, 1791), ("eval-hidden-1", 1, 1800))
    write(run / "times.jsonl", *({"stage": name, "seconds": wall, "cpu": cpu} for name, wall, cpu in times))
    found = results.read_run(run)
    assert (found.tasks, found.shared) == (("a", "b"), {"base": (60.0, 3600.0)})
    hidden, sft = found.arms
    assert (hidden.arm, hidden.rollouts, hidden.steps) == ("hidden", 4, 2)
    assert hidden.outcomes == ((16, 16, 0, 16), (16, 16, 0, 16))
    assert (hidden.curve, hidden.cpu_hours) == (((0.25, 0.5, 1.0), (0.5, 0.5, 0.0)), 1.0)
    assert sft.outcomes == ((16, 8, 0, 8), (16, 8, 0, 8))
    path = tmp_path / "results.json"
    second = Results(found.tasks, {}, (arm("sft", 2, (16, 4), (16, 4), cheats=4), arm("sft", 1, (16, 0), (16, 0))))
    second.merged(found).save(path)
    assert len(path.read_text().splitlines()) == 3 + 3 + 1, "a line per arm"
    merged = Results.load(path)
    assert [one.key for one in merged.arms] == [("llama", 1, "sft"), ("llama", 1, "hidden"), ("llama", 2, "sft")]
    assert merged.arms[0] == sft
    with pytest.raises(ValueError, match="other held-out tasks"):
        merged.merged(Results(("a",), {}, ()))
    assert "| SFT | 2 | 25.0% |" in results.rates(merged, "llama")
    assert "| 25.0% | 33.3% |\n" in results.rates(merged, "llama"), "the rate of cheats; 8 passes of 24 other rollouts"
    assert "| SFT | +50.0 (+50.0 to +50.0) | " in results.differences(merged, "llama")
    assert "| llama | RL, hidden tests | 4 | 2 | 1.00 |" in results.budget(merged)
    page = tmp_path / "results.md"
    marks = (f"<!-- {name}: made -->\nold\n<!-- {name}: end -->\n" for name, _ in results.parts(merged))
    page.write_text("".join(marks))
    outputs = ["--data", str(path), "--page", str(page), "--curve", str(tmp_path / "c.svg")]
    command = [sys.executable, "-m", "examples.learning.results", *outputs]
    subprocess.run(command, check=True, cwd=results.DOCS.parent)
    assert "old" not in page.read_text()
    drawn = (tmp_path / "c.svg").read_text()
    subprocess.run(command, check=True, cwd=results.DOCS.parent)
    assert (tmp_path / "c.svg").read_text() == drawn


def test_the_page_shows_the_committed_results() -> None:
    committed = Results.load(results.DATA)
    page = results.PAGE.read_text()
    for name, text in results.parts(committed):
        assert with_part(page, name, text) == page, f"run python -m examples.learning.results: {name} differs"
