"""`minisandbox sandbox` as a person and as a program use it: streams, terminals, live sandboxes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from fcntl import ioctl
from functools import partial
from pathlib import Path
from struct import pack

import pytest
from tests.waiting import until

from minisandbox import errors
from minisandbox.cli.common import exits
from minisandbox.host import registry
from minisandbox.launch.kernel import cgroups
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec, Limits

pytestmark = pytest.mark.kernel
PATIENCE = 60.0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli") / "store"


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "minisandbox", "sandbox", *words]


def environment(store: Path) -> dict[str, str]:
    return {**os.environ, "MINISANDBOX_STORE": str(store), "TERM": "xterm-256color"}


def sandbox(
    store: Path, *words: str, stdin: bytes = b"", start: Sequence[str] = ()
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end.

    Args:
        start: words that start it.
    """
    return subprocess.run(
        [*start, *command(*words)], capture_output=True, timeout=120, check=False, env=environment(store), input=stdin
    )


def piped(store: Path, *words: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command(*words), stdin=pipe, stdout=pipe, stderr=pipe, env=environment(store))


# --- streams ---------------------------------------------------------------------------------------------------------


def test_output_comes_while_the_command_runs_and_input_goes(store: Path) -> None:
    with piped(store, "run", "-i", "--", "cat") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in (b"one\n", b"two\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline() == line
        process.stdin.close()
        assert process.wait(PATIENCE) == 0


def test_more_output_than_memory_would_keep(store: Path) -> None:
    done = sandbox(store, "run", "--", "sh", "-c", "head -c 30000000 /dev/zero; echo end >&2")
    assert (len(done.stdout), done.stderr, done.returncode) == (30_000_000, b"end\n", 0)


def test_a_reader_that_goes_away_ends_the_command(store: Path) -> None:
    with piped(store, "run", "--", "yes") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"y\n"
        process.stdout.close()
        assert process.wait(PATIENCE) == exits.BROKEN_PIPE


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, exits.INTERRUPTED), (signal.SIGTERM, exits.TERMINATED)])
def test_an_interrupt_ends_the_command_and_its_sandbox(store: Path, number: int, status: int) -> None:
    with piped(store, "run", "--label", f"test=interrupt-{number}", "--", "sh", "-c", "echo up; sleep 600") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(number)
        assert b"the sandbox and everything in it has been removed" in process.stderr.read()
        assert process.wait(PATIENCE) == status
    assert json.loads(sandbox(store, "ls", "--json", "--label", f"test=interrupt-{number}").stdout) == []


def test_a_closed_stdin_is_an_empty_one(store: Path) -> None:
    line = " ".join([*command("run", "-i", "--", "wc", "-c"), "<&-"])
    done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=120, env=environment(store), check=False)
    assert (done.stdout, done.stderr, done.returncode) == (b"0\n", b"", 0)


def test_the_pieces_of_a_run(store: Path) -> None:
    done = sandbox(store, "run", "--limit", "lifetime=0.5", "--", "sleep", "600")
    assert done.returncode == errors.SandboxGone.exit_code, done.stderr
    done = sandbox(store, "run", "--cwd", "/tmp", "--env", "A=1", "--", "sh", "-c", "pwd; echo $A")
    assert done.stdout == b"/tmp\n1\n"


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_mistakes_are_told_before_anything_is_made(tmp_path: Path) -> None:
    bad = errors.InvalidValue.exit_code
    for words, said in (
        (("run", "ls", "-la"), "minisandbox sandbox run -- ls -la"),
        (("run", "--env", "A=1", "ls", "--", "-la"), "minisandbox sandbox run -- ls -la"),
        (("run",), "the command is missing"),
        (("run", "--env", "A", "--", "true"), "--env A"),
        (("run", "--label", "x", "--", "true"), "--label x"),
        (("run", "--limit", "disk=x", "--", "true"), "--limit disk=x"),
        (("exec", "box-1", "ls"), "minisandbox sandbox exec box-1 -- ls"),
        (("shell", "--", "ls"), "takes no command"),
        (("shell", "--limit", "disk=1M", "box-1"), "--limit needs a new sandbox"),
        (("kill",), "give ids, or --all"),
        (("kill", "--all", "box-1"), "give ids, or --all"),
    ):
        done = sandbox(tmp_path / "store", *words)
        assert (done.returncode, said in done.stderr.decode()) == (bad, True), (words, done.stderr)
    assert not (tmp_path / "store").exists()


