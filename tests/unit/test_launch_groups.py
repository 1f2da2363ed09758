"""Control groups of version 2 as their files show them, without the controllers that this machine may lack."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from minisandbox.host import environment, fixes
from minisandbox.launch.kernel import syscalls as sc
from minisandbox.launch.kernel.cgroups import LEAF, Cgroup, CgroupFds, LimitCounters, enable_controllers, find_roots

SERVICE = "/system.slice/train.service"


@pytest.fixture
def counters(tmp_path: Path) -> Path:
    """A directory with the counters that each group has."""
    for name in ("memory.events", "pids.events", "memory.oom_control"):
        (tmp_path / name).write_text("oom_kill 0\nmax 0\n", encoding="ascii")
    (tmp_path / "cgroup.procs").touch()
    return tmp_path


def open_files(version: int, directory: Path, *controllers: str) -> CgroupFds:
    return Cgroup(version, dict.fromkeys(("memory", "pids", *controllers), str(directory))).open()


def test_what_was_refused_since_the_last_command_began_is_named(counters: Path) -> None:
    refusals = LimitCounters(open_files(2, counters), str(counters))
    refusals.mark()
    assert refusals.hits() == []
    (counters / "memory.events").write_text("low 7\noom_kill 1\n", encoding="ascii")
    assert refusals.hits() == ["memory"]
    refusals.mark()
    (counters / "pids.events").write_text("max 2\n", encoding="ascii")
    refusals.note_memory()
    assert refusals.hits() == ["memory", "processes"]


@pytest.mark.parametrize(("version", "name", "written"), [(1, "cpu.cfs_quota_us", "-1"), (2, "cpu.max", "max")])
def test_who_ends_has_all_the_processors(counters: Path, version: int, name: str, written: str) -> None:
    """At a hundredth of one, freeing 3 GB took 37 s; both pid 1 and the zygote lift the limit."""
    quota = counters / name
    quota.write_text("", encoding="ascii")
    open_files(version, counters, "cpu").lift_quota()
    assert quota.read_text(encoding="ascii") == written
    quota.write_text("", encoding="ascii")
    Cgroup(version, {"cpu": str(counters)}).lift_quota()
    assert quota.read_text(encoding="ascii") == written


@pytest.mark.parametrize("version", [1, 2])
def test_without_a_limit_there_is_none_to_lift(counters: Path, version: int) -> None:
    before = sorted(counters.iterdir())
    open_files(version, counters).lift_quota()
    Cgroup(version, {"memory": str(counters)}).lift_quota()
    assert sorted(counters.iterdir()) == before


def test_a_worker_keeps_the_counters_alone(counters: Path) -> None:
    (counters / "cpu.max").touch()
    fds = open_files(2, counters, "cpu")
    fds.close_quota()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fds.quota)
    assert [os.fstat(counter).st_size for counter in fds.counters] == [17, 17]


# --- where groups are made -------------------------------------------------------------------------------------------


class Version2:
    """Groups of version 2 as files; what is written to them does what the kernel does.

    Args:
        root: where they are "mounted".
        patch: replaces what writes to them.
    """

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.own = root / "own"
        patch.setattr(sc, "write_setting", self.write)

    def add(self, path: str, available: str, given: str, *pids: str) -> Path:
        """A group with the controllers it has and those it gives to groups below it, and with these processes."""
        directory = Path(f"{self.root}{path}")
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in (("controllers", available), ("subtree_control", given), ("procs", "\n".join(pids))):
            (directory / f"cgroup.{name}").write_text(text, encoding="ascii")
        return directory

    def be_in(self, path: str) -> None:
        self.own.write_text(f"0::{path}\n", encoding="ascii")

    def write(self, path: str, text: str, below: int | None = None) -> None:
        assert below is None
        file, procs = Path(path), Path(path).parent / "cgroup.procs"
        if file.name == "cgroup.procs":
            above = file.parent.parent / "cgroup.procs"
            above.write_text("\n".join(set(above.read_text().split()) - {text}), encoding="ascii")
        elif procs.exists() and procs.read_text():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        elif file.exists():
            names = {*file.read_text().split(), *text.replace("+", "").split()}
            assert names <= set((file.parent / "cgroup.controllers").read_text().split()), "not one of the group"
            text = " ".join(names)
        file.write_text(text, encoding="ascii")


@pytest.fixture
def version2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Version2:
    monkeypatch.setattr(fixes, "in_container", lambda: False)
    return Version2(tmp_path, monkeypatch)


def test_sandboxes_stay_inside_a_services_own_group(version2: Version2) -> None:
    """A group above it gives controllers too, but has neither its MemoryMax nor its TasksMax."""
    version2.add("", "cpu memory pids", "cpu memory pids")
    version2.add("/system.slice", "cpu memory pids", "cpu memory pids")
    service = version2.add(SERVICE, "cpu memory pids", "", "41", "42")
    version2.be_in(SERVICE)
    found = find_roots(str(version2.root), str(version2.own))
    assert dict(found.directories) == dict.fromkeys(("memory", "pids", "cpu"), str(service))
    assert enable_controllers(found) == found
    assert set((service / "cgroup.subtree_control").read_text().split()) == {"cpu", "memory", "pids"}
    assert (service / LEAF / "cgroup.procs").exists()
    version2.be_in(f"{SERVICE}/{LEAF}")  # where this process is now, and the next one begins
    assert find_roots(str(version2.root), str(version2.own)) == found


def test_without_controllers_of_its_own_a_group_has_no_place(version2: Version2) -> None:
    version2.add("", "cpu memory pids", "cpu memory pids")
    version2.add("/system.slice", "cpu memory pids", "cpu")
    version2.add(SERVICE, "cpu", "")
    version2.be_in(SERVICE)
    assert find_roots(str(version2.root), str(version2.own)).version == 0


@pytest.mark.parametrize(
    ("available", "status", "fix"),
    [
        pytest.param("cpu memory pids", "ok", "", id="which is made good"),
        pytest.param("memory pids", "degraded", "cpu", id="which this process cannot change"),
    ],
)
def test_the_doctor_tells_of_a_group_that_gives_no_cpu(
    version2: Version2, available: str, status: str, fix: str
) -> None:
    """Limits.cpu was refused there, with a hint to the doctor, who called it ok."""
    version2.add("/scope", available, "memory pids")
    version2.be_in("/scope")
    found = environment.control_groups(str(version2.root), str(version2.own))
    assert (found.status, "Limits.cpu is refused" in found.detail) == (status, status == "degraded")
    assert fix in found.fix
