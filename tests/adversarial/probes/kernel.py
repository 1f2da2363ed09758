"""System calls by number, for what Python has no function for."""

from __future__ import annotations

import ctypes
import os
from typing import Union

from .core import REFUSALS, Missing

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
MACHINES = ("x86_64", "aarch64")

# --- numbers: x86_64, aarch64; None where there is no such call; one number where both agree (all calls since 424) ---
NUMBERS: dict[str, int | tuple[int, int | None]] = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280), "capset": (126, 91),
    "chroot": (161, 51), "clock_adjtime": (305, 266), "clock_settime": (227, 112), "clone": (56, 220), "clone3": 435,
    "delete_module": (176, 106), "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    "file_setattr": 469, "finit_module": (313, 273), "fsconfig": 431, "fsmount": 432, "fsopen": 430, "fspick": 433,
    "get_mempolicy": (239, 236), "getpid": (39, 172), "init_module": (175, 105), "inotify_add_watch": (254, 27),
    "inotify_init1": (294, 26), "io_setup": (206, 0), "io_uring_enter": 426,
    "io_uring_register": 427, "io_uring_setup": 425, "ioctl": (16, 29), "ioperm": (173, None), "iopl": (172, None),
    "ioprio_set": (251, 30), "kcmp": (312, 272), "kexec_file_load": (320, 294), "kexec_load": (246, 104),
    "keyctl": (250, 219), "listmount": 458, "listns": 470, "lookup_dcookie": (212, 18), "lsm_list_modules": 461,
    "mbind": (237, 235), "memfd_secret": 447, "migrate_pages": (256, 238), "modify_ldt": (154, None),
    "mount": (165, 40), "mount_setattr": 442, "move_mount": 429, "move_pages": (279, 239), "mq_open": (240, 180),
    "mq_unlink": (241, 181), "msgctl": (71, 187), "msgget": (68, 186),
    "msgsnd": (69, 189), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "open_tree": 428, "open_tree_attr": 467, "perf_event_open": (298, 241), "personality": (135, 92),
    "pidfd_getfd": 438, "pidfd_open": 434, "pidfd_send_signal": 424, "pivot_root": (155, 41), "prctl": (157, 167),
    "prlimit64": (302, 261), "process_madvise": 440, "process_mrelease": 448, "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "ptrace": (101, 117), "quotactl": (179, 60), "quotactl_fd": 443,
    "reboot": (169, 142), "request_key": (249, 218), "semctl": (66, 191), "semget": (64, 190),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": 450, "setdomainname": (171, 162), "sethostname": (170, 161), "setns": (308, 268),
    "settimeofday": (164, 170), "shmat": (30, 196), "shmctl": (31, 195), "shmget": (29, 194), "socket": (41, 198),
    "statmount": 457, "swapoff": (168, 225), "swapon": (167, 224), "sync": (162, 81), "syncfs": (306, 267),
    "sysfs": (139, None), "syslog": (103, 116),
    "umount2": (166, 39), "unshare": (272, 97), "uselib": (134, None), "userfaultfd": (323, 282),
    "ustat": (136, None), "vhangup": (153, 58),
}  # fmt: skip

NAMESPACE_FLAGS = {
    "mnt": 0x00020000, "cgroup": 0x02000000, "uts": 0x04000000, "ipc": 0x08000000, "user": 0x10000000,
    "pid": 0x20000000, "net": 0x40000000, "time": 0x00000080,
}  # fmt: skip
AT_FDCWD = -100
Argument = Union[int, bytes, None, "ctypes.Array[ctypes.c_char]"]


def number_of(name: str) -> int:
    """A call's number on this machine."""
    machine = os.uname().machine
    if machine not in MACHINES:
        raise Missing(f"its number on {machine} is not known")
    entry = NUMBERS[name]
    number = entry if isinstance(entry, int) else entry[MACHINES.index(machine)]
    if number is None:
        raise Missing(f"no such call on {machine}")
    return number


def call(name: str | int, *arguments: Argument) -> int:
    """Make a system call; -1 is raised as OSError."""
    number = number_of(name) if isinstance(name, str) else name
    converted = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    padded = [*converted, *[ctypes.c_long(0)] * (6 - len(converted))]
    ctypes.set_errno(0)
    result = LIBC.syscall(ctypes.c_long(number), *padded)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(name))
    return int(result)


def reaches(name: str | int, *arguments: Argument) -> bool:
    """Whether a call gets past those who ask for permission: any error but a refusal says so."""
    try:
        call(name, *arguments)
    except OSError as error:
        if error.errno in REFUSALS:
            raise
    return True


def buffer(size: int, content: bytes = b"") -> ctypes.Array[ctypes.c_char]:
    """Memory for the kernel to read or write."""
    return ctypes.create_string_buffer(content, size)
