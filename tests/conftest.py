"""What all tests share: skips with the doctor's reason, and a look at what the session left behind."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import pwd
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:  # what tests share is imported by its full name
    sys.path.insert(0, ROOT)

from minisandbox.host import doctor  # noqa: E402
from minisandbox.images.base import base_entries, write_base  # noqa: E402
from minisandbox.sandbox import Sandbox  # noqa: E402
from minisandbox.sandbox.controller import shut_down  # noqa: E402
from minisandbox.store import Store, remove_tree  # noqa: E402
from minisandbox.store.disk.paths import default_root  # noqa: E402
from minisandbox.tasks import harness  # noqa: E402
from minisandbox.types import ImageSpec  # noqa: E402
from tests.waiting import start_time, stat_fields  # noqa: E402 - after the path is set

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

# Set by .ci/run and tests/as_user.py, where nothing else runs sandboxes: what is new on the machine is then ours.
STRICT = os.environ.get("MINISANDBOX_TEST_STRICT", "") not in ("", "0")
OFFLINE = os.environ.get("MINISANDBOX_TEST_OFFLINE", "") not in ("", "0")
# Set by tests/as_user.py, which runs these tests with one id too.
REPEATED = os.environ.get("MINISANDBOX_TEST_IDS") == "range"
# Set by .ci/run: a file with the tests that an earlier pass, in another environment, has run already.
PASSED_BEFORE = os.environ.get("MINISANDBOX_TEST_PASSED_BEFORE", "")
_MOST_OF_A_FAILURE = 3000  # characters
SLOW_AS_ROOT = pytest.mark.slow if os.geteuid() == 0 else pytest.mark.kernel
"""For tests of what alone holds an ordinary user's memory: root has control groups too, and runs them with --slow."""
SHARED = "shared"  # the directory of what all workers share
GRACE = 30.0  # seconds that ending processes may take on a busy machine
# Where a mount of ours would show if it leaked: the launcher's scratch point, and what tests make.
OUR_PLACES = ("/tmp ", f"{tempfile.gettempdir()} ", f"{tempfile.gettempdir()}/pytest-of-")
CGROUPS = Path("/sys/fs/cgroup")
# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


@cache
def checks() -> tuple[doctor.Check, ...]:
    """What the doctor says about this machine; asked once, and only if a test wants to know."""
    return doctor.run_checks(default_root())


def missing(feature: str) -> str | None:
    """The doctor's reason why ``feature`` cannot be had here, or None."""
    return doctor.explain(feature, checks())


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slow``."""
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too, as `make test-all` does")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """``@pytest.mark.kernel`` needs what a sandbox needs; ``kernel("idmap")`` names features instead."""
    for marker in item.iter_markers("kernel"):
        for feature in marker.args or ("sandbox",):
            reason = missing(feature)
            if reason is not None:
                pytest.skip(f"doctor: {reason}")
    if OFFLINE and item.get_closest_marker("index"):
        pytest.skip("MINISANDBOX_TEST_OFFLINE is set: no package index")


# --- several at a time -----------------------------------------------------------------------------------------------

# Files whose tests share nothing but the store: workers take one test at a time, or one topic of the contract.
APART = ("tests/e2e/test_documents.py", "tests/conformance/test_conformance.py")
# The longest files come first, so that no worker is left with one of them at the end.
FIRST = (
    "tests/e2e/test_quickstart.py", "tests/e2e/test_documents.py", "tests/conformance/test_fuzz.py",
    "tests/adversarial/test_attacks.py", "tests/kernel/grading/", "tests/kernel/test_build", "tests/adversarial/",
    "tests/integrations/", "tests/e2e/", "tests/conformance/", "tests/kernel/",
)  # fmt: skip


def rank(item: pytest.Item) -> int:
    return next((n for n, start in enumerate(FIRST) if item.nodeid.startswith(start)), len(FIRST))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests, and tests that need no second run; put the longest first, where workers share the work.

    A slow test runs without ``--slow`` where it is named: ``pytest tests/kernel/test_x.py::test_y``.
    """
    named = any("::" in word for word in config.args)
    passed_before = frozenset(json.loads(Path(PASSED_BEFORE).read_text("utf-8"))) if PASSED_BEFORE else frozenset()
    marks = {"once"} if REPEATED else set()
    if not named and not config.getoption("--slow"):
        marks.add("slow")
    left_out = [item for item in items if any(map(item.get_closest_marker, marks)) or item.nodeid in passed_before]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        removed = set(left_out)
        items[:] = [item for item in items if item not in removed]
    if os.environ.get("PYTEST_XDIST_WORKER"):
        items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Spare the collected tests: otherwise each full garbage collection walks thousands of them."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Callable[..., None]) -> LoadScopeScheduling:
    """Give each worker a file at a time, whose tests share fixtures."""
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - only where it is used

    class Scheduler(LoadScopeScheduling):  # type: ignore[misc] # it has no types
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return nodeid.rpartition("-")[0] if path in APART else path

    config.option.loadscopereorder = False  # the order is ours
    return Scheduler(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """``@pytest.mark.alone``: no other worker runs a test meanwhile."""
    with contextlib.ExitStack() as turn:
        if os.environ.get("PYTEST_XDIST_WORKER"):
            alone = item.get_closest_marker("alone") is not None
            place = session_place(item.config)
            # Who wants to be alone keeps the next from beginning: nobody starves. Locks go with their process.
            with open(place / "turn", "w", encoding="ascii") as door:
                fcntl.flock(door, fcntl.LOCK_EX)
                room = turn.enter_context(open(place / "room", "w", encoding="ascii"))
                fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        return (yield)


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


@pytest.fixture(scope="session")
def shared(pytestconfig: pytest.Config) -> Path:
    """A directory that all workers share, for what is costly to make."""
    place = session_place(pytestconfig) / SHARED
    place.mkdir(exist_ok=True)
    return place


@pytest.fixture(scope="session")
def shared_store(shared: Path) -> Store:
    """A store in which a test finds what others have built, in any worker: interpreters, above all."""
    return Store.open(shared / "store")


def session_place(config: pytest.Config) -> Path:
    """The session's directory for temporary files: that of a worker lies in it."""
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined] # no other way
    base = factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


