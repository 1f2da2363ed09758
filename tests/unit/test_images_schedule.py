"""The graph of layers that a set of images needs: what a failure leaves out, and what that costs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from minisandbox.errors import SourceError
from minisandbox.images.builder import Maker
from minisandbox.images.plan import ChainBase, ImagePlan
from minisandbox.images.runner import BuildStep
from minisandbox.images.schedule import _Graph
from minisandbox.store import LayerRecord, Store, step_key


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


def _step(name: str) -> BuildStep:
    return BuildStep(name, {"kind": name}, cast("Any", None), key=step_key(None, {"name": name}))


def _graph(store: Store, plans: list[ImagePlan]) -> _Graph:
    maker = cast("Maker", SimpleNamespace(session=SimpleNamespace(store=store), make_base=lambda _: None))
    return _Graph(maker, {plan.name: plan for plan in plans}, None, 1, retry_failed=True)


def _plan(name: str, *steps: BuildStep) -> ImagePlan:
    return ImagePlan(name, ChainBase(("base",), ""), steps)


def test_a_failure_leaves_out_what_only_failed_images_need(store: Store) -> None:
    shared, first, second = _step("shared"), _step("first"), _step("second")
    graph = _graph(store, [_plan("one", shared, first), _plan("two", shared, second)])
    graph._fail(first.key, SourceError("gone"))
    assert set(graph.failures) == {"one"}
    assert graph._open == {shared.key, second.key}
    graph._fail(second.key, SourceError("gone too"))
    assert set(graph.failures) == {"one", "two"}
    assert graph._open == set()
    assert graph._next() is None


def test_a_step_waits_for_what_it_needs_and_is_not_made_over(store: Store) -> None:
    stage = _step("stage")
    copy = replace(_step("copy"), needs=(stage.key,))
    graph = _graph(store, [ImagePlan("one", ChainBase((), ""), (copy,), (stage,))])
    made = LayerRecord(stage.key, None, {}, 1.0, 0, 0, 0.0)
    assert graph._next() == stage.key
    assert graph._next() is None
    graph._end(stage.key, made)
    assert graph._next() == copy.key


def test_a_failure_costs_the_same_in_a_larger_set(store: Store) -> None:
    def seconds(images: int) -> float:
        """The CPU time of ten failures: the least of ten times, so that nothing else counts."""
        steps = [_step(f"step {number}") for number in range(images)]
        graph = _graph(store, [_plan(f"image {number}", step) for number, step in enumerate(steps)])
        took = []
        for start in range(0, 100, 10):
            began = time.thread_time()
            for step in steps[start : start + 10]:
                graph._fail(step.key, SourceError("gone"))
            took.append(time.thread_time() - began)
        assert (len(graph.failures), len(graph._open)) == (100, images - 100)
        return min(took)

    assert seconds(8_000) < 10 * seconds(200)
