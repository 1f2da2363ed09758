"""The processes that make sandboxes: what their death costs, and what they leave in what they make."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import until

from minisandbox.errors import SandboxCreationError
from minisandbox.launch.kernel import cgroups
from minisandbox.launch.kernel.identity import CAPABILITIES
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.controller import shut_down
from minisandbox.types import ImageSpec

pytestmark = pytest.mark.kernel


def status(pid: int) -> dict[str, str]:
    rows = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines())
    return {name: value.strip() for name, _, value in rows}


def setup_workers(box: Sandbox, name: str = "minisandbox-set") -> set[int]:
    """The setup workers beside the zygote that is the parent of a sandbox's first process; or those of another name."""
    zygote = status(box.info().pid)["PPid"]
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            rows = status(int(pid))
            if rows["PPid"] == zygote and rows["Name"] == name and not rows["State"].startswith("Z"):
                found.add(int(pid))
    return found


def test_setup_workers_that_are_killed_are_replaced(spec: ImageSpec) -> None:
    with Sandbox.create(spec) as box:
        before = setup_workers(box)
        assert len(before) >= 2
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        give_up = time.monotonic() + 60
        while len(after := setup_workers(box)) < len(before) or after & before:
            assert time.monotonic() < give_up, (before, after)
            time.sleep(0.02)
        with Sandbox.create(spec) as other:
            assert other.exec("echo made").stdout == "made\n"
        assert box.exec("echo alive").stdout == "alive\n"


def test_a_template_that_is_killed_is_replaced(spec: ImageSpec) -> None:
    with Sandbox.create(spec) as box:
        (before,) = setup_workers(box, "minisandbox-tem")
        os.kill(before, signal.SIGKILL)
        until(lambda: before not in setup_workers(box, "minisandbox-tem"))
        for _ in range(3):  # the first takes a spare
            with Sandbox.create(spec) as other:
                assert other.exec("echo made").stdout == "made\n"
        assert setup_workers(box, "minisandbox-tem") - {before}
        assert box.exec("echo alive").stdout == "alive\n"


@contextlib.contextmanager
def no_more_processes(pid: int) -> Iterator[None]:
    """Have the kernel refuse every fork of a process: by RLIMIT_NPROC, or for root, who is exempt, a control group."""
    if os.geteuid():
        before = resource.prlimit(pid, resource.RLIMIT_NPROC)
        resource.prlimit(pid, resource.RLIMIT_NPROC, (1, before[1]))
        yield
        resource.prlimit(pid, resource.RLIMIT_NPROC, before)
        return
    directories = dict(cgroups.find_roots().directories)
    if "pids" not in directories:
        pytest.skip("there is no control group for processes")
    group = Path(directories["pids"], f"{cgroups.PREFIX}test-{os.getpid()}")
    group.mkdir()
    (group / "pids.max").write_text("0", encoding="ascii")
    (group / "cgroup.procs").write_text(str(pid), encoding="ascii")
    yield
    (group / "pids.max").write_text("max", encoding="ascii")
    (group.parent / "cgroup.procs").write_text(str(pid), encoding="ascii")


@pytest.fixture
def own_launcher() -> Iterator[None]:
    """A launcher that no other test has used, or will."""
    shut_down()
    yield
    shut_down()
    for group in {Path(directory) for _, directory in cgroups.find_roots().directories}:
        with contextlib.suppress(FileNotFoundError):
            (group / f"{cgroups.PREFIX}test-{os.getpid()}").rmdir()


@pytest.mark.usefixtures("own_launcher")
def test_a_refused_fork_ends_no_sandbox(spec: ImageSpec) -> None:
    with Sandbox.create(spec) as box:
        before, zygote = setup_workers(box), int(status(box.info().pid)["PPid"])
        with no_more_processes(zygote):
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            until(lambda: not setup_workers(box))
            with pytest.raises(SandboxCreationError, match="temporarily unavailable") as caught:
                Sandbox.create(spec)
            assert "ulimit -u" in str(caught.value)
            assert box.exec("echo alive").stdout == "alive\n"
        until(lambda: len(setup_workers(box)) == len(before))  # without a request
        with Sandbox.create(spec) as other:
            assert other.exec("echo made").stdout == "made\n"
        assert box.exec("echo alive").stdout == "alive\n"


def children(pid: int | str) -> set[int]:
    with contextlib.suppress(OSError):
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()))
    return set()


def spares(box: Sandbox) -> set[int]:
    """First processes of sandboxes that nobody has asked for yet; ``box`` must be the only one."""
    found = set()
    for pid in children(status(box.info().pid)["PPid"]) - {box.info().pid}:
        with contextlib.suppress(OSError):  # it has ended since
            found |= {pid} if status(pid)["Name"] == "minisandbox-ini" else set()
    return found


