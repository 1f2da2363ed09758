"""Output: bytes as they are, bounded, and never silently less."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

from tests.conformance.contract import case

from minisandbox.types import Limits, Outcome
from minisandbox.values import MiB

if TYPE_CHECKING:
    from tests.conformance.contract import World

    from minisandbox.sandbox import AsyncSandbox

GIANT = 10**9


@case("bytes that are not text arrive as they are; as text they are replaced")
async def case_not_text(box: AsyncSandbox) -> None:
    result = await box.exec(r"printf '\xff\xfe\x00ok\xc3'; printf '\xe9' >&2")
    assert result.stdout_bytes == b"\xff\xfe\x00ok\xc3"
    assert result.stdout == "\ufffd\ufffd\0ok\ufffd"
    assert (result.stderr_bytes, result.stderr) == (b"\xe9", "\ufffd")


@case("every byte arrives, NUL and carriage return included")
async def case_every_byte(box: AsyncSandbox) -> None:
    program = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 300 + b'\\r\\n\\0')"
    result = await box.exec(["python3", "-S", "-c", program])
    assert result.stdout_bytes == bytes(range(256)) * 300 + b"\r\n\0"


@case("a character that is split across reads stays one; invalid UTF-8 split across reads is replaced once")
async def case_split_characters(box: AsyncSandbox) -> None:
    pieces = (r"\xc3", r"\xa9|\xe2\x82", r"\xac|\xf0\x9f", r"|\xff")
    result = await box.exec("; sleep 0.1; ".join(f"printf '{piece}'" for piece in pieces))
    assert result.stdout_bytes == b"\xc3\xa9|\xe2\x82\xac|\xf0\x9f|\xff"
    assert result.stdout == "é|€|\ufffd|\ufffd"


@case("invalid UTF-8 at every place of a long output is the same as when decoded at once")
async def case_invalid_everywhere(box: AsyncSandbox) -> None:
    program = "import os\nfor n in range(3000): os.write(1, bytes([0xe2, 0x82, 0xac, 0xff, 0xc3, n % 256]) * 7)"
    result = await box.exec(["python3", "-S", "-c", program], timeout=60)
    whole = b"".join(bytes([0xE2, 0x82, 0xAC, 0xFF, 0xC3, n % 256]) * 7 for n in range(3000))
    assert result.stdout_bytes == whole
    assert result.stdout == whole.decode("utf-8", "replace")


@case("10^9 bytes: memory is bounded and the count of what was dropped is exact", deadline=360.0)
async def case_giant_output(make: World) -> None:
    box = await make(limits=Limits(output=MiB))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await box.exec(f"echo first; head -c {GIANT - 11} /dev/zero; echo last", timeout=300)
    assert result.ok
    assert result.dropped_stdout == GIANT - MiB
    assert len(result.stdout_bytes) < MiB + 100
    assert result.stdout_bytes.startswith(b"first\n\0")
    assert result.stdout_bytes.endswith(b"\0last\n")
    assert b"[... %d bytes dropped ...]" % result.dropped_stdout in result.stdout_bytes
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


@case("head and tail of long output are kept, with a line between that counts what is missing")
async def case_head_and_tail(make: World) -> None:
    box = await make(limits=Limits(output=1000))
    result = await box.exec("seq 1 100000; echo tail-of-errors >&2")
    whole = "".join(f"{number}\n" for number in range(1, 100_001))
    note = f"\n[... {len(whole) - 1000} bytes dropped ...]\n"
    assert result.stdout == whole[:500] + note + whole[-500:]
    assert result.dropped_stdout == len(whole) - 1000
    assert (result.stderr, result.dropped_stderr) == ("tail-of-errors\n", 0)


@case("output of exactly the limit is whole; one byte more is one byte dropped")
async def case_at_the_limit(make: World) -> None:
    box = await make(limits=Limits(output=100))
    exact = await box.exec("head -c 100 /dev/zero | tr '\\0' x")
    assert (exact.stdout, exact.dropped_stdout) == ("x" * 100, 0)
    more = await box.exec("head -c 101 /dev/zero | tr '\\0' x >&2")
    assert (more.dropped_stdout, more.dropped_stderr) == (0, 1)
    assert "[... 1 bytes dropped ...]" in more.stderr


@case("a limit of no output at all still counts")
async def case_no_output_kept(make: World) -> None:
    box = await make(limits=Limits(output=0))
    result = await box.exec("echo hello; echo err >&2")
    assert (result.dropped_stdout, result.dropped_stderr) == (6, 4)
    assert "hello" not in result.stdout


@case("both streams may be large at once")
async def case_both_streams(box: AsyncSandbox) -> None:
    program = """
