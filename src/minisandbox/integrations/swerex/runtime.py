"""SWE-ReX's runtime, carried out by the sandbox's own verbs."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from swerex.exceptions import (
    CommandTimeoutError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
)
from swerex.runtime.abstract import (
    AbstractRuntime,
    BashAction,
    BashInterruptAction,
    BashObservation,
    CloseBashSessionRequest,
    CloseBashSessionResponse,
    CloseResponse,
    Command,
    CommandResponse,
    CreateBashSessionRequest,
    CreateBashSessionResponse,
    IsAliveResponse,
    ReadFileRequest,
    ReadFileResponse,
    UploadRequest,
    UploadResponse,
    WriteFileRequest,
    WriteFileResponse,
)
from swerex.utils.log import get_logger

from minisandbox.integrations.swerex.faults import in_their_words
from minisandbox.integrations.swerex.session import BashSession
from minisandbox.sandbox import AsyncSandbox
from minisandbox.types import ExecResult, FileType, Outcome

_MERGED = ("/bin/sh", "-c", 'exec "$@" 2>&1', "sh")


class MiniSandboxRuntime(AbstractRuntime):
    """What SWE-ReX's clients ask for, done in one sandbox. It may be used from one event loop after another.

    Args:
        box: the sandbox; whoever made it ends it.
        logger: where to tell; SWE-ReX's own if None.
    """

    def __init__(self, box: AsyncSandbox, *, logger: logging.Logger | None = None) -> None:
        self._box = box
        self._sessions: dict[str, BashSession] = {}
        self.logger = logger or get_logger("rex-runtime")

    @property
    def sandbox(self) -> AsyncSandbox:
        """The sandbox, for what SWE-ReX has no word for: snapshots, patches, usage."""
        return self._box

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:  # noqa: ARG002 - it takes no time
        """Whether the sandbox runs."""
        message = "" if self._box.alive else f"sandbox {self._box.id} has ended"
        return IsAliveResponse(is_alive=self._box.alive, message=message)

    async def create_session(self, request: CreateBashSessionRequest) -> CreateBashSessionResponse:
        """Start a bash that keeps its state, and let it source the files that it is told.

        Raises:
            SessionExistsError: there is a session of that name.
            CommandTimeoutError: the files took longer than ``startup_timeout``.
            SandboxFailure: the sandbox has ended.
        """
        if request.session in self._sessions:
            raise SessionExistsError(f"session {request.session!r} already exists")
        with in_their_words():
            session = await BashSession.open(self._box)
            self._sessions[request.session] = session
            try:
                return CreateBashSessionResponse(output=await session.source(request))
            except BaseException:  # a cancellation too: nobody knows of it
                await self._sessions.pop(request.session).close()
                raise

    async def run_in_session(self, action: BashAction | BashInterruptAction) -> BashObservation:
        """Run a command in a session, type a line for a program in it, or interrupt what runs there.

        Raises:
            SessionDoesNotExistError: there is no session of that name.
            BashIncorrectSyntaxError: bash cannot read the command.
            CommandTimeoutError: it took longer than its ``timeout``.
            NonZeroExitCodeError: its status is not 0, and ``check`` is "raise".
            SandboxFailure: the sandbox has ended.
        """
        with in_their_words():
            return await self._session(action.session).run(action)

    async def close_session(self, request: CloseBashSessionRequest) -> CloseBashSessionResponse:
        """End a session and what runs in it.

        Raises:
            SessionDoesNotExistError: there is no session of that name.
        """
        session = self._session(request.session)
        del self._sessions[request.session]
        with in_their_words():
            await session.close()
        return CloseBashSessionResponse()

    def _session(self, name: str) -> BashSession:
        try:
            return self._sessions[name]
        except KeyError:
            raise SessionDoesNotExistError(f"session {name!r} does not exist") from None

    async def execute(self, command: Command) -> CommandResponse:
        """Run a command by itself, as ``subprocess.run`` would; of a program that is not there, the status is 127.

        Raises:
            CommandTimeoutError: it took longer than its ``timeout``.
            NonZeroExitCodeError: its status is not 0, and ``check`` is true.
            SandboxFailure: the sandbox has ended.
        """
        with in_their_words():
            result = await self._box.exec(_argv(command), timeout=command.timeout, cwd=command.cwd)
        if result.outcome is Outcome.TIMEOUT:
            raise CommandTimeoutError(f"Timeout ({command.timeout}s) exceeded while running command")
        response = CommandResponse(stdout=_text(result.stdout_bytes), stderr=_text(result.stderr_bytes))
        response.exit_code = _status(result)
        if command.check and response.exit_code != 0:
            what = f"Command {command.command!r} failed with exit code {response.exit_code}. "
            what += f"Stdout:\n{response.stdout!r}\nStderr:\n{response.stderr!r}"
            raise NonZeroExitCodeError(f"{command.error_msg}: {what}" if command.error_msg else what)
        return response

    async def read_file(self, request: ReadFileRequest) -> ReadFileResponse:
        """Read a text file as ``Path.read_text`` does, line ends included; relative paths are below the workdir.

        Raises:
            OSError: it cannot be read; FileNotFoundError where there is none.
            UnicodeError: it is not in ``encoding``.
        """
        with in_their_words():
            data = await self._box.files.read_bytes(request.path)
        text = io.TextIOWrapper(io.BytesIO(data), encoding=request.encoding or "utf-8", errors=request.errors)
        return ReadFileResponse(content=text.read())

    async def write_file(self, request: WriteFileRequest) -> WriteFileResponse:
        """Replace the content of a file; missing parent directories are made.

        Raises:
            OSError: it cannot be written.
        """
        with in_their_words():
            await self._box.files.write_text(request.path, request.content)
        return WriteFileResponse()

    async def upload(self, request: UploadRequest) -> UploadResponse:
        """Copy a file or a tree of the host into the sandbox; a file whose target is a directory goes into it.

        Raises:
            OSError: the source cannot be read, or the target not be written.
        """
        source, target = Path(request.source_path), PurePosixPath(request.target_path)
        with in_their_words():
            if source.is_file() and await self._is_directory(target):
                target /= source.name
            await self._box.files.upload(source, target)
        return UploadResponse()

    async def _is_directory(self, path: PurePosixPath) -> bool:
        files = self._box.files
        return await files.exists(path) and (await files.stat(path)).type is FileType.DIRECTORY

    async def close(self) -> CloseResponse:
        """End all sessions."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()
        return CloseResponse()


def _argv(command: Command) -> Sequence[str]:
    """What ``subprocess.run`` executes: a text is one program's name, or the first argument of ``sh -c``."""
    words = [command.command] if isinstance(command.command, str) else command.command
    argv = ["/bin/sh", "-c", *words] if command.shell else words
    if command.env is not None:  # the whole environment, not some variables more
        argv = ["/usr/bin/env", "-i", "--", *(f"{name}={value}" for name, value in command.env.items()), *argv]
    return [*_MERGED, *argv] if command.merge_output_streams else argv


def _status(result: ExecResult) -> int | None:
    return result.exit_code if result.signal is None else -result.signal


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")
