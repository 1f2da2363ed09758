"""Implement a bash session of SWE-ReX with a stateful shell, and a terminal for an interactive program."""

from __future__ import annotations

import asyncio
import re

from swerex.exceptions import BashIncorrectSyntaxError, CommandTimeoutError, NonZeroExitCodeError
from swerex.runtime.abstract import BashAction, BashInterruptAction, BashObservation, CreateBashSessionRequest

from minisandbox.integrations.swerex.program import PROMPT, Program, plain
from minisandbox.sandbox import AsyncSandbox, AsyncShell
from minisandbox.types import Outcome, ShellResult

_SYNTAX_SECONDS = 60.0
_INTERRUPTED = 130


class BashSession:
    """A stateful bash, with stdout and stderr merged into one stream in the order of writing.

    Args:
        box: the sandbox.
        shell: a newly opened shell.
    """

    def __init__(self, box: AsyncSandbox, shell: AsyncShell) -> None:
        self._box = box
        self._shell = shell
        self._merged = False
        self._preparation = "exec 2>&1"
        self._preparation_timeout: float | None = None
        self._program: Program | None = None
        self._running: asyncio.Task[ShellResult] | None = None
        self._interrupted = False
        self._left_over = ""

    @classmethod
    async def open(cls, box: AsyncSandbox) -> BashSession:
        """Start bash in the image's workdir."""
        return cls(box, await box.shell())

    async def source(self, request: CreateBashSessionRequest) -> str:
        """Source files and return their output, including errors about missing files.

        A restarted bash, for instance after a timeout, sources the files again.

        Raises:
            CommandTimeoutError: sourcing the files took longer than ``startup_timeout``.
        """
        if not request.startup_source:
            return ""
        script = "\n".join(f"source {path}" for path in request.startup_source)
        result = await self._run_script(script, request.startup_timeout)
        if result.outcome is Outcome.TIMEOUT:
            raise CommandTimeoutError(f"timeout after {request.startup_timeout} seconds while starting the session")
        self._preparation += f"\n{{\n{script}\n}} >/dev/null"
        self._preparation_timeout = request.startup_timeout
        return plain(result.stdout_bytes)

    async def run(self, action: BashAction | BashInterruptAction) -> BashObservation:
        """Execute one action; raises the errors of :meth:`.MiniSandboxRuntime.run_in_session`."""
        if isinstance(action, BashInterruptAction):
            return await self._interrupt(action)
        if self._program is not None and self._program.ended:
            await self._end_program()
        if self._program is not None or action.is_interactive_command:
            return await self._talk(action)
        return _checked(action, await self._run_command(action))

    async def close(self) -> None:
        """Stop bash and the interactive program."""
        await self._end_program()
        await self._shell.close()

    # --- commands ----------------------------------------------------------------------------------------------------

    async def _run_command(self, action: BashAction) -> BashObservation:
        if all(not line.strip() or line.strip().startswith("#") for line in action.command.splitlines()):
            return BashObservation(output="", exit_code=0, expect_string=PROMPT)
        await self._check_syntax(action.command)
        result = await self._interruptible(action)
        if result is None:
            return BashObservation(output="", exit_code=_INTERRUPTED, expect_string=PROMPT)
        output = plain(result.stdout_bytes)
        if result.outcome is Outcome.TIMEOUT:
            self._left_over = output
            raise _timed_out(action)
        for pattern in action.expect:  # search the whole output, because the command has exited
            if match := re.search(pattern, output):
                output, matched = output[: match.start()], pattern
                return BashObservation(output=output, exit_code=result.shell_status, expect_string=matched)
        return BashObservation(output=output, exit_code=result.shell_status, expect_string=PROMPT)

    async def _check_syntax(self, command: str) -> None:
        check = await self._box.exec(["bash", "-n"], stdin=command + "\n", timeout=_SYNTAX_SECONDS)
        if check.outcome is Outcome.EXITED and check.exit_code != 0:  # otherwise bash did not finish the check
            output = f"---- Stderr ----\n{check.stderr}\n---- Stdout ----\n{check.stdout}"
            raise BashIncorrectSyntaxError(
                f"Error ({check.fate}) while checking bash command \n{command!r}\n{output}",
                extra_info={"bash_stdout": check.stdout, "bash_stderr": check.stderr},
            )

    async def _interruptible(self, action: BashAction) -> ShellResult | None:
        """Run a command, or return None if another task interrupts it. The session remains usable."""
        self._left_over, self._interrupted = "", False
        self._running = asyncio.ensure_future(self._run_script(action.command, action.timeout))
        try:
            return await self._running
        except asyncio.CancelledError:
            if self._interrupted:
                self._merged = False  # bash was restarted with separate streams
                return None
            raise
        finally:
            self._running = None

    async def _run_script(self, script: str, timeout: float | None) -> ShellResult:
        if not self._merged:
            await self._shell.run(self._preparation, timeout=self._preparation_timeout)
        result = await self._shell.run(script, timeout=timeout)
        self._merged = not result.restarted  # a restarted bash has separate streams
        return result

    async def _interrupt(self, action: BashInterruptAction) -> BashObservation:
        if self._program is not None and not self._program.ended:
            return await self._program.interrupt(action)
        if self._running is not None:
            self._interrupted = True
            self._running.get_loop().call_soon_threadsafe(self._running.cancel)
        output, self._left_over = self._left_over.strip(), ""
        return BashObservation(output=output, exit_code=0, expect_string=PROMPT)

    # --- programs ----------------------------------------------------------------------------------------------------

    async def _talk(self, action: BashAction) -> BashObservation:
        if self._program is None:
            self._program = await Program.start(self._box, action.command, self._shell)
        else:
            await self._program.write(action.command + "\n")
        try:
            output, matched = await self._program.expect(action.expect, action.timeout)
        except TimeoutError:
            raise _timed_out(action) from None
        if action.is_interactive_command:
            output = output.lstrip().removeprefix(action.command).strip()
        if matched == PROMPT:
            await self._end_program()
        return BashObservation(output=output, exit_code=0, expect_string=matched)

    async def _end_program(self) -> None:
        program, self._program = self._program, None
        if program is not None:
            await program.close()


def _timed_out(action: BashAction) -> CommandTimeoutError:
    return CommandTimeoutError(f"timeout after {action.timeout} seconds while running command {action.command!r}")


def _checked(action: BashAction, observation: BashObservation) -> BashObservation:
    if action.check == "ignore":
        observation.exit_code = None
    if action.check == "raise" and observation.exit_code != 0:
        message = f"Command {action.command!r} failed with exit code {observation.exit_code}. "
        message += f"Here is the output:\n{observation.output!r}"
        raise NonZeroExitCodeError(f"{action.error_msg}: {message}" if action.error_msg else message)
    return observation
