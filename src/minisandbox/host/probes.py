"""Try each kernel feature that a sandbox needs, in a child process whose exit undoes all changes.

:mod:`.doctor` starts this module in a separate process, because new namespaces need a process without threads
(unshare(2)) and must not affect the caller. The trials use the launcher's own code, so that a successful trial means
that sandboxes work.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from minisandbox.launch import plan as p
from minisandbox.launch.kernel import mounts
from minisandbox.launch.kernel import syscalls as sc
from minisandbox.launch.kernel.identity import (
    RANGE_SIZE,
    Identities,
    Identity,
    act_as_owner,
    become_inner_root,
    enter_outer_namespace,
    has_privileges,
    hold_namespace,
)
from minisandbox.launch.kernel.mounts import Executor

_DEADLINE = 5.0
"""Seconds for one trial, which takes milliseconds unless the kernel hangs."""
_NOBODY = 65534
_SIZE = 16 << 20
PREFIX = ".minisandbox-doctor-"
_LEFTOVER = 3600.0
"""Age in seconds from which the directory of a trial must belong to a killed doctor."""
# linux/prctl.h, linux/seccomp.h
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


@dataclass(frozen=True, slots=True)
class TrialDirectories:
    """Directories that trials may write to.

    Attributes:
        store: a temporary directory on the store's file system, removed after the run.
        locks: a directory for locks of id ranges.
    """

    store: str
    locks: str


Probe = Callable[[TrialDirectories], str]


class TrialError(OSError):
    """A trial failed: the kernel accepted a system call, but its effect is not sufficient, or a child has failed."""

    def __init__(self, message: str, number: int = errno.ENOTSUP) -> None:
        super().__init__(number, message)

    def __str__(self) -> str:
        return str(self.strerror)


# --- namespaces of the trials ----------------------------------------------------------------------------------------


def _as_launcher() -> bool:
    """Enter the namespaces in which the launcher mounts; return whether images are idmapped there."""
    mapped = has_privileges()
    if not mapped:
        enter_outer_namespace()
    sc.unshare(sc.CLONE_NEWNS)
    sc.mount("none", "/", None, sc.MS_REC | sc.MS_PRIVATE)
    return mapped


def _identity(directories: TrialDirectories, mapped: bool) -> Identity:
    identity = Identities(mapped=mapped, count=RANGE_SIZE if mapped else 1, lock_directory=directories.locks).make()
    hold_namespace(identity)
    return identity


def _execute(identity: Identity, *operations: p.Operation, proc: int = -1) -> None:
    """Execute operations with the ids of a sandbox."""
    act_as_owner(identity)
    executor = Executor(identity.userns_fd if identity.mapped else None, proc=proc)
    for operation in operations:
        executor.run(operation)


def _in_fork(action: Callable[[], str]) -> str:
    """Run ``action`` in a child and return its result; after unshare(CLONE_NEWPID) the child is pid 1."""
    answer = _run_in_child(action)
    if not answer["ok"]:
        raise TrialError(str(answer["detail"]), int(str(answer["errno"] or errno.EIO)))
    return str(answer["detail"])


def _run_in_child(action: Callable[[], str]) -> dict[str, object]:
    """Run ``action`` in a child; return its result or its error."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _answer(write_end, action)
    os.close(write_end)
    with sc.closing(read_end):
        return _result(read_end, child)


def _answer(write_end: int, action: Callable[[], str]) -> None:
    """Run ``action`` in a child, write its result to the pipe, and exit. Never returns."""
    status = 1
    try:
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
        answer: dict[str, object] = {"ok": True, "detail": action(), "errno": None}
        os.write(write_end, json.dumps(answer).encode())
        status = 0
    except OSError as error:
        os.write(write_end, json.dumps({"ok": False, "detail": str(error), "errno": error.errno}).encode())
    finally:
        os._exit(status)


