"""Limits: more processes, memory, disk, files than the host gave; what the host shares with everybody."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import signal
import socket
import stat
import struct
import time
from typing import Callable, Iterator

from .core import Finding, attempts, canary, each, in_child, judge, probe, read
from .files import own_file
from .kernel import LIBC, buffer, call

KIND = "limit"
LOOK = 1.0  # seconds within which whoever watches looks twice
BOMB = "it would take the host's"
MIB = 1 << 20
SLACK = 8  # processes of our own that a sandbox has besides
F_SETPIPE_SZ = 1031


def start_sleepers(count: int) -> int:
    """Start small processes, as many as can be had; they end with the probe."""
    started = 0
    with contextlib.suppress(OSError):
        for _ in range(count):
            os.posix_spawn("/bin/sleep", ["sleep", "30"], {})
            started += 1
    return started


@probe(KIND, without=BOMB + " processes", patience=30.0)
def processes() -> Finding:
    """Start more processes than the limit"""
    allowed = int(canary("limits")["processes"])
    started = start_sleepers(allowed + 50)
    return judge(started > allowed + SLACK, f"{started} of {allowed}")


@probe(KIND, without=BOMB + " processes", patience=30.0)
def processes_of_other_ids() -> Finding:
    """Start more processes than the limit as several users"""
    allowed = int(canary("limits")["processes"])
    reader, writer = os.pipe()
    leaders = 0
    for uid in range(2000, 2003):
        with contextlib.suppress(OSError):
            leaders += 1
            if os.fork() == 0:
                started = 0
                with contextlib.suppress(OSError):
                    os.setresuid(uid, uid, uid)
                    started = start_sleepers(allowed // 2 + 10)
                os.write(writer, b"%d\n" % started)
                signal.pause()
    text = b""
    while text.count(b"\n") < leaders:
        text += os.read(reader, 100)
    total = sum(map(int, text.split()))
    return judge(total > allowed + SLACK, f"{total} of {allowed}")


@probe(KIND, without=BOMB + " memory", patience=60.0, may_die=True)
def memory() -> Finding:
    """Touch more memory than the limit"""
    return use_memory(lambda size: mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


@probe(KIND, without=BOMB + " memory", patience=60.0, may_die=True)
def memory_of_several() -> Finding:
    """Touch more memory than the limit: three processes together, each far below it"""
    share = int(canary("limits")["memory"]) // 2

    def attempt() -> bool:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        for _ in range(3):
            if os.fork() == 0:
                block = mmap.mmap(-1, share, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                for offset in range(0, share, 4096):
                    block[offset] = 1
                os.write(writer, b"x")
                signal.pause()
        done = 0
        while os.waitpid(-1, os.WNOHANG) == (0, 0):
            time.sleep(0.1)
            with contextlib.suppress(BlockingIOError):
                done += len(os.read(reader, 3))
            if done == 3:
                time.sleep(LOOK)
                return os.waitpid(-1, os.WNOHANG) == (0, 0)
        return False

    return attempts([("three", in_child(attempt))])


@probe(KIND, without=BOMB + " memory", patience=60.0, may_die=True)
def memory_shared_with_nobody() -> Finding:
    """Touch more memory than the limit: mappings made to be shared"""
    return use_memory(lambda size: mmap.mmap(-1, size))


def use_memory(take: Callable[[int], mmap.mmap]) -> Finding:
    """In a child: the first answer is that of whoever is not killed."""
    allowed = int(canary("limits")["memory"])

    def attempt() -> bool:
        kept = []
        for _ in range(0, allowed + allowed // 2, 32 * MIB):
            block = take(32 * MIB)
            for offset in range(0, 32 * MIB, 4096):
                block[offset] = 1
            kept.append(block)
        time.sleep(LOOK)
        return True

    return attempts([(f"{allowed * 3 // 2 // MIB} MiB", in_child(attempt))])


@probe(KIND, without=BOMB + " memory", patience=60.0, may_die=True)
def memory_of_files_without_names() -> Finding:
    """Keep more in memory than the limit: memfd_create"""

    def take(size: int) -> mmap.mmap:
        descriptor = os.memfd_create("probe")
        os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)

    return use_memory(take)


@probe(KIND, without=BOMB + " memory", patience=60.0, may_die=True)
def memory_that_is_shared() -> Finding:
    """Keep more in memory than the limit: System V segments, which outlive their makers"""
    allowed = int(canary("limits")["memory"])

    def attempt() -> bool:
        LIBC.shmat.restype = ctypes.c_void_p
        taken = []
        try:
            for _ in range(0, allowed + allowed // 2, 32 * MIB):
                number = call("shmget", 0, 32 * MIB, 0o1600)
                taken.append(number)
                address = LIBC.shmat(number, None, 0)
                ctypes.memset(address, 1, 32 * MIB)
            time.sleep(LOOK)
            return True
        finally:
            for number in taken:
                call("shmctl", number, 0, None)

    return attempts([("segments", in_child(attempt))])


@probe(KIND, without=BOMB + " memory", patience=60.0, may_die=True)
def memory_that_nobody_maps() -> Finding:
    """Keep more in memory than the limit: written to files without names, and never mapped"""
    allowed = int(canary("limits")["memory"])

    def attempt() -> bool:
        block = b"x" * MIB
        for _ in range(0, allowed + allowed // 2, 32 * MIB):
            descriptor = os.memfd_create("probe")
            for _ in range(32):
                os.write(descriptor, block)
        time.sleep(LOOK)
        return True

    return attempts([("written", in_child(attempt))])


@probe(KIND, without=BOMB + " memory", patience=60.0, may_die=True)
def memory_that_was_let_go() -> Finding:
    """Keep more in memory than the limit: shared, and dropped from the page tables (madvise)"""
    allowed = int(canary("limits")["memory"])

    def attempt() -> bool:
        kept = []
        for _ in range(0, allowed + allowed // 2, 32 * MIB):
            block = mmap.mmap(-1, 32 * MIB)
            for offset in range(0, 32 * MIB, 4096):
                block[offset] = 1
            block.madvise(mmap.MADV_DONTNEED)
            kept.append(block)
        time.sleep(LOOK)
        return all(block[0] == 1 for block in kept)

    return attempts([("let go", in_child(attempt))])


def keep_after_the_end(verb: str, take: Callable[[], Iterator[int]]) -> Finding:
    """Make System V objects until there is more than the limit; their makers end, and then somebody looks."""

    def attempt() -> bool:
        numbers: list[int] = []
        try:
            numbers.extend(take())
            time.sleep(LOOK)
            return True
        finally:
            for number in numbers:
                call(verb, number, *((0, 0) if verb == "semctl" else (0, None)))

    return attempts([(verb, in_child(attempt))])


@probe(KIND, without=BOMB + " memory", patience=60.0, may_die=True)
def memory_of_messages() -> Finding:
    """Keep more in memory than the limit: System V messages that nobody receives"""
    allowed = int(canary("limits")["memory"])

    def take() -> Iterator[int]:
        message = buffer(8 + 8192, b"\1" + bytes(7))
        for _ in range(0, allowed + allowed // 2, 16384):
            number = call("msgget", 0, 0o1600)
            yield number
            for _ in range(2):
                call("msgsnd", number, message, 8192, 0o4000)

    return keep_after_the_end("msgctl", take)


@probe(KIND, without=BOMB + " memory", patience=60.0, may_die=True)
def memory_of_semaphores() -> Finding:
    """Keep more in memory than the limit: System V semaphores"""
    allowed = int(canary("limits")["memory"])

    def take() -> Iterator[int]:
        for _ in range(0, allowed + allowed // 2, 32000 * 64):
            yield call("semget", 0, 32000, 0o1600)

    return keep_after_the_end("semctl", take)


@probe(KIND, without="it would take the host's", maybe=True)
def operations_that_all_share() -> Finding:
    """Take of what the whole machine has one number of: asynchronous operations (io_setup)"""
    return judge(call("io_setup", 1000, buffer(8, bytes(8))) == 0)


def fill_descriptors(pair: Callable[[], tuple[int, int]]) -> Finding:
    """Fill pairs of descriptors with data that nobody reads, in as many processes as it takes."""
    allowed = int(canary("limits")["memory"])
    block = b"x" * 65536

    def fill(reports: int) -> None:
        kept = 0
        with contextlib.suppress(OSError):
            while True:
                _, writer = pair()
                os.set_blocking(writer, False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        kept += os.write(writer, block)
                if kept > 128 * MIB:
                    break
        os.write(reports, b"%d\n" % kept)
        signal.pause()

    def attempt() -> bool:
        reader, reports = os.pipe()
        wanted, text = allowed // (64 * MIB), b""
        for _ in range(wanted):
            if os.fork() == 0:
                fill(reports)
        os.set_blocking(reader, False)
        deadline = time.monotonic() + 20
        while text.count(b"\n") < wanted and time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                text += os.read(reader, 4096)
            if os.waitpid(-1, os.WNOHANG) != (0, 0):
                return False
            time.sleep(0.05)
        time.sleep(LOOK)
        held = sum(map(int, text.split()))
        return os.waitpid(-1, os.WNOHANG) == (0, 0) and held > allowed * 3 // 2

    return attempts([(f"more than {allowed * 3 // 2 // MIB} MiB", in_child(attempt))])


def pair_of_sockets() -> tuple[int, int]:
    left, right = socket.socketpair()
    return left.detach(), right.detach()


@probe(KIND, without=BOMB + " memory", patience=60.0, may_die=True)
def memory_of_sockets() -> Finding:
    """Keep more in the kernel's memory than the limit: what nobody reads from local sockets"""
    return fill_descriptors(pair_of_sockets)


