"""The bare host: the test commands of tasks, run in plain copies of their images' trees, without a sandbox.

A copy is one ordinary directory with all layers of an image, the host's `/usr` (read-only) and `/proc`, and a `/dev` of
six devices. A timed run is `chroot COPY bash -c COMMAND` and nothing else: no layers, namespaces, limits or reporter.
The patch, the hidden tests and a fresh copy of the repository are laid out before the clock starts.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minisandbox.images import Image
from minisandbox.tasks import LogGrader, Task, harness

REFERENCE, UNTOUCHED = "reference", "untouched"
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


@dataclass(frozen=True, slots=True)
class HostTask:
    """A task whose tests run on the bare host.

    Attributes:
        task: the task, one with a log grader.
        image: its image.
        root: the copy of the image's tree.
    """

    task: Task
    image: Image
    root: Path

    @classmethod
    def make(cls, task: Task, image: Image, directory: Path) -> HostTask:
        """Copy the image's tree, and prepare its repository with the hidden tests: with the reference and without.

        The mounts stay until the mount namespace of this process ends. Only then may the copies be removed.
        """
        host = cls(task, image, directory / task.instance_id)
        spec = image.spec()
        if spec.host_usr and any(any(layer.glob("usr/*")) for layer in spec.layers):
            raise SystemExit(f"{task.instance_id} has system packages over the host's /usr: leave it out by --only")
        host._copy_layers(spec.layers, directory / "merged")
        for name in ("usr", "proc") if spec.host_usr else ("proc",):
            (host.root / name).mkdir(exist_ok=True)
            _run("mount", "--bind", f"/{name}", host.root / name)
            _run("mount", "-o", "remount,bind,ro", host.root / name)
        (host.root / "dev/shm").mkdir(parents=True, exist_ok=True)
        _run("cp", "-a", *(f"/dev/{name}" for name in _DEVICES), host.root / "dev")
        tests = image.tests_dir()
        for state in (REFERENCE, UNTOUCHED):
            _run("cp", "-a", host._repository, host._prepared(state))
            if tests is not None:
                shutil.copytree(tests, host._prepared(state), dirs_exist_ok=True)
        reference = task.reference
        backwards = ("-R",) if reference.reverse else ()
        git = ("git", "-c", "safe.directory=*", "-C", host._prepared(REFERENCE))
        patch = reference.patch.encode("utf-8", "surrogateescape")
        _run(*git, "apply", "--whitespace=nowarn", *backwards, stdin=patch)
        return host

    def prepare(self, states: Sequence[str]) -> None:
        """Lay out a fresh repository for each of the coming runs."""
        for number, state in enumerate(states):
            for path in (self._next(number), self._next(number).with_suffix(".old")):
                _run("rm", "-rf", path)
            _run("cp", "-a", self._prepared(state), self._next(number))

    def run(self, states: Sequence[str]) -> None:
        """Run the test command once in each of the prepared repositories."""
        environment = {"HOME": "/root", "TMPDIR": "/tmp", "PYTHONHASHSEED": "0", **dict(self.image.environment)}
        script = f"cd {self.image.workdir}\n{self.task.grader.command}"
        for number, state in enumerate(states):
            self._repository.rename(self._next(number).with_suffix(".old"))
            self._next(number).rename(self._repository)
            with self._log(state).open("wb") as log:
                subprocess.run(
                    ["chroot", self.root, "bash", "-c", script], stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, env=environment, check=False,
                )  # fmt: skip

    def resolved(self, state: str) -> bool:
        """Return whether the log of the last run says that the task is resolved, by the benchmark's own parser."""
        grader = self.task.grader
        assert isinstance(grader, LogGrader)
        about = {"instance_id": self.task.instance_id, "repo": self.task.repo, "version": self.task.version}
        log = self._log(state).read_text(encoding="utf-8", errors="surrogateescape")
        return harness.judge(
            grader.parser, log, self.task.FAIL_TO_PASS, self.task.PASS_TO_PASS, rule=grader.rule, about=about
        ).resolved

    def _copy_layers(self, layers: Sequence[Path], merged: Path) -> None:
        merged.mkdir(exist_ok=True)
        lower = ":".join(str(path) for path in reversed(layers))
        _run("mount", "-t", "overlay", "overlay", "-o", f"ro,lowerdir={lower}", merged)
        try:
            _run("cp", "-a", merged, self.root)
        finally:
            _run("umount", merged)

    @property
    def _repository(self) -> Path:
        return self.root / self.image.workdir.relative_to("/")

    def _prepared(self, state: str) -> Path:
        return self.root / f".{state}"

    def _next(self, number: int) -> Path:
        return self.root / f".run{number}"

    def _log(self, state: str) -> Path:
        return self.root / f".{state}.log"


def _run(*command: str | Path, stdin: bytes = b"") -> None:
    done = subprocess.run(command, input=stdin, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed with {done.returncode}:\n{done.stderr.decode()}")
