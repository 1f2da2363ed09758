"""``trajectories collect|filter|balance|export`` as typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.scripted_model import decode_answer
from tests.unit.training_tools import DATA, FLAG, MESSAGES, example, saved_tokenizer, trajectory

from minisandbox.cli.main import main
from minisandbox.errors import NotFound
from minisandbox.rollouts import RunDirectory
from minisandbox.trajectories import PatchRecord
from minisandbox.trajectories.sources import read_examples


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two tasks, resolved three times and once; failures, a flag, an agent without a model."""
    rollouts = [
        *(trajectory("a__b-1", attempt, submission=b"diff --git a/x b/x\n%d" % attempt) for attempt in range(3)),
        trajectory("a__b-1", 3, reward=0.0),
        trajectory("a__b-1", 4, exit_status="submitted (exit_cost)"),
        trajectory("c__d-2", 0),
        trajectory("c__d-2", 1, flags=(FLAG,)),
        trajectory("c__d-2", 2, grade=None),
        trajectory("e__f-3", 0, agent="oracle", messages=(), turns=(), rows=(), model=""),
    ]
    with RunDirectory.open(tmp_path / "run", {}) as directory:
        for one in rollouts:
            directory.write(one)
    return tmp_path / "run"


def command(*words: object, status: int = 0) -> None:
    assert main(["trajectories", *map(str, words)]) == status


def report(path: Path) -> Any:
    return json.loads(path.read_text())


