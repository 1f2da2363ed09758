"""Provide Inspect's sandbox environment ``sandbox="minisandbox"``, found by the entry point ``inspect_ai``."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import shlex
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path, PurePosixPath
from typing import Literal, overload

import yaml

from minisandbox.errors import FileAccessError, InvalidValue, MiniSandboxError, MissingExtra, NotFound
from minisandbox.sandbox import AsyncSandbox, live_sandboxes
from minisandbox.types import ExecResult, Outcome
from minisandbox.values import MiB

try:
    from inspect_ai._util.error import PrerequisiteError
    from inspect_ai.util import ExecResult as InspectResult
    from inspect_ai.util import (
        OutputLimitExceededError,
        SandboxConnection,
        SandboxEnvironment,
        SandboxEnvironmentConfigType,
        SandboxEnvironmentLimits,
        SandboxUnavailableError,
        SandboxUserUnsupportedError,
        concurrency,
        sandboxenv,
    )
    from inspect_ai.util._subprocess import max_subprocesses_context_var
    from pydantic import Field, ValidationError
except ImportError as error:
    raise MissingExtra(
        f"minisandbox.integrations.inspect: {error}",
        reason="inspect-ai is not installed, or is older than 0.3.285",
        hint="pip install 'swe-minisandbox[inspect]'",
    ) from error

from minisandbox.integrations.settings import HOST, SandboxSettings, TaskImage

CONFIG_FILE = "minisandbox.yaml"
LABELS = {"by": "inspect"}

_FILE_TIMEOUT = 600.0
_NOT_EXECUTABLE = 126
_WRITE = """
LC_ALL=C; export LC_ALL
mkdir -p -- "$1" && exec cat > "$2"
"""
_MAKE_WORKDIR = 'mkdir -p -- "$1" && { [ -z "$2" ] || chown -- "$2" "$1"; }'


class MiniSandboxConfig(SandboxSettings):
    """The second element of ``sandbox=("minisandbox", ...)``, or the keys of ``minisandbox.yaml``.

    Attributes:
        image: the image, as in :class:`.SandboxSettings`; the image of a recipe file (``.toml``) is built first.
        user: the default user of commands and file access, by name or uid; None for root.
        workdir: the directory of commands and relative paths, created for ``user`` if missing; "" for the image's
            working directory.
        env: environment variables of all commands.
    """

    image: str = HOST
    user: str | None = None
    workdir: str = ""
    env: dict[str, str] = Field(default_factory=dict)

    def __hash__(self) -> int:
        """Return a hash, because Inspect puts configurations into a set to initialise equal configurations once."""
        return hash(self.model_dump_json())

    @classmethod
    def read(cls, config: SandboxEnvironmentConfigType | None) -> MiniSandboxConfig:
        """Read a configuration.

        Args:
            config: a configuration, which is returned unchanged; a YAML file with its keys (``.yaml``, ``.yml``); a
                recipe file; the name of an image; or None for only the host's ``/usr``.

        Raises:
            PrerequisiteError: the file cannot be read, or a key or value is invalid.
        """
        if isinstance(config, cls):
            return config
        if config is None:
            return cls()
        if not isinstance(config, str):
            raise PrerequisiteError(f"sandbox config is a {type(config).__name__}; give a str or a MiniSandboxConfig")
        if config.endswith(".toml"):
            return cls(image=config)
        if not config.endswith((".yaml", ".yml")):  # Inspect prepends the task's directory
            return cls(image=PurePosixPath(config).name)
        try:
            return cls.model_validate(yaml.safe_load(Path(config).read_text(encoding="utf-8")) or {})
        except (OSError, ValidationError, yaml.YAMLError) as error:
            raise PrerequisiteError(f"sandbox config {config}: {error}") from error

    async def ready(self) -> TaskImage:
        """Return the image; build the missing image of a task or recipe.

        Raises:
            PrerequisiteError: there is no such image, the build fails, a setting is invalid, or the event loop is not
                asyncio's.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError as error:
            raise PrerequisiteError("sandbox 'minisandbox' needs asyncio: unset INSPECT_ASYNC_BACKEND") from error
        try:
            self.checked_limits()
            self.checked_network()
            return await asyncio.to_thread(self.find, self.image)
        except MiniSandboxError as error:
            raise PrerequisiteError(str(error)) from error


