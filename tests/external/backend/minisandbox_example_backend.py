"""A backend: MiniSandbox's own sandboxes, each with a variable that names the backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from minisandbox import ImageSpec, Limits, Mount, Network
from minisandbox.sandbox import SandboxCore, create_core


def create(
    image: ImageSpec,
    *,
    limits: Limits | None = None,
    network: Network | None = None,
    mounts: tuple[Mount, ...] = (),
    environment: Mapping[str, str] | None = None,
    upper: Path | None = None,
    labels: Mapping[str, str] | None = None,
) -> SandboxCore:
    """Create a sandbox; the arguments are those of ``Sandbox.create``."""
    environment = {**(environment or {}), "MADE_BY": "labelled"}
    image = replace(image, backend="")
    return create_core(
        image, limits=limits, network=network, mounts=mounts, environment=environment, upper=upper, labels=labels
    )
