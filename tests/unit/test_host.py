"""The host's side without any sandbox: records of owners, and what is read off the machine."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.waiting import locked_bytes, stat_fields, until

from minisandbox.errors import HostError
from minisandbox.host import environment, file_systems, listeners, reaper, registry
from minisandbox.images.base import base_entries
from minisandbox.launch.jobs import descendants
from minisandbox.launch.kernel import cgroups, identity


def _record(number: int) -> registry.OwnerRecord:
    return registry.OwnerRecord(f"box-{number}", os.getpid(), "host", time.time(), os.getpid(), "off")


def test_what_is_no_owners_directory_stands_in_nobodys_way(tmp_path: Path) -> None:
    records = registry.Records(tmp_path)
    records.add(_record(1))
    (tmp_path / "owners/notes.txt").write_text("x", encoding="ascii")
    (tmp_path / "owners/999999999-1/deep").mkdir(parents=True)
    assert [one.id for one in registry.live_records(tmp_path)] == ["box-1"]
    assert not {one.path for one in reaper.reap(tmp_path)} & {*(tmp_path / "owners").iterdir()}


def test_a_link_is_no_owners_directory(tmp_path: Path) -> None:
    (tmp_path / "owners").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/kept.txt").touch()
    (tmp_path / "owners/999999999-1").symlink_to(tmp_path / "mine")
    assert tmp_path / "owners/999999999-1" not in {one.path for one in reaper.reap(tmp_path)}
    assert not list(registry.live_records(tmp_path))
    assert (tmp_path / "mine/kept.txt").exists()


def test_an_owner_that_ends_while_others_look_stands_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.Records(tmp_path).add(_record(1))
    ending = tmp_path / "owners/999999999-1"

    def sorted_slowly(*given: Any, **options: Any) -> list[Any]:
        found = sorted(*given, **options)
        with contextlib.suppress(FileNotFoundError):
            ending.rmdir()
        return found

    monkeypatch.setattr(registry, "sorted", sorted_slowly, raising=False)
    for look in (registry.live_records, reaper.leftovers):
        ending.mkdir()
        list(look(tmp_path))
        assert not ending.exists()


def test_directories_are_ones_own_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISANDBOX_RUNTIME", str(tmp_path / "a/b"))
    before = os.umask(0)
    try:
        registry.Records(registry.runtime_directory()).add(_record(1))
    finally:
        os.umask(before)
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}
    (tmp_path / "a/b/owners").chmod(0o777)
    with pytest.raises(HostError, match="owners is not a private directory"):
        registry.Records(registry.runtime_directory())


def test_an_owner_whose_directory_was_cleaned_away_goes_on(tmp_path: Path) -> None:
    records = registry.Records(tmp_path)
    shutil.rmtree(tmp_path / "owners")
    records.add(_record(2))
    assert [one.id for one in registry.live_records(tmp_path)] == ["box-2"]
    records.remove("box-2")
    assert list(registry.live_records(tmp_path)) == []
    shutil.rmtree(tmp_path / "owners")
    with records.listener("box-3.door"):
        assert (records.directory / "box-3.door").is_socket()


def test_a_directory_of_records_that_others_may_write_to_is_refused_where_it_is_made_again(tmp_path: Path) -> None:
    records = registry.Records(tmp_path)
    shutil.rmtree(tmp_path / "owners")
    (tmp_path / "owners").mkdir()
    (tmp_path / "owners").chmod(0o777)
    with pytest.raises(HostError, match="is not a private directory of this user"):
        records.add(_record(2))
    assert list((tmp_path / "owners").iterdir()) == []


def test_a_relative_runtime_directory_is_the_same_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINISANDBOX_RUNTIME", "here")
    assert registry.runtime_directory() == tmp_path / "here"


@pytest.mark.skipif(os.geteuid() == 0, reason="modes keep root from nothing")
def test_a_runtime_directory_that_keeps_this_user_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    monkeypatch.setenv("MINISANDBOX_RUNTIME", str(tmp_path / "closed/below"))
    with pytest.raises(HostError, match=f"make a runtime directory in {tmp_path}/closed/below") as caught:
        registry.runtime_directory()
    assert "keep this user out" in str(caught.value)
    assert "set MINISANDBOX_RUNTIME" in str(caught.value)


def test_a_quota_that_is_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> NoReturn:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    records = registry.Records(tmp_path)
    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(HostError, match=r"cannot record sandbox box-1 in .*quota there is used up"):
        records.add(_record(1))


def test_the_file_system_of_a_directory() -> None:
    assert file_systems.file_system(Path("/proc/self")) == "proc"
    assert file_systems.file_system(Path("/")) not in {"unknown", "proc"}


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs", "overlay"])
def test_a_network_file_system_is_no_place_for_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(environment, "file_system", lambda _: kind)
    finding = environment.store(tmp_path)
    assert finding.status == "missing"
    assert kind in finding.detail
    assert "MINISANDBOX_STORE" in finding.fix


def test_libraries_that_are_a_link_beside_real_ones(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib64").symlink_to("lib")
    (tmp_path / "bin").symlink_to("/nix/store/bin")
    found = {entry.path: entry.data for entry in base_entries(tmp_path)}
    assert found["lib64"] == b"lib"
    assert "bin" not in found


# --- what the dead left ----------------------------------------------------------------------------------------------


def ended_process() -> int:
    """A pid whose process has ended and been waited for."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def owner_directory(runtime: Path, name: str) -> Path:
    """What an owner of that name leaves when it is killed: a record and a door."""
    directory = runtime / "owners" / name
    directory.mkdir(parents=True)
    (directory / "box-1.json").write_text("{}", encoding="ascii")
    listeners.make(directory, listeners.name_of("box-1")).close()
    return directory