def make_once(place: Path, make: Callable[[Path], None]) -> Path:
    """Have ``make`` fill a directory, unless another worker has."""
    with open(f"{place}.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            filling = place.with_name(f"{place.name}.filling")
            make(filling)
            filling.rename(place)
    return place


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
            if not fields[4].startswith("/var/lib/containers/"):  # podman mounts its storage onto itself, and leaves it
                yield f"{fields[4]} ({fields[fields.index('-') + 1]})"


def processes() -> Iterator[Process]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        start = start_time(int(name))
        if start is not None:
            yield int(name), start


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


def descendants(ancestor: int) -> Iterator[int]:
    yield from (pid for pid, _ in processes() if descends(pid, ancestor))


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
    """Remember the machine as it was; a worker need not, whose session is part of another."""
    # nohup(1), and a shell that starts something in the background, have it ignore signals, and all that it starts.
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return
    session.config.stash[_before] = look()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a session that leaves processes, mounts, users or cgroups behind, whatever its tests said.

    It comes last, when the workers have ended, and looks at the whole machine. What a worker started is known by its
    descent as long as the worker is there, which looks for itself.
    """
    shut_down()
    harness.close()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        output: dict[str, object] = session.config.workeroutput  # type: ignore[attr-defined] # xdist's
        output["left"] = wait_until_clean(lambda: [*map(describe, descendants(os.getpid()))], GRACE)
        return
    with contextlib.suppress(FileNotFoundError):  # another session may prune old temporary directories meanwhile
        remove_tree(session_place(session.config) / SHARED)
    if os.environ.get("CI"):  # for .ci/run
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        passed = sorted(report.nodeid for report in reporter.stats.get("passed", ()) if report.when == "call")
        place = session.config.rootpath / ".pytest_cache"
        place.mkdir(exist_ok=True)
        (place / "passed.json").write_text(json.dumps(passed), encoding="utf-8")
    before = session.config.stash[_before]
    found = session.config.stash.setdefault(_left, [])
    found += wait_until_clean(lambda: leftovers(before), GRACE)
    if found and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Take over what a worker found; one that crashed has said nothing, and its tests have failed."""
    config: pytest.Config = node.config  # type: ignore[attr-defined] # xdist's
    config.stash.setdefault(_left, []).extend(getattr(node, "workeroutput", {}).get("left", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say why tests were tried once more, and name what was left behind, above the closing line."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"first try of {report.nodeid}")
        terminalreporter.write(f"{report.longreprtext[-_MOST_OF_A_FAILURE:]}\n")
    found = config.stash.get(_left, [])
    if found:
        terminalreporter.section("left behind by this session", red=True, bold=True)
        for line in found:
            terminalreporter.line(line)
