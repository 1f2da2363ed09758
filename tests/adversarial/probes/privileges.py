"""Privileges: capabilities, ids, setuid programs, no_new_privs, the filter."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
from functools import partial

from .core import Finding, Missing, attempts, canary, each, in_child, judge, probe, read, status_field
from .files import own_file
from .kernel import buffer, call

KIND = "privilege"
ALLOWED = 0xFB  # CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID
PLACES = ("/tmp", "/var/tmp", "/dev/shm", os.getcwd())
NET_RAW = 13
PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 47, 2


def beyond(field: str) -> Finding:
    held = int(status_field(field), 16)
    return judge(held & ~ALLOWED, f"{field} is {held:x}")


for name, needs_root in (("CapEff", True), ("CapPrm", True), ("CapBnd", False)):
    probe(
        KIND, name.lower(), "hold more capabilities than those over one's own files and ids: " + name, root=needs_root
    )(partial(beyond, name))


@probe(KIND, without="nothing hands capabilities on there")
def capabilities_handed_on() -> Finding:
    """Hold inheritable or ambient capabilities"""
    held = int(status_field("CapInh"), 16) | int(status_field("CapAmb"), 16)
    return judge(held, f"{held:x}")


@probe(KIND, root=True)
def capabilities_over_the_host() -> Finding:
    """Hold any capability in the host's user namespace"""
    held = int(status_field("CapEff"), 16)
    return judge(held and os.readlink("/proc/self/ns/user") == canary("namespaces")["user"], f"{held:x}")


@probe(KIND)
def no_new_privileges() -> Finding:
    """Gain privileges by execve: no_new_privs is not set"""
    return judge(status_field("NoNewPrivs") != "1", status_field("NoNewPrivs"))


@probe(KIND)
def system_call_filter() -> Finding:
    """Run without a system-call filter"""
    return judge(status_field("Seccomp") != "2", "Seccomp is {}".format(status_field("Seccomp")))


def maps_host_root(table: str) -> Finding:
    rows = [tuple(map(int, row.split())) for row in read(table).decode().splitlines()]
    return judge(any(outside == 0 for _, outside, _ in rows), str(rows))


for kind in ("uid", "gid"):
    probe(KIND, f"map-of-{kind}s", f"be mapped to the host's root: {kind} 0")(
        partial(maps_host_root, f"/proc/self/{kind}_map")
    )


@probe(KIND, maybe=True)
def groups_of_the_host() -> Finding:
    """Keep supplementary groups of the one who started it"""
    planted = set(canary("groups"))
    if not planted:
        raise Missing("whoever started it has no other groups")
    held = set(map(int, status_field("Groups").split()))
    return judge(held & planted, str(sorted(held)))


@probe(KIND, root=True)
def setuid_programs_of_its_own() -> Finding:
    """Have a setuid program of one's own honoured"""

    def attempt(place: str) -> bool:
        path = own_file(place)
        try:
            shutil.copy("/usr/bin/id", path)
            os.chown(path, 1, 1)
            os.chmod(path, 0o4755)
            if os.fork() == 0:
                os.setresgid(2, 2, 2)
                os.setresuid(2, 2, 2)
                done = subprocess.run([path, "-u"], stdout=subprocess.PIPE, check=False)
                os._exit(0 if done.stdout == b"1\n" else 1)
            return os.wait()[1] == 0
        finally:
            os.unlink(path)

    return each(sorted(set(PLACES)), attempt, apart=True)


@probe(KIND, root=True)
def capabilities_of_files() -> Finding:
    """Have a program's file capabilities honoured"""

    def attempt(place: str) -> bool:
        path = own_file(place)
        try:
            shutil.copy("/usr/bin/cat", path)
            os.chmod(path, 0o755)
            os.setxattr(path, "security.capability", struct.pack("<5I", 0x02000001, 1 << NET_RAW, 0, 0, 0))
            if os.fork() == 0:
                os.setresuid(2, 2, 2)
                done = subprocess.run([path, "/proc/self/status"], stdout=subprocess.PIPE, check=False)
                os._exit(0 if b"CapEff:\t%016x" % (1 << NET_RAW) in done.stdout else 1)
            return os.wait()[1] == 0
        finally:
            os.unlink(path)

    return each(sorted(set(PLACES)), attempt, apart=True)


@probe(KIND)
def setuid_programs_of_the_host() -> Finding:
    """Have a setuid program of /usr honoured: su, mount, sudo, newuidmap"""

    def honoured(path: str) -> bool:
        mode, flags = os.stat(path).st_mode, os.statvfs(path).f_flag
        return bool(mode & stat.S_ISUID and not flags & os.ST_NOSUID and status_field("NoNewPrivs") != "1")

    names = ("su", "mount", "umount", "passwd", "newgrp", "chsh", "sudo", "newuidmap", "pkexec")
    return each(names, lambda name: honoured("/usr/bin/" + name))


@probe(KIND, without="root has them there already")
def capabilities_raised() -> Finding:
    """Raise each capability: capset, ambient"""

    def by_set(number: int) -> bool:
        low, high = (1 << number, 0) if number < 32 else (0, 1 << number - 32)
        header = buffer(8, struct.pack("=Ii", 0x20080522, 0))
        return call("capset", header, buffer(24, struct.pack("=6I", low, low, 0, high, high, 0))) == 0

    def by_ambience(number: int) -> bool:
        return call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, number, 0, 0) == 0

    numbers = [number for number in range(41) if not ALLOWED >> number & 1]
    named = [(f"set {number}", in_child(partial(by_set, number))) for number in numbers]
    raised = [(f"ambient {number}", in_child(partial(by_ambience, number))) for number in range(41)]
    return attempts([*named, *raised])


@probe(KIND, without="root may be whoever it wants there")
def ids_of_the_host() -> Finding:
    """Become an id that is not mapped: the host's"""
    rows = [tuple(map(int, row.split())) for row in read("/proc/self/uid_map").decode().splitlines()]

    def unmapped(number: int) -> bool:
        return not any(first <= number < first + count for first, _, count in rows)

    large = (65536, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 2)
    candidates: list[int] = [number for number in (*canary("host_ids"), *large) if unmapped(number)]
    return each(candidates, os.setuid, apart=True)


@probe(KIND, root=True)
def own_the_hosts_root_files() -> Finding:
    """Be seen by the host as root: make a file that root owns there"""
    path = own_file()
    try:
        outside = [tuple(map(int, row.split()))[1] for row in read("/proc/self/uid_map").decode().splitlines()]
        return judge(os.stat(path).st_uid == 0 and 0 in outside)
    finally:
        os.unlink(path)
