"""Assemble classic BPF filters, and interpret them in tests.

Every piece of code is self-contained: each path ends in a return, and jumps go forward within the piece. So pieces are
concatenated without labels to resolve. Sources: linux/filter.h, linux/seccomp.h,
Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from .seccomp_rules import ALLOW, PRETEND, Clause, Test

# operation codes (linux/bpf_common.h): LD|W|ABS, ALU|AND|K, JMP|JA, JMP|JEQ|K, JMP|JGE|K, RET|K
_LOAD = 0x20
_AND = 0x54
_JUMP = 0x05
_IF_EQUAL = 0x15
_IF_AT_LEAST = 0x35
_RETURN = 0x06

_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_DATA = struct.Struct("=IIQ6Q")
_INSTRUCTION = struct.Struct("=HBBI")
_FARTHEST = 255  # a conditional jump's offset is a byte
_LOW = 0xFFFFFFFF

# SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
_RETURN_ALLOW = 0x7FFF0000
_RETURN_ERRNO = 0x00050000

Instruction = tuple[int, int, int, int]
"""code, jt, jf, k: struct sock_filter."""
Code = list[Instruction]


def decide(verdict: int) -> Code:
    """Return code that returns a verdict."""
    if verdict == ALLOW:
        return [(_RETURN, 0, 0, _RETURN_ALLOW)]
    return [(_RETURN, 0, 0, _RETURN_ERRNO | (0 if verdict == PRETEND else verdict))]


def check_arguments(clauses: Iterable[Clause], verdict: int) -> Code:
    """Return code that returns the verdict of the first clause whose tests hold, otherwise ``verdict``."""
    code = decide(verdict)
    for clause in reversed(tuple(clauses)):
        clause_code = decide(clause.verdict)
        for test in reversed(clause.tests):
            clause_code = _test(test, len(clause_code)) + clause_code
        code = clause_code + code
    return code


def _test(test: Test, skip_count: int) -> Code:
    """Return code that continues if a test holds, and otherwise skips ``skip_count`` further instructions."""
    low = _ARGUMENTS + 8 * test.argument  # little-endian: the low word comes first
    code = _compare(low, test, skip_count)
    if test.wide:
        return _compare(low + 4, Test(test.argument, (0,)), skip_count + len(code)) + code
    return code


def _compare(offset: int, test: Test, skip_count: int) -> Code:
    code: Code = [(_LOAD, 0, 0, offset)]
    if test.mask != _LOW:
        code.append((_AND, 0, 0, test.mask))
    last_index = len(test.values) - 1
    for index, value in enumerate(test.values):
        remaining = last_index - index
        on_match, on_mismatch = (remaining, skip_count) if test.one_of else (remaining + skip_count, 0)
        code.append((_IF_EQUAL, on_match, on_mismatch if remaining == 0 else 0, value))
    return code


def search(pieces: Sequence[tuple[int, Code]]) -> Code:
    """Return code that finds the piece for a system call number by binary search.

    Args:
        pieces: (first number, code) in ascending order; a piece covers all numbers below the next first number.
    """
    if len(pieces) == 1:
        return pieces[0][1]
    middle = len(pieces) // 2
    lower, upper = search(pieces[:middle]), search(pieces[middle:])
    return _branch(pieces[middle][0], lower) + lower + upper


def _branch(first_upper: int, lower: Code) -> Code:
    if len(lower) <= _FARTHEST:
        return [(_IF_AT_LEAST, len(lower), 0, first_upper)]
    return [(_IF_AT_LEAST, 0, 1, first_upper), (_JUMP, 0, 0, len(lower))]


def complete_filter(audit_architecture: int, pieces: Sequence[tuple[int, Code]], foreign_verdict: int) -> bytes:
    """Return a complete filter, which tests the architecture and then the system call number.

    Args:
        audit_architecture: ``AUDIT_ARCH_*`` of the architecture that the numbers belong to.
        pieces: pieces of code as in :func:`search`.
        foreign_verdict: verdict for system calls of any other architecture.

    Returns:
        An array of struct sock_filter.
    """
    refusal = decide(foreign_verdict)
    code: Code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, len(refusal), 0, audit_architecture),
        *refusal,
        (_LOAD, 0, 0, _NUMBER),
        *search(pieces),
    ]
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in code)


def instructions(program: bytes) -> Iterable[Instruction]:
    """Decode the instructions of a filter."""
    return _INSTRUCTION.iter_unpack(program)


def run(program: bytes, audit_architecture: int, number: int, arguments: Sequence[int]) -> int:
    """Interpret a filter as the kernel does.

    Args:
        program: the filter.
        audit_architecture: ``AUDIT_ARCH_*`` of the system call.
        number: number of the system call.
        arguments: up to six arguments, each of 64 bits.

    Returns:
        The verdict, as in :mod:`.seccomp_rules`.

    Raises:
        ValueError: the kernel would reject the filter, or the filter returns an unknown verdict.
    """
    six_arguments = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = _DATA.pack(number & _LOW, audit_architecture, 0, *(value & (1 << 64) - 1 for value in six_arguments))
    code = list(instructions(program))
    accumulator = position = 0
    while position < len(code):
        operation, if_true, if_false, constant = code[position]
        position += 1
        if operation == _LOAD and constant % 4 == 0 and constant < len(data):
            (accumulator,) = struct.unpack_from("=I", data, constant)
        elif operation == _AND:
            accumulator &= constant
        elif operation == _JUMP:
            position += constant
        elif operation == _IF_EQUAL:
            position += if_true if accumulator == constant else if_false
        elif operation == _IF_AT_LEAST:
            position += if_true if accumulator >= constant else if_false
        elif operation == _RETURN:
            return _verdict(constant)
        else:
            raise ValueError(f"instruction {position - 1} may not be in a filter: {operation:#x}, {constant:#x}")
    raise ValueError("the filter runs past its end")


def _verdict(action: int) -> int:
    if action == _RETURN_ALLOW:
        return ALLOW
    if action & ~0xFFFF == _RETURN_ERRNO and action & 0xFFFF:
        return action & 0xFFFF
    raise ValueError(f"no verdict: {action:#x}")
