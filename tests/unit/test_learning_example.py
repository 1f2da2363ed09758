"""The experiment that anybody can repeat: its tokens, its commands, and the page that is made of its runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

for _name in ("torch", "transformers", "tokenizers", "matplotlib"):
    pytest.importorskip(_name, reason="the extra [train] is not installed")

from examples.learning import results  # noqa: E402 - after what they need
from examples.learning.experiment import AGENT, HELD_OUT, HERE, TRAIN, Experiment  # noqa: E402 - the same
from examples.learning.model import encode, train_tokenizer  # noqa: E402 - the same
from examples.learning.mutations import WORDS, WordEdit  # noqa: E402 - the same
from tools.pages import with_part  # noqa: E402 - the same

from minisandbox.cli.main import parser  # noqa: E402 - the same
from minisandbox.train.config import RlConfig, SftConfig  # noqa: E402 - the same
from minisandbox.train.options import load  # noqa: E402 - the same

PROMPT = " 1 def f(x):\n 2     if x is not None and x < 10:\n 3         return 12"


def test_an_edit_is_five_tokens_and_a_row_is_what_the_chat_template_makes() -> None:
    tokenizer = train_tokenizer([PROMPT] * 4)
    for number, word in enumerate(WORDS):
        answer = WordEdit(number % 20 + 1, word, WORDS[number - 1]).text
        ids, mask = encode(tokenizer, PROMPT, answer)
        assert sum(mask) == 5
        assert mask == sorted(mask)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": PROMPT}], add_generation_prompt=True, tokenize=False
        )
        assert list(tokenizer(text)["input_ids"]) == ids[: mask.index(1)]
        sampled = tokenizer.decode(ids[mask.index(1) :], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert sampled.strip() == answer


def test_the_configurations_are_whole() -> None:
    sft, rl = load(SftConfig, str(HERE / "sft-mutations.yaml")), load(RlConfig, str(HERE / "rl-mutations.yaml"))
    assert (rl.policy.agent, rl.policy.steps, rl.reuse_grades) == (AGENT, 1, True)
    assert [Path(path).resolve() for path in (*rl.tasks, *rl.evaluation.tasks)] == [TRAIN, HELD_OUT]
    assert sft.device == rl.device == "cpu"


def test_the_experiments_commands_are_commands_and_what_is_done_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        words = command[2:]
        ran.append(words)
        if words[0] == "minisandbox":
            parser(words[1:]).parse_args(words[1:])
        out = Path(words[words.index("-o") + 1] if "-o" in words else words[1])
        made = {"sft": "model/config.json", "rl": "model/config.json"}.get(words[2], "config.json")
        path = out if out.suffix == ".jsonl" else out / made
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    one = Experiment(tmp_path, seeds=(1, 2), settings=("groups.size=4",))
    one.run()
    assert len(ran) == 2 + 2 * 4
    settings = [word for words in ran if words[1:3] == ["train", "rl"] for word in words]
    assert settings.count("groups.size=4") == 2
    one.run()
    assert len(ran) == 2 + 2 * 4
    stages = [json.loads(line)["stage"] for line in (tmp_path / "times.jsonl").read_text().splitlines()]
    assert stages[:5] == ["base", "warm-up", "sft-1", "rl-1", "likeliest-sft-1"]


def test_the_page_is_made_of_the_runs(tmp_path: Path) -> None:
    for seed, last in ((1, 0.5), (2, 0.4)):
        run = tmp_path / f"rl-{seed}"
        run.mkdir()
        scores = [
            {"step": step, "reward": rate, "rollouts": 100, "failed": 0} for step, rate in ((0, 0.25), (50, last))
        ]
        (run / "scores.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in scores))
        rewards = [{"step": step, "reward": step / 100} for step in range(50)]
        (run / "log.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in [*rewards, {"step": 50}]))
    times = [{"stage": "base", "seconds": 60, "cpu": 30}, {"stage": "rl-1", "seconds": 600, "cpu": 300}]
    (tmp_path / "times.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in times))
    seeds = list(results.read_seeds(tmp_path))
    assert [one.number for one in seeds] == [1, 2]
    table = results.rates(seeds).splitlines()
    assert table[2] == "| 1 | 25.0% | 50.0% | +25.0 points |  |  |"
    assert table[4:] == [
        "| mean | 25.0% | 45.0% | +20.0 points |  |  |",
        "| deviation of the seeds | 0.0 points | 7.1 points | 7.1 points |  |  |",
    ]
    assert "| seed 1, reward of the ten steps before |  | 44.5% |" in results.course(seeds)
    assert "| base | 1.0 | 0.5 |" in results.cost(tmp_path, seeds)
    assert "| seed 1: SFT and RL | 10 | 5 |" in results.cost(tmp_path, seeds)
    page = "a\n<!-- rates: made -->\nold\n<!-- rates: end -->\nb"
    assert with_part(page, "rates", "new") == "a\n<!-- rates: made -->\n\nnew\n\n<!-- rates: end -->\nb"
    with pytest.raises(ValueError, match="no lines"):
        with_part(page, "cost", "new")
