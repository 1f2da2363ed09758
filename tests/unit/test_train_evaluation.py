"""The resolve rate on held-out tasks, and how far it is to be believed."""

from __future__ import annotations

import asyncio
import itertools
import math
from pathlib import Path

import pytest

from minisandbox.train.config import Evaluation, Groups, RlConfig
from minisandbox.train.evaluation import Evaluator, Score, clustered_error, pass_at, score_from
from minisandbox.train.groups import Gatherer, Result, Wanted
from minisandbox.train.running import TrainingRun


def test_rollouts_of_a_task_are_alike() -> None:
    """Four equal rollouts of each of ten tasks say no more than one of each."""
    single = [(f"t{n}", float(n < 4)) for n in range(10)]
    error = clustered_error(single)
    assert error is not None
    assert error == pytest.approx(math.sqrt(0.4 * 0.6 / 9))
    assert clustered_error(single * 4) == pytest.approx(error)
    assert Score(0, 0.4, 40, 0).error == pytest.approx(error * math.sqrt(0.9) / 2), "as if they were independent"
    assert Score(0, 0.4, 40, 0, error).error == error
    assert clustered_error([("t", 1.0), ("t", 0.0)]) is None


def test_scores_of_earlier_versions_are_read() -> None:
    old = {"step": 1, "reward": 0.5, "rollouts": 4, "failed": 0, "of a later version": 1}
    assert score_from(old) == Score(1, 0.5, 4, 0)
    assert score_from({**old, "task_error": 0.1}).error == 0.1


def test_pass_at_k_is_the_share_of_samples_with_a_pass() -> None:
    """The estimator against all samples of k rollouts; a reward below 1 is no pass."""
    groups = [[1.0, 0.0, 0.0, 0.5, 1.0], [0.0] * 5, [1.0] * 5, [1.0, 0.0, 0.0]]
    values = pass_at(groups, 5)
    assert list(values) == ["1", "2", "4"]
    for k, value in values.items():
        shares = [
            sum(1.0 in sample for sample in samples) / len(samples)
            for group in groups
            if (samples := list(itertools.combinations(group, int(k))))
        ]
        assert value == pytest.approx(sum(shares) / len(shares))
    assert pass_at([], 4) == {}


class Failing:
    """Fails at a task, the first times that it is tried."""

    def __init__(self, times: int) -> None:
        self.times, self.done = times, list[Wanted]()

    async def run(self, wanted: Wanted) -> Result:
        self.done.append(wanted)
        lost = wanted.task == "a" and self.times > 0
        self.times -= lost
        return Result(wanted, None if lost else float(wanted.task == "a"), (), "no room" if lost else "")


@pytest.mark.parametrize(("times", "expected"), [(1, (0.5, 4, 0)), (9, (0.0, 2, 2))])
def test_what_we_failed_at_is_done_again(tmp_path: Path, times: int, expected: tuple[float, int, int]) -> None:
    config = RlConfig(model="m", tasks=("t",), out=str(tmp_path))
    fake, said = Failing(times), list[str]()
    with TrainingRun(tmp_path, config) as run:
        gatherer = Gatherer(fake, Groups(redo=1), workers=2, deadline=30.0, seed=1)
        evaluator = Evaluator(Evaluation(attempts=2), ("a", "b"), gatherer, run, said.append)
        result = asyncio.run(evaluator.evaluate(0))
        assert result is not None
        evaluator.store(result)
        (score,) = evaluator.scores()
    assert score == result
    assert score.tasks == ({"b": 0.0} if expected[2] else {"a": 1.0, "b": 0.0})
    assert score.pass_at == ({"1": 0.0, "2": 0.0} if expected[2] else {"1": 0.5, "2": 0.5})
    assert (score.reward, score.rollouts, score.failed) == expected
    assert len({(one.task, one.attempt) for one in fake.done}) == len(fake.done), "no two have the same number"
    assert ("have no reward" in said[-1]) == bool(score.failed)
