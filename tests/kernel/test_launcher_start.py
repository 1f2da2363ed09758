"""The launcher starts every time: its processes race for a moment while namespaces change under them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

import pytest

from minisandbox.sandbox import Sandbox, launcher
from minisandbox.sandbox.controller import current_controller, shut_down
from minisandbox.types import ImageSpec

pytestmark = pytest.mark.kernel

STARTS = 30  # a start that lost a race failed 2 times in 100


@pytest.mark.slow
def test_it_starts_every_time() -> None:
    for _ in range(STARTS):
        shut_down()
        assert current_controller().launcher.alive
    shut_down()


def test_the_hosts_sockets_are_looked_for_once_and_only_where_the_hosts_usr_is_shown(
    spec: ImageSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[tuple[str, ...]] = []

    def find(tops: Iterable[str]) -> tuple[str, ...]:
        searches.append(tuple(tops))
        return ()

    monkeypatch.setattr(launcher, "find_host_sockets", find)
    shut_down()
    try:
        assert current_controller().launcher.alive
        assert searches == [], "every start of a launcher would take as long as looking does"
        for _ in range(2):
            Sandbox.create(spec).stop()
        assert len(searches) == spec.host_usr
    finally:
        shut_down()


def test_the_callers_umask_changes_nothing_inside(spec: ImageSpec) -> None:
    shut_down()
    previous = os.umask(0o077)
    try:
        with Sandbox.create(spec) as box:
            assert box.exec("umask; touch /tmp/f; stat -c %a /tmp/f").stdout == "0022\n644\n"
            box.files.write_text("/testbed/new/file", "x")
            assert box.exec("stat -c %a /testbed/new /testbed/new/file").stdout == "755\n644\n"
    finally:
        os.umask(previous)
        shut_down()


def test_signals_that_the_caller_ignores_are_not_ignored_inside(spec: ImageSpec) -> None:
    shut_down()
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Sandbox.create(spec) as box:
            ignored = int(box.exec(["grep", "SigIgn", "/proc/self/status"]).stdout.split()[1], 16)
            assert ignored & ~(0b11 << 31) == 0  # posix_spawn(3) of the C library ignores its own two
    finally:
        signal.signal(signal.SIGHUP, previous)
        shut_down()


def test_signals_that_the_caller_blocks_are_not_blocked_inside(spec: ImageSpec) -> None:
    shut_down()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with Sandbox.create(spec) as box:
            result = box.exec("grep SigBlk /proc/self/status; sleep 600 & kill $!; wait $!; echo $?", timeout=30)
            assert (result.ok, result.stdout) == (True, "SigBlk:\t0000000000000000\n143\n"), result
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        shut_down()