import os
for n in range(400):
    os.write(1, b"o" * 10000)
    os.write(2, b"e" * 10000)
"""
    result = await box.exec(["python3", "-S", "-c", program], timeout=60)
    assert result.dropped_stdout == result.dropped_stderr == 4_000_000 - MiB
    assert set(result.stdout_bytes[: MiB // 2]) == {ord("o")}
    assert set(result.stderr_bytes[-MiB // 2 :]) == {ord("e")}


@case("ten thousand small writes are all there")
async def case_small_writes(box: AsyncSandbox) -> None:
    result = await box.exec("for i in {1..10000}; do echo $i; done", timeout=60)
    assert result.stdout == "".join(f"{number}\n" for number in range(1, 10_001))


@case("a line of five million bytes, and output without a line feed")
async def case_long_line(make: World) -> None:
    box = await make(limits=Limits(output=6_000_000))
    result = await box.exec("head -c 5000000 /dev/zero | tr '\\0' x; printf end")
    assert result.stdout == "x" * 5_000_000 + "end"


@case("order is kept within a stream, and across streams that the command joins")
async def case_order(box: AsyncSandbox) -> None:
    result = await box.exec("for i in {1..200}; do echo out $i; echo err $i >&2; done 2>&1")
    assert result.stdout == "".join(f"out {n}\nerr {n}\n" for n in range(1, 201))
    assert result.stderr == ""


@case("stdout and stderr are no terminals, and escape sequences pass through")
async def case_no_terminal(box: AsyncSandbox) -> None:
    result = await box.exec(r"[ -t 1 ] || [ -t 2 ] || [ -t 0 ]; echo $?; printf '\033[31mred\033[0m\r\n\a'")
    assert result.stdout_bytes == b"1\n\x1b[31mred\x1b[0m\r\n\a"


@case("a command may close its stdout and go on")
async def case_closed_stdout(box: AsyncSandbox) -> None:
    result = await box.exec("echo before; exec >&-; sleep 0.1; echo err >&2; exit 3", timeout=60)
    assert (result.stdout, result.stderr, result.exit_code) == ("before\n", "err\n", 3)


@case("a command may close all of its descriptors and go on; its status arrives, and so does a timeout")
async def case_closed_descriptors(box: AsyncSandbox) -> None:
    program = "import os, time; os.write(1, b'x'); os.closerange(0, 4096); time.sleep({}); os._exit(7)"
    result = await box.exec(["python3", "-S", "-c", program.format(0.2)], timeout=60)
    assert (result.outcome, result.exit_code, result.stdout) == (Outcome.EXITED, 7, "x")
    late = await box.exec(["python3", "-S", "-c", program.format(300)], timeout=0.5)
    assert (late.outcome, late.stdout) == (Outcome.TIMEOUT, "x")


@case("what a command printed before a signal ended it is there")
async def case_output_before_a_signal(box: AsyncSandbox) -> None:
    result = await box.exec("echo out; echo err >&2; kill -9 $$")
    assert (result.signal, result.stdout, result.stderr) == (9, "out\n", "err\n")


@case("what is in the pipe when the command ends is there")
async def case_last_words(box: AsyncSandbox) -> None:
    for _ in range(20):
        result = await box.exec(["head", "-c", "60000", "/dev/zero"])
        assert (len(result.stdout_bytes), result.dropped_stdout) == (60_000, 0)


@case("commands that print at the same time do not mix")
async def case_no_mixing(make: World, box: AsyncSandbox) -> None:
    async def shout(word: str) -> str:
        return (await box.exec(f"for i in {{1..500}}; do echo {word}; done", timeout=60)).stdout

    words = [f"word-{number}" for number in range(8)]
    assert await make.together(*map(shout, words)) == [f"{word}\n" * 500 for word in words]


@case("output is read while a command is flooding, and a reader that leaves ends the writer")
async def case_broken_pipe(box: AsyncSandbox) -> None:
    result = await box.exec("set -o pipefail; yes | head -n 3; echo ${PIPESTATUS[0]}", timeout=60)
    assert result.stdout == "y\ny\ny\n141\n"
