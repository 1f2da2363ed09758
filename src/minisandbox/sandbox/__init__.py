"""The handle on an isolated workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisandbox.sandbox.handles import live_sandboxes
from minisandbox.sandbox.snapshots import Snapshot
from minisandbox.sandbox.sync import Sandbox
from minisandbox.sandbox.sync_files import Files
from minisandbox.sandbox.sync_processes import Process
from minisandbox.sandbox.sync_shell import Shell

if TYPE_CHECKING:
    from minisandbox.sandbox.aio import AsyncSandbox as AsyncSandbox
    from minisandbox.sandbox.aio_files import AsyncFiles as AsyncFiles
    from minisandbox.sandbox.aio_processes import AsyncProcess as AsyncProcess
    from minisandbox.sandbox.aio_shell import AsyncShell as AsyncShell

_LATER = {
    "AsyncFiles": "aio_files",
    "AsyncProcess": "aio_processes",
    "AsyncSandbox": "aio",
    "AsyncShell": "aio_shell",
}
"""What needs asyncio, which costs more to import than all the rest."""

__all__ = [
    "AsyncFiles",
    "AsyncProcess",
    "AsyncSandbox",
    "AsyncShell",
    "Files",
    "Process",
    "Sandbox",
    "Shell",
    "Snapshot",
    "live_sandboxes",
]


def __getattr__(name: str) -> object:
    """Load a name that needs asyncio when it is first used (PEP 562)."""
    home = _LATER.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - costs nothing until a name is used

    return getattr(import_module(f"{__name__}.{home}"), name)
