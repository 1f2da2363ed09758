"""The host's files: read them, write them, reach them by another way."""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import stat
import struct
from typing import Callable, Iterator

from .core import (
    HOST,
    Attempt,
    Finding,
    Missing,
    all_pids,
    attempts,
    blocked,
    can_open,
    canary,
    each,
    in_child,
    is_secret,
    judge,
    opened,
    probe,
    read,
)
from .kernel import buffer, call

KIND = "files"
PLACES = ("home", "tmp", "var", "srv", "shm")
PRIVATE = ("shadow", "gshadow", "shadow-", "sudoers", "security/opasswd", "ssh/ssh_host_ed25519_key")
PASSED_OVER = ("/proc", "/sys", "/usr", "/bin", "/lib", "/lib64", "/sbin", "/dev/fd")
MOST_ENTRIES = 30_000
FS_IOC_GETFLAGS, FS_IOC_SETFLAGS = 0x80086601, 0x40086602


def secret_at(place: str) -> Callable[[], Finding]:
    def run() -> Finding:
        path = canary("secrets").get(place)
        if path is None:
            raise Missing(f"nothing was planted in {place}")
        return judge(is_secret(read(path)), path)

    return run


for where in PLACES:
    probe(KIND, "secret-in-" + where, "read a secret of the host: " + where)(secret_at(where))


