"""Build the operations and channels that run commands, for sync and async handles."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from minisandbox.errors import InvalidValue
from minisandbox.sandbox.backend import SandboxCore
from minisandbox.sandbox.protocol.channels import Lifetime, ProcessChannel, ShellChannel
from minisandbox.sandbox.protocol.wire import ExecCall, Operation, encoded, environment_for
from minisandbox.sandbox.validation import check_path, check_type
from minisandbox.types import ExecResult, Terminal


def directory(core: SandboxCore, path: str | PurePosixPath | None) -> str:
    """Return the absolute working directory of a command.

    Raises:
        InvalidValue: the path is invalid.
    """
    if path is not None:
        check_path("cwd", path)
    if path is not None and b"\0" in encoded(str(path)):
        raise InvalidValue(f"cwd is {str(path)!r}", reason="it has a NUL character", hint="give a directory inside")
    return str(core.image.workdir if path is None else core.image.workdir / path)


def user_of(core: SandboxCore, user: str | int | None) -> str | int | None:
    """Return the user of a command: the given user, else the image's, or None for root."""
    image = core.image.user
    return user if user is not None or not image else int(image) if re.fullmatch("[0-9]{1,10}", image) else image


def run(
    core: SandboxCore,
    command: str | Sequence[str],
    *,
    timeout: float | None = None,
    cwd: str | PurePosixPath | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes | str | None = None,
    user: str | int | None = None,
) -> Operation[ExecResult]:
    """Run a command; see :meth:`minisandbox.Sandbox.exec`."""
    if stdin is not None:
        check_type("stdin", stdin, (bytes, bytearray, memoryview, str), "bytes or a str")
    call = ExecCall(
        command,
        env=environment_for(core.environment, env, user_of(core, user)),
        cwd=directory(core, cwd),
        timeout=timeout,
        stdin=encoded(stdin) if isinstance(stdin, str) else stdin,
        output=core.limits.output,
        user=user_of(core, user),
    )
    yield call
    return call.result()


def process_channel(
    core: SandboxCore,
    command: str | Sequence[str],
    *,
    timeout: float | None,
    cwd: str | PurePosixPath | None,
    env: Mapping[str, str] | None,
    user: str | int | None,
    pty: Terminal | None,
    lifetime: Lifetime,
) -> ProcessChannel:
    """Return the channel that starts a process; see :meth:`minisandbox.Sandbox.start`."""
    return ProcessChannel(
        command,
        id=f"process-{secrets.token_hex(4)}",
        env=environment_for(core.environment, env, user_of(core, user)),
        cwd=directory(core, cwd),
        timeout=timeout,
        user=user_of(core, user),
        pty=pty,
        lifetime=lifetime,
        output=core.limits.output,
    )


def shell_channel(
    core: SandboxCore,
    *,
    cwd: str | PurePosixPath | None,
    env: Mapping[str, str] | None,
    user: str | int | None,
) -> ShellChannel:
    """Return the channel that starts a shell; see :meth:`minisandbox.Sandbox.shell`."""
    return ShellChannel(
        env=environment_for(core.environment, env, user_of(core, user)),
        cwd=directory(core, cwd),
        user=user_of(core, user),
        output=core.limits.output,
    )
