"""Programs of the host that end with us."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from minisandbox.images import guard
from minisandbox.images.bound import run_bound

OPEN = open
FAMILY = ["sh", "-c", "sleep 600 & setsid -f sleep 600; echo here; sleep 600"]
OWNER = f"""
import os
from minisandbox.images.bound import run_bound
run_bound({FAMILY!r}, timeout=600, stdout=1, env=os.environ)
"""


def read_to_the_end(output: int) -> bytes:
    """Return what comes until nobody has the other end of a pipe any more."""
    found = b""
    while select.select([output], [], [], 30)[0]:
        piece = os.read(output, 4096)
        if not piece:
            return found
        found += piece
    raise AssertionError(f"somebody still has the pipe open, who wrote {found!r}")


def test_all_that_was_started_ends_with_whoever_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, bufsize=0) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"here\n"
        owner.kill()
        assert read_to_the_end(owner.stdout.fileno()) == b""


def test_all_that_was_started_ends_where_it_takes_too_long() -> None:
    read, write = os.pipe()
    with pytest.raises(subprocess.TimeoutExpired):
        run_bound(FAMILY, timeout=1.0, stdout=write, env=os.environ)
    os.close(write)
    assert read_to_the_end(read) in (b"here\n", b"")
    os.close(read)


def test_what_a_program_left_running_ends_with_it(tmp_path: Path) -> None:
    left = tmp_path / "left"
    command = ["setsid", "-f", "sh", "-c", 'echo $$ > "$0.new"; mv "$0.new" "$0"; exec sleep 600', str(left)]
    waited = ["sh", "-c", '"$@"; until test -e "$6"; do :; done', "sh", *command]
    started = time.monotonic()
    done = run_bound(waited, timeout=60, env=os.environ)
    assert (done.returncode, done.stderr) == (0, b"")
    assert time.monotonic() - started < 30, "the end of its output was waited for"
    with pytest.raises(ProcessLookupError):
        os.kill(int(left.read_text()), 0)


def test_children_are_found_without_the_kernels_list_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        assert child.pid in guard._children()
        found = os.listdir("/proc")
        monkeypatch.setattr("builtins.open", _without_list)
        monkeypatch.setattr(os, "listdir", lambda _: found)
        assert child.pid in guard._children()
        child.kill()


def _without_list(path: str, *rest: Any, **more: Any) -> Any:
    if path.endswith("/children"):
        raise FileNotFoundError(path)
    return OPEN(path, *rest, **more)


def test_what_a_program_says() -> None:
    done = run_bound(["sh", "-c", "cat; echo no >&2; exit 3"], timeout=60, stdin=b"yes", env=os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"yes", b"no\n")
    assert run_bound(["sh", "-c", "kill -9 $$"], timeout=60, env=os.environ).returncode == 137
    assert run_bound(["sh", "-c", "kill -PIPE $$"], timeout=60, env=os.environ).returncode == 141, "it ignores it"
    with pytest.raises(FileNotFoundError, match="no such-program that can be executed"):
        run_bound(["such-program"], timeout=60, env=os.environ)
