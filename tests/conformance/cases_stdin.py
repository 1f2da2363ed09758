"""Standard input: empty unless given, whole, and never in the way."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from tests.conformance.contract import case

if TYPE_CHECKING:
    from minisandbox.sandbox import AsyncSandbox


@case("stdin is empty unless given")
async def case_empty(box: AsyncSandbox) -> None:
    assert (await box.exec("cat; echo end", timeout=60)).stdout == "end\n"
    assert (await box.exec("read line; echo $?", timeout=60)).stdout == "1\n"
    assert (await box.exec("cat; echo end", stdin=b"", timeout=60)).stdout == "end\n"
    assert (await box.exec("cat; echo end", stdin="", timeout=60)).stdout == "end\n"


@case("text and bytes arrive whole")
async def case_whole(box: AsyncSandbox) -> None:
    assert (await box.exec("cat", stdin="héllo\n")).stdout == "héllo\n"
    data = bytes(range(256)) * 1000
    assert (await box.exec("cat", stdin=data)).stdout_bytes == data


@case("text with surrogate escapes (PEP 383) is the bytes that it stands for")
async def case_surrogates(box: AsyncSandbox) -> None:
    assert (await box.exec("cat", stdin="caf\udce9")).stdout_bytes == b"caf\xe9"


@case("fifty million bytes arrive whole", deadline=240.0)
async def case_large(box: AsyncSandbox) -> None:
    data = hashlib.shake_256(b"seed").digest(1_000_000) * 50
    result = await box.exec(["sha256sum"], stdin=data, timeout=60)
    assert result.stdout.split()[0] == hashlib.sha256(data).hexdigest()


@case("a command that never reads its stdin, however much there is")
async def case_never_read(box: AsyncSandbox) -> None:
    result = await box.exec("exit 4", stdin=b"x" * 20_000_000, timeout=60)
    assert result.exit_code == 4
    later = await box.exec("sleep 0.5; echo late", stdin=b"x" * 20_000_000, timeout=60)
    assert later.stdout == "late\n"


@case("a command that closes its stdin, or reads a part of it")
async def case_partly_read(box: AsyncSandbox) -> None:
    result = await box.exec("exec <&-; sleep 0.2; echo closed", stdin=b"x" * 5_000_000, timeout=60)
    assert (result.stdout, result.exit_code) == ("closed\n", 0)
    assert (await box.exec("head -c 3", stdin=b"abc" * 2_000_000, timeout=60)).stdout == "abc"


@case("a slow reader gets everything, while output flows the other way")
async def case_slow_reader(box: AsyncSandbox) -> None:
    program = """
import os, time
total = 0
while data := os.read(0, 200_000):
    total += len(data); os.write(1, b"."); time.sleep(0.005)
print(total)
"""
    result = await box.exec(["python3", "-S", "-c", program], stdin=b"x" * 3_000_000, timeout=60)
    assert result.stdout.lstrip(".") == "3000000\n"


@case("more goes in and comes out than any pipe holds")
async def case_both_ways(box: AsyncSandbox) -> None:
    data = b"0123456789abcde\n" * 60_000
    assert (await box.exec(["cat"], stdin=data, timeout=60)).stdout_bytes == data


@case("programs of a script share its stdin")
async def case_shared(box: AsyncSandbox) -> None:
    result = await box.exec("read a; read b; echo $b $a; cat", stdin="1\n2\n3\n")
    assert result.stdout == "2 1\n3\n"


@case("stdin is a program for an interpreter that reads one")
async def case_program(box: AsyncSandbox) -> None:
    assert (await box.exec(["python3", "-"], stdin="print(6 * 7)\n")).stdout == "42\n"
    assert (await box.exec(["bash", "-s", "x"], stdin="echo $1")).stdout == "x\n"
