"""Our errors in SWE-ReX's words: agents tell by the class what is their doing and what is ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from swerex.exceptions import SwerexException

from minisandbox.errors import FileAccessError, InvalidValue, MiniSandboxError


class SandboxFailure(SwerexException, RuntimeError):
    """The sandbox has ended, or could not do what it was asked for: never a fault of the command."""


@contextmanager
def in_their_words() -> Iterator[None]:
    """Raise what a file verb says as the OSError that Python has for it, and what else fails as SandboxFailure.

    An argument that cannot be used is a ValueError, as it is here.
    """
    try:
        yield
    except FileAccessError as error:
        if error.errno is None:
            raise OSError(str(error)) from error
        raise OSError(error.errno, str(error)) from error  # FileNotFoundError and the like, by its number
    except InvalidValue:
        raise
    except MiniSandboxError as error:
        raise SandboxFailure(str(error)) from error
