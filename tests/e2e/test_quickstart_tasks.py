"""The lists of the bundled set are what the product measures: one task of each form, made and run anew."""

from __future__ import annotations

import pytest

from minisandbox.grade import derive_test_lists, measure
from minisandbox.images import build
from minisandbox.store import Store
from minisandbox.tasks import TaskSet

pytestmark = [pytest.mark.kernel, pytest.mark.index]


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("name", ["r1chardj0n3s__parse-*", "pytoolz__toolz-*outer_join"])
def test_lists_are_measured(shared_store: Store, name: str) -> None:
    (task,) = TaskSet.load("quickstart").select([name])
    image = build(task.recipe(), store=shared_store, name=task.instance_id)
    solved, unsolved = (measure(task, image, reference=yes, files=task.test_files) for yes in (True, False))
    assert solved.believed, solved.log
    assert unsolved.believed, unsolved.log
    fail_to_pass, pass_to_pass = derive_test_lists([solved], [unsolved])
    assert set(fail_to_pass) == set(task.FAIL_TO_PASS)
    assert set(pass_to_pass) >= set(task.PASS_TO_PASS)
