"""Convert our errors to SWE-ReX's, whose classes separate an agent's errors from infrastructure errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from swerex.exceptions import SwerexException

from minisandbox.errors import FileAccessError, InvalidValue, MiniSandboxError


class SandboxFailure(SwerexException, RuntimeError):
    """The sandbox has ended, or failed to do what was requested; never an error of the command."""


@contextmanager
def as_swerex_errors() -> Iterator[None]:
    """Raise file errors as the matching OSError, and others as SandboxFailure.

    Invalid arguments stay ValueErrors.
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
