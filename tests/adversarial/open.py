"""Known limits and their reasons, each documented in docs/security. A closed one fails its test until its line goes."""

from __future__ import annotations

UNMAPPED = "without control groups only memory that a process has mapped counts"
UNCHARGED = "the kernel charges this memory to no control group"
UNREFUSED = "the filter refuses no call for its accounting alone"
HOLES = {
    "limit-memory-that-nobody-maps": UNMAPPED,
    "limit-memory-that-was-let-go": UNMAPPED,
    "limit-memory-of-messages": UNMAPPED,
    "limit-memory-of-semaphores": UNMAPPED,
    "limit-memory-of-sockets": UNMAPPED,
    "limit-memory-of-connections": UNCHARGED,
    "limit-memory-of-netlink": UNCHARGED,
    "limit-memory-of-errors": UNCHARGED,
    "limit-memory-of-disconnected": UNMAPPED,
    "limit-memory-of-directories": UNCHARGED,
    "limit-memory-of-directories-under-way": UNCHARGED,
    "limit-memory-of-directories-out-of-sight": UNCHARGED,
    "limit-memory-of-directories-under-way-out-of-sight": UNCHARGED,
    "limit-pages-moved-to-pipes": UNREFUSED,
    "limit-what-was-received-mapped": UNREFUSED,
    "limit-options-that-nobody-counts": UNREFUSED,
    "limit-labels-that-all-share": UNREFUSED,
    "limit-sources-of-multicast": UNREFUSED,
}
"""Probes that get through, on every machine."""
SHARED = {
    "descriptors": "of those under way the kernel has one count for the user, and no limit but each sender's own",
}
"""What an ordinary user's sandboxes use up for the commands of others and for the user's programs (test_shared.py)."""
