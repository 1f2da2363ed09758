"""What of the host shows through: in /proc, /sys, the environment, names and tables."""

from __future__ import annotations

import hashlib
import os
import re
from functools import partial

from .core import Finding, all_pids, attempts, canary, each, is_secret, judge, opened, probe, read
from .files import walk

KIND = "leak"
SUSPICIOUS = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|^(SSH|AWS|SUDO|XDG|DBUS|VIRTUAL_ENV|PYTEST|MINISANDBOX)_?")
MASKED = (
    "kcore", "keys", "key-users", "timer_list", "sched_debug", "latency_stats", "kmsg", "timer_stats", "vmallocinfo",
    "slabinfo", "pagetypeinfo", "iomem", "ioports", "kpagecount", "kpageflags", "interrupts", "cmdline", "config.gz",
)  # fmt: skip
MASKED_DIRECTORIES = ("/proc/acpi", "/proc/asound", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap")
TABLES = ("mountinfo", "mounts", "mountstats", "cgroup", "maps", "environ", "cmdline", "smaps_rollup", "stat", "comm")


@probe(KIND)
def secrets_in_its_environment() -> Finding:
    """Find secrets in one's own environment"""
    found = [name for name, value in os.environ.items() if is_secret(value.encode())]
    return judge(found, str(found))


@probe(KIND)
def names_in_its_environment() -> Finding:
    """Find variables of the one who started it in one's own environment"""
    found = [name for name in os.environ if SUSPICIOUS.search(name) and not name.startswith("PYTHON")]
    return judge(found, str(found))


@probe(KIND)
def environments_of_all() -> Finding:
    """Find secrets in the environment of any process that shows"""
    return each(all_pids(), lambda pid: is_secret(read(f"/proc/{pid}/environ", 1 << 20)))


@probe(KIND)
def arguments_of_all() -> Finding:
    """Find host paths in the arguments of any process that shows"""
    word = canary("leak_path").encode()

    def attempt(pid: int) -> bool:
        return word in read(f"/proc/{pid}/cmdline")

    return each(all_pids(), attempt)


@probe(KIND)
def paths_in_tables() -> Finding:
    """Find host paths in what /proc says about processes: mounts, control groups, memory"""
    words = [
        canary("leak_path").encode(),
        canary("home").encode() if canary("home") != "/root" else b"/minisandbox-none",
    ]

    def attempt(pid: str, table: str) -> bool:
        text = read(f"/proc/{pid}/{table}", 1 << 20)
        return any(word in text for word in words)

    pids = sorted({"self", "1", str(os.getppid()), *map(str, all_pids()[:30])})
    return attempts((f"{pid}/{table}", partial(attempt, pid, table)) for pid in pids for table in TABLES)


@probe(KIND)
def links_of_processes() -> Finding:
    """Find host paths in the links of processes: exe, cwd, root, descriptors, mapped files"""
    word = canary("leak_path")

    def attempt(pid: int) -> bool:
        names = ["exe", "cwd", "root", *("fd/" + name for name in os.listdir(f"/proc/{pid}/fd"))]
        return any(word in os.readlink(f"/proc/{pid}/{name}") for name in names)

    return each(all_pids(), attempt)


@probe(KIND)
def name_of_the_host() -> Finding:
    """Learn the host's name"""
    name = canary("hostname")
    files = ("/proc/sys/kernel/hostname", "/etc/hostname", "/etc/hosts")
    if os.uname().nodename == name:
        return opened("uname")
    return each(files, lambda path: name in read(path).decode().split())


@probe(KIND, maybe=True)
def identity_of_the_machine() -> Finding:
    """Learn the host's machine id"""
    digest = canary("machine_id_sha256")
    paths = ("/etc/machine-id", "/var/lib/dbus/machine-id", "/sys/class/dmi/id/product_uuid")
    return each(paths, lambda path: hashlib.sha256(read(path).strip()).hexdigest() == digest)


@probe(KIND)
def users_of_the_host() -> Finding:
    """Learn who uses the host from /etc/passwd and /etc/group"""
    words = set(canary("host_users"))
    found = [
        line.split(b":")[0].decode()
        for path in ("/etc/passwd", "/etc/group", "/etc/subuid")
        if os.path.exists(path)
        for line in read(path, 1 << 20).splitlines()
    ]
    return judge(words & set(found), str(sorted(words & set(found))))


@probe(KIND, maybe=True)
def kernel_files_to_hide() -> Finding:
    """Read what containers hide of /proc: memory image, keys, timers, scheduler, log, maps of the machine"""
    return each(MASKED, lambda name: read("/proc/" + name, 64))


@probe(KIND, maybe=True)
def kernel_directories_to_hide() -> Finding:
    """Look into what containers hide of /proc and /sys: ACPI, sound, SCSI, firmware, power"""
    return each(MASKED_DIRECTORIES, os.listdir)


@probe(KIND, root=True)
def addresses_of_the_kernel() -> Finding:
    """Learn where the kernel lies in memory"""

    def attempt(path: str) -> bool:
        rows = read(path, 4096).decode().splitlines()
        return any(int(word, 16) for row in rows for word in re.findall(r"\b(?:0x)?([0-9a-f]{16})\b", row))

    return each(("/proc/kallsyms", "/proc/modules"), attempt)


@probe(KIND, without="the host's tree is full of the host's paths")
def names_of_the_host_in_small_files() -> Finding:
    """Find the host's name, paths or secret in any small file of /etc, /run, /var and /tmp"""
    words = [canary("leak_path").encode(), canary("secret_name").encode()]

    def tells(path: str) -> bool:
        if not os.path.isfile(path) or os.path.getsize(path) > 1 << 16:
            return False
        text = read(path)
        return is_secret(text) or any(word in text for word in words)

    tops = ("/etc", "/run", "/var", "/home", "/root", "/mnt", "/srv", "/opt")
    return each([path for top in tops for path in walk(top, 3)], tells)


@probe(KIND)
def control_groups() -> Finding:
    """Learn the path of one's control group on the host"""
    rows = read("/proc/self/cgroup").decode().splitlines()
    paths = [row.split(":", 2)[2] for row in rows]
    same = os.readlink("/proc/self/ns/cgroup") == canary("namespaces")["cgroup"]
    return judge(same or any(path not in ("/", "") and ".." in path for path in paths), "; ".join(sorted(set(paths))))
