"""Run an interactive program on its own terminal, and match patterns in its output."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence

from swerex.runtime.abstract import BashInterruptAction, BashObservation

from minisandbox.sandbox import AsyncProcess, AsyncSandbox, AsyncShell
from minisandbox.types import ExecResult, Terminal

PROMPT = "SHELLPS1PREFIX"
"""The string that SWE-ReX reports as the matched pattern when bash's prompt appears."""

_ESCAPES = re.compile(r"\x1B[@-_][0-?]*[ -/]*[@-~]")
_MIN_TIMEOUT = 0.05
_MAX_UNREAD = 1 << 20
"""The number of bytes at the end of the output that are searched for patterns."""
_PAUSE_FACTOR = 4
"""The pause after a search, as a multiple of the search's duration, so that other tasks of the event loop can run."""


def plain(data: bytes) -> str:
    """Remove a terminal's escape sequences from output, as clients of SWE-ReX expect."""
    return _ESCAPES.sub("", data.decode("utf-8", "backslashreplace"))


class Program:
    """An interactive program on a terminal.

    Args:
        process: the started process.
    """

    def __init__(self, process: AsyncProcess) -> None:
        self._process = process
        self._unread = b""
        self.ended = False

    @classmethod
    async def start(cls, box: AsyncSandbox, command: str, shell: AsyncShell) -> Program:
        """Start a program with the exported variables and the working directory of a shell."""
        output = (await shell.run("command env -0")).stdout_bytes.decode("utf-8", "surrogateescape")
        variables = dict(entry.split("=", 1) for entry in output.split("\0") if "=" in entry)
        script = 'stty -echo 2>/dev/null; eval -- "$1"'
        env = {**variables, "TERM": "dumb"}
        return cls(await box.start(["bash", "-c", script, "bash", command], pty=Terminal(), cwd=shell.cwd, env=env))

    async def write(self, text: str) -> None:
        """Write text to the terminal, as a user would type it."""
        await self._process.write(text)

    async def expect(self, patterns: Sequence[str], timeout: float | None) -> tuple[str, str]:
        """Wait until a pattern matches or the program exits.

        Args:
            patterns: regular expressions; the earliest match in the output counts.
            timeout: time limit in seconds; None for no limit.

        Returns:
            The output before the match, at most 1 MiB, and the pattern; :data:`PROMPT` if the program has exited.

        Raises:
            TimeoutError: the time limit was reached first; the output is kept for the next call.
        """
        async with asyncio.timeout(timeout):
            while True:
                began = time.perf_counter()
                if (match := self._find(patterns)) is not None:
                    return match
                await asyncio.sleep(_PAUSE_FACTOR * (time.perf_counter() - began))
                if self.ended:
                    output, self._unread = _lines(self._unread), b""
                    return output, PROMPT
                await self._read()

    def _find(self, patterns: Sequence[str]) -> tuple[str, str] | None:
        output = _lines(self._unread)
        matches = [(match, pattern) for pattern in patterns if (match := re.search(pattern, output))]
        if not matches:
            return None
        match, pattern = min(matches, key=lambda pair: pair[0].start())
        self._unread = output[match.end() :].encode("utf-8", "backslashreplace")
        return output[: match.start()], pattern

    async def _read(self) -> None:
        async for event in self._process.events():
            if isinstance(event, ExecResult):
                self.ended = True
            else:
                self._unread = (self._unread + event.data)[-_MAX_UNREAD:]
            return
        self.ended = True

    async def interrupt(self, action: BashInterruptAction) -> BashObservation:
        """Send Ctrl-C until a pattern matches or the program exits; kill the program after the last try."""
        output = ""
        for _ in range(action.n_retry):
            await self.write("\x03")
            try:
                output, matched = await self.expect(action.expect, max(action.timeout, _MIN_TIMEOUT))
            except TimeoutError:
                continue
            return BashObservation(output=output.strip(), exit_code=0, expect_string=matched)
        await self.close()
        output, self._unread = _lines(self._unread), b""
        return BashObservation(output=output.strip(), exit_code=0, expect_string=PROMPT)

    async def close(self) -> None:
        """Kill the program if it is still running; further calls do nothing."""
        self.ended = True
        await self._process.close()


def _lines(data: bytes) -> str:
    """Decode output, remove escape sequences, and convert a terminal's line ends to newlines."""
    return plain(data).replace("\r\n", "\n")
