"""Capture exact token ids with a proxy between any agent and an engine that reports them."""

from minisandbox.models.capture.captured import CapturedError, CapturedTurn, CaptureSession
from minisandbox.models.capture.proxy import Access, CaptureProxy

__all__ = ["Access", "CaptureProxy", "CaptureSession", "CapturedError", "CapturedTurn"]
