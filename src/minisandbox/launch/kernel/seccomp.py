"""The system-call filter of a sandbox; it applies to pid 1 and the workers too.

The filter denies by default: it refuses every system call that :mod:`.seccomp_rules` does not name. A call of another
architecture (i386 by ``int 0x80``, 32-bit ARM) gets ENOSYS before its number is examined. So does x32, whose numbers
are above all known ones. A kernel built without them behaves the same, so programs fall back or exit.

:func:`assemble` builds the filter once; :func:`install` applies it to the calling thread and its descendants.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from . import seccomp_bpf as bpf
from .seccomp_rules import ALLOW, OWNERS, Rule, rules_by_name
from .seccomp_tables import NEWEST, known_calls
from .syscalls import CallError

AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""``AUDIT_ARCH_*`` (linux/audit.h) of the supported architectures."""
UNKNOWN = errno.ENOSYS
"""The verdict on unknown system call numbers, and on calls of another architecture."""

# the calls that this module makes: seccomp, unshare, clone3
_NUMBERS = {"x86_64": (317, 272, 435), "aarch64": (277, 97, 435)}
_SET_MODE_FILTER = 1
_ALLOW_SPECULATION = 1 << 2
"""SECCOMP_FILTER_FLAG_SPEC_ALLOW (seccomp(2)). Without it, kernels before Linux 5.16 enable SSBD and STIBP with a
filter. These slow the whole program down, to protect it against its own code."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class SystemCall:
    """One system call and its rule.

    Attributes:
        number: its number.
        name: its name.
        rule: the rule that decides.
    """

    number: int
    name: str
    rule: Rule


class _Filter(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def machine() -> str:
    """Return the architecture of this process.

    Raises:
        ValueError: the architecture is not supported.
    """
    name = os.uname().machine
    if name not in AUDIT_ARCHITECTURES or sys.maxsize < 1 << 32 or sys.byteorder != "little":
        raise ValueError(f"there is no system-call filter for a {sys.maxsize.bit_length() + 1}-bit process on {name}")
    return name


def calls(architecture: str | None = None) -> tuple[SystemCall, ...]:
    """Return every known system call with its rule, in ascending order of numbers.

    Args:
        architecture: ``x86_64`` or ``aarch64``; None is this process's.

    Raises:
        ValueError: the architecture is not supported, or a known call has no rule.
    """
    rules, names = rules_by_name(), known_calls(architecture or machine())
    names_without_rule = [name for name in names.values() if name not in rules]
    if names_without_rule:
        raise ValueError(f"no rule for {', '.join(names_without_rule)}")
    return tuple(SystemCall(number, name, rules[name]) for number, name in sorted(names.items()))


@cache
def assemble(architecture: str | None = None) -> bytes:
    """Return the filter as an array of struct sock_filter.

    Args:
        architecture: ``x86_64`` or ``aarch64``; None is this process's.

    Raises:
        ValueError: as :func:`calls`.
    """
    architecture = architecture or machine()
    return bpf.complete_filter(AUDIT_ARCHITECTURES[architecture], list(_pieces(architecture)), UNKNOWN)


def _pieces(architecture: str) -> Iterator[tuple[int, bpf.Code]]:
    """Yield the verdicts by their first system call number; consecutive numbers with the same verdict are merged."""
    codes = {call.number: bpf.check_arguments(call.rule.clauses, call.rule.verdict) for call in calls(architecture)}
    previous_code: bpf.Code = []
    for number in range(NEWEST + 2):
        code = codes.get(number) or bpf.decide(UNKNOWN)
        if code != previous_code:
            yield number, code
        previous_code = code


def install() -> None:
    """Install the filter permanently in the calling thread and all its future child processes.

    The filter requires no_new_privs (prctl(2)) and survives execve(2). Other threads are not affected; the launcher's
    processes have none.

    Raises:
        ValueError: as :func:`calls`.
        CallError: the kernel refused: EACCES without no_new_privs, EINVAL if it lacks seccomp filters.
    """
    _install(assemble())


def pretend_owners() -> None:
    """Make changes of file owners and ids do nothing but return success, in this thread and its descendants.

    Call it before :func:`install`, which permits no further filter. It restricts nothing, because the affected calls
    are allowed.

    Raises:
        CallError: the kernel refused.
    """
    rules = {name: rule for rule in OWNERS for name in rule.names}
    code = {number: rules[name] for number, name in known_calls(machine()).items() if name in rules}
    pieces = [(0, bpf.decide(ALLOW))]
    for number, rule in sorted(code.items()):
        pieces.append((number, bpf.check_arguments(rule.clauses, rule.verdict)))
        if number + 1 not in code:
            pieces.append((number + 1, bpf.decide(ALLOW)))
    _install(bpf.complete_filter(AUDIT_ARCHITECTURES[machine()], pieces, ALLOW))


def _install(program: bytes) -> None:
    program_struct = _Filter(len(program) // 8, program)
    if _libc.syscall(_NUMBERS[machine()][0], _SET_MODE_FILTER, _ALLOW_SPECULATION, ctypes.byref(program_struct)) != 0:
        raise CallError(ctypes.get_errno(), "seccomp", "the sandbox's filter")


def verify() -> None:
    """Make two harmless system calls whose results prove that the filter is installed.

    Raises:
        OSError: a system call was not refused.
    """
    _, unshare, clone3 = _NUMBERS[machine()]
    # without a filter, unshare(0) would succeed, and clone3 with size 0 would fail with EINVAL
    for name, number, expected in (("unshare", unshare, errno.EPERM), ("clone3", clone3, errno.ENOSYS)):
        if _libc.syscall(number, 0, 0) == 0 or ctypes.get_errno() != expected:
            raise OSError(errno.ENOTRECOVERABLE, f"the system-call filter does not work: {name} is not refused")


def simulate(
    architecture: str, number: int, arguments: Sequence[int] = (), *, audit_architecture: int | None = None
) -> int:
    """Return the verdict of an architecture's filter on a system call, without making the call.

    Args:
        architecture: architecture of the filter.
        number: number of the system call.
        arguments: arguments of the system call, as 64-bit numbers.
        audit_architecture: ``AUDIT_ARCH_*`` of the system call; None is the filter's architecture.

    Returns:
        The verdict: 0 if the call is allowed, else the errno that the caller gets.

    Raises:
        ValueError: the architecture is not supported.
    """
    program = assemble(architecture)
    convention = AUDIT_ARCHITECTURES[architecture] if audit_architecture is None else audit_architecture
    return bpf.run(program, convention, number, arguments)


def describe(architecture: str | None = None) -> Iterator[str]:
    """Yield the filter as text: a line for each system call, followed by a line for each condition on its arguments.

    Args:
        architecture: architecture of the filter; None is this process's.

    Raises:
        ValueError: as :func:`calls`.
    """
    name = architecture or machine()
    all_calls = calls(name)
    allowed_count = sum(call.rule.verdict == ALLOW and not call.rule.clauses for call in all_calls)
    conditional_count = sum(bool(call.rule.clauses) for call in all_calls)
    instruction_count = len(assemble(name)) // 8
    refused_count = len(all_calls) - allowed_count - conditional_count
    counts = f"{allowed_count} allowed, {conditional_count} by their arguments, {refused_count} refused"
    yield f"System calls of {name}: {counts}."
    other = f"Any other number, and any other architecture's convention: {verdict_name(UNKNOWN)}."
    yield f"{other} {instruction_count} instructions."
    for call in all_calls:
        yield from _describe_call(call)


def _describe_call(call: SystemCall) -> Iterator[str]:
    rule = call.rule
    verdict = "by arguments" if rule.clauses else verdict_name(rule.verdict)
    yield f"{call.number:>4} {call.name:<24} {verdict:<15} {rule.reason}"
    for clause in rule.clauses:
        yield f"{'':>31}{verdict_name(clause.verdict):<15} - {clause.when}"
    if rule.clauses:
        yield f"{'':>31}{verdict_name(rule.verdict):<15} - otherwise"


def verdict_name(verdict: int) -> str:
    """Return a verdict's name: ``allowed``, or the name of the errno."""
    return "allowed" if verdict == ALLOW else errno.errorcode[verdict]
