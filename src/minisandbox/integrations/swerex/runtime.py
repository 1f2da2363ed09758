"""Execute SWE-ReX's requests in a sandbox."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from swerex.exceptions import (
    CommandTimeoutError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
    SwerexException,
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

from minisandbox.errors import FileAccessError, InvalidValue, MiniSandboxError
from minisandbox.integrations.settings import MERGED_STREAMS
from minisandbox.integrations.swerex.session import BashSession
from minisandbox.sandbox import AsyncSandbox
from minisandbox.types import FileType, Outcome


class SandboxFailure(SwerexException, RuntimeError):
    """The sandbox has ended, or a request failed in the sandbox itself. A failed command does not raise this error."""


@contextmanager
def as_swerex_errors() -> Iterator[None]:
    """Convert file errors to the matching OSError, and other errors to SandboxFailure.

    Invalid arguments remain ValueErrors.
    """
    try:
        yield
    except FileAccessError as error:
        if error.errno is None:
            raise OSError(str(error)) from error
        raise OSError(error.errno, str(error)) from error  # becomes FileNotFoundError etc.
    except InvalidValue:
        raise
    except MiniSandboxError as error:
        raise SandboxFailure(str(error)) from error


class MiniSandboxRuntime(AbstractRuntime):
    """Execute SWE-ReX's requests in one sandbox. Several event loops may use it one after another.

    Args:
        box: the sandbox; the caller stops it.
        logger: the logger; None for SWE-ReX's logger.
    """

    def __init__(self, box: AsyncSandbox, *, logger: logging.Logger | None = None) -> None:
        self._box = box
        self._sessions: dict[str, BashSession] = {}
        self.logger = logger or get_logger("rex-runtime")

    @property
    def sandbox(self) -> AsyncSandbox:
        """The sandbox, for features without an API in SWE-ReX: snapshots, patches, usage."""
        return self._box

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:  # noqa: ARG002 - the check does not wait
        """Return whether the sandbox runs."""
        message = "" if self._box.alive else f"sandbox {self._box.id} has ended"
        return IsAliveResponse(is_alive=self._box.alive, message=message)

    async def create_session(self, request: CreateBashSessionRequest) -> CreateBashSessionResponse:
        """Start a stateful bash session, and source the requested files in it.

        Raises:
            SessionExistsError: a session with this name exists.
            CommandTimeoutError: sourcing the files took longer than ``startup_timeout``.
            SandboxFailure: the sandbox has ended.
        """
        if request.session in self._sessions:
            raise SessionExistsError(f"session {request.session!r} already exists")
        with as_swerex_errors():
            session = await BashSession.open(self._box)
            self._sessions[request.session] = session
            try:
                return CreateBashSessionResponse(output=await session.source(request))
            except BaseException:  # also on cancellation, because the caller does not know the session
                await self._sessions.pop(request.session).close()
                raise

    async def run_in_session(self, action: BashAction | BashInterruptAction) -> BashObservation:
        """Run a command in a session, send a line to its interactive program, or interrupt the command.

        Raises:
            SessionDoesNotExistError: there is no session of that name.
            BashIncorrectSyntaxError: the command has a syntax error.
            CommandTimeoutError: the command took longer than its ``timeout``.
            NonZeroExitCodeError: the exit status is not 0, and ``check`` is "raise".
            SandboxFailure: the sandbox has ended.
        """
        with as_swerex_errors():
            return await self._session(action.session).run(action)

    async def close_session(self, request: CloseBashSessionRequest) -> CloseBashSessionResponse:
        """Close a session and kill its processes.

        Raises:
            SessionDoesNotExistError: there is no session of that name.
        """
        session = self._session(request.session)
        del self._sessions[request.session]
        with as_swerex_errors():
            await session.close()
        return CloseBashSessionResponse()

    def _session(self, name: str) -> BashSession:
        try:
            return self._sessions[name]
        except KeyError:
            raise SessionDoesNotExistError(f"session {name!r} does not exist") from None

    async def execute(self, command: Command) -> CommandResponse:
        """Run a command outside of sessions, like ``subprocess.run``. The status of a missing program is 127.

        Raises:
            CommandTimeoutError: the command took longer than its ``timeout``.
            NonZeroExitCodeError: the exit status is not 0, and ``check`` is true.
            SandboxFailure: the sandbox has ended.
        """
        with as_swerex_errors():
            result = await self._box.exec(_argv(command), timeout=command.timeout, cwd=command.cwd)
        if result.outcome is Outcome.TIMEOUT:
            raise CommandTimeoutError(f"Timeout ({command.timeout}s) exceeded while running command")
        response = CommandResponse(stdout=_text(result.stdout_bytes), stderr=_text(result.stderr_bytes))
        response.exit_code = result.exit_code if result.signal is None else -result.signal
        if command.check and response.exit_code != 0:
            message = f"Command {command.command!r} failed with exit code {response.exit_code}. "
            message += f"Stdout:\n{response.stdout!r}\nStderr:\n{response.stderr!r}"
            raise NonZeroExitCodeError(f"{command.error_msg}: {message}" if command.error_msg else message)
        return response

    async def read_file(self, request: ReadFileRequest) -> ReadFileResponse:
        """Read a text file like ``Path.read_text``, but keep line ends. Relative paths start at the working directory.

        Raises:
            OSError: the file cannot be read; FileNotFoundError if it does not exist.
            UnicodeError: the file is not in ``encoding``.
        """
        with as_swerex_errors():
            data = await self._box.files.read_bytes(request.path)
        text = io.TextIOWrapper(io.BytesIO(data), encoding=request.encoding or "utf-8", errors=request.errors)
        return ReadFileResponse(content=text.read())

    async def write_file(self, request: WriteFileRequest) -> WriteFileResponse:
        """Write a text file, replacing existing content; create missing parent directories.

        Raises:
            OSError: the file cannot be written.
        """
        with as_swerex_errors():
            await self._box.files.write_text(request.path, request.content)
        return WriteFileResponse()

    async def upload(self, request: UploadRequest) -> UploadResponse:
        """Copy a file or directory tree from the host into the sandbox. A file can go into an existing directory.

        Raises:
            OSError: the source cannot be read, or the target cannot be written.
        """
        source, target = Path(request.source_path), PurePosixPath(request.target_path)
        with as_swerex_errors():
            if source.is_file() and await self._is_directory(target):
                target /= source.name
            await self._box.files.upload(source, target)
        return UploadResponse()

    async def _is_directory(self, path: PurePosixPath) -> bool:
        files = self._box.files
        return await files.exists(path) and (await files.stat(path)).type is FileType.DIRECTORY

    async def close(self) -> CloseResponse:
        """Close all sessions."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()
        return CloseResponse()


def _argv(command: Command) -> Sequence[str]:
    """Return the argument list of a command, with the semantics of ``subprocess.run`` for strings and ``shell``."""
    arguments = [command.command] if isinstance(command.command, str) else command.command
    argv = ["/bin/sh", "-c", *arguments] if command.shell else arguments
    if command.env is not None:  # as in subprocess.run, env replaces the whole environment
        argv = ["/usr/bin/env", "-i", "--", *(f"{name}={value}" for name, value in command.env.items()), *argv]
    return [*MERGED_STREAMS, *argv] if command.merge_output_streams else argv


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")
