"""Every implementation of the sandbox keeps every promise of the contract."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tests.conformance.contract import DEADLINE, Case, cases
from tests.conformance.implementations import IMPLEMENTATIONS, NOT_IN_CONTAINERS, WORKDIR, Implementation
from tests.engines import in_engine

from minisandbox.errors import Unsupported
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec

FEWEST = 150
MODE = os.environ.get("MINISANDBOX_TEST_IDS", "")
"""Set by tests/as_user.py, for which the mode of real sandboxes is the point; the fakes have no modes."""
KERNEL = {"kernel", "range", "one id"}


def promised(case: Case, implementation: Implementation) -> bool:
    """Whether a case makes sense for an implementation; what this machine lacks is found out when it runs."""
    lacking = case.needs - implementation.has
    return not lacking or (implementation.real and lacking <= KERNEL)


def marks(case: Case, implementation: Implementation) -> list[pytest.MarkDecorator]:
    """Choose where a case runs.

    Sync and async sandboxes share most of their code. Without --slow, async ones have only the cases that sync ones
    cannot have; the fake and cases that do a lot are left out. An ordinary user repeats the sync cases.
    """
    twin = "cancel" not in case.needs and (implementation.name.startswith("async") or not implementation.real)
    once = [pytest.mark.once] * (twin and implementation.real)
    slow = [pytest.mark.slow] * (twin or case.deadline > DEADLINE or bool(implementation.engine))
    return [pytest.mark.kernel] * implementation.real + once + slow


HOLDS = [
    pytest.param(case, implementation, id=f"{implementation.name}-{case.name}", marks=marks(case, implementation))
    for implementation in IMPLEMENTATIONS
    if implementation.real or not MODE
    for case in cases()
    if promised(case, implementation)
]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory, spec: ImageSpec) -> ImageSpec:
    """The smallest image, with a directory to work in."""
    return replace(spec, workdir=WORKDIR)


@cache
def ids_inside(spec: ImageSpec) -> int:
    """How many user ids a sandbox has here."""
    with Sandbox.create(spec) as box:
        rows = [line.split() for line in box.exec("cat /proc/self/uid_map").check().stdout.splitlines()]
    return sum(int(row[2]) for row in rows)


@pytest.mark.parametrize(("case", "implementation"), HOLDS)
def test_promise(case: Case, implementation: Implementation, image: ImageSpec, tmp_path: Path) -> None:
    if "range" in case.needs and ids_inside(image) < 65536:
        pytest.skip("doctor: sandboxes have one user id here; see newuidmap and /etc/subuid")
    if "one id" in case.needs and ids_inside(image) > 1:
        pytest.skip("sandboxes have a range of user ids here")
    if not implementation.engine:
        implementation.world(image, tmp_path).hold_to(case)
        return
    if reason := NOT_IN_CONTAINERS.get(case.name):
        pytest.skip(f"{implementation.engine}: {reason}")
    try:
        implementation.world(in_engine(implementation.engine, image), tmp_path).hold_to(case)
    except Unsupported as error:
        pytest.skip(error.what)


def test_the_list_is_long_enough() -> None:
    assert len(cases()) >= FEWEST
    assert len({case.title for case in cases()}) == len(cases())


def test_most_promises_are_kept_by_the_fake_too() -> None:
    fake = [case for case in cases() if not case.needs]
    assert len(fake) >= FEWEST
