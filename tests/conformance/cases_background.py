"""Background children: they never hold a result back, and they live on."""

from __future__ import annotations

import platform
import time
from typing import TYPE_CHECKING

from tests.conformance.contract import a_while, case, count, ended, runs, until

from minisandbox.types import Limits, Outcome

if TYPE_CHECKING:
    from tests.conformance.contract import World

    from minisandbox.sandbox import AsyncSandbox


@case("a background child that holds stdout does not hold the result; it lives on and is counted")
async def case_held_stdout(box: AsyncSandbox) -> None:
    mark, started = a_while(), time.monotonic()
    result = await box.exec(f"sleep {mark} & echo started")
    assert time.monotonic() - started < 60
    assert (result.stdout, result.exit_code, result.left_running) == ("started\n", 0, 1)
    assert await runs(box, f"sleep {mark}")


@case("daemons do not hold the result either, and live on")
async def case_daemon_lives_on(box: AsyncSandbox) -> None:
    mark = a_while()
    result = await box.exec(f"nohup setsid sleep {mark} & setsid -f sleep {mark}; (sleep {mark} &)")
    assert result.left_running == 3
    assert await count(box, f"sleep {mark}") == 3


@case("every process left running is counted")
async def case_left_running(box: AsyncSandbox) -> None:
    mark = a_while()
    result = await box.exec(f"for i in 1 2 3 4 5; do sleep {mark} & done; sleep 0.01 & wait $!")
    assert result.left_running == 5
    assert (await box.exec("true")).left_running == 0


@case("background children may go on writing: no signal, no full pipe")
async def case_go_on_writing(box: AsyncSandbox) -> None:
    await box.exec("(sleep 0.3; for i in $(seq 5000); do echo line of output $i; echo err >&2; done; touch survived) &")
    assert (await box.exec("until [ -e survived ]; do sleep 0.05; done", timeout=60)).ok


@case("what a background child printed before the command ended is there")
async def case_early_output(box: AsyncSandbox) -> None:
    result = await box.exec("(echo early; sleep 30) & sleep 0.3; echo end")
    assert result.stdout == "early\nend\n"


@case("a command whose children are waited for returns all they printed")
async def case_waited_for(box: AsyncSandbox) -> None:
    result = await box.exec("for i in {1..20}; do (sleep 0.0$((i % 5)); echo $i) & done; wait; echo all")
    lines = result.stdout.split()
    assert sorted(lines[:-1], key=int) == [str(number) for number in range(1, 21)]
    assert (lines[-1], result.left_running) == ("all", 0)


@case("orphans that end are reaped")
async def case_no_zombies(make: World, box: AsyncSandbox) -> None:
    mark = a_while()
    script = "for i in {1..30}; do (exec -a $MARK sleep 0.05 &) ; done"
    await box.exec(script, env={"MARK": mark})
    await ended(make, box, mark)
    look = "grep -l '^State:.Z' /proc/[0-9]*/status | xargs -r grep -h '^PPid' | sort | uniq -c"

    async def reaped() -> bool:
        return int((await box.exec(f"{look} | awk '{{n += $1}} END {{print n + 0}}'")).stdout) < 20

    await until(make, reaped)


def forker(children: int) -> str:
    """A bash script that leaves so many children running that wait for a signal, with as little memory as possible.

    A program of fifty bytes where the machine's language is known: ten thousand copies of an interpreter are GBs.
    """
    if platform.machine() != "x86_64":
        program = f"import os, signal\nfor n in range({children}):\n  if not os.fork(): signal.pause()\n"
        return f"cp $(readlink -f $(which python3)) forker; exec ./forker -S -E -c '{program}'"
    code = (
        b"\xbb" + children.to_bytes(4, "little")  # 0: mov ebx, children
        + b"\xb8\x39\0\0\0\x0f\x05"  # 5: mov eax, fork; syscall
        + b"\x85\xc0\x74\x0d\xff\xcb\x75\xf1"  # 12: test eax, eax; jz 29; dec ebx; jnz 5
        + b"\xb8\x3c\0\0\0\x31\xff\x0f\x05"  # 20: mov eax, exit; xor edi, edi; syscall
        + b"\xb8\x22\0\0\0\x0f\x05\xeb\xf7"  # 29: mov eax, pause; syscall; jmp 29
    )  # fmt: skip
    base, offset = 0x400000, 120
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\0\x3e\0\x01\0\0\0" + (base + offset).to_bytes(8, "little")
    header += (64).to_bytes(8, "little") + bytes(8) + bytes(4) + b"\x40\0\x38\0\x01\0\0\0\0\0\0\0"
    size = (offset + len(code)).to_bytes(8, "little")
    segment = (
        b"\x01\0\0\0\x05\0\0\0" + bytes(8) + base.to_bytes(8, "little") * 2 + size * 2 + (4096).to_bytes(8, "little")
    )
    text = "".join(f"\\x{byte:02x}" for byte in header + segment + code)
    return f"printf '{text}' > forker; chmod +x forker; exec ./forker"


@case("10,000 background children: the result comes, they are counted, a deadline ends them all",
      needs="kernel", deadline=540.0)  # fmt: skip
async def case_ten_thousand_children(make: World) -> None:
    box = await make(limits=Limits(processes=12_000))
    result = await box.exec(forker(10_000), timeout=300)
    assert (result.outcome, result.exit_code) == (Outcome.EXITED, 0), result.stderr
    assert result.left_running == 10_000
    assert (await box.exec("echo beside them", timeout=60)).stdout == "beside them\n"
    killed = await box.exec("pkill -9 forker; while pgrep forker >/dev/null; do sleep 0.1; done", timeout=60)
    assert killed.ok
    late = await box.exec(forker(10_000).replace("exec ./", "./") + "; sleep 600", timeout=4)
    assert late.outcome is Outcome.TIMEOUT
    assert int((await box.exec("ls -d /proc/[0-9]* | wc -l", timeout=60)).stdout) < 20


@case("a server in the background answers the next command", needs="kernel")
async def case_server(box: AsyncSandbox) -> None:
    await box.files.write_text("index.html", "served\n")
    await box.exec(["bash", "-c", "python3 -m http.server --bind 127.0.0.1 8000 &"])
    script = "import time, urllib.request as u\nfor n in range(100):\n try: print(u.urlopen('http://127.0.0.1:8000').read())\n"
    result = await box.exec(["python3", "-c", script + " except OSError: time.sleep(.1)\n else: break"], timeout=60)
    assert "served" in result.stdout


@case("a background child outlives a command that is killed")
async def case_after_a_signal(box: AsyncSandbox) -> None:
    mark = a_while()
    result = await box.exec(f"sleep {mark} & kill -9 $$")
    assert (result.signal, result.left_running) == (9, 1)
    assert await runs(box, f"sleep {mark}")