def _result(read_end: int, child: int) -> dict[str, object]:
    """Return the result that a child writes to a pipe; kill the child at the deadline."""
    data = b""
    deadline = time.monotonic() + _DEADLINE
    while select.select([read_end], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(read_end, 65536)
        data += chunk
        if not chunk:
            break
    else:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not data:
        detail = f"the trial ended with status {os.waitstatus_to_exitcode(status)} without a word"
        return {"ok": False, "detail": detail, "errno": None}
    answer: dict[str, object] = json.loads(data)
    return answer


# --- trials ----------------------------------------------------------------------------------------------------------


def _user_namespace(_: TrialDirectories) -> str:
    """Create a user namespace as an ordinary user, and mount in it, because AppArmor may forbid only the mount."""
    if has_privileges():  # root in a container may lack privileges; it then has only the rights of an ordinary user
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        sc.prctl(sc.PR_SET_DUMPABLE, 1)  # otherwise root owns /proc/self after the change of uid (proc(5))
    enter_outer_namespace()
    sc.unshare(sc.CLONE_NEWNS)
    sc.mount("none", "/", None, sc.MS_REC | sc.MS_PRIVATE)
    os.close(sc.fsmount(sc.fsopen("tmpfs")))
    return "an ordinary user can make one and mount in it"


_NAMESPACES = {
    "mount": sc.CLONE_NEWNS, "process": sc.CLONE_NEWPID, "ipc": sc.CLONE_NEWIPC, "uts": sc.CLONE_NEWUTS,
    "network": sc.CLONE_NEWNET, "cgroup": sc.CLONE_NEWCGROUP,
}  # fmt: skip


def _namespaces(_: TrialDirectories) -> str:
    _as_launcher()
    refused = {}
    for name, flag in _NAMESPACES.items():
        try:
            sc.unshare(flag)
        except OSError as error:
            refused[name] = str(error)
    if refused:
        raise TrialError("; ".join(f"{name}: {reason}" for name, reason in refused.items()))
    return ", ".join(_NAMESPACES)


def _new_mount_api(directories: TrialDirectories) -> str:
    _as_launcher()
    tree = sc.fsmount(sc.fsopen("tmpfs"))
    mount_point = os.open(directories.store, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    sc.move_mount(tree, mount_point)
    tree_copy = sc.open_tree(directories.store)
    sc.mount_setattr(tree_copy, sc.MOUNT_ATTR_RDONLY | sc.MOUNT_ATTR_NOSUID)
    os.close(sc.openat2(tree, ".", os.O_PATH, sc.RESOLVE_BENEATH | sc.RESOLVE_NO_SYMLINKS))
    return "open_tree, fsopen, fsmount, move_mount, mount_setattr, openat2"


def _many_layers(directories: TrialDirectories) -> str:
    _as_launcher()
    fs = sc.fsopen("overlay")
    try:
        for name in ("lower-1", "lower-2"):
            sc.fsconfig(fs, "lowerdir+", str(_make_lower(directories, name)))
        sc.fsconfig(fs, "userxattr")
        sc.fsmount(fs, 0, "overlay")  # before Linux 6.5, unknown options fail only here
    except sc.CallError as error:
        if error.errno == errno.EINVAL:
            raise TrialError("overlays take their layers in one text, which holds about 400 (lowerdir=)") from error
        raise
    return "overlays take layers one by one (lowerdir+)"


def _make_lower(directories: TrialDirectories, name: str) -> Path:
    lower = Path(directories.store, name)
    (lower / "directory").mkdir(parents=True)
    for file in ("kept", "changed", "removed", "directory/inner"):
        (lower / file).write_text("lower\n", encoding="ascii")
    return lower


def _use_overlay(root: Path) -> None:
    """Read, modify, delete and replace files in an overlay, as sandboxes do."""
    with (root / "changed").open("a", encoding="ascii") as file:
        file.write("upper\n")
    (root / "removed").unlink()
    shutil.rmtree(root / "directory")
    (root / "directory").mkdir()
    os.chown(root / "changed", 0, 0)
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*"))
    if names != ["changed", "directory", "kept"] or (root / "changed").read_text(encoding="ascii") != "lower\nupper\n":
        raise TrialError(f"the overlay shows something else than was written: {', '.join(names)}")


def _idmap_tmpfs(directories: TrialDirectories) -> str:
    if not _as_launcher():
        return "not needed: with one uid there is nothing to map"
    if not mounts.tmpfs_can_be_idmapped(_identity(directories, True).userns_fd):
        raise TrialError("a tmpfs cannot be mounted with a map of ids")
    return "a tmpfs can be mounted with a map of ids"


def _tmpfs_xattrs(_: TrialDirectories) -> str:
    _as_launcher()
    if not mounts.tmpfs_keeps_attributes():
        raise TrialError("a tmpfs keeps no user.* attributes, which overlayfs marks its files with")
    return "a tmpfs keeps user.* attributes, and with them overlayfs's marks"


def _overlay_on_tmpfs(directories: TrialDirectories) -> str:
    lower = _make_lower(directories, "lower-of-tmpfs")
    identity = _identity(directories, _as_launcher())
    _execute(
        identity,
        p.Take(str(lower), "0"),
        p.Scratch(_SIZE),
        p.Directory("upper"),
        p.Directory("work"),
        p.Attach("layers/0", slot="0"),
        p.Overlay("root", ("layers/0",), "upper", "work"),
    )
    become_inner_root(identity)
    _use_overlay(Path("root"))
    return "layers on the store's file system, writes in memory: copied up, deleted and replaced"


def _overlay_on_store(directories: TrialDirectories) -> str:
    lower = _make_lower(directories, "lower-of-store")
    upper = Path(directories.store, "upper")
    for directory in (upper / "tree", upper / "work"):
        directory.mkdir(parents=True)
    identity = _identity(directories, _as_launcher())
    _execute(
        identity,
        p.Take(str(lower), "0"),
        p.Take(str(upper), "disk", read_only=False),
        p.Scratch(_SIZE),
        p.Attach("layers/0", slot="0"),
        p.Attach("disk", slot="disk"),
        p.Overlay("root", ("layers/0",), "disk/tree", "disk/work", volatile=True),
    )
    become_inner_root(identity)
    _use_overlay(Path("root"))
    return "layers and writes on the store's file system: copied up, deleted and replaced"


def _private_proc(directories: TrialDirectories) -> str:
    identity = _identity(directories, _as_launcher())
    sc.unshare(sc.CLONE_NEWPID)

    def mount_proc() -> str:
        sc.unshare(sc.CLONE_NEWNS)
        proc = sc.new_filesystem("proc", sc.MOUNT_ATTR_NOEXEC)
        _execute(identity, p.Scratch(_SIZE), p.Proc("proc", ("kcore",), ("sys",)), proc=proc)
        pids = sorted(filter(str.isdigit, os.listdir("proc")))
        if pids != ["1"]:
            raise TrialError(f"a new /proc shows {len(pids)} processes instead of one")
        return "a /proc of its own shows only its own processes"

    return _in_fork(mount_proc)


def _devices(directories: TrialDirectories) -> str:
    identity = _identity(directories, _as_launcher())
    _execute(identity, p.Scratch(_SIZE), p.Directory("dev"), p.Devices("dev"))
    become_inner_root(identity)
    if device_errors := {name: error for name in mounts.DEVICE_NAMES if (error := _use_device(name))}:
        raise TrialError(
            "; ".join(f"a sandbox cannot use /dev/{name}: {error}" for name, error in device_errors.items())
        )
    return "null, zero, full, random, urandom, tty and terminals of its own"


def _use_device(name: str) -> str:
    """Open a device as commands do, and write to it if it is ``null``; return the error, or ""."""
    try:
        descriptor = os.open(f"dev/{name}", (os.O_RDONLY if "random" in name else os.O_RDWR) | os.O_NOCTTY)
        if name == "null":
            os.write(descriptor, b"x")
        os.close(descriptor)
    except OSError as error:
        if (name, error.errno) != ("tty", errno.ENXIO):  # expected, because this process has no controlling terminal
            return str(error.strerror)
    return ""


def _no_nesting(directories: TrialDirectories) -> str:
    identity = _identity(directories, _as_launcher())

    def nest() -> str:
        become_inner_root(identity)
        try:
            sc.unshare(sc.CLONE_NEWUSER)
        except sc.CallError as error:
            return f"a namespace inside a sandbox is refused ({error.strerror})"
        raise TrialError(
            "/proc/sys/user cannot be written here: only the system-call filter refuses nested user namespaces"
        )

    return _in_fork(nest)


def _idmap(directories: TrialDirectories, path: str) -> str:
    if not _as_launcher():
        return "not needed: with one uid there is nothing to map"
    identity = _identity(directories, True)
    tree = sc.open_tree(path)
    sc.mount_setattr(tree, sc.MOUNT_ATTR_IDMAP, userns_fd=identity.userns_fd)
    return "files of uid 0 appear as the sandbox's uid 0"


def _idmap_store(directories: TrialDirectories) -> str:
    return _idmap(directories, directories.store)


def _idmap_usr(directories: TrialDirectories) -> str:
    return _idmap(directories, "/usr")


def _seccomp(_: TrialDirectories) -> str:
    sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
    try:
        sc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER)
    except sc.CallError as error:
        if error.errno == errno.EFAULT:  # EFAULT proves that the kernel supports filters, because it tried to read one
            return "system-call filters"
        raise
    raise TrialError("the kernel took a filter that is not there")


def _pidfd(_: TrialDirectories) -> str:
    descriptor = os.pidfd_open(os.getpid())
    signal.pidfd_send_signal(descriptor, 0)
    sc.close_range(descriptor, descriptor)
    return "pidfd_open, pidfd_send_signal, close_range"


def _loopback(_: TrialDirectories) -> str:
    _as_launcher()
    sc.unshare(sc.CLONE_NEWNET)
    names = [name for _, name in socket.if_nameindex()]
    if "lo" not in names:
        raise TrialError("a new network namespace has no loopback device")
    return f"a network of its own has {', '.join(sorted(names))}"


def _id_ranges(_: TrialDirectories) -> str:
    """Map this user's range of /etc/subuid, as the launcher does."""
    if has_privileges():
        return "not needed: root gives each sandbox a range of its own"
    mappers = [shutil.which(name) or "" for name in ("newuidmap", "newgidmap")]
    if not all(mappers):
        raise FileNotFoundError(errno.ENOENT, "there is no newuidmap")
    if enter_outer_namespace(mappers) == 1:
        raise TrialError(
            f"/etc/subuid and /etc/subgid give this user no range of {RANGE_SIZE} ids, or newuidmap refuses it"
        )
    return f"{RANGE_SIZE} ids"


PROBES: dict[str, Probe] = {
    "user-namespaces": _user_namespace,
    "namespaces": _namespaces,
    "new-mount-api": _new_mount_api,
    "many-layers": _many_layers,
    "idmap-tmpfs": _idmap_tmpfs,
    "tmpfs-xattrs": _tmpfs_xattrs,
    "overlay-tmpfs": _overlay_on_tmpfs,
    "overlay-store": _overlay_on_store,
    "private-proc": _private_proc,
    "devices": _devices,
    "private-network": _loopback,
    "no-nesting": _no_nesting,
    "idmap-store": _idmap_store,
    "idmap-usr": _idmap_usr,
    "id-ranges": _id_ranges,
    "seccomp": _seccomp,
    "pidfd": _pidfd,
}


def main(store_directory: str) -> None:
    """Run every trial and write one JSON object to stdout.

    Args:
        store_directory: an existing directory on the store's file system.
    """
    _remove_leftovers(store_directory)
    with tempfile.TemporaryDirectory(prefix="minisandbox-doctor-") as locks:
        directories = TrialDirectories(_make_directory(store_directory), locks)
        try:
            results = {name: _run_in_child(partial(probe, directories)) for name, probe in PROBES.items()}
        finally:
            _remove(directories.store)
    print(json.dumps({"privileged": has_privileges(), "results": results}))  # noqa: T201 - the answer to the doctor


def _make_directory(parent: str) -> str:
    try:
        return tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    except OSError:  # another check reports that the store is not writable
        return tempfile.mkdtemp(prefix=PREFIX)


def _remove_leftovers(parent: str) -> None:
    for path in Path(parent).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # the directory belongs to another user, or has just been removed
            if path.stat().st_uid == os.geteuid() and time.time() - path.stat().st_mtime > _LEFTOVER:
                _remove(str(path))


def _remove(directory: str) -> None:
    """Remove a directory of trials, in which overlayfs leaves directories with mode 000."""
    for path, names, _ in os.walk(directory):
        for name in names:  # there are no symbolic links, because only trials wrote here
            os.chmod(os.path.join(path, name), 0o700)
    shutil.rmtree(directory, ignore_errors=True)
