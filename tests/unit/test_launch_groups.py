"""Control groups of version 2 as their files show them, without the controllers that this machine may lack."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minisandbox.launch.limits import Group, Hold

STATISTICS = (
    "anon 4096\nfile 8192\nkernel 900000\npagetables 70000\nsec_pagetables 0\n"
    "slab_reclaimable 500000\nslab_unreclaimable 300000\nslab 800000\n"
)


@pytest.fixture
def counters(tmp_path: Path) -> Path:
    """A directory with the counters that each group has."""
    for name in ("memory.events", "pids.events", "memory.oom_control"):
        (tmp_path / name).write_text("oom_kill 0\nmax 0\n", encoding="ascii")
    return tmp_path


def hold(version: int, directory: Path, *controllers: str) -> Hold:
    return Group(version, dict.fromkeys(("memory", "pids", *controllers), str(directory))).open()


def test_version_2_tells_which_objects_cannot_be_given_back(counters: Path) -> None:
    (counters / "memory.stat").write_text(STATISTICS, encoding="ascii")
    objects = hold(2, counters).objects
    assert objects is not None
    assert (objects.held(), objects.page_tables()) == (300_000, 70_000)
    assert objects.emptying == -1
    objects.give_back()  # there is nothing that would have to be


def test_version_1_tells_all_and_can_be_emptied(counters: Path) -> None:
    (counters / "memory.kmem.usage_in_bytes").write_text("800000\n", encoding="ascii")
    emptied = counters / "memory.force_empty"
    emptied.touch()
    objects = hold(1, counters).objects
    assert objects is not None
    assert (objects.held(), objects.page_tables()) == (800_000, 800_000)
    objects.give_back()
    assert emptied.read_text(encoding="ascii") == "0"


def test_a_kernel_that_does_not_tell_is_not_asked(counters: Path) -> None:
    """cgroup.memory=nokmem has no such file."""
    assert hold(1, counters).objects is None


def test_a_word_of_the_statistics_that_is_missing_counts_as_nothing(counters: Path) -> None:
    (counters / "memory.stat").write_text("anon 4096\n", encoding="ascii")
    objects = hold(2, counters).objects
    assert objects is not None
    assert (objects.held(), objects.page_tables()) == (0, None)


@pytest.mark.parametrize(("version", "name", "written"), [(1, "cpu.cfs_quota_us", "-1"), (2, "cpu.max", "max")])
def test_who_ends_has_all_the_processors(counters: Path, version: int, name: str, written: str) -> None:
    """At a hundredth of one, freeing 3 GB took 37 s; both pid 1 and the zygote lift the limit."""
    quota = counters / name
    quota.write_text("", encoding="ascii")
    hold(version, counters, "cpu").lift_quota()
    assert quota.read_text(encoding="ascii") == written
    quota.write_text("", encoding="ascii")
    Group(version, {"cpu": str(counters)}).lift_quota()
    assert quota.read_text(encoding="ascii") == written


@pytest.mark.parametrize("version", [1, 2])
def test_without_a_limit_there_is_none_to_lift(counters: Path, version: int) -> None:
    before = sorted(counters.iterdir())
    hold(version, counters).lift_quota()
    Group(version, {"memory": str(counters)}).lift_quota()
    assert sorted(counters.iterdir()) == before


def test_a_worker_keeps_the_counters_alone(counters: Path) -> None:
    for name in ("memory.stat", "cpu.max"):
        (counters / name).touch()
    held = hold(2, counters, "cpu")
    held.keep_counters()
    assert held.objects is not None
    for closed in (held.objects.counter, held.quota):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(closed)
    assert [os.fstat(counter).st_size for counter in held.counters] == [17, 17]
