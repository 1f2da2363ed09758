"""Find the file system of a directory."""

from __future__ import annotations

import os
import re
from pathlib import Path

USR_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Names in the root directory that may be links into ``/usr``."""
_ESCAPED = re.compile(rb"\\([0-7]{3})")  # escaped white space in the paths of mountinfo
_NETWORK = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gpfs", "lustre", "nfs", "nfs4", "panfs", "pvfs2", "smb3",
        "smbfs", "wekafs",
    }
)  # fmt: skip


def is_network(kind: str) -> bool:
    """Return whether a type of file system may be shared with other machines.

    FUSE counts, because most of its file systems are shared (sshfs, gcsfuse, juicefs), and the kernel does not report
    which.
    """
    return kind in _NETWORK or kind.startswith("fuse.")


def file_system(directory: Path) -> str:
    """Return the type of a directory's file system, from the mount table (proc_pid_mountinfo(5))."""
    device = os.stat(directory).st_dev
    device_number = f"{os.major(device)}:{os.minor(device)}"
    kind, best_weight = "unknown", -1
    for line in Path("/proc/thread-self/mountinfo").read_bytes().splitlines():
        fields = os.fsdecode(line).split()
        mount_point = os.fsdecode(_ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), line.split()[4]))
        # prefer the same device, then the longest prefix; btrfs subvolumes have different device numbers in stat(2)
        is_below = directory == Path(mount_point) or Path(mount_point) in directory.parents
        weight = len(mount_point) + (10_000 if fields[2] == device_number else 0)
        if is_below and weight > best_weight:
            kind, best_weight = fields[fields.index("-") + 1], weight
    return kind
