"""All probes, in the order in which they are declared."""

from __future__ import annotations

from . import (
    calls,
    devices,
    files,
    functions,
    ipc,
    kernel_memory,
    leaks,
    limits,
    namespaces,
    network,
    privileges,
    processes,
    supervision,
)
from .core import PROBES, Probe

MODULES = (
    files, processes, namespaces, privileges, calls, devices, ipc, network, leaks, supervision, limits, kernel_memory,
    functions,
)  # fmt: skip


def probes() -> list[Probe]:
    return list(PROBES.values())