def walk(top: str, depth: int) -> Iterator[str]:
    """Paths below a directory, nothing followed, nothing waited for."""
    try:
        entries = sorted(os.scandir(top), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.path not in PASSED_OVER:
            yield entry.path
            if depth and entry.is_dir(follow_symlinks=False):
                yield from walk(entry.path, depth - 1)


@probe(KIND)
def secret_by_its_name() -> Finding:
    """Find a secret's file anywhere in the tree by its name"""
    name = canary("secret_name")
    for number, path in enumerate(walk("/", 4)):
        if name in path:
            return opened(path)
        if number > MOST_ENTRIES:
            break
    return blocked()


@probe(KIND, root=True)
def private_files_of_etc() -> Finding:
    """Open the host's shadow, sudoers, host keys"""
    identities = {tuple(pair) for pair in canary("etc_identities")}

    def is_the_hosts(path: str) -> bool:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            digest = hashlib.sha256(file.read()).hexdigest()
        return (status.st_dev, status.st_ino) in identities or (
            bool(status.st_size) and digest in canary("etc_digests")
        )

    return each(PRIVATE, lambda name: is_the_hosts("/etc/" + name))


@probe(KIND)
def marker_in_the_hosts_tmp() -> Finding:
    """Write a file into a world-writable directory of the host"""
    with open(os.path.join(canary("drop"), "marker-" + canary("run")), "w", encoding="ascii") as file:
        file.write("x")
    return Finding(HOST, "written")


@probe(KIND, root=True)
def marker_in_the_hosts_usr() -> Finding:
    """Make a file in the host's /usr"""
    path = canary("usr_marker")
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    return Finding(HOST, "made " + path)


@probe(KIND, root=True)
def change_a_file_of_usr() -> Finding:
    """Change content, mode, times, owner, attributes or name of a file of the host's /usr"""
    path = canary("usr_file")

    def overwrite() -> bool:
        with open(path, "r+b") as file:
            return file.write(b"changed") > 0

    def set_flags() -> bool:
        with open(path, "rb") as file:
            flags = struct.unpack("i", fcntl.ioctl(file, FS_IOC_GETFLAGS, b"\0" * 4))[0]
            fcntl.ioctl(file, FS_IOC_SETFLAGS, struct.pack("i", flags | 0x40))  # no dump: harmless
        return True

    def replace() -> bool:
        os.rename(path, path + ".moved")
        os.rename(path + ".moved", path)
        return True

    def link() -> bool:
        os.link(path, path + ".linked")
        os.unlink(path + ".linked")
        return True

    finding = attempts(
        (
            ("content", overwrite),
            ("mode", lambda: os.chmod(path, 0o4755)),
            ("times", lambda: os.utime(path, (1, 1))),
            ("owner", lambda: os.chown(path, 1, 1)),
            ("attribute", lambda: os.setxattr(path, "user.changed", b"1")),
            ("flags", set_flags),
            ("name", replace),
            ("link", link),
        )
    )
    return Finding(HOST, finding.detail)  # a copy of the sandbox's own may be changed


@probe(KIND, root=True, maybe=True)
def handles() -> Finding:
    """Open the root of a mounted file system by its handle (open_by_handle_at)"""

    def by_number(point: str, inode: int) -> Attempt:
        def attempt() -> bool:
            mount = os.open(point, os.O_RDONLY)
            handle = buffer(64, struct.pack("=IiII", 8, 1, inode, 0))
            found = call("open_by_handle_at", mount, handle, os.O_RDONLY | os.O_DIRECTORY)
            return bool(os.listdir(found))

        return attempt

    points = ("/", "/usr", "/etc", "/tmp", "/dev/shm", os.getcwd())
    return attempts((f"{point}:{inode}", by_number(point, inode)) for point in points for inode in (2, 128, 256))


@probe(KIND)
def roots_of_processes() -> Finding:
    """Reach the host's files through /proc/PID/root, cwd and fd"""
    path = canary("secrets")["tmp"]

    def through(pid: int, link: str, climb: str) -> Attempt:
        return lambda: is_secret(read(f"/proc/{pid}/{link}{climb}{path}"))

    pids = sorted({1, os.getppid(), canary("host_pid"), *all_pids()[:40]})
    ways = [("root", ""), ("cwd", "/../../../../../../../.."), ("cwd", "")]
    return attempts((f"{pid}/{link}{climb}", through(pid, link, climb)) for pid in pids for link, climb in ways)


@probe(KIND, root=True)
def programs_of_processes() -> Finding:
    """Open a running program of the host for writing through /proc/PID/exe (CVE-2019-5736)"""

    def attempt(pid: int) -> bool:
        path = f"/proc/{pid}/exe"
        if os.readlink(path) != canary("host_exe"):
            return False
        try:
            return can_open(path, os.O_WRONLY)
        except OSError as error:
            if error.errno != 26:  # ETXTBSY: access was given, but it runs
                raise
            return not os.statvfs(path).f_flag & os.ST_RDONLY

    return each({1, os.getppid(), canary("host_pid")}, attempt)


def writable(top: str, depth: int) -> Finding:
    """Open every file below for writing, and write nothing."""
    through: list[str] = []
    count = 0
    for path in walk(top, depth):
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                continue
            count += 1
            if can_open(path, os.O_WRONLY):
                through.append(path)
        except OSError:
            continue
    some = ", ".join(through[:8])
    return judge(through, f"{len(through)} of {count} files open for writing: {some}")


@probe(KIND, root=True)
def settings_of_the_kernel() -> Finding:
    """Open any file of /proc/sys for writing"""
    return writable("/proc/sys", 8)


@probe(KIND, root=True)
def triggers_of_the_kernel() -> Finding:
    """Open /proc/sysrq-trigger, /proc/irq, /proc/bus, /proc/fs ... for writing"""
    names = [entry.path for entry in os.scandir("/proc") if not entry.name.isdigit()]
    skipped = ("/proc/sys", "/proc/self", "/proc/thread-self", "/proc/net", "/proc/mounts")
    findings = [(path, writable(path, 3)) for path in names if path not in skipped and os.path.isdir(path)]
    plain = [path for path in names if os.path.isfile(path) and not os.path.islink(path)]
    found = each(plain, lambda path: can_open(path, os.O_WRONLY))
    through = [*found.through, *(path for path, finding in findings if finding.verdict == "open")]
    return judge(through, ", ".join(through))


@probe(KIND, root=True)
def settings_of_devices() -> Finding:
    """Open any file of /sys for writing, control groups included"""
    return writable("/sys", 3)


@probe(KIND, maybe=True)
def file_systems_for_debugging() -> Finding:
    """Look into debugfs, tracefs, securityfs, bpf, firmware"""
    places = ("kernel/debug", "kernel/tracing", "kernel/security", "fs/bpf", "firmware", "devices/virtual/powercap")
    return each(places, lambda place: os.listdir("/sys/" + place))


@probe(KIND, root=True)
def attributes_of_overlays() -> Finding:
    """Set attributes that overlayfs believes, or that give capabilities"""
    path = own_file()
    names = ("trusted.overlay.redirect", "trusted.overlay.opaque", "trusted.x", "security.x")
    found = each(names, lambda name: os.setxattr(path, name, b"/../../etc"))
    os.unlink(path)
    return found


def own_file(directory: str = "/tmp") -> str:
    """An empty file of the probe's own."""
    run = canary("run")
    path = os.path.join(directory, f"probe-{run}-{os.getpid()}")
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600))
    return path


