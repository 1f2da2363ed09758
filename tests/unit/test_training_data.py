"""Training data: who is chosen, and that nobody is left out without a word."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.training_tools import DATA, FLAG, MESSAGES, PATCH, byte_row, example, trajectory

from minisandbox.errors import InvalidValue, RunError, TrajectoryError
from minisandbox.models import Message, TokenRow, ToolCall
from minisandbox.rollouts import RunDirectory
from minisandbox.rollouts.examples import open_examples
from minisandbox.trajectories.choosing import Collect, Filter, Filtering, balance, chosen, drawn, normalised
from minisandbox.trajectories.example import Example, example_of
from minisandbox.trajectories.reports import StageReport, report_path
from minisandbox.trajectories.sources import Reading, read_examples
from minisandbox.trajectories.writing import chat_row, write_lines, write_rows

SMITH = "oauthlib__oauthlib.1fd52536.func_pm_remove_cond__aaaa1111"


def why(rules: Collect | Filter, one: Example) -> str | None:
    refusal = rules.refuse(one) if isinstance(rules, Collect) else Filtering(rules).refuse(one)
    return None if refusal is None else refusal[0]


# --- the file --------------------------------------------------------------------------------------------------------


def test_an_example_survives_its_file(tmp_path: Path) -> None:
    call = ToolCall("c1", "bash", "not json \ud800")
    one = example(
        submission=b"diff \xff\r\n", rows=(byte_row(),), flags=(FLAG,), tools=({"type": "function"},),
        messages=(Message("assistant", "\ud800", (call,), reasoning="so"),),
    )  # fmt: skip
    file = tmp_path / "examples.jsonl"
    assert write_lines(file, [one.to_line(), example().to_line()]) == 2
    assert list(read_examples(file)) == [one, example()]
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
    assert list(read_examples(tmp_path / "packed.jsonl.gz")) == [one, example()]


def test_examples_of_version_1_are_read(tmp_path: Path) -> None:
    row = TokenRow(array("i", [1, 2]), array("d", [0.0, -1.0]), b"\0\1", (0,), ((-1, 1), (7, 1)))
    body = json.loads(example(rows=(row,)).to_line()) | {"version": 1}
    del body["rows"][0]["versions"]
    (tmp_path / "x.jsonl").write_text(json.dumps(body) + "\n")
    (read,) = read_examples(tmp_path / "x.jsonl")
    assert read == example(rows=(replace(row, versions=()),))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"version": 3}, "reads up to 2"), ({"format": "other"}, "no messages"), ({"new": 1}, "unknown field 'new'")],
)
def test_what_is_no_example_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    body = {**json.loads(example().to_line()), **change}
    if "format" in change:
        del body["messages"]
    (tmp_path / "x.jsonl").write_text(json.dumps(body) + "\n")
    with pytest.raises(TrajectoryError, match=words):
        list(read_examples(tmp_path / "x.jsonl"))


def test_an_example_of_a_rollout() -> None:
    done = trajectory(attempt=3)
    one = example_of(done, source="run", style="text")
    assert one.traj_id.startswith("a__b-1.3.")
    assert (one.reward, one.tokens, one.turns, one.rows) == (1.0, 45, 2, done.rows)
    assert one.traj_id != example_of(done, source="other", style="text").traj_id, "two runs have the same attempts"
    assert one == example_of(done, source="run", style="text")


@pytest.mark.parametrize(
    ("name", "repo"),
    [(SMITH, "oauthlib/oauthlib"), ("pytest-dev__pytest-5413", "pytest-dev/pytest"), ("mine", "mine")],
)
def test_repositories_by_id(name: str, repo: str) -> None:
    assert example(name).repo == repo


# --- collect and filter ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "rules", "reason"),
    [
        (example(), Collect(), None),
        (example(reward=0.0), Collect(), "reward"),
        (example(reward=0.0), Collect(min_reward=0), None),
        (example(reward=None), Collect(), "no_reward"),
        (example(reward=None), Collect(min_reward=None), None),
        (example(exit_status="submitted (exit_cost)"), Collect(), "exit_status"),
        (example(exit_status="exit_cost"), Collect(statuses=()), None),
        (example(exit_status=None), Collect(), None),
        (example(flags=(FLAG,)), Collect(), "flagged"),
        (example(flags=(FLAG,)), Collect(any_flags=True), None),
        (example(flags=(replace(FLAG, kind="not_confirmed"),)), Collect(), None),
        (example(agent="replay"), Collect(agents=("bash",)), "agent"),
        (example(model="m-2"), Collect(models=("m-1",)), "model"),
        (example(messages=()), Collect(), "no_answers"),
    ],
)
def test_what_is_collected(one: Example, rules: Collect, reason: str | None) -> None:
    assert why(rules, one) == reason


@pytest.mark.parametrize(
    ("one", "rules", "reason"),
    [
        (example(), Filter(max_tokens=30, max_chars=1000, min_turns=2, max_turns=2, unique=True), None),
        (example(tokens=31), Filter(max_tokens=30), "too_many_tokens"),
        (example(tokens=None, rows=(byte_row(),)), Filter(max_tokens=30), "too_many_tokens"),
        (example(), Filter(max_chars=10), "too_many_characters"),
        (example(), Filter(min_turns=3), "too_few_turns"),
        (example(), Filter(max_turns=1), "too_many_turns"),
        (example(flags=(FLAG,)), Filter(no_flags=True), "flagged"),
        (example(flags=(FLAG,)), Filter(flags=("frame",)), "flagged"),
        (example(flags=(FLAG,)), Filter(flags=("^pytest",)), None),
        (example(SMITH), Filter(repo="^oauthlib/"), None),
        (example("x__y-1"), Filter(repo="^oauthlib/"), "repo"),
        (example(SMITH), Filter(not_repo="oauth"), "repo"),
    ],
)
def test_what_is_filtered(one: Example, rules: Filter, reason: str | None) -> None:
    assert why(rules, one) == reason


def test_tokens_that_nobody_counted() -> None:
    with pytest.raises(InvalidValue, match="not known"):
        why(Filter(max_tokens=10), example(tokens=None))
    assert Filtering(Filter(max_tokens=10), count=lambda _: 11).refuse(example(tokens=None)) == (
        "too_many_tokens", "11 of at most 10",
    )  # fmt: skip


@pytest.mark.parametrize("bad", [{"repo": "("}, {"flags": ("[",)}, {"max_tokens": 0}, {"min_turns": -1}])
def test_rules_that_mean_nothing(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidValue):
        Filter(**bad)  # type: ignore[arg-type] # as a mistaken user has it


def test_the_same_submission_counts_once_for_each_task() -> None:
    same = PATCH.replace(b"index 1..2", b"index 3..4").replace(b"@@ def f", b"@@ class C").replace(b"\n", b"\r\n")
    assert normalised(same) == normalised(PATCH)
    assert normalised(PATCH.replace(b"+b", b"+c")) != normalised(PATCH)
    two = PATCH + PATCH.replace(b"/x", b"/y")
    assert normalised(two) == normalised(PATCH.replace(b"/x", b"/y") + PATCH), "whichever file comes first"
    filtering = Filtering(Filter(unique=True))
    examples = [example(), example(number=1, submission=same), example("c__d-2"), example(number=2, submission=None)]
    assert [filtering.refuse(one) for one in examples] == [
        None,
        ("duplicate", "the submission of a__b-1.0"),
        None,
        None,
    ]


# --- balance ---------------------------------------------------------------------------------------------------------

NAMES = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 99).map(str)), max_size=40, unique=True)


@given(NAMES, st.integers(1, 4), st.integers(), st.none() | st.integers(1, 20))
def test_balance(names: list[tuple[str, str]], most: int, seed: int, total: int | None) -> None:
    dropped = balance(names, max_per_instance=most, seed=seed, total=total)
    kept = [name for place, name in enumerate(names) if place not in dropped]
    assert len(kept) + len(dropped) == len(names)
    assert all(0 <= place < len(names) for place in dropped)
    counts, before = Counter(name for name, _ in kept), Counter(name for name, _ in names)
    assert all(count <= most for count in counts.values())
    if total is None:
        assert counts == {name: min(most, count) for name, count in before.items()}, "and no fewer than allowed"
    else:
        assert len(kept) == min(total, sum(min(most, count) for count in before.values()))
        wanting = [counts[name] for name in before if counts[name] < min(most, before[name])]
        assert not wanting or max(counts.values()) <= min(wanting) + 1, "first ones before second ones"
    assert dropped == balance(names, max_per_instance=most, seed=seed, total=total)
    again = balance(names[::-1], max_per_instance=most, seed=seed, total=total)
    assert {names[place] for place in dropped} == {names[::-1][place] for place in again}, "in whatever order"


def test_another_seed_draws_others() -> None:
    names = [("a", str(number)) for number in range(50)]
    draws = {frozenset(balance(names, max_per_instance=2, seed=seed)) for seed in range(5)}
    assert len(draws) == 5


@pytest.mark.parametrize("bad", [{"max_per_instance": 0}, {"max_per_instance": 1, "total": 0}])
def test_balance_of_nothing(bad: dict[str, int]) -> None:
    with pytest.raises(InvalidValue):
        balance([], seed=0, **bad)


def test_examples_that_change_while_they_are_balanced() -> None:
    names = [("a__b-1", "a__b-1.0")]
    assert len(list(drawn([example()], names, {}, StageReport("balance")))) == 1
    for others in ([], [example(number=1)], [example(), example()]):
        with pytest.raises(RunError, match="changed"):
            list(drawn(others, names, {}, StageReport("balance")))


# --- reports ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([0.0, 1.0, None]))))
def test_reports_add_up(rollouts: list[tuple[str, float | None]]) -> None:
    report = StageReport("collect")
    examples = [example(name, number, reward=reward) for number, (name, reward) in enumerate(rollouts)]
    kept = list(chosen(examples, Collect().refuse, report))
    assert report.read == len(examples) == report.kept + len(report.dropped)
    assert report.kept == len(kept)
    assert {one.traj_id for one in kept} | {one.traj_id for one in report.dropped} == {one.traj_id for one in examples}
    assert sum(report.reasons.values()) == len(report.dropped)
    assert sum(count * many for count, many in report.per_instance.items()) == report.kept


def test_a_report_is_a_file(tmp_path: Path) -> None:
    report = StageReport("filter", {"max_tokens": 5})
    list(chosen([example(), example(number=1, tokens=9)], Filtering(Filter(max_tokens=5)).refuse, report))
    path = report_path(tmp_path / "x.jsonl")
    assert path.name == "x.report.json"
    report.write(path)
    body = json.loads(path.read_text())
    assert (body["stage"], body["read"], body["kept"], body["reasons"]) == ("filter", 2, 0, {"too_many_tokens": 2})
    assert body["dropped"][1] == {
        "traj_id": "a__b-1.1", "instance_id": "a__b-1", "reason": "too_many_tokens", "detail": "9 of at most 5",
        "source": "",
    }  # fmt: skip
    assert body["instances"] == {"read": 1, "kept": 0}
    assert body["examples_per_instance"] == {"0": 1}


# --- sources ---------------------------------------------------------------------------------------------------------


def test_a_run(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as directory:
        for attempt, reward in enumerate((1.0, 0.0)):
            directory.write(trajectory(attempt=attempt, reward=reward))
        directory.write(trajectory("c__d-2", configuration={"action_format": "tool"}))
        directory.write(trajectory("e__f-3", agent="oracle", messages=(), turns=(), rows=(), model=""))
    found = list(open_examples(tmp_path / "run"))
    assert [(one.instance_id, one.attempt, one.reward) for one in found] == [
        ("a__b-1", 0, 1.0), ("a__b-1", 1, 0.0), ("c__d-2", 0, 1.0), ("e__f-3", 0, 1.0),
    ]  # fmt: skip
    assert [one.style for one in found] == ["text", "text", "tool", ""]
    assert [len(one.tools) for one in found] == [0, 0, 3, 0]
    assert {one.source for one in found} == {"run"}


def test_files_of_swe_agent() -> None:
    good, bad = read_examples(DATA / "sweagent_run", Reading(evaluation=DATA / "sweagent_evaluation"))
    if good.reward == 0:
        good, bad = bad, good
    assert (good.instance_id, good.reward, good.exit_status, good.style) == (SMITH, 1.0, "submitted", "tool")
    assert (bad.reward, bad.exit_status) == (0.0, "submitted (exit_cost)")
    assert good.model == "claude-3-7-sonnet-20250219"
    assert (good.submission or b"").startswith(b"diff --git a/a.py")
    assert [one.role for one in good.messages[:4]] == ["system", "user", "assistant", "tool"]
    assert good.messages[3].tool_call_id == good.messages[2].tool_calls[0].id == "toolu_00"
    assert good.turns == 5
    assert {one.reward for one in read_examples(DATA / "sweagent_run")} == {None}, "nobody has said"
    [single] = read_examples(DATA / "sweagent_run" / SMITH / f"{SMITH}.traj")
    assert single.messages == good.messages


def test_numbered_files_of_swe_agent(tmp_path: Path) -> None:
    body = {"history": [{"role": "assistant", "content": "x"}], "info": {"reward": None}}
    for name in ("a__b.1.pr_12", "a__b.1.pr_12_0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.traj").write_text(json.dumps(body))
    names = [(one.instance_id, one.attempt) for one in read_examples(tmp_path)]
    assert names == [("a__b.1.pr_12", 0), ("a__b.1.pr_12_0", 0)]
    (tmp_path / names[1][0] / f"{names[1][0]}.pred").write_text(json.dumps({"instance_id": "a__b.1.pr_12"}))
    assert [(one.instance_id, one.attempt) for one in read_examples(tmp_path)][1] == ("a__b.1.pr_12", 0)
    numbered = [(one.instance_id, one.attempt) for one in read_examples(tmp_path, Reading(numbered=True))]
    assert numbered == [("a__b.1.pr", 12), ("a__b.1.pr_12", 0)]


MINI: dict[str, object] = {  # as mini-swe-agent 1.17.5 wrote it, without most of its configuration
    "info": {
        "exit_status": "Submitted",
        "submission": "diff\n",
        "model_stats": {"instance_cost": 3.0, "api_calls": 3},
        "mini_version": "1.17.5",
        "config": {"model": {"model_name": "m-1"}},
    },
    "messages": [
        {"role": "system", "content": "You are", "timestamp": 1.0},
        {"role": "user", "content": "Solve this", "timestamp": 1.0},
        {"role": "assistant", "content": "Look.\n\n```bash\necho hi\n```", "timestamp": 1.0},
        {"role": "user", "content": "Observation: hi", "timestamp": 1.0},
        {"role": "assistant", "content": "Done.\n\n```bash\necho COMPLETE\n```", "timestamp": 1.0},
        {"role": "user", "content": "diff\n", "timestamp": 1.0},
    ],
    "trajectory_format": "mini-swe-agent-1",
    "instance_id": "a__b-1",
}


def test_files_of_mini_swe_agent_1(tmp_path: Path) -> None:
    """Version 1.1 names no format; a run that failed at once has no messages; a name may be any."""
    stats: dict[str, object] = {"model_stats": {}, "exit_status": "ImageNotFound", "submission": "no image"}
    bodies = {
        "a__b-1": MINI,
        "c__d-2": {name: value for name, value in MINI.items() if name not in ("trajectory_format", "instance_id")},
        "e__f-3": {"info": stats, "messages": [], "trajectory_format": "mini-swe-agent-1"},
    }
    for name, body in bodies.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.traj.json").write_text(json.dumps(body, indent=2))
    (tmp_path / "c__d-2" / "report.json").write_text('{"c__d-2": {"resolved": true}}')
    first, second, failed = read_examples(tmp_path)
    assert (first.instance_id, first.exit_status, first.model, first.agent, first.style, first.submission) == (
        "a__b-1", "submitted", "m-1", "mini-swe-agent", "text", b"diff\n",
    )  # fmt: skip
    assert [message.content for message in first.messages][-2:] == [
        "Observation: hi",
        "Done.\n\n```bash\necho COMPLETE\n```",
    ]
    assert (second.instance_id, second.messages) == ("c__d-2", first.messages)
    assert [one.reward for one in (first, second, failed)] == [None, 1.0, None]
    assert (failed.instance_id, failed.messages, failed.exit_status) == ("e__f-3", (), "ImageNotFound")
    assert why(Collect(), failed) == "no_answers"
    for name, text in (
        ("mine.json", json.dumps(bodies["c__d-2"], indent=2)),
        ("line.json", json.dumps(MINI)),
        ("rows.jsonl", json.dumps(MINI) + "\n" + json.dumps(MINI) + "\n"),
        ("list.json", json.dumps([MINI])),
    ):
        (tmp_path / name).write_text(text)
        assert {one.messages for one in read_examples(tmp_path / name)} == {first.messages}


@pytest.mark.parametrize("text", ["{", "[]", '{"history": []}', '{"history": [{"role": "king"}]}'])
def test_damaged_files_of_swe_agent(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.traj").write_text(text)
    with pytest.raises(TrajectoryError, match=r"x\.traj"):
        list(read_examples(tmp_path / "x.traj"))


@pytest.mark.parametrize("style", ["xml", "tool", "ticks"])
@pytest.mark.parametrize("stored", ["text", "list", "parquet", "folder"])
def test_published_sets(tmp_path: Path, style: str, stored: str) -> None:
    file = DATA / f"published_{style}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    if stored == "list":
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps({**row, "messages": json.loads(row["messages"])}) + "\n" for row in rows))
    elif stored == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        (tmp_path / "data").mkdir()
        file = tmp_path
        for number, row in enumerate(rows):
            part = tmp_path / "data" / f"{style}-{number:05}-of-00002.parquet"
            parquet.write_table(arrow.Table.from_pylist([row]), part)
    elif stored == "folder":
        file = tmp_path / "folder"
        pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(str(file))
    found = list(read_examples(file))
    assert [one.reward for one in found] == [1.0, 0.0]
    assert found[0].instance_id == SMITH
    assert found[0].traj_id == rows[0]["traj_id"]
    assert {one.style for one in found} == {style}
    assert found[0].turns == 4
    assert {one.exit_status for one in found} == {None}


def test_arguments_in_columns_and_rows_without_names(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls", "path": None}}}
    row = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    first, second = read_examples(tmp_path / "x.jsonl")
    assert first.messages[0].tool_calls[0].arguments == '{"command": "ls"}'
    assert first.instance_id
    assert first == second, "a name by what is said"


def test_messages_in_columns_of_mixed_types(tmp_path: Path) -> None:
    """``datasets`` stores text that is JSON unquoted, so it reads the output of ``echo 42`` as a number."""
    datasets = pytest.importorskip("datasets")
    texts = ['say "hi"\nC:\\x', '{"a": 1.5}', "42", "true", "é"]
    messages = [{"role": "user", "content": text} for text in texts] + [
        {"role": "user", "content": [{"type": "text", "text": "part"}]}
    ]
    leaf = datasets.Features(
        {"messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Json()})}
    )
    for name, features in (("leaf", leaf), ("whole", datasets.Features({"messages": datasets.List(datasets.Json())}))):
        table = datasets.Dataset.from_list([{"messages": messages}], features=features)
        table.to_parquet(str(tmp_path / f"{name}.parquet"))
        table.save_to_disk(str(tmp_path / name))
        for source in (tmp_path / f"{name}.parquet", tmp_path / name):
            [one] = read_examples(source)
            assert [message.content for message in one.messages] == [*texts, "part"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": "["}, "not JSON"),
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": "assistant", "content": [1]}]}, "message 0"),
        ({"messages": [{"role": "user", "content": "x"}], "instance_id": 3}, "instance_id"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": "x"}, "tools"),
    ],
)
def test_rows_that_are_no_conversations(tmp_path: Path, row: dict[str, object], words: str) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(TrajectoryError, match=words) as caught:
        list(read_examples(tmp_path / "x.jsonl"))
    assert "line 1" in caught.value.what


# --- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet", "folder"])
def test_chat_rows_are_read_again(tmp_path: Path, name: str) -> None:
    pytest.importorskip("datasets")
    call = ToolCall("c1", "bash", '{"command": "ls"}')
    tool = (Message("assistant", "I", (call,), reasoning="hm"), Message("tool", "x", tool_call_id="c1"))
    written = [example(), example(number=1, messages=tool, tools=({"type": "function"},), style="tool", reward=0.0)]
    assert write_rows(tmp_path / name, map(chat_row, written), "chat") == 2
    found = list(read_examples(tmp_path / name))
    for one, before in zip(found, written, strict=True):
        assert (one.messages, one.tools, one.style) == (before.messages, before.tools, before.style)
        assert (one.traj_id, one.reward, one.submission) == (before.traj_id, before.reward, before.submission)
    assert [one.name for one in tmp_path.iterdir()] == [name], "nothing else stays"


def test_a_folder_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    with pytest.raises(InvalidValue, match="is not empty"):
        write_rows(tmp_path, [], "chat")


def test_what_no_column_holds_is_told(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(InvalidValue, match="columns"):
        write_rows(tmp_path / "x.parquet", [{"messages": 3}], "plain")
    assert not list(tmp_path.iterdir())


def test_bytes_that_are_no_text_do_not_stop_an_export(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    odd = example(submission=b"\xff", messages=(*MESSAGES, Message("user", "half \ud800")))
    write_rows(tmp_path / "x.parquet", [chat_row(odd)], "chat")
    [found] = read_examples(tmp_path / "x.parquet")
    assert (found.submission or b"").decode() == "\ufffd"
    assert found.messages[-1].content == "half ?"


@pytest.mark.parametrize("through", ["collect", "parquet"])
def test_memory_does_not_grow_with_the_number(tmp_path: Path, through: str) -> None:
    pytest.importorskip("pyarrow.parquet")
    long = tuple(replace(message, content=message.content + "x" * 20_000) for message in MESSAGES)

    def many(count: int) -> Iterator[Example]:
        for number in range(count):
            yield example(
                number=number, messages=tuple(replace(one, content=one.content + str(number)) for one in long)
            )

    def peak(count: int) -> int:
        tracemalloc.reset_peak()
        report = StageReport("collect")
        kept = chosen(many(count), Collect().refuse, report)
        writer: Callable[[], int] = (
            (lambda: write_lines(tmp_path / "x.jsonl", (one.to_line() for one in kept)))
            if through == "collect"
            else (lambda: write_rows(tmp_path / "x.parquet", map(chat_row, kept), "plain"))
        )
        assert writer() == count
        return tracemalloc.get_traced_memory()[1]

    tracemalloc.start()
    try:
        few, all_of_them = peak(150), peak(900)
    finally:
        tracemalloc.stop()
    assert all_of_them < 2 * few, f"{few} bytes for 150 of 100 kB, {all_of_them} for 900"
