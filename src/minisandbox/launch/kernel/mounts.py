"""Execute the operations of a plan with the new mount interface, or with mount(2) on older kernels.

It runs in a setup worker with the launcher's privileges. Host trees are opened in the launcher's mount namespace; every
other operation runs in the sandbox's. Paths below scratch are opened without following symbolic links.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import stat
from dataclasses import dataclass, field

from minisandbox.launch import plan as p
from minisandbox.launch.disk import BYTES_PER_FILE

from . import syscalls as sc

_SCRATCH_POINT = "/tmp"  # noqa: S108 - hidden under our own mount; exists on every host
DEVICE_NAMES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = (
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
)
_INODES = 1024
_MOST_TERMINALS = "256"
"""Terminals per sandbox, because all devpts instances of the machine share one limit (kernel.pty.max)."""
_EMPTY_FILE, _EMPTY_DIRECTORY = "hidden/file", "hidden/directory"
_without_lowerdir_plus: list[bool] = []
"""Not empty once this process has found that overlayfs lacks the option ``lowerdir+``."""
_SAFE = sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV
_DEVICE = sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NOEXEC | sc.MOUNT_ATTR_RDONLY


@dataclass(slots=True)
class Executor:
    """Executes one plan.

    New files belong to the file-system ids of this process (:func:`.identity.act_as_owner`).

    Attributes:
        idmap_fd: user namespace whose id map makes image files appear as owned by uid 0; None if they already do.
        sealed: descriptors of the sealed trees passed along with the plan.
        proc: descriptor of a detached proc mount of the sandbox's process namespace; only needed for preparations.
        tree: descriptor of a copy of the writable mount (scratch or the disk upper), once it exists. The copy can
            outlive the sandbox. It has no id map, because the next sandbox could not change it (mount_setattr(2)).
        disk: descriptor of the disk upper with the sandbox's id map, or -1.
    """

    idmap_fd: int | None
    sealed: tuple[int, ...] = ()
    proc: int = -1
    tree: int = -1
    disk: int = -1
    _slot_trees: dict[str, int] = field(default_factory=dict)
    _scratch: int = -1

    def enter_scratch(self) -> None:
        """Make the scratch tmpfs of a prepared sandbox the working directory."""
        self._scratch = os.open(_SCRATCH_POINT, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fchdir(self._scratch)

    def run(self, operation: p.Operation) -> None:  # noqa: C901, PLR0912 - one line for each kind
        """Execute one operation.

        Raises:
            OSError: the kernel refused; a :class:`.syscalls.CallError` names the system call.
        """
        match operation:
            case p.Take():
                self._slot_trees[operation.slot] = self._take(operation)
            case p.Given():
                tree = self._slot_trees[operation.slot] = self.sealed[operation.number]
                self._set_attributes(tree, _SAFE | sc.MOUNT_ATTR_RDONLY, owners="image")
            case p.Scratch():
                self._make_scratch(operation.size)
            case p.Resize():
                _resize(operation.size)
            case p.DiskUpper():
                self._slot_trees[operation.slot] = self._take_disk_upper(operation)
            case p.Directory():
                self._make_directory(operation.path, operation.mode)
            case p.Attach():
                self._attach(operation)
            case p.Move():
                mount = os.open(operation.source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                self._mount_at(mount, operation.path)
            case p.Overlay():
                self._mount_overlay(operation)
            case p.Tmpfs():
                self._mount_tmpfs(operation)
            case p.Devices():
                self._make_devices(operation.path)
            case p.Proc():
                self._mount_proc(operation)
            case p.Cover():
                self._cover(operation.paths)
            case p.File():
                self._write_file(operation)
            case p.Name():
                _set_names(operation.hostname)
            case p.Complete():
                _make_missing(operation)
            case p.Enter():
                _enter(operation.path)

    def _take(self, take: p.Take) -> int:
        tree = sc.open_tree(take.source, recursive=take.recursive)
        flags = sc.MOUNT_ATTR_NOSUID
        flags |= sc.MOUNT_ATTR_RDONLY if take.read_only else 0
        flags |= 0 if take.devices else sc.MOUNT_ATTR_NODEV
        self._set_attributes(tree, flags, owners=take.owners, recursive=take.recursive)
        return tree

    def _set_attributes(self, tree: int, flags: int, *, owners: str, recursive: bool = False) -> None:
        if owners == "image" and self.idmap_fd is not None:
            sc.mount_setattr(tree, flags | sc.MOUNT_ATTR_IDMAP, userns_fd=self.idmap_fd, recursive=recursive)
        else:
            sc.mount_setattr(tree, flags, recursive=recursive)

    def _make_scratch(self, size: int) -> None:
        options = _tmpfs_sizes(size) | {"mode": "0755"}
        is_idmapped = self.idmap_fd is not None and tmpfs_can_be_idmapped(self.idmap_fd)
        # with an id map, the files belong to uid 0 like those of a layer; else to the file-system ids of this process
        if is_idmapped:
            options |= {"uid": "0", "gid": "0"}
        self._scratch = sc.new_filesystem("tmpfs", 0, **options)
        attach(self._scratch, _SCRATCH_POINT)
        if self.disk < 0:
            self.tree = sc.open_tree(_SCRATCH_POINT)
        if is_idmapped:
            os.close(self._scratch)
            self._scratch = sc.open_tree(_SCRATCH_POINT)
            self._set_attributes(self._scratch, 0, owners="image")
            attach(self._scratch, _SCRATCH_POINT)
        os.fchdir(self._scratch)

    def _take_disk_upper(self, upper: p.DiskUpper) -> int:
        self.tree = sc.open_tree(upper.source)
        sc.mount_setattr(self.tree, _SAFE)
        tree = sc.open_tree(upper.source)
        self._set_attributes(tree, _SAFE, owners="image")
        self.disk = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=tree)
        return tree

    def _make_directory(self, path: str, mode: int) -> None:
        os.mkdir(path, mode)
        os.chmod(path, mode)  # because mkdir(2) applies the umask

    def _write_file(self, file: p.File) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with sc.closing(os.open(file.path, flags, file.mode)) as descriptor:
            os.write(descriptor, file.text.encode())
            os.fchmod(descriptor, file.mode)

    def _attach(self, attach: p.Attach) -> None:
        tree = self._slot_trees.pop(attach.slot) if attach.slot else sc.open_tree(attach.source)
        self._mount_at(tree, attach.path)

    def _mount_at(self, tree: int, path: str) -> None:
        is_directory = stat.S_ISDIR(os.fstat(tree).st_mode)
        with sc.closing(tree), sc.closing(self._mount_point(path, directory=is_directory)) as mount_point:
            sc.move_mount(tree, mount_point, path)

    def _mount_proc(self, proc: p.Proc) -> None:
        """Mount proc in scratch and restrict it.

        mount(2) is safe here, because paths in scratch contain no links. It is also faster: each of the thirty binds
        per sandbox takes one call and inherits the flags of its source.
        """
        self._mount_at(self.proc, proc.path)
        if proc.hidden:
            self._make_directory("hidden", 0o755)
            self._make_directory(_EMPTY_DIRECTORY, 0o555)
            self._write_file(p.File(_EMPTY_FILE, "", 0o444))
            for empty in (_EMPTY_FILE, _EMPTY_DIRECTORY):
                _bind_read_only(empty)
        names = set(os.listdir(proc.path))  # this kernel may lack some names
        for name in names.intersection(proc.hidden):
            _hide(f"{proc.path}/{name}")
        for name in names.intersection(proc.frozen):
            _bind_read_only(f"{proc.path}/{name}")

    def _cover(self, paths: tuple[str, ...]) -> None:
        self._make_directory("cover", 0o755)
        self._make_directory("cover/directory", 0o555)
        self._write_file(p.File("cover/file", "", 0o444))
        for path in paths:
            try:
                mount_point = sc.openat2(self._scratch, path, os.O_PATH, sc.RESOLVE_INSIDE)
            except sc.CallError as error:
                if error.errno in (errno.ENOENT, errno.EACCES):
                    continue
                raise
            empty = "cover/directory" if stat.S_ISDIR(os.fstat(mount_point).st_mode) else "cover/file"
            with sc.closing(mount_point), sc.closing(sc.open_tree(empty)) as tree:
                sc.mount_setattr(tree, _SAFE | sc.MOUNT_ATTR_RDONLY | sc.MOUNT_ATTR_NOEXEC)
                sc.move_mount(tree, mount_point, path)

    def _mount_point(self, path: str, *, directory: bool) -> int:
        """Open a mount point below scratch, or create it; refuse symbolic links on the way."""
        try:
            return sc.openat2(self._scratch, path, os.O_PATH, sc.RESOLVE_INSIDE)
        except sc.CallError as error:
            if error.errno != errno.ENOENT:
                raise
        parent_path, _, name = path.rpartition("/")
        parent_fd = self._mount_point(parent_path, directory=True) if parent_path else os.dup(self._scratch)
        with sc.closing(parent_fd):
            _create(parent_fd, name, directory=directory)
        return sc.openat2(self._scratch, path, os.O_PATH, sc.RESOLVE_INSIDE)

    def _mount_overlay(self, overlay: p.Overlay) -> None:
        if _without_lowerdir_plus:
            self._mount_overlay_classic(overlay)
            return
        # always set userxattr, so that layers stay usable by ordinary users (overlayfs.rst)
        with sc.closing(sc.fsopen("overlay")) as fs:
            try:
                for lower in overlay.lowers:
                    sc.fsconfig(fs, "lowerdir+", lower)
                if overlay.upper:
                    sc.fsconfig(fs, "upperdir", overlay.upper)
                    sc.fsconfig(fs, "workdir", overlay.work)
                sc.fsconfig(fs, "userxattr")
                if overlay.volatile:
                    sc.fsconfig(fs, "volatile")
                tree = sc.fsmount(fs, _SAFE, "overlay")
            except sc.CallError as error:
                if (error.operation, error.errno) != ("fsconfig", errno.EINVAL):
                    raise
                self._mount_overlay_classic(overlay)
                _without_lowerdir_plus.append(True)  # do not try again: each refusal is logged by the kernel
                return
        self._mount_at(tree, overlay.path)

    def _mount_overlay_classic(self, overlay: p.Overlay) -> None:
        """Mount an overlay with mount(2) and one option string, on kernels without ``lowerdir+``.

        From Linux 6.5 to 6.7, fsconfig(2) refuses ``lowerdir+``. Before, it accepts any option, and creating the file
        system fails (EINVAL). Slot names need no escaping and keep the string short.
        """
        options = f"lowerdir={':'.join(overlay.lowers)},userxattr"
        options += f",upperdir={overlay.upper},workdir={overlay.work}" if overlay.upper else ""
        options += ",volatile" if overlay.volatile else ""
        os.close(self._mount_point(overlay.path, directory=True))
        sc.mount("overlay", overlay.path, "overlay", sc.MS_NOSUID | sc.MS_NODEV, options)

    def _mount_tmpfs(self, tmpfs: p.Tmpfs) -> None:
        shown_mounts = [(sc.open_tree(path), path) for path in (f"{tmpfs.path}/{name}" for name in tmpfs.shown)]
        options = {"mode": "1777"} | ({"size": str(tmpfs.size)} if tmpfs.size else {})
        is_idmapped = self.idmap_fd is not None and tmpfs_can_be_idmapped(self.idmap_fd)
        tree = sc.new_filesystem("tmpfs", 0, **options, **({"uid": "0", "gid": "0"} if is_idmapped else {}))
        self._set_attributes(tree, _SAFE, owners="image" if is_idmapped else "host")
        for mount, path in ((tree, tmpfs.path), *shown_mounts):
            self._mount_at(mount, path)

    def _make_devices(self, path: str) -> None:
        with sc.closing(self._mount_point(path, directory=True)) as directory:
            os.fchdir(directory)
        for name in DEVICE_NAMES:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
            sc.mount(f"/dev/{name}", name, None, sc.MS_BIND)
            # a read-only mount protects the timestamps of the host's node, and still allows writing to the device
            sc.mount_setattr(sc.AT_FDCWD, _DEVICE, path=name)
        for name, target in _DEVICE_LINKS:
            os.symlink(target, name)
        os.fchdir(self._scratch)
        pts = sc.new_filesystem("devpts", sc.MOUNT_ATTR_NOEXEC, ptmxmode="0666", mode="0600", max=_MOST_TERMINALS)
        self._mount_at(pts, f"{path}/pts")


def _tmpfs_sizes(size: int) -> dict[str, str]:
    return {"size": str(size), "nr_inodes": str(_INODES + size // BYTES_PER_FILE)}


def _resize(size: int) -> None:
    """Resize the tmpfs of the working directory; a remount changes only the given options (mount(2))."""
    options = ",".join(f"{name}={value}" for name, value in _tmpfs_sizes(size).items())
    sc.mount("none", ".", None, sc.MS_REMOUNT | sc.MS_NOSUID | sc.MS_NODEV, options)


@functools.cache
def tmpfs_can_be_idmapped(userns_fd: int) -> bool:
    """Return whether a tmpfs can be mounted with an id map (Linux 6.3).

    Args:
        userns_fd: a user namespace for the attempt.
    """
    with sc.closing(sc.new_filesystem("tmpfs", 0)) as tree:
        try:
            sc.mount_setattr(tree, sc.MOUNT_ATTR_IDMAP, userns_fd=userns_fd)
        except sc.CallError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
    return True


def tmpfs_keeps_attributes() -> bool:
    """Return whether a tmpfs keeps ``user.*`` attributes, which overlayfs needs (Linux 6.6)."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with sc.closing(sc.new_filesystem("tmpfs", 0)) as tree, sc.closing(os.open(".", flags, dir_fd=tree)) as root:
        try:
            os.setxattr(root, "user.overlay.minisandbox", b"y")
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                return False
            raise
    return True


