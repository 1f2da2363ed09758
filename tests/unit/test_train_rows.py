from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minisandbox.errors import InvalidValue, TaskFileError, TokenMismatch, TrainingError
from minisandbox.models import Message, Request, Sampling, TokenGraph, TokenRow
from minisandbox.train.rows import (
    BFLOAT16,
    FLOAT32,
    Gaps,
    Tolerance,
    TrainingRow,
    collate,
    held_out,
    read_rows,
    shown_mask,
)
from minisandbox.trajectories.writing import write_rows


def row(ids: list[int], mask: list[int], name: str = "t__0", task: str = "") -> TrainingRow:
    logprobs = array("d", (-0.5 if one else 0.0 for one in mask))
    return TrainingRow(name, array("i", ids), bytes(mask), logprobs, task=task)


@pytest.fixture(scope="module")
def sampled() -> tuple[Any, TrainingRow]:
    """A model, and a row of two answers that it has sampled."""
    from tests.unit.tiny_model import tiny_engine  # noqa: PLC0415 - it skips where torch is not installed

    engine = tiny_engine()

    async def converse() -> TokenGraph:
        graph, messages = TokenGraph(), [Message("user", "the tests fail")]
        for turn in range(2):
            sampling = Sampling(max_tokens=12, seed=turn, temperature=0.7)
            answer = await engine.complete(Request(tuple(messages), sampling=sampling))
            assert answer.tokens is not None
            graph.add(answer.tokens)
            messages += [answer.message, Message("user", "and now")]
        await engine.close()
        return graph

    (one,) = asyncio.run(converse()).rows()
    return engine.model, TrainingRow.of(one, rollout="task__3#0")


def largest_gap(
    model: Any, rows: Iterable[TrainingRow], *, temperature: float = 1.0, tolerance: Tolerance = FLOAT32
) -> float:
    """The largest difference between the log-probabilities of the rows and those of the model."""
    from minisandbox.models.engine import recompute_logprobs  # noqa: PLC0415 - it skips where torch is not installed

    gaps = Gaps(tolerance)
    for one in rows:
        assert one.logprobs is not None
        gaps.add(one, recompute_logprobs(model, TokenRow(one.ids, one.logprobs, one.mask, ()), temperature=temperature))
    gaps.check()
    return max(gaps.sizes)


def test_captured_rows_pass(sampled: tuple[Any, TrainingRow]) -> None:
    model, one = sampled
    assert 0 < one.loss_tokens < len(one.ids)
    assert largest_gap(model, [one], temperature=0.7) < 1e-4


def test_a_differing_token_is_named(sampled: tuple[Any, TrainingRow]) -> None:
    model, one = sampled
    assert one.logprobs is not None
    logprobs, position = one.logprobs[:], one.mask.rindex(1)
    logprobs[position] -= 0.01
    with pytest.raises(TokenMismatch, match=f"task__3#0, token {position} ") as caught:
        largest_gap(model, [replace(one, logprobs=logprobs)], temperature=0.7)
    assert (caught.value.rollout, caught.value.position) == ("task__3#0", position)


def test_a_mask_over_context_shows(sampled: tuple[Any, TrainingRow]) -> None:
    model, one = sampled
    mask = bytearray(one.mask)
    position = mask.index(1) - 1  # the last token of the prompt
    mask[position] = 1
    with pytest.raises(TokenMismatch, match=f"token {position} "):
        largest_gap(model, [replace(one, mask=bytes(mask))], temperature=0.7)


def test_another_context_shows(sampled: tuple[Any, TrainingRow]) -> None:
    model, one = sampled
    ids = one.ids[:]
    ids[2] += 1
    with pytest.raises(TokenMismatch):
        largest_gap(model, [replace(one, ids=ids)], temperature=0.7)


def bfloat16_rows() -> tuple[Any, list[TrainingRow]]:
    """A model in bfloat16, and rows that it has sampled, several at once and with a cache."""
    from tests.unit.tiny_model import tiny_engine  # noqa: PLC0415 - it skips where torch is not installed

    engine = tiny_engine(scale=0.1)
    engine.model.bfloat16()

    async def sample(seed: int) -> list[TrainingRow]:
        sampling = Sampling(max_tokens=40, seed=seed)
        answer = await engine.complete(Request((Message("user", f"the tests fail {seed}"),), sampling=sampling))
        assert answer.tokens is not None
        graph = TokenGraph()
        graph.add(answer.tokens)
        return [TrainingRow.of(one, rollout=f"task__{seed}") for one in graph.rows()]

    async def all_of_them() -> list[TrainingRow]:
        found = await asyncio.gather(*map(sample, range(8)))
        await engine.close()
        return [one for rows in found for one in rows]

    return engine.model, asyncio.run(all_of_them())


def shifted(one: TrainingRow) -> TrainingRow:
    """The row with each log-probability at the token after its own."""
    assert one.logprobs is not None
    moved = array("d", (0.0, *one.logprobs[:-1]))
    return replace(one, logprobs=array("d", (value if m else 0.0 for value, m in zip(moved, one.mask, strict=True))))


