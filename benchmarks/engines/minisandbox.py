"""MiniSandbox: an overlay over two layers, the writes in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from benchmarks.engines.engine import ENVIRONMENT, WORKDIR, Engine, Output, Project

from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec


class AsRoot(Engine):
    """By root."""

    needs_root = True

    def create(self, project: Project) -> Sandbox:
        """Make a sandbox over the project's layers."""
        layers, variables = (project.base, project.tree), tuple(ENVIRONMENT.items())
        return Sandbox.create(ImageSpec(project.home.name, layers, variables, PurePosixPath(WORKDIR)))

    def exec(self, box: Sandbox, command: Sequence[str] | str) -> Output:
        """Run a program; a string by a shell."""
        done = box.exec(command)
        return Output(done.exit_code, done.stdout)

    def shell(self, box: Sandbox, command: str) -> Output:
        """Run a command in a bash of its own."""
        return self.exec(box, command)

    def stop(self, box: Sandbox) -> None:
        """Stop it."""
        box.stop()


class AsUser(AsRoot):
    """By an ordinary user, who owns the layers."""

    needs_root = False
    as_user = True
