"""What is known to be open, with the reason. A line goes when the hole is closed: a test fails as long as it stays."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hole:
    """A probe that gets through.

    Attributes:
        probe: its name.
        reason: why it does.
        ordinary: only in sandboxes of ordinary users.
        many: only where a sandbox has many ids.
        needs: only on machines that have this file.
    """

    probe: str
    reason: str
    ordinary: bool = False
    many: bool = False
    needs: str = "/"

    def applies(self, ids: int) -> bool:
        """Whether it is to be expected here, in sandboxes with so many ids."""
        return (not self.ordinary or os.geteuid() != 0) and (not self.many or ids > 1) and os.path.exists(self.needs)


KNOWN = (
    Hole("limit-memory-of-sockets", "without control groups nobody counts the kernel's own memory"),
)  # fmt: skip
SHARED = {
    "descriptors": "of those under way the kernel has one count for the user, and no limit but each sender's own",
}
"""What an ordinary user's sandboxes use up for the commands of others and for the user's programs (test_shared.py)."""
HOLES = {hole.probe: hole for hole in KNOWN}
