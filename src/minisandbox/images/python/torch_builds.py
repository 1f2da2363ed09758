"""Select PyTorch builds without CUDA: sandboxes have no GPU, and CUDA libraries take most of the space."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from minisandbox.images.python.simple_api import version_in
from minisandbox.index_settings import IndexSettings
from minisandbox.spec import CPU

_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # the builds on PyPI need CUDA
_BUILT = frozenset({"torch", "torchaudio", "torchcsprng", "torchtext", "torchvision"})
_CUDA = re.compile(
    r"nvidia-(?:cu[a-z]*|nccl|nvjitlink|nvshmem|nvtx)(?:-.*)?|(?:pytorch-)?triton|cuda-(?:bindings|pathfinder|toolkit)"
)
_LOCAL = re.compile(r"(===?\s*[^\s,;+]+)\+[A-Za-z0-9._-]+")


def names_torch(lines: Iterable[str]) -> bool:
    """Return whether requirements contain a project that has separate builds with and without CUDA."""
    return any(_name(line) in _BUILT for line in lines)


def without_cuda(lines: Iterable[str]) -> tuple[str, ...]:
    """Return requirements without CUDA's libraries and without local versions of PyTorch (``+cu121``)."""
    remaining = (line for line in lines if not is_cuda(_name(line)))
    return tuple(_LOCAL.sub(r"\1", line) if _name(line) in _BUILT else line for line in remaining)


def is_cuda(project: str) -> bool:
    """Return whether a project is a CUDA library or another dependency that only CUDA builds of PyTorch need."""
    return _CUDA.fullmatch(project) is not None


def has_builds(project: str) -> bool:
    """Return whether a project has separate builds with and without CUDA."""
    return project in _BUILT


def is_for_cpu(project: str, filename: str) -> bool:
    """Return whether a file is a build without CUDA: its local version says so, or it is pure Python."""
    local = (version_in(project, filename) or "").partition("+")[2]
    return filename.endswith(".whl") and (local == CPU or (not local and filename.endswith("-none-any.whl")))


def with_cpu_index(settings: IndexSettings) -> IndexSettings:
    """Return the settings with PyTorch's own index added."""
    return replace(settings, extra_index_urls=(*settings.extra_index_urls, _CPU_INDEX))


def _name(line: str) -> str:
    return canonicalize_name(Requirement(line).name)
