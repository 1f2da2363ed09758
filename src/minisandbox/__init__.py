"""Container-free sandboxes for reinforcement learning of software-engineering agents.

Public names are loaded when first used, so that ``import minisandbox`` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "ExecResult": "types",
    "Image": "images",
    "ImageSpec": "types",
    "Limits": "types",
    "MiniSandboxError": "errors",
    "Mount": "types",
    "Network": "types",
    "Outcome": "types",
    "Sandbox": "sandbox",
    "Task": "tasks",
    "TaskSet": "tasks",
    "Usage": "types",
}

__all__ = ["__version__", *sorted(_HOME)]  # noqa: PLE0604 - the table above is the one definition

if TYPE_CHECKING:
    from minisandbox.errors import MiniSandboxError as MiniSandboxError
    from minisandbox.images import Image as Image
    from minisandbox.sandbox import Sandbox as Sandbox
    from minisandbox.tasks import Task as Task
    from minisandbox.tasks import TaskSet as TaskSet
    from minisandbox.types import ExecResult as ExecResult
    from minisandbox.types import ImageSpec as ImageSpec
    from minisandbox.types import Limits as Limits
    from minisandbox.types import Mount as Mount
    from minisandbox.types import Network as Network
    from minisandbox.types import Outcome as Outcome
    from minisandbox.types import Usage as Usage


def __getattr__(name: str) -> object:
    """Load a public name from its home (PEP 562)."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - costs nothing until a name is used

    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