@probe(KIND, without=BOMB + " memory", patience=60.0, may_die=True)
def memory_of_pipes() -> Finding:
    """Keep more in the kernel's memory than the limit: what nobody reads from pipes"""
    return fill_descriptors(os.pipe)


@probe(KIND, without=BOMB + " disk", patience=60.0, may_die=True)
def disk() -> Finding:
    """Write more than the limit: /tmp, /dev/shm, /run and the workspace together"""
    allowed, written = int(canary("limits")["disk"]), 0
    block = b"x" * (4 * MIB)
    paths = []
    for place in ("/tmp", "/dev/shm", "/run", os.getcwd(), "/usr", "/dev", "/etc"):
        with contextlib.suppress(OSError):
            path = own_file(place) + "-fill"
            descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
            paths.append(path)
            while written <= allowed + 64 * MIB:
                written += os.write(descriptor, block)
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
            os.unlink(path[: -len("-fill")])
    return judge(written > allowed, f"{written // MIB} of {allowed // MIB} MiB")


@probe(KIND, without=BOMB + " inodes", patience=60.0)
def inodes() -> Finding:
    """Make more empty files than the limit of the disk has room for"""
    allowed = int(canary("limits")["disk"]) // 512
    count = 0
    os.mkdir("/tmp/inodes")
    with contextlib.suppress(OSError):
        for count in range(min(allowed + 1, 400_000)):
            os.mknod(f"/tmp/inodes/{count}", stat.S_IFIFO | 0o600)
    for name in os.listdir("/tmp/inodes"):
        os.unlink("/tmp/inodes/" + name)
    return judge(count >= min(allowed, 399_999), f"{count} of {allowed}")


