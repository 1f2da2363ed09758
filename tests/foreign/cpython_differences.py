"""Where CPython's tests end differently in a sandbox, and which of our rules makes them.

The rules of system calls are rows of ``launch/kernel/seccomp_rules.py``; docs/design/system-calls.md says why each is
there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """A rule, and the tests that it makes end differently.

    Attributes:
        rule: what is different in a sandbox, and why.
        tests: by the names that unittest gives them.
        outside: how they end on the host.
        inside: how they end in a sandbox.
        root: whether root alone sees it.
    """

    rule: str
    tests: tuple[str, ...]
    outside: str = "ok"
    inside: str = "failed"
    root: bool = False


IGNORED = {
    "*VSOCK*": "in a virtual machine without a peer they wait for ever on the host; sandboxes have no AF_VSOCK",
    "*UDPLITE*": "seccomp: IPPROTO_UDPLITE is EPROTONOSUPPORT, and threads of these tests end without a report",
    "*test_sethostname": "it renames the host for a moment; in a sandbox it is skipped, since root there may not",
}
"""Patterns of tests that are left out on both sides, with the reason."""

DIFFERENCES = (
    Difference(
        "mounts: / is an overlay of two file systems: readdir(3) and stat(2) give a directory different inode numbers",
        ("test.test_os.TestScandir.test_attributes",),
    ),
    Difference(
        "ids: root of a sandbox has no CAP_SYS_RESOURCE on the host, so RLIMIT_NPROC holds for it",
        ("test.test_subprocess.POSIXProcessTestCase.test_preexec_fork_failure",),
        outside="skipped",
        inside="ok",
        root=True,
    ),
)


def difference_of(name: str, *, root: bool) -> Difference | None:
    """Return what the table has about a test, or None."""
    rows = (row for row in DIFFERENCES if name in row.tests and (root or not row.root))
    return next(rows, None)
