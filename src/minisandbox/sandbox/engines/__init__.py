"""Container engines, podman and docker, as a backend of sandboxes: to compare verdicts, time and disk with.

One container per sandbox, one ``exec`` per command or file verb. Each runs the worker of a sandbox, so that everything
above the core is shared. An engine cannot take snapshots, fork, list changes or filter the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.sandbox.core import Core
from minisandbox.types import ImageSpec, Limits, Mount, Network

if TYPE_CHECKING:
    from minisandbox.sandbox.backend import SandboxCore
    from minisandbox.sandbox.snapshots import Snapshot


def create_core(
    image: ImageSpec | Snapshot,
    *,
    limits: Limits | None = None,
    network: Network | None = None,
    mounts: Sequence[Mount] = (),
    environment: Mapping[str, str] | None = None,
    upper: Path | None = None,
    labels: Mapping[str, str] | None = None,
) -> SandboxCore:
    """Make a sandbox by the backend that its image names; see :meth:`minisandbox.Sandbox.create`."""
    if isinstance(image, ImageSpec) and image.backend:
        from minisandbox.sandbox.engines.core import ContainerCore  # noqa: PLC0415 - few sandboxes need an engine

        return ContainerCore.create(
            image, limits=limits, network=network, mounts=mounts, environment=environment, upper=upper, labels=labels
        )
    return Core.create(
        image, limits=limits, network=network, mounts=mounts, environment=environment, upper=upper, labels=labels
    )


def stop_core(core: SandboxCore) -> None:
    """End a sandbox of any backend."""
    core.stop()
