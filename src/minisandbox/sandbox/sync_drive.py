"""Carrying calls through on blocking sockets."""

from __future__ import annotations

from typing import TypeVar

from minisandbox.sandbox.drive import converse
from minisandbox.sandbox.handles import Returned, SandboxCore, advance, conclude, give_up
from minisandbox.sandbox.wire import Call, Operation

T = TypeVar("T")


def carry_out(core: SandboxCore, operation: Operation[T]) -> T:
    """Carry an operation's calls out one after another.

    Args:
        core: the sandbox.
        operation: what to do; closed at the end, however it comes.

    Returns:
        What the operation returns.

    Raises:
        SandboxGone: the sandbox has ended.
    """
    try:
        while not isinstance(call := advance(operation), Returned):
            _drive(core, call)
        return call.value
    finally:
        operation.close()


def _drive(core: SandboxCore, call: Call) -> None:
    """Carry a call through on a socket of its own.

    Leaving early (an exception, a Ctrl-C) closes the socket, which ends the command's tree.
    """
    with core.open_job() as connection:
        connection.settimeout(call.patience)
        try:
            converse(call, connection)
        except TimeoutError:
            raise give_up(core) from None
    conclude(core, call)