@probe(KIND)
def lock_of_the_host() -> Finding:
    """See, and so hold, a lock on a file that the host uses"""
    path = canary("lock_file")
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return opened(f"the host's lock on {path} is in the way")
    return blocked("a lock of one's own")


@probe(KIND)
def watch_of_the_hosts_files() -> Finding:
    """Watch when the host opens a program (inotify)"""
    watch = call("inotify_init1", os.O_NONBLOCK)
    call("inotify_add_watch", watch, canary("lock_file").encode(), 0x20)
    ready, _, _ = select.select([watch], [], [], 1.0)
    os.close(watch)
    return judge(ready, canary("lock_file"))


@probe(KIND, root=True)
def lease_of_the_hosts_file() -> Finding:
    """Watch who opens a file of the host (F_SETLEASE)"""
    path = canary("lease_file")
    with open(path, "rb") as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return judge(os.stat(path).st_dev in canary("host_devices"), path)


@probe(KIND, root=True)
def other_roots() -> Finding:
    """Break out of a root directory: chroot with a directory held open"""
    path = canary("secrets")["tmp"]

    def attempt() -> bool:
        held = os.open("/", os.O_RDONLY)
        os.chroot("/usr")
        os.fchdir(held)
        for _ in range(64):
            os.chdir("..")
        os.chroot(".")
        return is_secret(read(path))

    return attempts([("chroot", in_child(attempt))])


@probe(KIND, maybe=True)
def mounts_of_the_host() -> Finding:
    """List mounts that the mount table does not show (listmount, statmount)"""
    request, answer = buffer(32, struct.pack("=IIQQ", 24, 0, 0xFFFFFFFFFFFFFFFF, 0)), buffer(8 * 512)
    count = call("listmount", request, answer, 512, 0)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
        shown = {int(line.split()[0]) for line in table}
    return judge(count > 0, f"{count} mounts listed, {len(shown)} shown")


@probe(KIND)
def climbing() -> Finding:
    """Name files of the host by walking up from a descriptor of /proc or /dev"""
    inode = tuple(canary("root_identity"))

    def climb(start: str) -> bool:
        descriptor = os.open(start, os.O_RDONLY | os.O_DIRECTORY)
        for _ in range(40):
            descriptor = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=descriptor)
        status = os.fstat(descriptor)
        return (status.st_dev, status.st_ino) == inode

    starts = ("/proc/self", "/dev/pts", "/dev/shm", "/tmp", "/usr/lib", "/proc/1/cwd", "/proc/self/fd")
    return each(starts, climb)


@probe(KIND)
def what_lies_under_the_root() -> Finding:
    """See the host's file system as the root: its identity, its free space"""
    status = os.stat("/")
    return judge((status.st_dev, status.st_ino) == tuple(canary("root_identity")), f"{status.st_dev}:{status.st_ino}")
