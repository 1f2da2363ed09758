"""Create and use sandboxes: isolated, writable, throw-away workspaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisandbox.lazy import importer

if TYPE_CHECKING:
    from minisandbox.sandbox._async.files import AsyncFiles as AsyncFiles
    from minisandbox.sandbox._async.process import AsyncProcess as AsyncProcess
    from minisandbox.sandbox._async.sandbox import AsyncSandbox as AsyncSandbox
    from minisandbox.sandbox._async.shell import AsyncShell as AsyncShell
    from minisandbox.sandbox._sync.files import Files as Files
    from minisandbox.sandbox._sync.process import Process as Process
    from minisandbox.sandbox._sync.sandbox import Sandbox as Sandbox
    from minisandbox.sandbox._sync.shell import Shell as Shell
    from minisandbox.sandbox.attached import live_sandboxes as live_sandboxes
    from minisandbox.sandbox.backend import SandboxCore as SandboxCore
    from minisandbox.sandbox.engines import create_core as create_core
    from minisandbox.sandbox.snapshots import Snapshot as Snapshot

_HOME = {
    "AsyncFiles": "_async.files",
    "AsyncProcess": "_async.process",
    "AsyncSandbox": "_async.sandbox",
    "AsyncShell": "_async.shell",
    "Files": "_sync.files",
    "Process": "_sync.process",
    "Sandbox": "_sync.sandbox",
    "SandboxCore": "backend",
    "Shell": "_sync.shell",
    "Snapshot": "snapshots",
    "create_core": "engines",
    "live_sandboxes": "attached",
}
"""The module of each public name. They are loaded at first use; asyncio is slow to load."""

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table above is the one definition

__getattr__ = importer(__name__, _HOME)
