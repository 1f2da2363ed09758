"""bubblewrap: namespaces for one command, or for a shell that lives as long as the sandbox."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engines.engine import ENVIRONMENT, WORKDIR, Bash, Engine, NotRun, Output, Project, Shelled, run_program


def bwrap(project: Project, *options: str) -> list[str]:
    """Return a bubblewrap command line that shows a project, read-only but for what the options add."""
    root = str(project.root)
    return ["bwrap", "--unshare-all", "--ro-bind", root, "/", "--ro-bind", "/usr", "/usr", "--proc", "/proc",
            "--dev", "/dev", "--tmpfs", "/tmp", *options, "--chdir", WORKDIR]  # fmt: skip


class OneCommand(Engine):
    """A new sandbox for every command, over the read-only project: the least that bubblewrap can do."""

    measures = frozenset(("creation", "exec", "at-once"))

    def open(self) -> str:
        """Find the program."""
        if shutil.which("bwrap") is None:
            raise NotRun("bwrap is not installed")
        return subprocess.check_output(["bwrap", "--version"], text=True).strip()

    def create(self, project: Project) -> Project:
        """Make nothing: every command makes its own sandbox."""
        return project

    def exec(self, box: Project, command: Sequence[str]) -> Output:
        """Run a program in a new sandbox."""
        return run_program([*bwrap(box), *command], ENVIRONMENT)

    def stop(self, box: Project) -> None:
        """Remove nothing."""


class WithShell(Shelled):
    """A copy of the repository, since bubblewrap 0.8 has no overlay, and a shell inside that takes the commands."""

    open = OneCommand.open

    def create(self, project: Project) -> tuple[Bash, Path]:
        """Copy the repository and start the shell."""
        place = Path(tempfile.mkdtemp(dir=self.place))
        subprocess.run(["cp", "-a", f"{project.root}{WORKDIR}", place], check=True)
        return Bash(bwrap(project, "--bind", f"{place}{WORKDIR}", WORKDIR)), place