def test_what_is_not_there(store: Path) -> None:
    for words in (("exec", "box-nothing", "--", "true"), ("shell", "box-nothing"), ("kill", "box-nothing")):
        done = sandbox(store, *words)
        assert done.returncode == errors.NotFound.exit_code
        assert b"box-nothing" in done.stderr
        assert b"sandbox ls" in done.stderr


# --- live sandboxes --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(spec: ImageSpec) -> Iterator[Sandbox]:
    with Sandbox.create(spec, labels={"test": "cli", "kind": "live"}, limits=Limits(lifetime=900)) as box:
        yield box


def test_exec_in_a_live_sandbox(store: Path, live: Sandbox) -> None:
    live.files.write_text("/tmp/note", "hello")
    done = sandbox(store, "exec", live.id, "--", "cat", "/tmp/note")
    assert (done.stdout, done.returncode) == (b"hello", 0), done.stderr
    assert sandbox(store, "exec", live.id.removeprefix("box-")[:8], "--", "sh", "-c", "exit 7").returncode == 7
    done = sandbox(
        store,
        "exec",
        "-i",
        "--cwd",
        "/tmp",
        "--env",
        "A=b",
        live.id,
        "--",
        "sh",
        "-c",
        "pwd; echo $A; cat",
        stdin=b"in",
    )
    assert done.stdout == b"/tmp\nb\nin"
    late = sandbox(store, "exec", "--timeout", "0.3", live.id, "--", "sleep", "600")
    assert (late.returncode, b"timed out" in late.stderr) == (exits.TIMEOUT, True)
    assert live.alive


def test_a_beginning_that_several_ids_have(store: Path, live: Sandbox, spec: ImageSpec) -> None:
    with Sandbox.create(spec) as other:
        done = sandbox(store, "exec", "box-", "--", "true")
        assert done.returncode == errors.InvalidValue.exit_code
        assert live.id in done.stderr.decode()
        assert other.id in done.stderr.decode()


def test_ls(store: Path, live: Sandbox) -> None:
    rows = json.loads(sandbox(store, "ls", "--json", "--label", "test=cli").stdout)
    assert [row["id"] for row in rows] == [live.id]
    assert rows[0]["labels"] == {"test": "cli", "kind": "live"}
    assert 0 < rows[0]["expires"] - time.time() < 900
    assert rows[0]["owner"] == os.getpid()
    table = sandbox(store, "ls", "--label", "kind=live").stdout.decode()
    assert "kind=live, test=cli" in table
    assert re.search(r"1[0-5] min \d+ s", table)
    assert json.loads(sandbox(store, "ls", "--json", "--label", "test=cli", "--label", "kind=x").stdout) == []


def test_kill(store: Path, spec: ImageSpec) -> None:
    boxes = [Sandbox.create(spec, labels={"doomed": str(number % 2)}) for number in range(4)]
    try:
        done = sandbox(store, "kill", boxes[0].id, boxes[0].id)
        assert (done.returncode, done.stdout.decode()) == (0, f"{boxes[0].id}\n")
        done = sandbox(store, "kill", "--label", "doomed=1")
        assert set(done.stdout.decode().split()) == {boxes[1].id, boxes[3].id}
        assert [box.alive for box in boxes] == [False, False, True, False]
    finally:
        for box in boxes:
            box.stop()


def test_commands_on_stdin_of_a_shell(store: Path, live: Sandbox) -> None:
    done = sandbox(store, "shell", live.id, stdin=b"cd /tmp\npwd\nexit 5\n")
    assert (done.stdout, done.returncode) == (b"/tmp\n", 5), done.stderr
    done = sandbox(store, "shell", stdin=b"echo new; hostname")
    assert (done.stdout, done.returncode) == (b"new\nsandbox\n", 0), done.stderr


# --- terminals -------------------------------------------------------------------------------------------------------


