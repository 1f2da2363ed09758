"""Known holes and their reasons, each documented in docs/security. A closed hole fails its test until its line goes."""

from __future__ import annotations

HOLES = {
    "limit-memory-that-was-let-go": "without control groups nothing shows shared memory that nobody has mapped",
}
"""Probes that get through, on every machine."""
SHARED = {
    "descriptors": "of those under way the kernel has one count for the user, and no limit but each sender's own",
}
"""What an ordinary user's sandboxes use up for the commands of others and for the user's programs (test_shared.py)."""
