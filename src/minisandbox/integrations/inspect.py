"""Inspect's sandbox environment: ``sandbox="minisandbox"``. Inspect finds it by the entry point ``inspect_ai``."""

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
from minisandbox.types import ExecResult, MiB, Outcome

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

from minisandbox.integrations.settings import HOST, Found, SandboxSettings

CONFIG_FILE = "minisandbox.yaml"
LABELS = {"by": "inspect"}

_SECONDS = 600.0
_NOT_EXECUTABLE = 126
_WRITE = """
LC_ALL=C; export LC_ALL
mkdir -p -- "$1" && exec cat > "$2"
"""
_MAKE_WORKDIR = 'mkdir -p -- "$1" && { [ -z "$2" ] || chown -- "$2" "$1"; }'


class MiniSandboxConfig(SandboxSettings):
    """The second element of ``sandbox=("minisandbox", ...)``, or the keys of ``minisandbox.yaml``.

    Attributes:
        image: as of :class:`.SandboxSettings`; a recipe file (``.toml``) is built first.
        user: name or uid that runs commands, reads and writes files where a call names nobody; root if None.
        workdir: where commands start and relative paths begin, made for ``user`` if missing; the image's if "".
        env: variables for every command.
    """

    image: str = HOST
    user: str | None = None
    workdir: str = ""
    env: dict[str, str] = Field(default_factory=dict)

    def __hash__(self) -> int:
        """Inspect keeps configurations in a set, to initialize equal ones once."""
        return hash(self.model_dump_json())

    @classmethod
    def read(cls, config: SandboxEnvironmentConfigType | None) -> MiniSandboxConfig:
        """Return a configuration.

        Args:
            config: one already; a YAML file of its keys (``.yaml``, ``.yml``); a recipe file; an image's name; None for
                the host's ``/usr`` alone.

        Raises:
            PrerequisiteError: it cannot be read, or a key or value in it cannot be used.
        """
        if isinstance(config, cls):
            return config
        if config is None:
            return cls()
        if not isinstance(config, str):
            raise PrerequisiteError(f"sandbox config is a {type(config).__name__}; give a str or a MiniSandboxConfig")
        if config.endswith(".toml"):
            return cls(image=config)
        if not config.endswith(
            (".yaml", ".yml")
        ):  # Inspect takes it for a path, and puts the task's directory before it
            return cls(image=PurePosixPath(config).name)
        try:
            return cls.model_validate(yaml.safe_load(Path(config).read_text(encoding="utf-8")) or {})
        except (OSError, ValidationError, yaml.YAMLError) as error:
            raise PrerequisiteError(f"sandbox config {config}: {error}") from error

    async def ready(self) -> Found:
        """Find the image; build it if it is a task's or a recipe's and does not exist.

        Raises:
            PrerequisiteError: there is no such image, it cannot be built, another setting cannot be used, or the event
                loop is not asyncio's.
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
class MiniSandboxEnvironment(SandboxEnvironment):
    """One sandbox per sample. It ends with the sample, and at the latest with Inspect's process.

    Args:
        box: the sandbox; :meth:`sample_cleanup` stops it.
        user: who runs commands where a call names nobody; root if None.
        output: bytes of stdout, and of stderr, that the sandbox keeps of a command.
    """

    def __init__(self, box: AsyncSandbox, *, user: str | None = None, output: int = MiB) -> None:
        super().__init__()
        self._box = box
        self._user = _user(user)
        self._output = output

    @property
    def sandbox(self) -> AsyncSandbox:
        """The sandbox, for what Inspect has no word for: snapshots, forks, patches, usage."""
        return self._box

    # --- commands ----------------------------------------------------------------------------------------------------

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002 - Inspect's name
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,  # noqa: ARG002 - no transport can hang: a timeout is the command's own
        concurrency: bool = True,
    ) -> InspectResult[str]:
        """Run a command. One that is not found is exit status 127, one that a signal ends 128 and its number.

        Raises:
            TimeoutError: it ran longer than ``timeout``; the whole process tree was killed.
            PermissionError: ``cmd[0]`` is not executable.
            FileNotFoundError: ``cwd`` does not exist.
            OutputLimitExceededError: stdout or stderr is larger than Inspect's limit, or than ``limits.output``.
            SandboxUserUnsupportedError: the sandbox has no such user.
            SandboxUnavailableError: the sandbox has ended.
        """
        async with _turn() if concurrency else contextlib.nullcontext():
            with _in_inspects_words():
                result = await self._run(cmd, user, timeout=timeout, cwd=cwd, env=env, stdin=input)
        if result.outcome is Outcome.TIMEOUT:
            raise _timed_out(result, timeout)
        self._check_output(result)
        if result.exit_code == _NOT_EXECUTABLE and result.stderr == f"{cmd[0]}: {os.strerror(errno.EACCES)}\n":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), cmd[0])
        status = result.exit_code if result.signal is None else 128 + result.signal
        assert status is not None
        return InspectResult(result.ok, status, result.stdout, result.stderr)

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
        runs = self._user if user is None else _user(user)
        try:
            return await self._box.exec(cmd, timeout=timeout, cwd=cwd, env=env, stdin=stdin, user=runs)
        except InvalidValue as error:
            if runs is not None and error.what.startswith(f"user {str(runs)!r}"):
                raise SandboxUserUnsupportedError(str(error)) from error
            raise

    def _check_output(self, result: ExecResult) -> None:
        """Refuse output that is not complete: a caller may parse it."""
        limit = min(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE, self._output)
        for kept, dropped in (
            (result.stdout_bytes, result.dropped_stdout),
            (result.stderr_bytes, result.dropped_stderr),
        ):
            if dropped or len(kept) > limit:
                raise OutputLimitExceededError(f"{limit} bytes", kept[-limit:].decode("utf-8", "replace"))

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """Return the command that opens a shell in the sandbox.

        Raises:
            ConnectionError: the sandbox has ended.
        """
        if not self._box.alive:
            raise ConnectionError(f"sandbox {self._box.id} has ended")
        runs = self._user if user is None else _user(user)
        user_option = [] if runs is None else ["--user", str(runs)]
        argv = [sys.executable, "-m", "minisandbox", "sandbox", "shell", *user_option, self._box.id]
        return SandboxConnection(type="minisandbox", command=shlex.join(argv))

    # --- files -------------------------------------------------------------------------------------------------------

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Replace the content of a file; missing parent directories are made.

        Raises:
            IsADirectoryError: it is a directory.
            PermissionError: the default user may not write it.
            OSError: it cannot be written for another reason.
            SandboxUnavailableError: the sandbox has ended.
        """
        data = contents.encode() if isinstance(contents, str) else contents
        with _in_inspects_words(file):
            if self._user is None:
                await self._box.files.write_bytes(file, data)
                return
            argv = ["/bin/sh", "-c", _WRITE, "sh", str(PurePosixPath(file).parent), file]
            _check_file(await self._run(argv, None, timeout=_SECONDS, stdin=data), file)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Read a file; line ends stay as they are.

        Raises:
            FileNotFoundError: it does not exist.
            IsADirectoryError: it is a directory.
            PermissionError: the default user may not read it.
            UnicodeDecodeError: it is not UTF-8, and ``text`` is true.
            OutputLimitExceededError: it is larger than Inspect's limit.
            SandboxUnavailableError: the sandbox has ended.
        """
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        with _in_inspects_words(file):
            if self._user is None:
                data = await self._box.files.read_bytes(file, limit=limit)
            else:
                data = await self._read_as_user(file, limit)
        return data.decode("utf-8") if text else data

    async def _read_as_user(self, file: str, limit: int) -> bytes:
        """The file verbs work as root; this reads no more than the user may."""
        pieces: list[bytes] = []
        size = 0
        argv = ["/bin/cat", "--", file]
        async with await self._box.start(argv, user=self._user, env={"LC_ALL": "C"}, timeout=_SECONDS) as cat:
            async for event in cat.events():
                if isinstance(event, ExecResult):
                    _check_file(event, file)
                    break
                if event.stream == "stdout":
                    pieces.append(event.data)
                    size += len(event.data)
                if size > limit:
                    raise _too_large()
        return b"".join(pieces)

    # --- samples and tasks -------------------------------------------------------------------------------------------

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:  # noqa: ARG003 - images have no tasks
        """Build the image before the first sample needs it.

        Raises:
            PrerequisiteError: there is no such image, it cannot be built, or a setting cannot be used.
        """
        await MiniSandboxConfig.read(config).ready()

    @classmethod
    async def sample_init(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        metadata: dict[str, str],  # noqa: ARG003 - a sample's own sandbox= says what differs
    ) -> dict[str, SandboxEnvironment]:
        """Make the sandbox of a sample.

        Raises:
            PrerequisiteError: as :meth:`task_init`.
            MiniSandboxError: the sandbox cannot be made.
        """
        settings = MiniSandboxConfig.read(config)
        found = await settings.ready()
        limits = settings.checked_limits()
        if "output" not in settings.limits:
            limits = dataclasses.replace(limits, output=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE)
        spec = found.image.spec()
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
                (await box.exec(argv, cwd="/", timeout=_SECONDS)).check()
        except BaseException:  # a cancellation too: nobody else knows of it
            await box.stop()
            raise
        return {"default": cls(box, user=settings.user, output=limits.output)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,  # noqa: ARG003 - a sandbox knows what it needs to end
        config: SandboxEnvironmentConfigType | None,  # noqa: ARG003 - as above
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,  # noqa: ARG003 - as above
    ) -> None:
        """Stop the sandbox of a sample."""
        for environment in environments.values():
            await environment.as_type(cls).sandbox.stop()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:  # noqa: A002 - Inspect's name
        """Stop the sandboxes of this user's evals, or one of them: ``inspect sandbox cleanup minisandbox [ID]``."""
        for info in await asyncio.to_thread(live_sandboxes, labels=LABELS):
            if id in (None, info.id):
                with contextlib.suppress(NotFound):  # it has ended meanwhile
                    await (await AsyncSandbox.attach(info.id)).stop()

    @classmethod
    def config_files(cls) -> list[str]:
        """Return what Inspect looks for next to a task that names no configuration."""
        return [CONFIG_FILE]

    @classmethod
    def config_deserialize(cls, config: dict[str, object]) -> MiniSandboxConfig:
        """Return the configuration that a log file holds."""
        return MiniSandboxConfig.model_validate(config)

    def default_polling_interval(self) -> float:
        """Return the seconds between two looks at a service's requests: a look costs a millisecond."""
        return 0.2


