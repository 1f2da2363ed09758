"""Recipes of images, as dataclasses that can be imported without the code that builds images.

Public names are imported on first use, because a pull needs only those of references.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisandbox.lazy import importer

_NAMES = {
    "index": (
        "CPU EVERYTHING LOCK_FORMAT TORCH_BACKEND TORCH_BACKENDS IndexView Lock Package PythonRequest parse_moment"
    ),
    "pins": "Pins included_file read_pins requirement_lines",
    "python": "Buildable PythonRecipe",
    "recipe": (
        "NETWORKS Base CheckOut Context CopyFiles CutHistory DockerfileBase Document HiddenTests HostBase "
        "Install InstallAgent InstallPython InstallRequirements InstallSystem OciBase Recipe ResolvedMount Run "
        "RunCommand RunMount ScratchBase StageBase Step Variables check_environment check_repository_path "
        "check_requirement"
    ),
    "reference": "DOCKER_HUB Local Remote has_host is_repository parse_reference parse_remote split_local",
    "sources": "GitSource ImageSource LocalSource SdistSource Source is_commit shown",
}
"""The public names of each module, separated by spaces."""
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table above is the one definition

if TYPE_CHECKING:
    from minisandbox.spec.index import CPU as CPU
    from minisandbox.spec.index import EVERYTHING as EVERYTHING
    from minisandbox.spec.index import LOCK_FORMAT as LOCK_FORMAT
    from minisandbox.spec.index import TORCH_BACKEND as TORCH_BACKEND
    from minisandbox.spec.index import TORCH_BACKENDS as TORCH_BACKENDS
    from minisandbox.spec.index import IndexView as IndexView
    from minisandbox.spec.index import Lock as Lock
    from minisandbox.spec.index import Package as Package
    from minisandbox.spec.index import PythonRequest as PythonRequest
    from minisandbox.spec.index import parse_moment as parse_moment
    from minisandbox.spec.pins import Pins as Pins
    from minisandbox.spec.pins import included_file as included_file
    from minisandbox.spec.pins import read_pins as read_pins
    from minisandbox.spec.pins import requirement_lines as requirement_lines
    from minisandbox.spec.python import Buildable as Buildable
    from minisandbox.spec.python import PythonRecipe as PythonRecipe
    from minisandbox.spec.recipe import NETWORKS as NETWORKS
    from minisandbox.spec.recipe import Base as Base
    from minisandbox.spec.recipe import CheckOut as CheckOut
    from minisandbox.spec.recipe import Context as Context
    from minisandbox.spec.recipe import CopyFiles as CopyFiles
    from minisandbox.spec.recipe import CutHistory as CutHistory
    from minisandbox.spec.recipe import DockerfileBase as DockerfileBase
    from minisandbox.spec.recipe import Document as Document
    from minisandbox.spec.recipe import HiddenTests as HiddenTests
    from minisandbox.spec.recipe import HostBase as HostBase
    from minisandbox.spec.recipe import Install as Install
    from minisandbox.spec.recipe import InstallAgent as InstallAgent
    from minisandbox.spec.recipe import InstallPython as InstallPython
    from minisandbox.spec.recipe import InstallRequirements as InstallRequirements
    from minisandbox.spec.recipe import InstallSystem as InstallSystem
    from minisandbox.spec.recipe import OciBase as OciBase
    from minisandbox.spec.recipe import Recipe as Recipe
    from minisandbox.spec.recipe import ResolvedMount as ResolvedMount
    from minisandbox.spec.recipe import Run as Run
    from minisandbox.spec.recipe import RunCommand as RunCommand
    from minisandbox.spec.recipe import RunMount as RunMount
    from minisandbox.spec.recipe import ScratchBase as ScratchBase
    from minisandbox.spec.recipe import StageBase as StageBase
    from minisandbox.spec.recipe import Step as Step
    from minisandbox.spec.recipe import Variables as Variables
    from minisandbox.spec.recipe import check_environment as check_environment
    from minisandbox.spec.recipe import check_repository_path as check_repository_path
    from minisandbox.spec.recipe import check_requirement as check_requirement
    from minisandbox.spec.reference import DOCKER_HUB as DOCKER_HUB
    from minisandbox.spec.reference import Local as Local
    from minisandbox.spec.reference import Remote as Remote
    from minisandbox.spec.reference import has_host as has_host
    from minisandbox.spec.reference import is_repository as is_repository
    from minisandbox.spec.reference import parse_reference as parse_reference
    from minisandbox.spec.reference import parse_remote as parse_remote
    from minisandbox.spec.reference import split_local as split_local
    from minisandbox.spec.sources import GitSource as GitSource
    from minisandbox.spec.sources import ImageSource as ImageSource
    from minisandbox.spec.sources import LocalSource as LocalSource
    from minisandbox.spec.sources import SdistSource as SdistSource
    from minisandbox.spec.sources import Source as Source
    from minisandbox.spec.sources import is_commit as is_commit
    from minisandbox.spec.sources import shown as shown

__getattr__ = importer(__name__, _HOME)
