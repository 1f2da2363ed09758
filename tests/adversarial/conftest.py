"""The suite's own modules are imported by their full names; their assertions are explained as those of tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.register_assert_rewrite("tests.adversarial")

from tests.adversarial.rewards import Try, kinds, make_task  # noqa: E402 - after the registration

from minisandbox.grade import Grade, grade  # noqa: E402 - after the registration
from minisandbox.images import Image, build  # noqa: E402 - after the registration
from minisandbox.store import Store  # noqa: E402 - after the registration
from minisandbox.tasks import Task  # noqa: E402 - after the registration


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """A task to attack: add() subtracts."""
    return make_task(tmp_path_factory.mktemp("calc"))


@pytest.fixture(scope="session")
def image(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Image:
    return build(task.recipe(), store=Store.open(tmp_path_factory.mktemp("store")), name="attacked")


@pytest.fixture
def attempt(task: Task, image: Image, record_property: Callable[[str, object], None]) -> Try:
    """Grade a submission that fixes nothing; whatever comes of it, it earns nothing and is not ours.

    The default policy confirms a pass only if it has a flag. What earns nothing so earns nothing with ``always``.
    """

    def graded(submission: str) -> Grade:
        found = grade(task, image, submission.encode(), timeout=20.0)
        record_property("verdict", f"{found.verdict}: {found.reason}")
        record_property("flags", " ".join(sorted(kinds(found))))
        assert found.reward == 0.0, found
        return found

    return graded
