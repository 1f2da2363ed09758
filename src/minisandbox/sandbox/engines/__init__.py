"""Container engines, podman and docker, as a backend of sandboxes: to compare verdicts, time and disk with.

One container per sandbox, one ``exec`` per command or file verb. Each runs the worker of a sandbox, so that everything
above the core is shared. An engine cannot take snapshots, fork, list changes or filter the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.errors import InvalidValue
from minisandbox.plugins import load_plugin, plugin_names
from minisandbox.sandbox.core import Core
from minisandbox.types import ENGINES, ImageSpec, Limits, Mount, Network

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
    """Create a sandbox by the backend that its image names; see :meth:`minisandbox.Sandbox.create`.

    Raises:
        InvalidValue: there is no such backend.
        PackageError: another distribution's backend cannot be loaded.
    """
    create = Core.create if not isinstance(image, ImageSpec) or not image.backend else _backend(image.backend)
    return create(
        image, limits=limits, network=network, mounts=mounts, environment=environment, upper=upper, labels=labels
    )


def _backend(name: str) -> Callable[..., SandboxCore]:
    """Return the function that creates the sandboxes of a backend: an engine's, or another distribution's."""
    if name in ENGINES:
        from minisandbox.sandbox.engines.core import ContainerCore  # noqa: PLC0415 - few sandboxes need an engine

        return ContainerCore.create
    create = load_plugin("backends", name, (*ENGINES, "sandbox"))
    if not callable(create):
        names = (*ENGINES, *plugin_names("backends"))
        raise InvalidValue(f"backend {name!r} is not known", hint=f"use one of {', '.join(names)}")
    return create


def stop_core(core: SandboxCore) -> None:
    """End a sandbox of any backend."""
    core.stop()
