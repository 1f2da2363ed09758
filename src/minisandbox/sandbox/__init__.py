"""Create and use sandboxes: isolated, writable, throw-away workspaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisandbox.sandbox._sync.files import Files
from minisandbox.sandbox._sync.process import Process
from minisandbox.sandbox._sync.sandbox import Sandbox
from minisandbox.sandbox._sync.shell import Shell
from minisandbox.sandbox.attached import live_sandboxes
from minisandbox.sandbox.backend import SandboxCore
from minisandbox.sandbox.engines import create_core
from minisandbox.sandbox.snapshots import Snapshot

if TYPE_CHECKING:
    from minisandbox.sandbox._async.files import AsyncFiles as AsyncFiles
    from minisandbox.sandbox._async.process import AsyncProcess as AsyncProcess
    from minisandbox.sandbox._async.sandbox import AsyncSandbox as AsyncSandbox
    from minisandbox.sandbox._async.shell import AsyncShell as AsyncShell

_LATER = {
    "AsyncFiles": "_async.files",
    "AsyncProcess": "_async.process",
    "AsyncSandbox": "_async.sandbox",
    "AsyncShell": "_async.shell",
}
"""Names that are loaded at first use, because importing asyncio takes longer than everything else here."""

__all__ = [
    "AsyncFiles",
    "AsyncProcess",
    "AsyncSandbox",
    "AsyncShell",
    "Files",
    "Process",
    "Sandbox",
    "SandboxCore",
    "Shell",
    "Snapshot",
    "create_core",
    "live_sandboxes",
]


def __getattr__(name: str) -> object:
    """Import a name that needs asyncio at its first use (PEP 562)."""
    home = _LATER.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - costs nothing until a name is used

    return getattr(import_module(f"{__name__}.{home}"), name)
