"""The protocol that every measured engine implements."""

from __future__ import annotations

import shlex
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

WORKDIR = "/testbed"
ENVIRONMENT = {
    "PATH": "/opt/env/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": f"{WORKDIR}/src", "HOME": "/tmp",
    "LANG": "C.UTF-8",
}  # fmt: skip
SUITE = ("/opt/env/bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider")


class NotRun(Exception):
    """An engine that is not installed or cannot run on this machine."""


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a command: its exit status, and what it printed."""

    status: int | None
    text: str


def run_program(command: Sequence[str | Path], environment: Mapping[str, str], directory: Path | None = None) -> Output:
    """Run a program of the host without input."""
    done = subprocess.run(
        command, env=environment, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
    )  # fmt: skip
    return Output(done.returncode, done.stdout)


@dataclass(frozen=True, slots=True)
class Project:
    """A project in every form that an engine starts from; all have the same files.

    Attributes:
        home: the directory that has all forms. Its name is the project's.
    """

    home: Path

    @property
    def base(self) -> Path:
        """A root filesystem without ``/usr``, shared by the projects."""
        return self.home.parent / "base"

    @property
    def tree(self) -> Path:
        """``/testbed``, the repository, and ``/opt/env``, its environment."""
        return self.home / "tree"

    @property
    def root(self) -> Path:
        """``base`` and ``tree`` together."""
        return self.home / "root"

    @property
    def image(self) -> Path:
        """``root`` and a small ``/usr`` from this machine's files, as a tar archive."""
        return self.home / "image.tar"

    @property
    def archives(self) -> tuple[Path, Path]:
        """``/opt/env`` and ``/testbed`` as gzipped tar archives."""
        return self.home / "env.tar.gz", self.home / "testbed.tar.gz"


class Engine(ABC):
    """A way to run commands in isolation.

    Args:
        place: an empty directory of its own.
        group: the control group, relative to a controller's root, whose CPU time and memory are counted.
        projects: what sandboxes are made of.

    Attributes:
        measures: the kinds of quantities that it can measure.
        needs_root: whether only root can run it.
        as_user: whether root runs it as an ordinary user.
        private: whether it gets a mount namespace with an empty ``/run``, so that daemons leave nothing.
    """

    measures: ClassVar[frozenset[str]] = frozenset(("creation", "exec", "at-once", "rollout", "validation"))
    needs_root: ClassVar[bool] = False
    as_user: ClassVar[bool] = False
    private: ClassVar[bool] = False

    def __init__(self, place: Path, group: str, projects: Sequence[Project]) -> None:
        self.place = place
        self.group = group
        self.projects = projects

    def open(self) -> str:
        """Prepare what all sandboxes share, and return the engine's name and version.

        Raises:
            NotRun: this machine cannot run the engine.
        """
        return ""

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End what :meth:`open` started."""

    @abstractmethod
    def create(self, project: Project) -> Any:
        """Return a new sandbox over a project, ready for commands."""

    @abstractmethod
    def exec(self, box: Any, command: Sequence[str]) -> Output:
        """Run a program in a sandbox, without a shell where the engine can."""

    def shell(self, box: Any, command: str) -> Output:
        """Run a shell command in a sandbox."""
        return self.exec(box, ["bash", "-c", command])

    @abstractmethod
    def stop(self, box: Any) -> None:
        """Remove a sandbox and everything it wrote."""


class Bash:
    """A bash that takes commands through a pipe: the channel of engines that cannot start another process inside.

    Args:
        command: what starts it, followed by ``bash`` and its options.
    """

    _MARK = "end-of-command-5c1d"

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [*command, "bash", "--noprofile", "--norc"], env=ENVIRONMENT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, command: str | Sequence[str]) -> Output:
        """Run a shell command, or a program with its arguments."""
        text = command if isinstance(command, str) else shlex.join(command)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{{ {text}\n}} </dev/null; printf '\\n{self._MARK} %s\\n' $?\n")
        self._process.stdin.flush()
        lines: list[str] = []
        for line in self._process.stdout:
            if line.startswith(self._MARK):
                return Output(int(line.split()[1]), "".join(lines).removesuffix("\n"))
            lines.append(line)
        raise RuntimeError(f"the shell ended: {''.join(lines)[-500:]}")

    def stop(self) -> None:
        """End the shell by closing its input."""
        try:
            self._process.communicate(timeout=30)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()


class Shelled(Engine):
    """An engine whose sandbox is a shell inside and a directory outside, which is removed with it."""

    def exec(self, box: tuple[Bash, Path], command: Sequence[str]) -> Output:
        """Run a program by the shell."""
        return box[0].run(command)

    def shell(self, box: tuple[Bash, Path], command: str) -> Output:
        """Run a command in the shell, which keeps its state."""
        return box[0].run(command)

    def stop(self, box: tuple[Bash, Path]) -> None:
        """End the shell, whose mounts end with it, and remove the directory."""
        box[0].stop()
        subprocess.run(["rm", "-rf", "--one-file-system", box[1]], check=True)
