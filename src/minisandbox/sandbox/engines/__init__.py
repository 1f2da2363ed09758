"""Run sandboxes in containers of podman or docker, to compare verdicts, time and disk use.

Each sandbox is one container, and each command or file operation one ``exec`` in it. The ``exec`` runs a sandbox
worker, so only the core (:mod:`.core`) differs from that of other sandboxes. Containers have no snapshots, forks,
changes or network filter.
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
    """Create a sandbox with the backend that its image names; see :meth:`minisandbox.Sandbox.create`.

    Raises:
        InvalidValue: there is no such backend.
        PackageError: a backend plugin cannot be loaded.
    """
    create = Core.create if not isinstance(image, ImageSpec) or not image.backend else _backend(image.backend)
    return create(
        image, limits=limits, network=network, mounts=mounts, environment=environment, upper=upper, labels=labels
    )


def _backend(name: str) -> Callable[..., SandboxCore]:
    """Return the function that creates sandboxes of a container engine or a backend plugin."""
    if name in ENGINES:
        from minisandbox.sandbox.engines.core import ContainerCore  # noqa: PLC0415 - few sandboxes need an engine

        return ContainerCore.create
    create = load_plugin("backends", name, (*ENGINES, "sandbox"))
    if not callable(create):
        names = (*ENGINES, *plugin_names("backends"))
        raise InvalidValue(f"backend {name!r} is not known", hint=f"use one of {', '.join(names)}")
    return create


def stop_core(core: SandboxCore) -> None:
    """Stop a sandbox of any backend."""
    core.stop()
