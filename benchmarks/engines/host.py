"""No isolation: commands of the host in a copy of the project, to compare with."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engines.engine import ENVIRONMENT, WORKDIR, Engine, Output, Project, run_program


class Host(Engine):
    """Bare processes."""

    measures = frozenset(("exec", "validation"))

    def create(self, project: Project) -> Path:
        """Copy the repository and the environment."""
        place = Path(tempfile.mkdtemp(dir=self.place))
        subprocess.run(["cp", "-a", f"{project.tree}/.", place], check=True)
        return place

    def exec(self, box: Path, command: Sequence[str]) -> Output:
        """Run a program in the copy; paths of the environment are those of the copy."""
        words = [f"{box}{word}" if word.startswith("/opt/") else word for word in command]
        variables = {**ENVIRONMENT, "PYTHONPATH": f"{box}{ENVIRONMENT['PYTHONPATH']}"}
        return run_program(words, variables, box / WORKDIR[1:])

    def stop(self, box: Path) -> None:
        """Remove the copy."""
        subprocess.run(["rm", "-rf", box], check=True)
