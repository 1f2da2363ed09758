"""Call the command line of a container engine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from typing import IO

from minisandbox.errors import HostError, InvalidValue, ProgramNotFound
from minisandbox.types import ENGINES

LABEL = "minisandbox"
"""Label of every container, image and volume that MiniSandbox creates."""
_PATIENCE = 900.0


@dataclass(frozen=True, slots=True)
class Client:
    """The client of an engine, which reads ``DOCKER_HOST`` or ``CONTAINERS_CONF`` from this process's environment.

    Attributes:
        name: ``podman`` or ``docker``.
        program: path of the client.
    """

    name: str
    program: str

    @classmethod
    def find(cls, name: str) -> Client:
        """Return the client of an engine.

        Raises:
            InvalidValue: the engine is unknown.
            ProgramNotFound: the engine's client is not installed.
        """
        if name not in ENGINES:
            raise InvalidValue(f"backend {name!r} is not known", hint=f"give {' or '.join(ENGINES)}")
        program = shutil.which(name)
        if program is None:
            raise ProgramNotFound(f"{name} is not installed", hint=f"install {name}, or leave out --backend")
        return cls(name, program)

    @property
    def remote(self) -> bool:
        """Whether the engine may run on another machine, which cannot mount files of this one."""
        host = os.environ.get("DOCKER_HOST" if self.name == "docker" else "CONTAINER_HOST", "")
        return bool(host) and not host.startswith("unix:")

    def succeeds(self, *arguments: str) -> bool:
        """Run the client, and return whether it succeeds."""
        return self._call(arguments, None).returncode == 0

    def output(self, *arguments: str) -> str:
        """Run the client, and return its output even if it fails."""
        return self._call(arguments, None).stdout.decode(errors="replace").strip()

    def run(self, *arguments: str, stdin: IO[bytes] | None = None) -> str:
        """Run the client, and return its output.

        Raises:
            HostError: the client failed.
        """
        completed = self._call(arguments, stdin)
        if completed.returncode != 0:
            raise self.failure(arguments[0], completed.stderr)
        return completed.stdout.decode(errors="replace").strip()

    def failure(self, verb: str, output: bytes) -> HostError:
        """Return the error for a failed run of the client.

        Args:
            verb: subcommand of the client.
            output: its error output.
        """
        text = output.decode(errors="replace").strip()[-1000:]
        return HostError(f"{self.name} {verb} failed", reason=text or None, hint=f"does '{self.name} info' work?")

    def open(self, *arguments: str, **streams: IO[bytes] | socket.socket | int) -> subprocess.Popen[bytes]:
        """Start the client in a new session, so that Ctrl-C reaches only this process."""
        return subprocess.Popen([self.program, *arguments], start_new_session=True, **streams)  # type: ignore[call-overload,no-any-return] # streams only

    def _call(self, arguments: tuple[str, ...], stdin: IO[bytes] | None) -> subprocess.CompletedProcess[bytes]:
        source = subprocess.DEVNULL if stdin is None else stdin
        try:
            return subprocess.run(
                [self.program, *arguments], stdin=source, capture_output=True, check=False, timeout=_PATIENCE
            )
        except subprocess.TimeoutExpired:
            raise HostError(f"{self.name} {arguments[0]} did not end in {_PATIENCE:g} s") from None