@pytest.mark.usefixtures("own_launcher")
def test_a_killed_spare_is_not_handed_out(spec: ImageSpec) -> None:
    with Sandbox.create(spec) as box:
        until(lambda: len(spares(box)) == 1)
        (spare,) = spares(box)
        os.kill(spare, signal.SIGKILL)
        until(lambda: len(spares(box) - {spare}) == 1 and not os.path.exists(f"/proc/{spare}"))  # without a request
        with Sandbox.create(spec) as other:
            assert other.exec("echo made").stdout == "made\n"


@pytest.mark.usefixtures("own_launcher")
def test_a_spare_whose_first_worker_was_killed_becomes_a_sandbox_all_the_same(spec: ImageSpec) -> None:
    with Sandbox.create(spec) as box:
        until(lambda: any(map(children, spares(box))))
        (spare,) = spares(box)
        for pid in children(spare):
            os.kill(pid, signal.SIGKILL)
        with Sandbox.create(spec) as other:
            assert other.info().pid == spare
            assert other.exec("echo made").stdout == "made\n"


@pytest.mark.usefixtures("own_launcher")
def test_a_spare_and_its_first_worker_have_no_privileges(spec: ImageSpec) -> None:
    with Sandbox.create(spec) as box:
        until(lambda: any(map(children, spares(box))))
        (spare,) = spares(box)
        for pid in (spare, *children(spare)):
            rows = status(pid)
            assert (rows["Seccomp"], rows["NoNewPrivs"]) == ("2", "1")
            assert int(rows["CapBnd"], 16) == int(rows["CapPrm"], 16) == CAPABILITIES


@pytest.mark.usefixtures("own_launcher")
def test_more_spares_wait_while_many_are_asked_for(spec: ImageSpec) -> None:
    def create() -> None:
        with Sandbox.create(spec) as made:
            assert made.exec("echo made").stdout == "made\n"

    with Sandbox.create(spec) as box:
        until(lambda: len(spares(box)) == 1)
        threads = [threading.Thread(target=create) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        until(lambda: 2 <= len(spares(box)) <= 8)
        create()


def test_a_sandbox_is_made_or_its_creation_fails_whenever_setup_workers_die(spec: ImageSpec) -> None:
    results: list[str] = []

    def create() -> None:
        for _ in range(10):
            try:
                with Sandbox.create(spec) as made:
                    results.append(made.exec("echo made").stdout.strip())
            except SandboxCreationError as error:
                results.append("ended while it was made" if "ended while it was made" in str(error) else str(error))

    with Sandbox.create(spec) as box:
        threads = [threading.Thread(target=create) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            for pid in setup_workers(box):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert set(results) <= {"made", "ended while it was made"}
        assert len(results) == 40
        assert box.exec("echo alive").stdout == "alive\n"


def test_a_setup_worker_that_fails_makes_the_next_as_if_nothing_had_been(spec: ImageSpec, tmp_path: Path) -> None:
    with Sandbox.create(spec) as box:
        for _ in range(3 * len(setup_workers(box))):  # each of them, several times
            with pytest.raises(SandboxCreationError, match="no-such-layer"):
                Sandbox.create(ImageSpec("x", (*spec.layers, tmp_path / "no-such-layer")))

        def held() -> set[int]:
            return {len(os.listdir(f"/proc/{pid}/fd")) for pid in setup_workers(box)} if os.geteuid() == 0 else {7}

        until(lambda: held() == {7})  # the standard ones, the queue of jobs, the namespaces that are its home
        for _ in range(2 * len(setup_workers(box))):
            with Sandbox.create(spec) as other:
                assert other.exec("hostname; id -u; ls /testbed | wc -l").stdout.split()[1:] == ["0", "0"]
        until(lambda: held() == {7})


def test_nothing_of_a_setup_worker_is_inside(spec: ImageSpec) -> None:
    with Sandbox.create(spec) as box:
        assert box.exec("echo /proc/[0-9]*").stdout.split()[:1] == ["/proc/1"]
        ours = status(box.info().pid)
        for pid in setup_workers(box):
            assert os.stat(f"/proc/{pid}").st_uid in (0, os.geteuid())
            assert status(pid)["NSpid"].split()[:1] != ours["NSpid"].split()[:1]
            if os.geteuid() == 0:  # nobody else may look
                for name in ("mnt", "uts", "net", "pid", "user"):
                    assert os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/{box.info().pid}/ns/{name}")
