"""Fields of script-graded tasks: the solution script, and the requirements of their sandboxes."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from minisandbox.errors import InvalidValue
from minisandbox.tasks.fields import object_of
from minisandbox.types import Limits, Network


@dataclass(frozen=True, slots=True)
class Solution:
    """A script that solves a task.

    Attributes:
        files: a host directory that is copied to ``files_at`` before the script runs; agents cannot see it.
        command: the shell command; the image's user runs it in the image's working directory. Its exit status is
            ignored.
        files_at: the directory of ``files`` inside the sandbox.
        timeout: the script's time limit in seconds.
        environment: environment variables that only the script gets.
    """

    files: Path
    command: str = "bash /solution/solve.sh"
    files_at: str = "/solution"
    timeout: float = 1800.0
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def shell(self) -> str:
        """Return the command, preceded by exports of its variables, as one line of shell code."""
        return "; ".join((*(f"export {name}={shlex.quote(value)}" for name, value in self.environment), self.command))

    def to_row(self) -> dict[str, object]:
        """Return the solution as the value of a row's ``solution``."""
        return object_of(self, ("command", "files_at", "timeout"))


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of a task's sandboxes; None means the default.

    Attributes:
        memory: the memory limit in bytes, not counting written files.
        disk: the limit of written files, in bytes.
        network: the hosts accessible to the agent and the solution.
        grader_network: the hosts accessible to the grader in its own sandbox.
        seconds: the agent's time limit in seconds.
        entrypoint: whether the image's entrypoint runs in the background of the sandboxes of agents and script graders.
        directories: absolute paths of directories that exist in these sandboxes and are writable for every user.
    """

    memory: int | None = None
    disk: int | None = None
    network: Network = Network.off()
    grader_network: Network = Network.off()
    seconds: float | None = None
    entrypoint: bool = False
    directories: tuple[str, ...] = ()

    def limits(self, given: Limits | None) -> Limits:
        """Return the given limits of a sandbox, or the task's own if none are given.

        Files in a memory-backed upper directory count as memory, so the disk limit is added to the memory limit.
        """
        if given is not None:
            return given
        disk = Limits().disk if self.disk is None else self.disk
        return Limits(disk=disk) if self.memory is None else Limits(memory=self.memory + disk, disk=disk)

    def to_row(self) -> dict[str, object]:
        """Return the requirements as the value of a row's ``needs``."""
        networks = {name: _network_row(getattr(self, name)) for name in ("network", "grader_network")}
        return {name: networks.get(name, value) for name, value in object_of(self).items()}


_PUBLIC = Network.allow("*")


def _network_row(network: Network) -> str | list[str]:
    return "public" if network == _PUBLIC else list(network.hosts)


def network_of(value: object, *, public: bool) -> Network:
    """Parse the network that a row requests: ``off``, ``public``, or a list of hosts.

    Args:
        value: the name, or the hosts.
        public: whether ``public`` is granted, as HTTP and HTTPS to all public hosts; otherwise ``public`` means
            ``off``.

    Raises:
        InvalidValue: the value names no network.
    """
    if isinstance(value, list | tuple):
        return Network.allow(*value)
    if value not in ("off", "public"):
        raise InvalidValue(f"network {value!r}", hint="write 'off', 'public' or a list of hosts")
    return _PUBLIC if public and value == "public" else Network.off()
