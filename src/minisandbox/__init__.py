"""Container-free sandboxes for reinforcement learning of software-engineering agents.

Public names are imported when first used, so that ``import minisandbox`` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "AsyncFiles": "sandbox",
    "AsyncProcess": "sandbox",
    "AsyncSandbox": "sandbox",
    "AsyncShell": "sandbox",
    "Change": "types",
    "ChangeKind": "types",
    "ExecResult": "types",
    "FileInfo": "types",
    "FileType": "types",
    "Files": "sandbox",
    "Grade": "grade",
    "Image": "images",
    "ImageSpec": "types",
    "Limits": "types",
    "MiniSandboxError": "errors",
    "Mount": "types",
    "Network": "types",
    "Outcome": "types",
    "Output": "types",
    "Process": "sandbox",
    "PythonRecipe": "spec",
    "Recipe": "spec",
    "Refusals": "types",
    "Sandbox": "sandbox",
    "SandboxInfo": "types",
    "SandboxUsage": "types",
    "Shell": "sandbox",
    "ShellResult": "types",
    "Snapshot": "sandbox",
    "Store": "store",
    "Task": "tasks",
    "TaskSet": "tasks",
    "Terminal": "types",
    "Transfer": "types",
    "Usage": "types",
    "Verdict": "grade",
    "build": "images",
    "host_image": "images",
    "load_image": "images",
}

__all__ = ["__version__", *sorted(_HOME)]  # noqa: PLE0604 - _HOME defines the public names

if TYPE_CHECKING:
    from minisandbox.errors import MiniSandboxError as MiniSandboxError
    from minisandbox.grade import Grade as Grade
    from minisandbox.grade import Verdict as Verdict
    from minisandbox.images import Image as Image
    from minisandbox.images import build as build
    from minisandbox.images import host_image as host_image
    from minisandbox.images import load_image as load_image
    from minisandbox.sandbox import AsyncFiles as AsyncFiles
    from minisandbox.sandbox import AsyncProcess as AsyncProcess
    from minisandbox.sandbox import AsyncSandbox as AsyncSandbox
    from minisandbox.sandbox import AsyncShell as AsyncShell
    from minisandbox.sandbox import Files as Files
    from minisandbox.sandbox import Process as Process
    from minisandbox.sandbox import Sandbox as Sandbox
    from minisandbox.sandbox import Shell as Shell
    from minisandbox.sandbox import Snapshot as Snapshot
    from minisandbox.spec import PythonRecipe as PythonRecipe
    from minisandbox.spec import Recipe as Recipe
    from minisandbox.store import Store as Store
    from minisandbox.tasks import Task as Task
    from minisandbox.tasks import TaskSet as TaskSet
    from minisandbox.types import Change as Change
    from minisandbox.types import ChangeKind as ChangeKind
    from minisandbox.types import ExecResult as ExecResult
    from minisandbox.types import FileInfo as FileInfo
    from minisandbox.types import FileType as FileType
    from minisandbox.types import ImageSpec as ImageSpec
    from minisandbox.types import Limits as Limits
    from minisandbox.types import Mount as Mount
    from minisandbox.types import Network as Network
    from minisandbox.types import Outcome as Outcome
    from minisandbox.types import Output as Output
    from minisandbox.types import Refusals as Refusals
    from minisandbox.types import SandboxInfo as SandboxInfo
    from minisandbox.types import SandboxUsage as SandboxUsage
    from minisandbox.types import ShellResult as ShellResult
    from minisandbox.types import Terminal as Terminal
    from minisandbox.types import Transfer as Transfer
    from minisandbox.types import Usage as Usage


def __getattr__(name: str) -> object:
    """Import a public name from its module when it is first used (PEP 562)."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - costs nothing until a name is used

    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
