"""What pid 1 makes of what it sees of sockets and directories."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import cast

import pytest

from minisandbox.launch.kernel_memory import KernelMemory, _shown_directories
from minisandbox.launch.sockets import Sockets

pytestmark = pytest.mark.once

LIMIT = 64 << 20


class Seen:
    """Sockets of which looks tell these bytes, one after the other and then the last again, and how many are hidden."""

    netlink = groups = sharing = 0

    def __init__(self, *held: int, hidden: int) -> None:
        self._held, self.hidden = list(held), hidden

    def held(self) -> int:
        return self._held.pop(0) if len(self._held) > 1 else self._held[0]


def stay_too_many(seen: Seen) -> bool:
    return KernelMemory(LIMIT, None, ())._sockets_stay_too_many(cast("Sockets", seen))


def test_sockets_that_show_what_they_hold_are_too_many_at_the_second_look() -> None:
    assert stay_too_many(Seen(LIMIT + 1, LIMIT + 1, 0, hidden=0))
    assert not stay_too_many(Seen(LIMIT + 1, LIMIT, hidden=0))


def test_sockets_that_are_not_shown_are_too_many_only_if_they_stay() -> None:
    """A program that ends closes the listener first, and then the connections that it reset."""
    assert stay_too_many(Seen(LIMIT + 1, hidden=200))
    assert not stay_too_many(Seen(*[LIMIT + 1] * 5, 0, hidden=200))


def test_threads_that_share_descriptors_count_once(tmp_path: Path) -> None:
    """A program of a hundred threads was ended for a few open directories."""
    release = threading.Event()
    threads = [threading.Thread(target=release.wait) for _ in range(20)]
    opened = [os.open(tmp_path, os.O_RDONLY) for _ in range(5)]
    for thread in threads:
        thread.start()
    try:
        place = f"/proc/{os.getpid()}/task"
        tables = [f"{place}/{name}/fd" for name in os.listdir(place)]
        assert len(tables) > 20
        assert _shown_directories(tables, 10_000) == _shown_directories(tables[:1], 10_000)
    finally:
        release.set()
        for descriptor in opened:
            os.close(descriptor)
        for thread in threads:
            thread.join()
