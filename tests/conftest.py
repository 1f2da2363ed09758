"""What all tests share: skips with the doctor's reason, and a look at what the session left behind."""

from __future__ import annotations

import os
import pwd
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from minisandbox.host import doctor
from minisandbox.images.base import base_entries, write_base
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.controller import shut_down
from minisandbox.store.paths import default_root
from minisandbox.types import ImageSpec

# Set by .ci/run and tests/as_user.py, where nothing else runs sandboxes: what is new on the machine is then ours.
STRICT = os.environ.get("MINISANDBOX_TEST_STRICT", "") not in ("", "0")
OFFLINE = os.environ.get("MINISANDBOX_TEST_OFFLINE", "") not in ("", "0")
GRACE = 3.0  # seconds that ending processes may take: the promise is 2
# Where a mount of ours would show if it leaked: the launcher's scratch point, and what tests make.
OUR_PLACES = ("/tmp ", f"{tempfile.gettempdir()} ", f"{tempfile.gettempdir()}/pytest-of-")
CGROUPS = Path("/sys/fs/cgroup")


@cache
def checks() -> tuple[doctor.Check, ...]:
    """What the doctor says about this machine; asked once, and only if a test wants to know."""
    return doctor.run_checks(default_root())


def missing(feature: str) -> str | None:
    """The doctor's reason why ``feature`` cannot be had here, or None."""
    return doctor.explain(feature, checks())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """``@pytest.mark.kernel`` needs what a sandbox needs; ``kernel("idmap")`` names features instead."""
    for marker in item.iter_markers("kernel"):
        for feature in marker.args or ("sandbox",):
            reason = missing(feature)
            if reason is not None:
                pytest.skip(f"doctor: {reason}")
    if OFFLINE and item.get_closest_marker("index"):
        pytest.skip("MINISANDBOX_TEST_OFFLINE is set: no package index")


# --- sandboxes -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Records of our own, so that counting dead owners counts ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINISANDBOX_RUNTIME", str(tmp_path_factory.mktemp("runtime")))
        yield
        shut_down()


@pytest.fixture(scope="session")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ImageSpec:
    """The smallest image: nothing but the made base layer and the host's /usr."""
    tree = tmp_path_factory.mktemp("base") / "tree"
    write_base(base_entries(), tree)
    return ImageSpec("base", (tree,))


@pytest.fixture
def box(spec: ImageSpec) -> Iterator[Sandbox]:
    """A sandbox of its own for each test."""
    with Sandbox.create(spec) as made:
        yield made


# --- what was left behind --------------------------------------------------------------------------------------------

Process = tuple[int, int]  # pid and start time: a pid alone may come back


@dataclass(frozen=True, slots=True)
class World:
    """What a test session could leave behind on a machine."""

    mounts: frozenset[str]
    processes: frozenset[Process]
    users: frozenset[str]
    cgroups: frozenset[str]


def look() -> World:
    """Take stock of this machine."""
    return World(
        frozenset(mounts()), frozenset(processes()), frozenset(u.pw_name for u in pwd.getpwall()), frozenset(cgroups())
    )


def mounts() -> Iterator[str]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
        for line in table:
            fields = line.split()
            yield f"{fields[4]} ({fields[fields.index('-') + 1]})"


def processes() -> Iterator[Process]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        start = start_time(int(name))
        if start is not None:
            yield int(name), start


def start_time(pid: int) -> int | None:
    fields = stat_fields(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def stat_fields(pid: int) -> list[str] | None:
    """/proc/PID/stat from the state on (proc_pid_stat(5)), or None for a process that has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def cgroups() -> Iterator[str]:
    for directory, names, _ in os.walk(CGROUPS):  # unlike glob(), it lets others remove what it is about to read
        yield from (f"{directory}/{name}" for name in names if "minisandbox" in name)


def is_ours(pid: int) -> bool:
    """Whether a new process comes from this session.

    A descendant does. On a machine of our own, so does one in another pid namespace, or an orphan of ours by its user.
    """
    if descends(pid, os.getpid()):
        return True
    if not STRICT:
        return False
    try:
        if os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
            return True
        return os.getuid() != 0 and Path(f"/proc/{pid}").stat().st_uid == os.getuid() and parent(pid) == 1
    except OSError:  # gone, or nobody's business of ours
        return False


def parent(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[1]) if fields else 0


def descends(pid: int, ancestor: int) -> bool:
    while pid > 1:
        pid = parent(pid)
        if pid == ancestor:
            return True
    return False


def describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return f"process {pid} (gone since)"
    return f"process {pid}, child of {parent(pid)}: {command or f'[{name}]'}"


def leftovers(before: World) -> list[str]:
    """What is there now, was not before, and comes from this session; an empty list when all is clean."""
    now = look()
    found = [describe(pid) for pid, _ in now.processes - before.processes if is_ours(pid)]
    found += [f"mount {mount}" for mount in now.mounts - before.mounts if STRICT or mount.startswith(OUR_PLACES)]
    if STRICT:  # elsewhere, somebody else's may come and go meanwhile
        found += [f"user {name}" for name in now.users - before.users]
        found += [f"cgroup {path}" for path in now.cgroups - before.cgroups]
    return found


def wait_until_clean(find: Callable[[], list[str]], seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    while True:
        found = find()
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


_before = pytest.StashKey[World]()
_left = pytest.StashKey[list[str]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remember the machine as it was."""
    session.config.stash[_before] = look()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a session that leaves processes, mounts, users or cgroups behind, whatever its tests said."""
    shut_down()
    before = session.config.stash[_before]
    found = wait_until_clean(lambda: leftovers(before), GRACE)
    session.config.stash[_left] = found
    if found and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what was left behind, above the closing line."""
    found = config.stash.get(_left, [])
    if found:
        terminalreporter.section("left behind by this session", red=True, bold=True)
        for line in found:
            terminalreporter.line(line)