@sandboxenv(name="minisandbox")
class MiniSandboxProvider(SandboxEnvironment):
    """One sandbox per sample. It is stopped after the sample, or at the latest when Inspect's process exits.

    Args:
        box: the sandbox; :meth:`sample_cleanup` stops it.
        user: the default user of commands; None for root.
        output: maximum bytes of a command's stdout, and of its stderr, that the sandbox records.
    """

    def __init__(self, box: AsyncSandbox, *, user: str | None = None, output: int = MiB) -> None:
        super().__init__()
        self._box = box
        self._user = _user(user)
        self._output = output

    @property
    def sandbox(self) -> AsyncSandbox:
        """The sandbox, for features without an API in Inspect: snapshots, forks, patches, usage."""
        return self._box

    # --- commands ----------------------------------------------------------------------------------------------------

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002 - Inspect's parameter name
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,  # noqa: ARG002 - a sandbox has no transport to retry
        concurrency: bool = True,
    ) -> InspectResult[str]:
        """Run a command. The exit status is 127 for a missing program, and 128 plus the number for a signal.

        Raises:
            TimeoutError: the command ran longer than ``timeout``; all its processes were killed.
            PermissionError: ``cmd[0]`` is not executable.
            FileNotFoundError: ``cwd`` does not exist.
            OutputLimitExceededError: stdout or stderr exceeds Inspect's limit or ``limits.output``.
            SandboxUserUnsupportedError: the sandbox has no such user.
            SandboxUnavailableError: the sandbox has ended.
        """
        async with _slot() if concurrency else contextlib.nullcontext():
            with _as_inspect_errors():
                result = await self._run(cmd, user, timeout=timeout, cwd=cwd, env=env, stdin=input)
        if result.outcome is Outcome.TIMEOUT:
            raise _timed_out(result, timeout)
        self._check_output(result)
        if result.exit_code == _NOT_EXECUTABLE and result.stderr == f"{cmd[0]}: {os.strerror(errno.EACCES)}\n":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), cmd[0])
        assert result.shell_status is not None
        return InspectResult(result.ok, result.shell_status, result.stdout, result.stderr)

    async def _run(
        self,
        cmd: list[str],
        user: str | None,
        *,
        timeout: float | None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecResult:
        name_or_uid = self._user if user is None else _user(user)
        try:
            return await self._box.exec(cmd, timeout=timeout, cwd=cwd, env=env, stdin=stdin, user=name_or_uid)
        except InvalidValue as error:
            if name_or_uid is not None and error.what.startswith(f"user {str(name_or_uid)!r}"):
                raise SandboxUserUnsupportedError(str(error)) from error
            raise

    def _check_output(self, result: ExecResult) -> None:
        """Reject truncated output, because the caller may parse it."""
        limit = min(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE, self._output)
        for output, dropped_count in (
            (result.stdout_bytes, result.dropped_stdout),
            (result.stderr_bytes, result.dropped_stderr),
        ):
            if dropped_count or len(output) > limit:
                raise OutputLimitExceededError(f"{limit} bytes", output[-limit:].decode("utf-8", "replace"))

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """Return the command that opens a shell in the sandbox.

        Raises:
            ConnectionError: the sandbox has ended.
        """
        if not self._box.alive:
            raise ConnectionError(f"sandbox {self._box.id} has ended")
        name_or_uid = self._user if user is None else _user(user)
        user_option = [] if name_or_uid is None else ["--user", str(name_or_uid)]
        argv = [sys.executable, "-m", "minisandbox", "sandbox", "shell", *user_option, self._box.id]
        return SandboxConnection(type="minisandbox", command=shlex.join(argv))

    # --- files -------------------------------------------------------------------------------------------------------

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Replace a file's content, creating missing parent directories.

        Raises:
            IsADirectoryError: the path is a directory.
            PermissionError: the default user may not write the file.
            OSError: the file cannot be written for another reason.
            SandboxUnavailableError: the sandbox has ended.
        """
        data = contents.encode() if isinstance(contents, str) else contents
        with _as_inspect_errors(file):
            if self._user is None:
                await self._box.files.write_bytes(file, data)
                return
            argv = ["/bin/sh", "-c", _WRITE, "sh", str(PurePosixPath(file).parent), file]
            _check_file(await self._run(argv, None, timeout=_FILE_TIMEOUT, stdin=data), file)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Read a file, keeping its line ends.

        Raises:
            FileNotFoundError: the file does not exist.
            IsADirectoryError: the path is a directory.
            PermissionError: the default user may not read the file.
            UnicodeDecodeError: the file is not UTF-8, and ``text`` is true.
            OutputLimitExceededError: the file exceeds Inspect's limit.
            SandboxUnavailableError: the sandbox has ended.
        """
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        with _as_inspect_errors(file):
            if self._user is None:
                data = await self._box.files.read_bytes(file, limit=limit)
            else:
                data = await self._read_as_user(file, limit)
        return data.decode("utf-8") if text else data

    async def _read_as_user(self, file: str, limit: int) -> bytes:
        """Read a file as the user with ``cat``, because the sandbox's file methods have root's permissions."""
        chunks: list[bytes] = []
        size = 0
        argv = ["/bin/cat", "--", file]
        async with await self._box.start(argv, user=self._user, env={"LC_ALL": "C"}, timeout=_FILE_TIMEOUT) as cat:
            async for event in cat.events():
                if isinstance(event, ExecResult):
                    _check_file(event, file)
                    break
                if event.stream == "stdout":
                    chunks.append(event.data)
                    size += len(event.data)
                if size > limit:
                    raise _too_large()
        return b"".join(chunks)

    # --- samples and tasks -------------------------------------------------------------------------------------------

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:  # noqa: ARG003 - the image does not depend on the task
        """Build the image before the first sample.

        Raises:
            PrerequisiteError: there is no such image, the build fails, or a setting is invalid.
        """
        await MiniSandboxConfig.read(config).ready()

    @classmethod
    async def sample_init(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        metadata: dict[str, str],  # noqa: ARG003 - the sample's sandbox= already determines the configuration
    ) -> dict[str, SandboxEnvironment]:
        """Create a sample's sandbox.

        Raises:
            PrerequisiteError: there is no such image, the build fails, or a setting is invalid.
            MiniSandboxError: the sandbox cannot be created.
        """
        settings = MiniSandboxConfig.read(config)
        task_image = await settings.ready()
        limits = settings.checked_limits()
        if "output" not in settings.limits:
            limits = dataclasses.replace(limits, output=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE)
        spec = task_image.image.spec()
        if settings.workdir:
            spec = dataclasses.replace(spec, workdir=PurePosixPath("/", settings.workdir))
        box = await AsyncSandbox.create(
            spec,
            limits=limits,
            network=settings.checked_network(),
            environment=settings.env,
            labels={**LABELS, "task": task_name},
        )
        try:
            if settings.workdir:
                argv = ["/bin/sh", "-c", _MAKE_WORKDIR, "sh", str(spec.workdir), settings.user or ""]
                (await box.exec(argv, cwd="/", timeout=_FILE_TIMEOUT)).check()
        except BaseException:  # also on cancellation, because the caller has no handle to stop the sandbox
            await box.stop()
            raise
        return {"default": cls(box, user=settings.user, output=limits.output)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,  # noqa: ARG003 - not needed to stop a sandbox
        config: SandboxEnvironmentConfigType | None,  # noqa: ARG003 - not needed to stop a sandbox
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,  # noqa: ARG003 - not needed to stop a sandbox
    ) -> None:
        """Stop a sample's sandbox."""
        for environment in environments.values():
            await environment.as_type(cls).sandbox.stop()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:  # noqa: A002 - Inspect's parameter name
        """Stop one or all sandboxes of this user's evaluations (``inspect sandbox cleanup minisandbox [ID]``)."""
        for info in await asyncio.to_thread(live_sandboxes, labels=LABELS):
            if id in (None, info.id):
                with contextlib.suppress(NotFound):  # already stopped
                    await (await AsyncSandbox.attach(info.id)).stop()

    @classmethod
    def config_files(cls) -> list[str]:
        """Return the file names that Inspect looks for next to a task without a configuration."""
        return [CONFIG_FILE]

    @classmethod
    def config_deserialize(cls, config: dict[str, object]) -> MiniSandboxConfig:
        """Decode the configuration in a log file."""
        return MiniSandboxConfig.model_validate(config)

    def default_polling_interval(self) -> float:
        """Return the seconds between two polls for a service's requests; a poll takes a millisecond."""
        return 0.2


def _user(user: str | None) -> str | int | None:
    """Convert a uid given as a string to an integer."""
    return int(user) if user is not None and user.isdecimal() else user


@contextlib.asynccontextmanager
async def _slot() -> AsyncIterator[None]:
    """Wait for a free slot of ``--max-subprocesses``."""
    async with concurrency("subprocesses", max_subprocesses_context_var.get(), resizable=True):
        yield


@contextlib.contextmanager
def _as_inspect_errors(file: str | None = None) -> Iterator[None]:
    """Convert this package's errors to the errors of Inspect's protocol; invalid arguments remain ValueErrors."""
    try:
        yield
    except FileAccessError as error:
        if error.errno == errno.EFBIG and file is not None:
            raise _too_large() from error
        code = errno.EIO if error.errno is None else error.errno
        raise OSError(code, os.strerror(code), file or error.path) from error  # becomes FileNotFoundError etc.
    except InvalidValue:
        raise
    except MiniSandboxError as error:
        raise SandboxUnavailableError(str(error)) from error


def _check_file(result: ExecResult, file: str) -> None:
    """Raise the OSError that matches the error message of a failed ``cat`` or shell."""
    if result.ok:
        return
    for code in (errno.ENOENT, errno.EISDIR, errno.EACCES, errno.ENOTDIR, errno.ENOSPC):
        if os.strerror(code) in result.stderr:
            raise OSError(code, os.strerror(code), file)
    raise OSError(errno.EIO, result.stderr.strip() or result.fate, file)


def _too_large() -> OutputLimitExceededError:
    return OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)


def _timed_out(result: ExecResult, timeout: float | None) -> TimeoutError:
    error = TimeoutError(f"Command timed out after {timeout} seconds")
    setattr(error, "truncated_output", result.stdout + result.stderr)  # noqa: B010 - Inspect shows this attribute to the model
    return error
