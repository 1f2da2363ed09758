"""Programs of the host that end with us."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minisandbox.images.sources import hostgit
from minisandbox.images.sources.hostgit import run_bound

FAMILY = ["sh", "-c", "sleep 600 & setsid -f sleep 600; echo here; sleep 600"]
OWNER = f"""
import os
from minisandbox.images.sources.hostgit import run_bound
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
        started = time.monotonic()
        assert read_to_the_end(owner.stdout.fileno()) == b""
        assert time.monotonic() - started < 5


FETCH = """
import sys
from minisandbox.images.sources.hostgit import run_git
run_git(["ls-remote", sys.argv[1]], timeout=600, fetches=True)
"""


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_a_fetch_that_hangs_ends_with_whoever_is_killed() -> None:
    """It hangs in a helper of git's, which waits for a server and would not see that git is gone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x.git"
        with subprocess.Popen([sys.executable, "-c", FETCH, url]) as owner:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(30)
                assert b"GET /x.git" in connection.recv(4096)
                owner.kill()
                started = time.monotonic()
                assert connection.recv(4096) == b"", "the helper's end of the connection is open"
                assert time.monotonic() - started < 5


def test_nothing_is_started_for_an_owner_that_has_ended(tmp_path: Path) -> None:
    guard = Path(hostgit.__file__).with_name("guard.py")
    command = [sys.executable, "-I", "-S", str(guard), "1", "touch", str(tmp_path / "started")]
    assert subprocess.run(command, timeout=60, check=False).returncode == 1
    assert not (tmp_path / "started").exists()


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


def test_what_a_program_says() -> None:
    done = run_bound(["sh", "-c", "cat; echo no >&2; exit 3"], timeout=60, stdin=b"yes", env=os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"yes", b"no\n")
    assert run_bound(["sh", "-c", "kill -9 $$"], timeout=60, env=os.environ).returncode == 137
    assert run_bound(["sh", "-c", "kill -PIPE $$"], timeout=60, env=os.environ).returncode == 141, "it ignores it"