def _user(user: str | None) -> str | int | None:
    """Inspect gives uids as text."""
    return int(user) if user is not None and user.isdecimal() else user


@contextlib.asynccontextmanager
async def _turn() -> AsyncIterator[None]:
    """Wait for one of the places that ``--max-subprocesses`` gives to commands on this machine."""
    async with concurrency("subprocesses", max_subprocesses_context_var.get(), resizable=True):
        yield


@contextlib.contextmanager
def _in_inspects_words(file: str | None = None) -> Iterator[None]:
    """Raise our errors as those of Inspect's protocol. An argument that cannot be used stays a ValueError."""
    try:
        yield
    except FileAccessError as error:
        if error.errno == errno.EFBIG and file is not None:
            raise _too_large() from error
        number = errno.EIO if error.errno is None else error.errno
        raise OSError(number, os.strerror(number), file or error.path) from error  # FileNotFoundError, by its number
    except InvalidValue:
        raise
    except MiniSandboxError as error:
        raise SandboxUnavailableError(str(error)) from error


def _check_file(result: ExecResult, file: str) -> None:
    """Raise what cat said as the OSError that it stands for."""
    if result.ok:
        return
    for number in (errno.ENOENT, errno.EISDIR, errno.EACCES, errno.ENOTDIR, errno.ENOSPC):
        if os.strerror(number) in result.stderr:
            raise OSError(number, os.strerror(number), file)
    raise OSError(errno.EIO, result.stderr.strip() or result.fate, file)


def _too_large() -> OutputLimitExceededError:
    return OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)


def _timed_out(result: ExecResult, timeout: float | None) -> TimeoutError:
    error = TimeoutError(f"Command timed out after {timeout} seconds")
    setattr(error, "truncated_output", result.stdout + result.stderr)  # noqa: B010 - Inspect shows it to the model
    return error
