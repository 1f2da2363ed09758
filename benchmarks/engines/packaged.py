"""kern and sandlock, from the package index: a new sandbox for every command."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.bubblewrap import OneCommand
from benchmarks.engines.engine import ENVIRONMENT, WORKDIR, NotRun, Output, Project, run_program


class Packaged(OneCommand):
    """An engine that is installed into a temporary virtual environment.

    Attributes:
        requirement: name and version on the package index.
    """

    requirement: str

    def open(self) -> str:
        """Install the package.

        Raises:
            NotRun: it cannot be installed.
        """
        self.environment = self.place / "environment"
        commands: tuple[list[str | Path], ...] = (
            [sys.executable, "-m", "venv", self.environment],
            [self.environment / "bin/pip", "install", "--quiet", "--no-input", self.requirement],
        )
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise NotRun(f"{self.requirement} cannot be installed: {done.stderr[-300:]}")
        return self.requirement.replace("==", " ")


class Kern(Packaged):
    """kern, by its command line: a writable overlay over the project, the host's /usr read-only."""

    requirement = "kern-sandbox==0.2.49"
    _numbers = itertools.count()

    def open(self) -> str:
        """Install the package, and run a first box, which prints warnings that later ones leave out."""
        version = super().open()
        self.exec(self.projects[0], ["/bin/true"])
        return version

    def exec(self, box: Project, command: Sequence[str]) -> Output:
        """Run a program in a new box."""
        name = f"bench-{os.getpid()}-{next(self._numbers)}"
        variables = [word for pair in ENVIRONMENT.items() for word in ("--env", "=".join(pair))]
        words: list[str | Path] = [
            self.environment / "bin/kern", "box", name, "--rootfs", str(box.root), "--volume", "/usr:/usr:ro",
            "--rm", "--quiet", *variables, "--workdir", WORKDIR, "--", *command,
        ]  # fmt: skip
        return run_program(words, {"PATH": ENVIRONMENT["PATH"], "HOME": str(self.place)})


class Sandlock(Packaged):
    """sandlock, by its Python interface: Landlock and seccomp over the host's own files; no namespaces, no root."""

    requirement = "sandlock==0.9.0"
    _sandbox: Any

    def open(self) -> str:
        """Install the package and import it."""
        version = super().open()
        sys.path.append(str(next(self.environment.glob("lib/python*/site-packages"))))
        self._sandbox = importlib.import_module("sandlock").Sandbox
        return version

    def exec(self, box: Project, command: Sequence[str]) -> Output:
        """Run a program that may read the host's programs and the project, and write to /tmp."""
        readable = [str(box.tree), *(f"/{name}" for name in ("usr", "bin", "lib", "lib64", "etc", "dev", "proc"))]
        done = self._sandbox(fs_readable=readable, fs_writable=["/tmp"], env=ENVIRONMENT).run(list(command))
        return Output(done.exit_code, (done.stdout + done.stderr).decode(errors="replace"))
