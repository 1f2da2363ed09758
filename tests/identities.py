"""What ids the sandboxes of a test have."""

from __future__ import annotations

from minisandbox.sandbox import Sandbox


def has_one_id(box: Sandbox) -> bool:
    """Return whether a sandbox has one user id only: no newuidmap, or no range in /etc/subuid."""
    return box.exec("awk '{n += $3} END {print n}' /proc/self/uid_map").stdout == "1\n"
