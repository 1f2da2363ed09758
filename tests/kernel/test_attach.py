"""Live sandboxes from another process: found, used, ended; their life stays with their owner."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import PATIENCE, until

from minisandbox.errors import HostError, InvalidValue, NotFound, OwnerOnly, SandboxGone
from minisandbox.sandbox import Process, Sandbox, live_sandboxes
from minisandbox.types import ExecResult, ImageSpec, Outcome, Output, Terminal

pytestmark = pytest.mark.kernel

OWNER = """
import sys
from pathlib import Path, PurePosixPath
from minisandbox import ImageSpec, Sandbox
image = ImageSpec("foreign", (Path(sys.argv[1]),), (("FROM", "image"),), PurePosixPath("/testbed"))
with Sandbox.create(image, labels={"made": "elsewhere"}, environment={"OVER": "owner"}) as box:
    wait = "until [ -e note ]; do sleep 0.01; done"  # what is said before the handle is closed goes to that handle
    process = box.start(wait + "; echo early; read line; echo got $line; sleep 0.1; exit 4", lifetime="sandbox")
    process.close()
    box.files.write_text("note", "from the owner")
    print(box.id, process.id, flush=True)
    for line in sys.stdin:
        print(eval(line), flush=True)
"""


class Owner:
    """Another process, and the sandbox that it made."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid
        self.box, self.started = self._line().split()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def evaluate(self, expression: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{expression}\n")
        self._process.stdin.flush()
        return self._line()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)


@pytest.fixture
def owner(spec: ImageSpec) -> Iterator[Owner]:
    command, pipe = [sys.executable, "-c", OWNER, str(spec.layers[0])], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield Owner(process)
        finally:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait(PATIENCE)


def test_it_is_listed(owner: Owner) -> None:
    (info,) = Sandbox.list(labels={"made": "elsewhere"})
    assert (info.id, info.owner, info.image) == (owner.box, owner.pid, "foreign")
    assert Sandbox.list(labels={"made": "here"}) == ()
    with Sandbox.attach(owner.box) as box:
        assert box.info() == info


def test_everything_but_the_owners_verbs_works(owner: Owner, tmp_path: Path) -> None:
    with Sandbox.attach(owner.box) as box:
        assert box.exec("pwd; echo $FROM $OVER; cat note").stdout == "/testbed\nimage owner\nfrom the owner"
        box.files.write_text("answer", "from elsewhere")
        assert box.files.download("/testbed", tmp_path / "copy").files == 2
        assert box.usage().processes >= 1
        with box.shell() as shell:
            assert shell.run("cd /tmp").cwd.name == "tmp"
            assert shell.run("pwd").stdout == "/tmp\n"
        with box.start("tty", pty=Terminal()) as process:
            assert process.wait(PATIENCE).stdout.startswith("/dev/pts/")
        for verb in (box.snapshot, box.fork, box.reset, box.changes):
            with pytest.raises(OwnerOnly, match=owner.box):
                verb()
    assert owner.evaluate("box.files.read_text('answer')") == "from elsewhere"


def test_many_commands_at_once(owner: Owner) -> None:
    with Sandbox.attach(owner.box) as box:
        results: list[ExecResult] = []
        threads = [threading.Thread(target=lambda: results.append(box.exec("sleep 0.3; echo x"))) for _ in range(60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert [result.stdout for result in results] == ["x\n"] * 60


def test_a_process_of_the_owner_is_attached_to(owner: Owner) -> None:
    with Sandbox.attach(owner.box) as box:
        assert box.processes() == (owner.started,)
        with box.process(owner.started) as process:
            assert process.pid > 1
            assert "echo early" in process.command
            assert next(process.events()) == Output("stdout", b"early\n")
        with box.process(owner.started) as again:
            again.write("a line\n")
            result = again.wait(PATIENCE)
        assert (result.outcome, result.exit_code) == (Outcome.EXITED, 4)
        assert result.stdout.endswith("got a line\n")
        until(lambda: box.processes() == ())
        with pytest.raises(NotFound, match=owner.started):
            box.process(owner.started)


def test_a_process_that_is_held_is_refused_until_its_holder_closes(owner: Owner) -> None:
    with Sandbox.attach(owner.box) as box:
        with box.process(owner.started) as first:
            with pytest.raises(InvalidValue, match="held by another handle"):
                box.process(owner.started)
            assert first.pid > 1
        with box.process(owner.started) as second:
            second.kill()
            assert second.wait(PATIENCE).outcome is Outcome.SIGNALED


def test_letting_go_leaves_it_alone_and_stop_ends_it(owner: Owner) -> None:
    with Sandbox.attach(owner.box) as box:
        pass
    with pytest.raises(SandboxGone):
        box.exec("true")
    assert owner.evaluate("box.alive") == "True"
    other = Sandbox.attach(owner.box)
    other.stop()
    other.stop()
    assert not other.alive
    assert owner.evaluate("box.alive") == "False"
    assert live_sandboxes(labels={"made": "elsewhere"}) == ()


def test_it_ends_with_its_owner(owner: Owner) -> None:
    with Sandbox.attach(owner.box) as box:
        process = box.start("sleep 600")
        caught: list[BaseException] = []
        thread = threading.Thread(target=lambda: caught.append(fate(process)))
        thread.start()
        owner.kill()
        thread.join(PATIENCE)
        assert isinstance(caught[0], SandboxGone)
        until(lambda: not box.alive)
        with pytest.raises(SandboxGone):
            box.exec("true")
        process.close()
    with pytest.raises(NotFound):
        Sandbox.attach(owner.box)


def fate(process: Process) -> BaseException:
    try:
        process.wait(PATIENCE)
    except SandboxGone as error:
        return error
    return AssertionError("it ended otherwise")


def test_attached_to_a_sandbox_of_our_own(box: Sandbox) -> None:
    with Sandbox.attach(box.id) as other:
        assert other.exec("echo both").stdout == "both\n"
        with pytest.raises(OwnerOnly):
            other.snapshot()
    assert box.alive


@pytest.mark.parametrize("name", ["", "box-nothing", "../x", "box"])
def test_what_is_not_there(name: str) -> None:
    with pytest.raises(NotFound, match="sandbox ls"):
        Sandbox.attach(name)


def test_want_of_descriptors_is_not_the_end_of_a_sandbox(box: Sandbox) -> None:
    with Sandbox.attach(box.id) as attached:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # what is open stays open
        try:
            for handle in (box, attached):
                with pytest.raises(HostError, match="Too many open files"):
                    handle.exec("true")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert box.exec("true").ok
        assert attached.exec("true").ok
