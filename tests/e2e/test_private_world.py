"""What a probe sees that `minisandbox sandbox run` starts: nothing of the host but its /usr."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernel

PROBE = """
import json, os, socket
def listed(path):
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        return [error.strerror]
def reach(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
        return "reached"
    except OSError as error:
        return error.strerror or str(error)
print(json.dumps({
    "pids": [n for n in os.listdir("/proc") if n.isdigit()],
    "home": listed("/home"), "root": listed("/root"), "run": listed("/run"), "tmp": listed("/tmp"),
    "mounts": open("/proc/self/mountinfo").read(), "environment": dict(os.environ),
    "interfaces": [name for _, name in socket.if_nameindex()], "port": reach(%d), "uid": os.getuid(),
    "host": socket.gethostname(),
    "cmdlines": [open(f"/proc/{n}/cmdline").read() for n in os.listdir("/proc") if n.isdigit()],
}))
"""


def sandbox(store: Path, *words: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "MINISANDBOX_STORE": str(store), "SECRET_OF_THE_HOST": "hunter2"}
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [sys.executable, "-m", "minisandbox", "sandbox", *words],
        capture_output=True, timeout=120, check=False, env=environment, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("private") / "store"


def test_a_private_world(store: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        probe = PROBE % server.getsockname()[1]
        done = sandbox(store, "run", "--", "python3", "-c", probe)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert len(seen["pids"]) <= 4
    assert not any("pytest" in line for line in seen["cmdlines"] if "json.dumps" not in line)
    assert seen["home"] == []
    assert seen["root"] == []
    assert seen["interfaces"] == ["lo"]
    assert seen["port"] == "Connection refused"
    assert "SECRET_OF_THE_HOST" not in seen["environment"]
    assert "hunter2" not in done.stdout.decode()
    assert seen["host"] != socket.gethostname()
    assert seen["uid"] == 0
    for path in (store, Path.home(), Path(sys.prefix), Path(__file__).resolve().parents[2], Path.cwd()):
        if path not in (Path("/"), Path("/root"), Path("/usr")):
            assert str(path) not in done.stdout.decode(), path


def test_the_host_network_on_request(store: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        probe = PROBE % server.getsockname()[1]
        done = sandbox(store, "run", "--network", "host", "--", "python3", "-c", probe)
    assert json.loads(done.stdout)["port"] == "reached"


def test_a_command_s_fate_is_the_exit_status(store: Path) -> None:
    assert sandbox(store, "run", "--", "true").returncode == 0
    assert sandbox(store, "run", "--", "sh", "-c", "exit 7").returncode == 7
    killed = sandbox(store, "run", "--", "sh", "-c", "kill -TERM $$")
    assert killed.returncode == 128 + 15
    assert b"SIGTERM" in killed.stderr
    late = sandbox(store, "run", "--timeout", "0.3", "--", "sh", "-c", "echo begun; sleep 60")
    assert (late.returncode, late.stdout) == (124, b"begun\n")
    assert b"timed out" in late.stderr


def test_output_and_input_pass_through_as_bytes(store: Path) -> None:
    data = bytes(range(256)) * 100
    done = sandbox(store, "run", "-i", "--", "sh", "-c", "cat; echo oops >&2", input=data)
    assert (done.stdout, done.stderr) == (data, b"oops\n")
    without = sandbox(store, "run", "--", "cat", input=data)
    assert without.stdout == b""


def test_options(store: Path, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("hello", encoding="ascii")
    script = 'cat note; echo "$A"; touch x 2>/dev/null || echo read-only; head -c 9M /dev/zero > /tmp/f || echo full'
    options = ("--mount", f"{tmp_path}:/data", "--env", "A=b c", "--cwd", "/data", "--limit", "disk=8M")
    done = sandbox(store, "run", *options, "--", "sh", "-c", script)
    assert done.stdout == b"hellob c\nread-only\nfull\n", done.stderr


def test_live_ones_are_listed(store: Path) -> None:
    environment = {**os.environ, "MINISANDBOX_STORE": str(store)}
    command = [sys.executable, "-m", "minisandbox", "sandbox", "run", "-i", "--", "cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        found = wait_for_listing(store, process.pid)
        process.stdin.close()
        assert process.wait(60) == 0
    assert found["image"] == "host"
    assert process.pid not in {one["owner"] for one in json.loads(sandbox(store, "ls", "--json").stdout)}


def wait_for_listing(store: Path, owner: int) -> dict[str, object]:
    for _ in range(100):
        rows: list[dict[str, object]] = json.loads(sandbox(store, "ls", "--json").stdout)
        for row in rows:
            if row["owner"] == owner:
                return row
    raise AssertionError("the sandbox was never listed")