def attach(tree: int, path: str) -> None:
    """Attach a detached mount at a directory."""
    with sc.closing(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as mount_point:
        sc.move_mount(tree, mount_point, path)


def _bind_read_only(path: str) -> None:
    """Bind-mount a path in scratch over itself, read-only."""
    sc.mount(path, path, None, sc.MS_BIND)
    sc.mount_setattr(sc.AT_FDCWD, _SAFE | sc.MOUNT_ATTR_RDONLY | sc.MOUNT_ATTR_NOEXEC, path=path)


def _hide(path: str) -> None:
    """Cover a path in scratch with an empty file or directory; skip a path that is not accessible."""
    for empty in (_EMPTY_FILE, _EMPTY_DIRECTORY):
        try:
            sc.mount(empty, path, None, sc.MS_BIND)
        except sc.CallError as error:
            if error.errno == errno.ENOTDIR and empty == _EMPTY_FILE:
                continue
            if error.errno != errno.EACCES:
                raise
        return


def _create(parent: int, name: str, *, directory: bool) -> None:
    if directory:
        os.mkdir(name, 0o755, dir_fd=parent)
    else:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=parent))


def _make_missing(complete: p.Complete) -> None:
    """Create missing directories in the sandbox's root; no process runs yet that could change the paths."""
    with sc.closing(os.open(complete.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        for path in complete.paths:
            with contextlib.suppress(OSError):  # a command that starts in the directory reports the error
                _make_path(root, path.strip("/"))


def _make_path(root: int, path: str) -> None:
    """Create a directory and its parents below a root, resolving links as a process with that root would."""
    parent = os.dup(root)
    for prefix_length in (index for index, character in enumerate(f"{path}/") if character == "/"):
        try:
            directory = sc.openat2(root, path[:prefix_length], os.O_PATH | os.O_DIRECTORY, sc.RESOLVE_AS_ROOT)
        except sc.CallError as error:
            if error.errno == errno.ENOENT:
                _create(parent, path[:prefix_length].rpartition("/")[2], directory=True)
                directory = sc.openat2(root, path[:prefix_length], os.O_PATH | os.O_DIRECTORY, sc.RESOLVE_AS_ROOT)
            else:
                raise
        finally:
            os.close(parent)
        parent = directory
    os.close(parent)


def _set_names(hostname: str) -> None:
    """Set the hostname; if a container engine's seccomp profile refuses, make the old name resolve to 127.0.0.1."""
    try:
        socket.sethostname(hostname)
        sc.setdomainname("(none)")  # the kernel's default for NIS
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        with sc.closing(os.open("run/hosts", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)) as hosts:
            os.write(hosts, f"127.0.0.1\t{os.uname().nodename}\n".encode())


def _enter(path: str) -> None:
    os.chdir(path)
    # pivot_root(".", ".") stacks the old root on top of the new root until it is detached (pivot_root(2), NOTES)
    sc.pivot_root(".", ".")
    sc.umount(".", sc.MNT_DETACH)
    os.chdir("/")