def test_from_a_run_to_training_data(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden, short, even, out = (tmp_path / f"{name}.jsonl" for name in ("golden", "short", "even", "xml"))
    command("collect", run, "-o", golden)
    told = capsys.readouterr()
    assert "dropped: exit_status" in told.out
    assert "4 examples" in told.err
    said = report(tmp_path / "golden.report.json")
    assert (said["stage"], said["read"], said["kept"]) == ("collect", 9, 4)
    assert said["reasons"] == {"reward": 1, "exit_status": 1, "flagged": 1, "no_reward": 1, "no_answers": 1}
    assert said["rules"] == {"min_reward": 1.0, "statuses": ["submitted"]}
    assert len(said["dropped"]) == 5
    assert said["instances"] == {"read": 3, "kept": 2}
    command("filter", golden, "-o", short, "--max-tokens", "100", "--unique", "--no-flags")
    assert report(tmp_path / "short.report.json")["kept"] == 4
    capsys.readouterr()
    command("balance", short, "-o", even, "--max-per-instance", "2", "--seed", "7", "--json")
    printed = json.loads(capsys.readouterr().out)
    assert printed == {**report(tmp_path / "even.report.json"), "out": str(even)}
    assert (printed["kept"], printed["reasons"]) == (3, {"over_max_per_instance": 1})
    assert printed["examples_per_instance"] == {"1": 1, "2": 1}
    again = tmp_path / "again.jsonl"
    command("balance", short, "-o", again, "--max-per-instance", "2", "--seed", "7")
    assert again.read_bytes() == even.read_bytes()
    command("export", even, "--to", "xml", "-o", out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["instance_id"] for row in rows] == ["a__b-1", "a__b-1", "c__d-2"]
    assert rows[0]["messages"][2]["content"] == (
        "I look.\n\n<function=bash>\n<parameter=command>ls</parameter>\n</function>"
    )


def test_the_patch_after_a_turn(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    changes = (PatchRecord(1, b"diff \xff\n"), PatchRecord(2, None, "it has 70000 bytes"))
    with RunDirectory.open(tmp_path, {}) as directory:
        directory.write(trajectory("a__b-1", 0, patches=changes))
        directory.write(trajectory("a__b-1", 1))
    command("show", tmp_path, "a__b-1#0", "--turn", 1)
    assert capfdbinary.readouterr().out == b"diff \xff\n"
    for name, turn, words in (("0", 2, b"70000"), ("0", 9, b"has no turn 9"), ("1", 1, b"--no-turn-patches")):
        command("show", tmp_path, f"a__b-1#{name}", "--turn", turn, status=NotFound.exit_code)
        assert words in capfdbinary.readouterr().err


def test_other_rules(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    every = ("--min-reward", "none", "--status", "any", "--any-flags")
    command("collect", run, "-o", out, *every)
    assert len(list(read_examples(out))) == 8, "all but the oracle's"
    command("collect", run, "-o", out, *every, "--no-tokens", "--agent", "bash", "--model", "m-1")
    assert all(not one.rows and one.tokens for one in read_examples(out))
    command("collect", run, "-o", out, "--model", "other", status=1)
    assert out.read_text() == ""
    assert report(tmp_path / "x.report.json")["reasons"]["model"] == 4


def test_others_data_goes_the_same_way(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "mixed.jsonl"
    sources = [DATA / "published_xml.jsonl", DATA / "sweagent_run"]
    command("collect", *sources, run, "--evaluation", DATA / "sweagent_evaluation", "-o", out)
    found = list(read_examples(out))
    assert len(found) == 6
    assert {one.source for one in found} == {"published_xml", "sweagent_run", "run"}
    command("export", out, "--to", "tool", "-o", tmp_path / "tool.parquet")
    assert {one.style for one in read_examples(tmp_path / "tool.parquet")} == {"tool"}
    assert all(one.tools for one in read_examples(tmp_path / "tool.parquet"))


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("chat", "x.jsonl"), ("chat", "x.parquet"), ("parquet", "x.parquet"), ("datasets", "folder"),
        ("text", "folder"), ("ticks", "x.jsonl"), ("tool", "x.parquet"), ("xml", "x.parquet"),
    ],
)  # fmt: skip
def test_forms(run: Path, tmp_path: Path, form: str, name: str) -> None:
    command("collect", run, "-o", tmp_path / "golden.jsonl")
    command("export", tmp_path / "golden.jsonl", "--to", form, "-o", tmp_path / name)
    found = list(read_examples(tmp_path / name))
    assert len(found) == 4
    assert {one.style for one in found} == {form if form in ("tool", "xml", "ticks") else "text"}
    said = report(tmp_path / ("x.report.json" if name.startswith("x") else "folder.report.json"))
    assert (said["stage"], said["kept"], said["rules"]["to"]) == ("export", 4, form)
    if form in ("chat", "text"):
        assert found[0].messages == MESSAGES


def test_what_cannot_be_said_is_told(tmp_path: Path) -> None:
    one, other = example(), example("c__d-2", style="")
    (tmp_path / "x.jsonl").write_text(one.to_line() + other.to_line())
    command("export", tmp_path / "x.jsonl", "--to", "xml", "-o", tmp_path / "y.jsonl")
    said = report(tmp_path / "y.report.json")
    assert (said["kept"], said["reasons"]) == (1, {"cannot_convert": 1})
    assert said["notes"] == {"prompts that may describe another style": 1, "rows written": 1}
    system = tmp_path / "system.md"
    system.write_text("Call functions.\n")
    command("export", tmp_path / "x.jsonl", "--to", "xml", "-o", tmp_path / "z.jsonl", "--system", system)
    assert json.loads((tmp_path / "z.jsonl").read_text())["messages"][0]["content"] == "Call functions."
    assert report(tmp_path / "z.report.json")["notes"] == {"rows written": 1}


ENGINES_TOKENS = "examples with their engine's tokens, not the tokenizer's"


def test_tokens(run: Path, tmp_path: Path) -> None:
    command("collect", run, "-o", tmp_path / "golden.jsonl")
    out = tmp_path / "tokens.jsonl"
    command("export", tmp_path / "golden.jsonl", "--to", "tokens", "-o", out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 4
    said = [token for token in rows[0]["labels"] if token != -100]
    assert decode_answer(said).content.startswith(MESSAGES[2].content)
    notes = report(tmp_path / "tokens.report.json")["notes"]
    assert notes["tokens"] == sum(len(row["input_ids"]) for row in rows)
    assert notes["tokens with loss"] == sum(sum(row["loss_mask"]) for row in rows)
    command("export", DATA / "published_xml.jsonl", "--to", "tokens", "-o", tmp_path / "none.jsonl", status=1)
    assert report(tmp_path / "none.report.json")["reasons"] == {"no_tokens": 2}


def test_a_tokenizer_replaces_no_captured_tokens(run: Path, tmp_path: Path) -> None:
    tokenizer, notes = saved_tokenizer(tmp_path / "tokenizer"), []
    for options in ((), ("--no-tokens",)):
        command("collect", run, "-o", tmp_path / "golden.jsonl", *options)
        command(
            "export", tmp_path / "golden.jsonl", "--to", "tokens", "--tokenizer", tokenizer, "-o", tmp_path / "t.jsonl"
        )
        notes.append(report(tmp_path / "t.report.json")["notes"].get(ENGINES_TOKENS))
    assert notes == [4, None]


def test_tokens_by_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = saved_tokenizer(tmp_path / "tokenizer")
    source, out = DATA / "published_xml.jsonl", tmp_path / "tokens.parquet"
    command("export", source, "--to", "tokens", "--tokenizer", tokenizer, "-o", out)
    assert report(tmp_path / "tokens.report.json")["kept"] == 2
    command("filter", source, "--max-tokens", "5", "--tokenizer", tokenizer, "-o", tmp_path / "x.jsonl", status=1)
    assert report(tmp_path / "x.report.json")["reasons"] == {"too_many_tokens": 2}
    capsys.readouterr()
    name = next(iter(read_examples(source))).traj_id
    command("export", source, "--tokenizer", tokenizer, "--show-mask", name)
    shown = capsys.readouterr().out
    assert "=== LOSS" in shown
    assert "I'll look at the file first." in shown
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}")
    words = ("export", source, "--to", "tokens", "--tokenizer", tokenizer, "--chat-template", template, "-o", out)
    before = out.read_bytes()
    command(*words, status=31)
    assert "prefix-preserving" in capsys.readouterr().err
    assert out.read_bytes() == before


def test_the_mask_of_a_rollout(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("export", run, "--show-mask", "a__b-1#2")
    shown = capsys.readouterr().out
    assert shown.startswith("a__b-1.2.")
    assert shown.count("=== LOSS") == 2
    command("export", run, "--show-mask", "a__b-1")
    assert capsys.readouterr().out.count("row 0:") == 5
    command("export", run, "--show-mask", "nobody", status=6)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("collect", "RUN", "-o", "OUT", "--min-reward", "much"), 3, "--min-reward"),
        (("collect", "RUN", "-o", "OUT", "--min-reward", "nan"), 3, "--min-reward 'nan' is not a number"),
        (("filter", "RUN", "-o", "OUT", "--repo", "("), 3, "regular expression"),
        (("balance", "RUN", "-o", "OUT", "--max-per-instance", "0"), 3, "cannot draw 0 per task"),
        (("export", "RUN", "--to", "chat"), 3, "--out"),
        (("export", "RUN", "--to", "parquet", "-o", "OUT"), 3, ".parquet"),
        (("export", "RUN", "--to", "chat", "-o", "OUT", "--system", "OUT"), 3, "--system"),
        (("export", "RUN", "RUN", "-o", "OUT"), 3, "one run"),
        (("collect", "NOWHERE", "-o", "OUT"), 4, "cannot be read"),
        (("filter", "OUT", "-o", "OUT"), 3, "also a source"),
    ],
)
def test_mistakes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], status: int, said: str
) -> None:
    (tmp_path / "x.jsonl").write_text(example().to_line())
    places = {"RUN": run, "OUT": tmp_path / "x.jsonl", "NOWHERE": tmp_path / "nowhere"}
    command(*(places.get(word, word) for word in words), status=status)
    assert said in capsys.readouterr().err
    assert (tmp_path / "x.jsonl").read_text() == example().to_line(), "nothing has changed"


def test_an_interrupted_stage_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("minisandbox.trajectories.reports.StageReport.keep", stop)
    command("collect", run, "-o", tmp_path / "x.jsonl", status=130)
    assert [one.name for one in tmp_path.iterdir()] == ["run"]
    assert "no file was written" in capsys.readouterr().err
