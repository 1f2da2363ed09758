"""From rollouts in sandboxes to training data: the whole way as typed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.scripted_model import decode_answer

from minisandbox.agents import AgentOptions, BashAgent, OracleAgent, ReplayAgent
from minisandbox.cli.main import main
from minisandbox.images import Image
from minisandbox.models import ScriptedModel
from minisandbox.rollouts import Setup, run_batch
from minisandbox.tasks import Task

pytestmark = [pytest.mark.kernel, pytest.mark.once]

FIX = "The operator is wrong.\n\n```bash\nsed -i 's/a - b/a + b/' calc/core.py\n```"
SUBMIT = "Done.\n\n```submit\n```"
NOTHING = "I give up.\n\n```submit\n```"


def command(*words: object) -> None:
    assert main(["trajectories", *map(str, words)]) == 0


@pytest.mark.slow
def test_from_sandboxes_to_tokens(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    tasks = [replace(smith, instance_id=f"calc__{name}") for name in ("easy-1", "hard-2", "never-3")]
    script = {"calc__easy-1": [FIX, SUBMIT], "calc__hard-2": [FIX, SUBMIT], "calc__never-3": [NOTHING]}
    options = AgentOptions()
    model = Setup(agent=BashAgent(options), model=ScriptedModel(script), configuration={"action_format": "text"})
    runs = {"model": model, "oracle": Setup(agent=OracleAgent()), "replay": Setup(agent=ReplayAgent(["true"]))}
    for name, setup in runs.items():
        attempts = 3 if name == "model" else 1
        found = run_batch(tasks, setup, tmp_path / name, image_of=lambda _: smith_image, attempts=attempts)
        assert all(one.reward is not None for one in found), found

    golden, short, even = (tmp_path / f"{name}.jsonl" for name in ("golden", "short", "even"))
    command("collect", *(tmp_path / name for name in runs), "-o", golden)
    said = json.loads((tmp_path / "golden.report.json").read_text())
    assert (said["read"], said["kept"]) == (15, 6)
    assert said["reasons"] == {"no_answers": 6, "reward": 3}, "who asks no model has nothing to learn from"
    command("filter", golden, "-o", short, "--unique", "--max-tokens", "20000")
    said = json.loads((tmp_path / "short.report.json").read_text())
    assert (said["kept"], said["reasons"]) == (2, {"duplicate": 4}), "the same patch in every attempt"
    command("balance", golden, "-o", even, "--max-per-instance", "2", "--seed", "1")
    assert json.loads((tmp_path / "even.report.json").read_text())["examples_per_instance"] == {"2": 2}

    command("export", even, "--to", "tokens", "-o", tmp_path / "tokens.jsonl")
    for line in (tmp_path / "tokens.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["reward"] == 1.0
        assert row["labels"] == [
            token if loss else -100 for token, loss in zip(row["input_ids"], row["loss_mask"], strict=True)
        ]
        spans = [[token for token in part if token != -100] for part in _answers(row["labels"])]
        assert [decode_answer(span).content for span in spans] == [FIX, SUBMIT], "what was sampled, and nothing else"
        assert all((value < 0) == bool(loss) for value, loss in zip(row["logprobs"], row["loss_mask"], strict=True))

    command("export", even, "--to", "xml", "-o", tmp_path / "xml.jsonl")
    row = json.loads((tmp_path / "xml.jsonl").read_text().splitlines()[0])
    assert "<function=bash>" in row["messages"][0]["content"], "the prompt tells of functions"
    assert row["messages"][2]["content"] == (
        "The operator is wrong.\n\n<function=bash>\n<parameter=command>sed -i 's/a - b/a + b/' calc/core.py</parameter>"
        "\n</function>"
    )
    assert row["patch"].startswith("diff --git a/calc/core.py")


def _answers(labels: list[int]) -> list[list[int]]:
    """The runs of labels that carry loss."""
    found: list[list[int]] = [[]]
    for label in labels:
        if label == -100:
            found += [[]] if found[-1] else []
        else:
            found[-1].append(label)
    return [part for part in found if part]