@probe(KIND, maybe=True)
def file_systems_without_an_end() -> Finding:
    """Find a writable file system as large as the host's"""

    def attempt(place: str) -> bool:
        status = os.statvfs(place)
        if not os.access(place, os.W_OK) or status.f_flag & os.ST_RDONLY:
            return False
        free = status.f_bavail * status.f_frsize
        return free > 2 * int(canary("limits")["disk"])

    return each(("/", "/tmp", "/dev/shm", "/dev", "/run", "/usr"), attempt)


@probe(KIND)
def giant_sparse_file() -> Finding:
    """Make a file of a tebibyte that takes no room, for whoever reads it"""
    path = own_file()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with open(path, "wb") as file:
            file.truncate(1 << 40)
        return judge(True, path)
    finally:
        os.unlink(path)


@probe(KIND, maybe=True)
def open_files_and_cores() -> Finding:
    """Have more than 65,536 open files, or leave core dumps"""
    files, cores = resource.getrlimit(resource.RLIMIT_NOFILE)[1], resource.getrlimit(resource.RLIMIT_CORE)[1]
    return judge(files > 65536 or files < 0 or cores != 0, f"{files}, {cores}")


@probe(KIND, maybe=True)
def giant_pipes() -> Finding:
    """Make pipes larger than anybody may (needs CAP_SYS_RESOURCE)"""
    _, writer = os.pipe()
    return judge(fcntl.fcntl(writer, F_SETPIPE_SZ, 64 * MIB))


