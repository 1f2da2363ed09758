"""Git on the host ends with us, and with its time."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from minisandbox.git import run_git

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git here")

FETCH = """
import sys
from minisandbox.git import run_git
run_git(["ls-remote", sys.argv[1]], timeout=600, fetches=True)
"""


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def url_of(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}/x.git"


def asked_of(server: socket.socket) -> socket.socket:
    connection, _ = server.accept()
    connection.settimeout(30)
    assert b"GET /x.git" in connection.recv(4096)
    return connection


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv here")
def test_a_fetch_that_hangs_ends_with_whoever_is_killed(server: socket.socket) -> None:
    """It hangs in a helper of git's, which waits for a server and would not see that git is gone."""
    with subprocess.Popen([sys.executable, "-c", FETCH, url_of(server)]) as owner, asked_of(server) as connection:
        owner.kill()
        started = time.monotonic()
        assert connection.recv(4096) == b"", "the helper's end of the connection is open"
        assert time.monotonic() - started < 5


def test_a_fetch_that_hangs_ends_where_it_takes_too_long(server: socket.socket) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_git(["ls-remote", url_of(server)], timeout=2.0, fetches=True)
    with asked_of(server) as connection:
        assert connection.recv(4096) == b"", "the helper's end of the connection is open"


def test_what_git_says() -> None:
    done = run_git(["hash-object", "--stdin"], timeout=60, stdin=b"yes")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"396a0ba2698c6a26f17a1e0141f9d1e7a6a56d46\n", b"")
    done = run_git(["no-such-command"], timeout=60)
    assert done.returncode == 1
    assert b"not a git command" in done.stderr
