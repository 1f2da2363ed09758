"""What a sandbox's upper on disk holds, and when the watchdog of pid 1 ends commands that write to it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisandbox.launch import disk, watchdog
from minisandbox.launch.disk import Count, DiskLimit, FreeSpace, measure

MIB = 1 << 20
PLENTY = FreeSpace(100 << 30, 0)  # a file system that does not count files


@pytest.fixture
def upper(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "upper").mkdir()
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def fill(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)


# --- counting --------------------------------------------------------------------------------------------------------


def test_blocks_count_once_and_holes_not(upper: int, tmp_path: Path) -> None:
    fill(tmp_path / "upper/a/file", MIB)
    os.link(tmp_path / "upper/a/file", tmp_path / "upper/again")
    (tmp_path / "upper/hole").touch()
    os.truncate(tmp_path / "upper/hole", 1 << 30)
    fill(tmp_path / "usr/lib/file", MIB)
    fill(tmp_path / "work/work/file", MIB)
    assert 2 * MIB <= measure(upper) < 2.1 * MIB


def test_empty_files_count_as_much_as_in_memory(upper: int, tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"upper/{number}").touch()
    assert measure(upper) == 300 * 4096


def test_no_link_is_followed(upper: int, tmp_path: Path) -> None:
    fill(tmp_path / "outside/file", MIB)
    (tmp_path / "upper/link").symlink_to(tmp_path / "outside")
    (tmp_path / "usr").symlink_to(tmp_path / "outside")
    assert measure(upper) == 4096


@pytest.mark.parametrize("most_open", [256, 3])
def test_a_deep_tree_is_counted_with_few_descriptors(
    upper: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_open: int
) -> None:
    monkeypatch.setattr(disk, "_MOST_OPEN", most_open)
    place = tmp_path / "upper"
    for number in range(20):
        fill(place / "beside/file", 4096)
        place /= f"d{number}"
    fill(place / "file", MIB)
    descriptors = len(os.listdir("/proc/self/fd"))
    assert MIB + 20 * 4096 <= measure(upper) < 1.3 * MIB
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_tree_that_is_moved_meanwhile_ends_the_count_of_that_part_alone(
    upper: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_MOST_OPEN", 2)
    monkeypatch.setattr(disk, "_ENTRIES", 1)
    fill(tmp_path / "upper/a/b/c/d/e/file", MIB)
    fill(tmp_path / "upper/z/file", MIB)
    count, moved = Count(upper), False
    for _ in count.steps():
        if not moved and count.bytes >= MIB:  # in the deepest directory, or next to it
            moved = True
            for name in ("upper/a/b/c/d", "upper/a/b"):
                (tmp_path / name).rename(tmp_path / f"elsewhere-{name.count('/')}")
    assert moved
    assert count.bytes >= MIB
    descriptors = len(os.listdir("/proc/self/fd"))
    del count
    assert len(os.listdir("/proc/self/fd")) == descriptors


# --- limiting --------------------------------------------------------------------------------------------------------


@pytest.fixture
def limit(upper: int, monkeypatch: pytest.MonkeyPatch) -> DiskLimit:
    """A limit of 8 MiB on a file system that shows nothing of what is written, as if others freed as much."""
    monkeypatch.setattr(disk, "free_space_of", lambda _: PLENTY)
    monkeypatch.setattr(disk, "tmpfs_usage", lambda: 0)
    return DiskLimit(upper, 8 * MIB, memoryview(bytearray(disk.SHARED_SIZE)))


def test_a_job_that_wrote_nothing_is_not_counted(
    limit: DiskLimit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "measure", lambda _: pytest.fail("it counted"))
    monkeypatch.setattr(disk, "_written", lambda: 0)
    limit.mark()
    fill(tmp_path / "upper/file", 9 * MIB)  # by somebody else
    assert not limit.was_hit()


@pytest.mark.parametrize(("size", "hit"), [(6 * MIB, False), (9 * MIB, True)])
def test_what_a_job_has_written_itself_counts(
    limit: DiskLimit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, hit: bool
) -> None:
    written = 0
    monkeypatch.setattr(disk, "_written", lambda: written)
    limit.mark()
    fill(tmp_path / "upper/file", size)
    written = size
    assert limit.was_hit() == hit
    assert limit.allowed_size == (limit.counted_size if hit else limit.limit)


def test_a_file_operation_is_refused_what_has_no_room(limit: DiskLimit, tmp_path: Path) -> None:
    fill(tmp_path / "upper/file", 6 * MIB)
    limit.note_count(6 * MIB, PLENTY)
    limit.mark()
    limit.charge(MIB)
    with pytest.raises(OSError, match="No space left") as caught:
        limit.charge(3 * MIB)
    assert caught.value.errno == errno.ENOSPC


# --- watching --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """How often everything was to be ended."""
    found: list[object] = []
    monkeypatch.setattr(watchdog, "end_all", found.append)
    monkeypatch.setattr(watchdog, "INTERVAL", 0.0)
    monkeypatch.setattr(watchdog, "_COUNTS_APART", 0.0)
    monkeypatch.setattr(watchdog, "_COUNT_SHARE", 0)
    monkeypatch.setattr(watchdog, "_COUNT_SHARE_NEAR", 0)
    monkeypatch.setattr(watchdog, "tmpfs_usage", lambda: 0)
    monkeypatch.setattr(watchdog, "free_space_of", lambda _: PLENTY)
    return found


def test_commands_end_when_there_is_more_than_before(ended: list[object], limit: DiskLimit, tmp_path: Path) -> None:
    looks = watchdog.DiskWatchdog(limit)
    fill(tmp_path / "upper/1", 7 * MIB)
    looks.check(())
    assert ended == []
    limit.mark()
    fill(tmp_path / "upper/2", 3 * MIB)
    looks.check(())
    assert len(ended) == 1
    assert limit.was_hit()
    fill(tmp_path / "upper/3", MIB)  # of commands that are ending
    for _ in range(3):
        looks.check(())
    assert len(ended) == 1, "what lies there may stay"
    (tmp_path / "upper/1").unlink()
    fill(tmp_path / "upper/4", 2 * MIB)
    looks.check(())
    looks.check(())
    assert len(ended) == 1, "and be replaced by less"
    fill(tmp_path / "upper/5", 3 * MIB)
    looks.check(())
    assert len(ended) == 2, "but not by more"


def test_a_disk_that_fills_up_stops_those_who_write(
    ended: list[object], limit: DiskLimit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = watchdog.DiskWatchdog(limit)
    fill(tmp_path / "upper/1", MIB)
    looks.check(())
    monkeypatch.setattr(watchdog, "free_space_of", lambda _: FreeSpace(disk.NEAR_FLOOR - 1, 0))
    looks.check(())
    assert ended == []
    fill(tmp_path / "upper/2", MIB)
    looks.check(())
    assert len(ended) == 1
    monkeypatch.setattr(watchdog, "free_space_of", lambda _: FreeSpace(disk.FLOOR - 1, 0))
    looks.check(())
    assert len(ended) == 2, "below the floor everything is ended"


def test_a_count_of_many_files_takes_many_short_looks(
    ended: list[object], limit: DiskLimit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_SLICE", 0.0)
    monkeypatch.setattr(watchdog, "_SLICE_NEAR", 0.0)
    for number in range(1000):
        (tmp_path / f"upper/{number}").touch()
    looks = watchdog.DiskWatchdog(limit)
    looks.check(())
    assert limit.counted_size == 0
    for _ in range(10):
        looks.check(())
    assert limit.counted_size == 1000 * 4096
    assert ended == []