def test_bfloat16_passes_by_its_statistics_and_what_is_wrong_does_not() -> None:
    from tests.unit.tiny_model import tiny_model  # noqa: PLC0415 - it skips where torch is not installed

    model, rows = bfloat16_rows()
    assert largest_gap(model, rows, tolerance=BFLOAT16) > 1e-4
    with pytest.raises(TokenMismatch):
        largest_gap(model, rows, tolerance=FLOAT32)
    with pytest.raises(TokenMismatch):
        largest_gap(model, map(shifted, rows), tolerance=BFLOAT16)
    with pytest.raises(TokenMismatch):  # a template that says one token otherwise
        largest_gap(model, [replace(one, ids=array("i", [7, *one.ids[:-1]])) for one in rows], tolerance=BFLOAT16)
    with pytest.raises(TokenMismatch):
        largest_gap(model, rows, temperature=0.7, tolerance=BFLOAT16)
    other = tiny_model(model.config.vocab_size, seed=1, scale=0.1).bfloat16()
    with pytest.raises(TokenMismatch):
        largest_gap(other, rows, tolerance=BFLOAT16)


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (row([1, 2, 3], [0, 0, 0]), "none of its 3 tokens"),
        (row([1, 2, 3], [1, 0, 0]), "token 0 carries loss"),
        (row([1, 2], [0, 1, 1]), "the lengths differ"),
        (row([1, -2], [0, 1]), "token 1: the id -2"),
        (replace(row([1, 2], [0, 1]), logprobs=array("d", [0.0, float("nan")])), "token 1: the log-probability nan"),
        (replace(row([1, 2], [0, 1]), logprobs=array("d", [0.0, 0.5])), "the log-probability 0.5"),
    ],
)
def test_rows_that_cannot_be_trained_on(one: TrainingRow, said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        one.check()


def test_collation_pads_without_loss() -> None:
    pytest.importorskip("torch", reason="the extra [train] is not installed")
    found = collate([row([5, 6, 7], [0, 1, 1]), replace(row([8, 9], [0, 1]), weight=-0.5)], pad=3)
    assert found["input_ids"].tolist() == [[5, 6, 7], [8, 9, 3]]
    assert found["mask"].tolist() == [[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]]
    assert found["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert found["logprobs"].tolist() == [[0.0, -0.5, -0.5], [0.0, -0.5, 0.0]]
    assert found["weights"].tolist() == [[1.0], [-0.5]]


BODY = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "loss_mask": [0, 1, 1], "logprobs": [0.0, -1.0, -2.0],
        "reward": 1.0, "instance_id": "a__b-1", "traj_id": "a__b-1.0", "row": 2}  # fmt: skip


def test_rows_of_files(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        json.dumps(BODY) + "\n" + json.dumps({"input_ids": [1, 2], "labels": [-100, 2]})
    )
    first, second = read_rows(tmp_path / "rows.jsonl")
    assert (first.rollout, first.task, first.mask, first.labels) == ("a__b-1.0#2", "a__b-1", b"\0\1\1", [-100, 2, 3])
    assert (second.logprobs, second.mask) == (None, b"\0\1")
    assert "line 2" in second.rollout


def test_rows_of_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([BODY]), tmp_path / "rows.parquet")
    (one,) = read_rows(tmp_path / "rows.parquet")
    assert one.logprobs == array("d", [0.0, -1.0, -2.0])


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"input_ids": [1, 2], "labels": [-100, 2], "loss_mask": [1, 1]}',
             '{"input_ids": [1, 2, 3], "labels": [-100, 3, -100]}', '{"input_ids": [1, 2, 3], "labels": [-100, 3, 1]}',
             '{"input_ids": [1, 2], "labels": [-100, 2, -100], "loss_mask": [0, 1]}',
             '{"input_ids": [99999999999], "labels": [1]}', '{"input_ids": [1, 2], "labels": [-100, -100]}']
)  # fmt: skip
def test_damaged_files_name_the_row(tmp_path: Path, line: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(BODY) + "\n" + line + "\n")
    with pytest.raises((TrainingError, TaskFileError), match="line 2"):
        list(read_rows(tmp_path / "rows.jsonl"))


def test_no_file_of_rows(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="no such file"):
        list(read_rows(tmp_path / "x.jsonl"))


def test_files_that_are_damaged(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "rows.jsonl").write_bytes(json.dumps(BODY).encode() + b'\n{"traj_id": "\xff"}\n')
    found = {"rows.parquet": "cannot be read as Parquet", "rows.jsonl": "line 2: byte 14 is not UTF-8"}
    for name, said in found.items():
        with pytest.raises(TaskFileError, match=said):
            list(read_rows(tmp_path / name))


def test_rows_of_a_folder_of_datasets(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    write_rows(tmp_path / "rows", [BODY], "tokens")
    (one,) = read_rows(tmp_path / "rows")
    assert (one.rollout, one.labels) == ("a__b-1.0#2", [-100, 2, 3])


def test_a_tasks_rows_are_held_out_together() -> None:
    tasks = [f"t{task}" for task in range(10) for _ in range(3)]
    chosen = held_out(tasks, 0.2, 7)
    assert len(chosen) == 2
    assert chosen < set(tasks)
    assert held_out(tasks, 0.2, 7) == chosen
    assert held_out(tasks, 0.0, 7) == set()
    assert len(held_out(tasks, 0.01, 7)) == 1  # at least one task


def test_the_mask_can_be_read() -> None:
    assert list(shown_mask(row([5, 6, 7], [0, 1, 1]), lambda one: f"<{one}>")) == [
        "context     0 to     0: <5>",
        "LOSS        1 to     2: <6> <7>",
    ]
