"""What processes share without files: memory, queues, semaphores, keys, descriptors, sockets with names."""

from __future__ import annotations

import os
import socket
import stat
from functools import partial

from .core import Finding, attempts, canary, each, is_secret, judge, opened, probe, read
from .kernel import buffer, call

KIND = "ipc"
KEYCTL_SEARCH, KEYCTL_READ, KEYCTL_DESCRIBE = 10, 11, 6
SESSION, USER, USER_SESSION = -3, -4, -5
OPEN_AT_START: list[tuple[int, str]] = []


def remember_descriptors() -> None:
    """Note what was open when the program started."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink("/proc/self/fd/" + name)
        except OSError:  # the listing's own
            continue
        if int(name) > 2 and not target.endswith("/fd"):
            OPEN_AT_START.append((int(name), target))


@probe(KIND)
def inherited_descriptors() -> Finding:
    """Inherit descriptors from the one who started it"""
    return judge(OPEN_AT_START, str(OPEN_AT_START))


@probe(KIND)
def secret_in_a_descriptor() -> Finding:
    """Read the secret from a descriptor that leaked, or reach the host's root by one"""

    def attempt(number: int) -> bool:
        mode = os.fstat(number).st_mode
        if stat.S_ISDIR(mode):
            status = os.fstat(number)
            return (status.st_dev, status.st_ino) == tuple(canary("root_identity"))
        return stat.S_ISREG(mode) and is_secret(os.pread(number, 4096, 0))

    return each(range(64), attempt)


@probe(KIND)
def shared_memory_by_key() -> Finding:
    """Find a System V shared memory segment of the host by its key"""
    return judge(call("shmget", canary("shm_key"), 0, 0) >= 0)


@probe(KIND)
def shared_memory_by_number() -> Finding:
    """List, or attach, a System V shared memory segment of the host by its number"""
    listed = str(canary("shm_key")) in read("/proc/sysvipc/shm").decode()
    if not listed and call("shmctl", canary("shm_id"), 2, buffer(128)) < 0:
        return judge(False)
    return judge(listed, "listed" if listed else "some segment of that number")


@probe(KIND)
def semaphores_and_queues_by_key() -> Finding:
    """Find System V semaphores and message queues of the host by their keys"""
    return attempts(
        (
            ("semaphores", lambda: call("semget", canary("sem_key"), 0, 0) >= 0),
            ("messages", lambda: call("msgget", canary("msg_key"), 0) >= 0),
        )
    )


@probe(KIND)
def posix_queue() -> Finding:
    """Open a POSIX message queue of the host"""
    return judge(call("mq_open", canary("mq_name").encode(), os.O_RDWR, 0, None) >= 0)


@probe(KIND)
def key_of_the_session() -> Finding:
    """Find and read a key in the session keyring of the one who started it"""

    def attempt(ring: int) -> bool:
        key = call("keyctl", KEYCTL_SEARCH, ring, b"user", canary("key_name").encode(), 0)
        content = buffer(256)
        size = call("keyctl", KEYCTL_READ, key, content, 256)
        return is_secret(content.raw[:size])

    return each((SESSION, USER), attempt)


@probe(KIND)
def session_keyring() -> Finding:
    """Be in the session keyring of the one who started it"""
    return judge(call("keyctl", 0, SESSION, 0, 0, 0) == canary("key_ring"))


@probe(KIND)
def keys_by_number() -> Finding:
    """Describe or read a key of the host by its number"""

    def attempt(verb: int) -> bool:
        return call("keyctl", verb, canary("key_number"), buffer(256), 256, 0) >= 0

    return attempts((("describe", lambda: attempt(KEYCTL_DESCRIBE)), ("read", lambda: attempt(KEYCTL_READ))))


@probe(KIND)
def list_of_keys() -> Finding:
    """See the host's keys in /proc/keys"""
    return judge(canary("key_name").encode() in read("/proc/keys", 1 << 20))


def answers(address: str, kind: int) -> bool:
    with socket.socket(socket.AF_UNIX, kind) as connection:
        connection.settimeout(2)
        connection.connect(address)
    return True


@probe(KIND)
def abstract_sockets() -> Finding:
    """Connect to an abstract socket of the host: stream, datagram, sequenced packets"""
    return attempts(
        (name, partial(answers, "\0" + canary("abstract")[name], kind))
        for name, kind in (("stream", 1), ("datagram", 2), ("seqpacket", 5))
    )


@probe(KIND)
def sockets_with_paths() -> Finding:
    """Connect to a socket of the host by its path"""
    usual = ("docker.sock", "containerd/containerd.sock", "dbus/system_bus_socket", "systemd/private", "user/0/bus")
    paths = [canary("unix_path"), *("/run/" + name for name in usual)]
    return each(paths, lambda path: answers(path, 1))


@probe(KIND)
def names_in_shared_memory() -> Finding:
    """See the host's POSIX shared memory and semaphores"""
    found = set(os.listdir("/dev/shm")) & set(canary("shm_names"))
    return opened(str(sorted(found))) if found else judge(False)