def name_with(**parts: object) -> str:
    """This process's name as an owner, but for some parts."""
    own = dict(zip(("pid", "started", "boot", "namespace"), registry.owner_name().split("-"), strict=True))
    return "-".join(str(part) for part in {**own, **parts}.values())


def test_an_owner_is_named_by_pid_start_and_boot() -> None:
    pid, started, boot, namespace = registry.owner_name().split("-")
    assert (int(pid), int(started)) == (os.getpid(), registry.start_time(os.getpid()))
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
    pids, times = namespace.split(".")
    assert (os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/time")) == (f"pid:[{pids}]", f"time:[{times}]")
    assert registry.is_alive(registry.owner_name())
    assert not registry.is_dead(registry.owner_name())


def test_a_boot_that_cannot_be_told_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = registry.owner_name()
    assert not registry.is_dead(name_with(boot="unknown"))
    monkeypatch.setattr(registry, "boot_id", lambda: "unknown")
    assert not registry.is_dead(mine)
    assert registry.is_alive(mine)
    assert registry.is_dead("-".join([str(ended_process()), *mine.split("-")[1:]]))


ELSEWHERE = (
    "import sys; from minisandbox.host import registry as r; n = sys.argv[1]; print(r.is_dead(n), r.is_alive(n))"
)


def test_from_another_time_namespace_only_a_restart_tells() -> None:
    shifted = ["unshare", *(() if os.geteuid() == 0 else ("-U", "--map-current-user")), "-T", "--boottime", "864000"]
    if subprocess.run([*shifted, "-f", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no time namespace can be made here (unshare -T)")
    for name, said in (
        (registry.owner_name(), "False False"),
        (name_with(pid=ended_process()), "False False"),
        (name_with(boot="0" * 32), "True False"),
    ):
        asked = [*shifted, "-f", sys.executable, "-c", ELSEWHERE, name]
        assert subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True).stdout.strip() == said


def test_what_is_hidden_in_proc_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        name = registry.owner_name(process.pid)
        monkeypatch.setattr(descendants, "stat_fields", lambda _: [])  # as where hidepid=2 is set
        assert (registry.is_alive(name), registry.is_dead(name), registry.has_ended(process.pid)) == (
            True,
            False,
            False,
        )
        process.communicate()
    assert (registry.is_alive(name), registry.is_dead(name), registry.has_ended(process.pid)) == (False, True, True)


FIRST_THREAD_ENDS = """
import ctypes, os, sys, threading
def rest():
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=rest).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def is_shown_as_ended(pid: int) -> bool:
    return (stat_fields(pid) or ["X"])[0] == "Z"


def test_an_owner_whose_first_thread_has_ended_is_alive_until_all_have(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", FIRST_THREAD_ENDS], stdin=subprocess.PIPE) as process:
        name = registry.owner_name(process.pid)
        until(lambda: is_shown_as_ended(process.pid))
        directory = owner_directory(tmp_path, name)
        assert (registry.owner_name(process.pid), registry.is_alive(name), registry.is_dead(name)) == (
            name,
            True,
            False,
        )
        assert directory not in {one.path for one in reaper.reap(tmp_path)}
        assert (directory / "box-1.json").exists()
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie, whose threads have all ended
        assert is_shown_as_ended(process.pid)
        assert (registry.is_alive(name), registry.is_dead(name)) == (False, True)
        assert directory in {one.path for one in reaper.reap(tmp_path)}


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(lambda: {"pid": ended_process()}, id="ended"),
        pytest.param(lambda: {"started": 1}, id="another process has the pid"),
        pytest.param(lambda: {"boot": "0" * 32}, id="before the machine was restarted"),
        pytest.param(lambda: {"boot": "0" * 32, "namespace": 1}, id="before the restart, in a container"),
        pytest.param(lambda: {"pid": "x"}, id="no pid"),
    ],
)
def test_what_a_dead_owner_left_is_reclaimed(tmp_path: Path, parts: Callable[[], dict[str, object]]) -> None:
    name = name_with(**parts())
    live, dead = owner_directory(tmp_path, registry.owner_name()), owner_directory(tmp_path, name)
    found = [one for one in reaper.leftovers(tmp_path) if one.kind == "records"]
    assert [(one.path, one.owner) for one in found] == [(dead, name)]
    assert dead in {one.path for one in reaper.reap(tmp_path)}
    assert (live.exists(), dead.exists()) == (True, False)


def test_the_groups_of_a_dead_owner_are_removed_wherever_they_lie(tmp_path: Path) -> None:
    name = name_with(pid=ended_process())
    dead = owner_directory(tmp_path, name)
    own, foreign = tmp_path / "memory/elsewhere" / f"minisandbox-{name}", tmp_path / "memory/elsewhere/of-a-service"
    assert own.name == f"{cgroups.PREFIX}{name}"
    (own / "box-1").mkdir(parents=True)
    foreign.mkdir()
    (dead / "groups").write_text(json.dumps([str(own), str(foreign), str(tmp_path / "gone")]), encoding="ascii")
    busy = own / "box-1" / "process"
    busy.touch()  # it cannot be removed, as a group with a process in it
    assert not {one.path for one in reaper.reap(tmp_path)} & {own, dead}, "the next needs to know where it lies"
    list(registry.live_records(tmp_path))
    busy.unlink()
    assert {one.path for one in reaper.reap(tmp_path)} >= {own, dead}
    assert foreign.exists()


def test_an_owner_in_another_container_is_let_be(tmp_path: Path) -> None:
    name = name_with(pid=ended_process(), namespace=1)
    records = registry.Records(tmp_path)
    records.add(_record(1))
    records.directory.rename(tmp_path / "owners" / name)  # its pids mean other processes here, or none
    assert list(registry.live_records(tmp_path)) == []
    assert not {one.owner for one in reaper.reap(tmp_path)} & {name}
    assert (tmp_path / "owners" / name / "box-1.json").exists()


@pytest.mark.parametrize(("uid", "most", "status"), [(1000, 1500, "degraded"), (0, 1500, "ok"), (1000, 1 << 20, "ok")])
def test_few_processes_for_a_user_are_told(monkeypatch: pytest.MonkeyPatch, uid: int, most: int, status: str) -> None:
    """An ordinary user's sandboxes are that user, and each may have 1,024."""
    limits = {resource.RLIMIT_NOFILE: (1 << 20, 1 << 20), resource.RLIMIT_NPROC: (most, most)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(os, "getuid", lambda: uid)
    found = environment.rlimits()
    assert found.status == status
    assert ("nproc" in (found.fix or "")) is (status == "degraded")


def test_ranges_lie_where_nobody_else_gives_ids() -> None:
    last = identity.GATEWAY_ID + identity.RANGE_SIZE
    assert (identity.BLOCK_START % identity.RANGE_SIZE, last <= 1 << 31) == (0, True)
    assert identity.BLOCK_START >= 2_000_200_000  # the end of SSSD's


def test_a_range_has_one_holder_until_it_is_given_back(tmp_path: Path) -> None:
    first, second = (identity.Identities(mapped=True, count=65536, lock_directory=str(tmp_path)) for _ in range(2))
    second._next_index = first._next_index
    mine = [first.make() for _ in range(3)]
    theirs = [second.make() for _ in range(3)]
    assert len({one.first_id for one in (*mine, *theirs)}) == 6
    assert (locked_bytes(tmp_path / identity.LOCKS), [path.name for path in tmp_path.iterdir()]) == (
        6,
        [identity.LOCKS],
    )
    first.give_back(mine[1])
    assert locked_bytes(tmp_path / identity.LOCKS) == 5
    assert any(second.make().first_id == mine[1].first_id for _ in range(identity.BLOCK_RANGES - 5))


def test_a_range_of_which_a_process_is_left_is_not_given_to_another(tmp_path: Path) -> None:
    """Its owner was killed, and a call that looks for no signal keeps the process."""
    if os.geteuid() != 0:
        pytest.skip("being another user takes root")
    index = 1234
    uid = identity.BLOCK_START + index * identity.RANGE_SIZE + 1000
    script = "import os, sys; os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1])); print(flush=True); input()"
    given = []
    with subprocess.Popen(
        [sys.executable, "-c", script, str(uid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.readline()
        for _ in range(2):
            made = identity.Identities(mapped=True, count=65536, lock_directory=str(tmp_path))
            made._next_index = index
            given.append(made.make().first_id)
            process.kill()
            process.wait()
    assert given == [uid - 1000 + identity.RANGE_SIZE, uid - 1000]


def test_root_has_one_place_for_the_locks_of_ranges(tmp_path: Path) -> None:
    places = {registry.ranges_directory(tmp_path / name) for name in "ab"}
    assert len(places) == (1 if os.access("/run", os.W_OK) else 2)


def test_a_door_that_nobody_opens_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_PATIENCE", 0.2)
    waiting = []
    with listeners.make(tmp_path, "box.door") as door:
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting.append(listeners.connect(tmp_path, "box.door", wait=False))
        with pytest.raises(TimeoutError, match="no connection was accepted"):
            listeners.connect(tmp_path, "box.door")
        door.accept()[0].close()
        waiting.append(listeners.connect(tmp_path, "box.door"))
        assert waiting[-1].getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16) == bytes(16)
    for connection in waiting:
        connection.close()
