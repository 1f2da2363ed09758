"""Programs of the host that end with us."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from minisandbox.images.bound import run_bound

FAMILY = ["sh", "-c", "sleep 600 & echo here; sleep 600"]
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


def test_what_a_program_says() -> None:
    done = run_bound(["sh", "-c", "cat; echo no >&2; exit 3"], timeout=60, stdin=b"yes", env=os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"yes", b"no\n")
    assert run_bound(["sh", "-c", "kill -9 $$"], timeout=60, env=os.environ).returncode == 137
    assert run_bound(["sh", "-c", "kill -PIPE $$"], timeout=60, env=os.environ).returncode == 141, "it ignores it"
    with pytest.raises(FileNotFoundError, match="no such-program that can be executed"):
        run_bound(["such-program"], timeout=60, env=os.environ)