@probe(KIND)
def watches_that_all_share() -> Finding:
    """Use up what the kernel counts per user of the host: inotify instances"""
    inside = os.readlink("/proc/self/ns/user") != canary("namespaces")["user"]
    allowed = int(read("/proc/sys/user/max_inotify_instances"))
    count = 0
    while count < 4096 and LIBC.inotify_init() >= 0:
        count += 1
    return judge(not inside or count >= 4096 or allowed > 4096, f"{count} of {allowed}")


@probe(KIND, maybe=True)
def locked_memory() -> Finding:
    """Lock more memory than anybody may"""
    size = 256 * MIB
    memory_block = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory_block))
    return judge(LIBC.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)) == 0)


FILTER = struct.pack("HBBI", 0x94, 0, 0, 7) * 64 + struct.pack("HBBI", 6, 0, 0, 0xFFFF)  # A %= 7, again and again


def filter_program() -> tuple[object, bytes]:
    """A classic BPF program, and the buffer that it lies in."""
    code = ctypes.create_string_buffer(FILTER, len(FILTER))
    return code, struct.pack("HxxxxxxQ", len(FILTER) // 8, ctypes.addressof(code))


@probe(KIND)
def programs_in_the_kernel_of_sockets() -> Finding:
    """Attach programs to sockets: their code is memory of which the machine has one amount"""
    code, program = filter_program()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        for option in (26, 51):  # SO_ATTACH_FILTER, SO_ATTACH_REUSEPORT_CBPF
            try:
                one.setsockopt(socket.SOL_SOCKET, option, program)
            except OSError:
                continue
            return judge(True, f"option {option}, {len(bytes(FILTER))} bytes at {code}")
    return judge(False)


@probe(KIND)
def programs_in_the_kernel_of_seccomp() -> Finding:
    """Add filters of system calls, of the same memory, as many as there are processes"""
    allow = struct.pack("HBBI", 6, 0, 0, 0x7FFF0000)
    code = ctypes.create_string_buffer(allow, len(allow))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 1, ctypes.addressof(code)))
    child = os.fork()
    if child == 0:
        LIBC.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        done = LIBC.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0)  # PR_SET_SECCOMP, a filter
        os._exit(done == 0)
    return judge(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1)


@probe(KIND, maybe=True)
def modules_for_bridges() -> Finding:
    """Have the kernel load code for bridges and VLANs by asking a socket"""
    with socket.socket() as one:
        for request in (0x8940, 0x8982):
            try:
                fcntl.ioctl(one, request, b"\0" * 64)
            except PermissionError:
                continue
            except OSError as error:
                return judge(True, f"{request:#x}: {error}")
            return judge(True, f"{request:#x}")
    return judge(False)