class Person:
    """Somebody at a terminal."""

    def __init__(self, store: Path, *words: str) -> None:
        self.seen = b""
        self._master, slave = pty.openpty()
        self.resize(31, 97)
        self._slave = slave
        self.settings = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            command(*words), stdin=slave, stdout=slave, stderr=slave, env=environment(store),
            start_new_session=True, preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - one thread, one system call
        )  # fmt: skip

    def resize(self, rows: int, columns: int) -> None:
        ioctl(self._master, termios.TIOCSWINSZ, pack("HHHH", rows, columns, 0, 0))

    def type(self, text: bytes) -> None:
        os.write(self._master, text)

    def see(self, pattern: bytes) -> None:
        """Read until something has been shown since the last look."""
        give_up = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < give_up, (pattern, self.seen)
            if select.select([self._master], [], [], 0.2)[0]:
                self.seen += os.read(self._master, 4096)
        self.seen = self.seen[found.end() :]

    def end(self) -> int:
        """How it ended; the terminal must be as it was."""
        give_up = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < give_up, self.seen
            if select.select([self._master], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.seen += os.read(self._master, 4096)
        assert termios.tcgetattr(self._slave) == self.settings
        return self.process.returncode

    def leave(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE)
        os.close(self._master)
        os.close(self._slave)


@contextlib.contextmanager
def person(store: Path, *words: str) -> Iterator[Person]:
    somebody = Person(store, *words)
    try:
        yield somebody
    finally:
        somebody.leave()


def wait_for(box: Sandbox, command: str) -> None:
    done = box.exec(f"until ps -eo args | grep -qx '{command}'; do sleep 0.05; done", timeout=PATIENCE)
    assert done.ok, done.fate


def test_a_person_in_a_shell(store: Path, live: Sandbox) -> None:
    with person(store, "shell", live.id) as somebody:
        somebody.see(live.id.encode() + b"; exit or .D leaves the shell, and the sandbox keeps running")
        somebody.type(b"stty size; echo $TERM\r")
        somebody.see(rb"\r31 97\r\nxterm-256color\r\n")
        somebody.resize(20, 60)
        somebody.type(b"until [ \"$(stty size)\" = '20 60' ]; do sleep 0.05; done; echo seen:$?\r")
        somebody.see(rb"\rseen:0\r\n")
        somebody.type(b"sleep 600\r")
        somebody.see(rb"sleep 600\r\n")
        wait_for(live, "sleep 600")  # before it is in the foreground, bash takes no ^C
        somebody.type(b"\x03")
        somebody.see(rb"\^C")
        somebody.type(b"echo status:$?\r")
        somebody.see(rb"\rstatus:130\r\n")
        somebody.type(b"exit 9\r")
        assert somebody.end() == 9
    assert live.alive


def test_the_end_of_input_leaves_the_shell(store: Path) -> None:
    with person(store, "shell") as somebody:
        somebody.see(b"ends the sandbox")
        somebody.type(b"echo ready:$((1+1))\r")
        somebody.see(rb"\rready:2\r\n[^\n]*# ")  # before its prompt the shell's terminal swallows an end of input
        somebody.type(b"\x04")
        assert somebody.end() == 0


def test_the_terminal_is_restored_when_the_sandbox_is_killed(store: Path, spec: ImageSpec) -> None:
    with Sandbox.create(spec) as box, person(store, "shell", box.id) as somebody:
        somebody.type(b"echo ready:$((1+1))\r")
        somebody.see(rb"\rready:2\r\n")
        box.stop()
        assert somebody.end() == errors.SandboxGone.exit_code
        assert b"minisandbox: sandbox" in somebody.seen


def test_the_terminal_is_restored_when_we_are_told_to_end(store: Path, live: Sandbox) -> None:
    with person(store, "exec", "-it", live.id, "--", "sh", "-c", "tty; echo up; sleep 600") as somebody:
        somebody.see(rb"/dev/pts/\d+\r\nup\r\n")
        somebody.process.send_signal(signal.SIGTERM)
        assert somebody.end() == exits.TERMINATED
        assert b"the sandbox keeps running" in somebody.seen


def test_a_terminal_without_input_leaves_the_keys_to_us(store: Path) -> None:
    with person(store, "run", "-t", "--", "sh", "-c", "tty; sleep 600") as somebody:
        somebody.see(rb"/dev/pts/\d+\r\n")
        somebody.type(b"\x03")
        assert somebody.end() == exits.INTERRUPTED


def test_a_terminal_for_a_command_where_nobody_sits_at_one(store: Path) -> None:
    done = sandbox(store, "run", "-it", "--", "sh", "-c", "tty; stty size; cat", stdin=b"line\n")
    assert done.returncode == 0, done.stderr
    said = done.stdout.replace(b"line\r\n", b"")  # the terminal echoes it whenever it comes
    assert re.search(rb"/dev/pts/\d+\r\n24 80\r\n", said)
    assert done.stdout.count(b"line\r\n") == 2


# --- what the dead left ----------------------------------------------------------------------------------------------


JOIN = 'while [ "$1" != -- ]; do echo 0 >"$1/cgroup.procs" || exit; shift; done; shift; exec "$@"'


@pytest.fixture
def groups_apart() -> Iterator[tuple[set[Path], list[str]]]:
    """Control groups that nobody else looks below, and the words that start a command in them.

    A command looks below the groups that it is in. Where it would look by itself, others may have left some that
    nothing can remove: their processes do not end. Where none can be made, these places have to do, without words.
    """
    places = cgroups.find_roots()
    above = {Path(place) for _, place in places.directories}
    ours = {place / f"test-minisandbox-{os.getpid()}" for place in above}
    inside = {place / "inside" if places.version == 2 else place for place in ours}  # no processes beside groups there
    words = ["sh", "-c", JOIN, "sh", *map(str, inside), "--"]
    try:
        for place in inside:
            place.mkdir(parents=True)
            if places.version == 2:
                (place.parent / "cgroup.subtree_control").write_text("+memory +pids", encoding="ascii")
        made = subprocess.run([*words, "true"], capture_output=True, check=False, timeout=60).returncode == 0
    except OSError:  # not for us to make
        made = False
    yield (ours, words) if ours and made else (above, [])
    for place in ours:
        remove_groups(place)


@pytest.fixture
def stubborn(groups_apart: tuple[set[Path], list[str]]) -> Iterator[None]:
    """A dead owner's control group elsewhere that nobody can remove: a process sits in it that does not end."""
    ours, words = groups_apart
    if not words:
        yield
        return
    groups = [place.parent / f"{cgroups.PREFIX}{dead_owner(1)}" for place in ours]
    try:
        for group in groups:
            (group / "1").mkdir(parents=True)
        with subprocess.Popen([*words[:4], *(f"{group}/1" for group in groups), "--", "sleep", "600"]) as process:
            until(lambda: all((group / "1/cgroup.procs").read_text(encoding="ascii") for group in groups))
            yield
            process.kill()
    finally:
        for group in groups:
            remove_groups(group)


def remove_groups(place: Path) -> None:
    """Remove a control group and all below it; the kernel may need a moment to see that their processes have ended."""
    for group in [Path(directory) for directory, _, _ in os.walk(place, topdown=False)]:
        until(partial(is_removed, group))


def is_removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def dead_owner(number: int = 0) -> str:
    """This very process, before the machine was restarted."""
    pid, started, _, namespace = registry.owner_name().split("-")
    return f"{pid}-{started}-{number:032}-{namespace}"


@pytest.mark.alone  # whoever starts meanwhile removes what this one means to
@pytest.mark.usefixtures("stubborn")
def test_prune(
    store: Path,
    spec: ImageSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups_apart: tuple[set[Path], list[str]],
) -> None:
    monkeypatch.setenv("MINISANDBOX_RUNTIME", str(tmp_path / "runtime"))
    places, words = groups_apart
    dead = dead_owner()
    records = tmp_path / "runtime/owners" / dead
    groups = {place / f"{cgroups.PREFIX}{dead}" for place in places}
    living = {place / f"{cgroups.PREFIX}{registry.owner_name()}" for place in places if words}
    hidden = Path(tempfile.gettempdir(), f"minisandbox-scratch-{dead}-x")
    with Sandbox.create(spec) as box:  # the first of a process removes what dead ones left, as prune does
        records.mkdir(parents=True)
        (records / "box-1.json").touch()
        for group in groups | living:
            (group / "1").mkdir(parents=True, exist_ok=True)
        (hidden / "tests").mkdir(parents=True, exist_ok=True)
        (hidden / "tests").chmod(0o500)
        would = sandbox(store, "prune", "--dry-run", start=words)
        assert f"would remove records {records}\n" in would.stdout.decode()
        assert f"would remove directory {hidden}\n" in would.stdout.decode()
        assert all(f"would remove control group {group}\n" in would.stdout.decode() for group in groups)
        assert (would.returncode, records.exists(), hidden.exists()) == (0, True, True)
        done = sandbox(store, "prune", start=words)
        assert f"\nremoved records {records}\n" in f"\n{done.stdout.decode()}"
        assert done.returncode == 0, done.stdout
        assert not any(path.exists() for path in (records, hidden, *groups))
        assert all((group / "1").exists() for group in living)
        assert box.exec("echo alive").stdout == "alive\n"
    assert str(records) not in sandbox(store, "prune", start=words).stdout.decode()


def test_prune_says_what_it_could_not_remove(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISANDBOX_RUNTIME", str(tmp_path / "runtime"))
    odd = tmp_path / "runtime/owners/999999999-1-0"
    (odd / "deep").mkdir(parents=True)
    done = sandbox(store, "prune")
    assert f"could not remove records {odd}\n" in done.stdout.decode()
    assert done.returncode == exits.NEGATIVE
    rows = json.loads(sandbox(store, "prune", "--json").stdout)
    row = next(row for row in rows if row["path"] == str(odd))
    assert row == {"kind": "records", "path": str(odd), "owner": "999999999-1-0", "removed": False}
