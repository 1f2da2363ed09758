"""The handle on an isolated workspace."""

from __future__ import annotations

from minisandbox.sandbox.sync import Files, Sandbox, live_sandboxes

__all__ = ["Files", "Sandbox", "live_sandboxes"]
