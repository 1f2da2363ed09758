"""Provide an ``Environment`` for mini-swe-agent, which users select by import path on mini-swe-agent's command line.

mini-swe-agent passes a benchmark's instance only to its own environment classes. This class gets the instance from
``run.env_startup_command``, which the runner renders with the instance and runs in every environment. With
``@bind {{instance_id}}``, the first command names the task. Later commands cannot change the task.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import platform
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from minisandbox.errors import FileAccessError, InvalidValue, MiniSandboxError, MissingExtra
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.protocol.wire import encoded
from minisandbox.types import ExecResult, Outcome

try:
    from minisweagent.exceptions import Submitted
    from minisweagent.utils.serialize import recursive_merge
    from pydantic import Field, field_validator
except ImportError as error:
    raise MissingExtra(
        f"minisandbox.integrations.mini_swe_agent: {error}",
        reason="mini-swe-agent is not installed, or older than 2.4",
        hint="pip install 'swe-minisandbox[mini]'",
    ) from error

from minisandbox.integrations.settings import HOST, MERGED_STREAMS, SandboxSettings

BIND = "@bind"
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

_LOG = logging.getLogger("minisweagent.environment.minisandbox")
_DOCKER_KEYS = ("executable", "run_args", "container_timeout", "pull_timeout")


class SandboxEnvironmentConfig(SandboxSettings):
    """The section ``environment:`` of mini-swe-agent's configuration.

    Attributes:
        cwd: the working directory of commands; "" for the image's working directory.
        env: environment variables of commands.
        forward_env: names of host environment variables to pass to commands, if they are set.
        timeout: time limit of a command in seconds.
        interpreter: the argument list to which the command is appended.
        workspace: a host directory to copy into the sandbox; the agent works on the copy.
        patch: a host file to which the agent's changes are written as a git patch, on submission and at the end.
    """

    cwd: str = ""
    env: dict[str, str] = Field(default_factory=dict)
    forward_env: list[str] = Field(default_factory=list)
    timeout: float = 30
    interpreter: list[str] = Field(default_factory=lambda: ["bash", "-c"])
    workspace: Path | None = None
    patch: Path | None = None

    @field_validator("workspace", "patch")
    @classmethod
    def absolute(cls, path: Path | None) -> Path | None:
        """Make a path absolute, so that later changes of the working directory do not affect it."""
        return None if path is None else path.absolute()


class SandboxEnvironment:
    """Run an agent's commands in a sandbox.

    If the configuration names an image, the sandbox is created immediately; otherwise the first command must name an
    image. The sandbox is stopped when this object is deleted or the process exits.

    Args:
        settings: the keys of :class:`SandboxEnvironmentConfig`. Keys for containers (``executable``, ``run_args``,
            ``container_timeout``, ``pull_timeout``) are ignored.

    Raises:
        InvalidValue: the settings contradict each other.
        MiniSandboxError: the image is missing and cannot be built, or the sandbox cannot be created.
    """

    def __init__(self, **settings: object) -> None:
        sandbox_settings = {name: value for name, value in settings.items() if name not in _DOCKER_KEYS}
        self.config = SandboxEnvironmentConfig.model_validate(sandbox_settings)
        self._box: Sandbox | None = None
        self._name = ""
        self._write_patch: Callable[[], None] = _nothing
        self._end: Callable[[], object] = _nothing
        if self.config.workspace is not None and self.config.patch is None:
            raise InvalidValue(
                "environment.workspace needs environment.patch",
                reason="the agent works on a copy, and its changes would be lost with the sandbox",
                hint="add -c environment.patch=FILE",
            )
        if self.config.image or self.config.workspace:
            self._create_sandbox(self.config.image or HOST)

    def execute(
        self, action: Mapping[str, object], cwd: str = "", *, timeout: float | None = None
    ) -> dict[str, object]:
        """Run one command, and return its stdout and stderr as one string.

        Args:
            action: a mapping with the command to run as ``command``. Without a configured image, the first command must
                be ``@bind NAME``, which names the sandbox's image; its further lines are run in the new sandbox.
            cwd: the working directory; "" for the configured directory.
            timeout: time limit in seconds; None for the configured limit.

        Returns:
            ``output``, ``returncode`` (128 plus the signal's number for a killed command, -1 after a timeout) and
            ``exception_info``.

        Raises:
            Submitted: the command succeeded, and its first line of output submits the task.
            MiniSandboxError: there is no such image, the build fails, or the sandbox has ended. A failed command does
                not raise this error.
        """
        command = str(action.get("command", ""))
        if self._box is None:
            command = self._bind(command)
        output = self._run(command, cwd or self.config.cwd, timeout or self.config.timeout)
        self._check_finished(output)
        return output

    def _bind(self, command: str) -> str:
        """Create the sandbox that the first command names; return the command's remaining lines."""
        first_line, _, remaining = command.partition("\n")
        verb, _, name = first_line.strip().partition(" ")
        if verb != BIND or not name.strip():
            raise _unbound()
        self._create_sandbox(name.strip())
        return remaining

    def _create_sandbox(self, name: str) -> None:
        task_image = self.config.find(name)
        box = Sandbox.create(
            task_image.image.spec(),
            limits=self.config.checked_limits(),
            network=self.config.checked_network(),
            environment=self._variables(),
            labels={"by": "mini-swe-agent"},
        )
        try:
            base = None if self.config.workspace is None else copy_in(box, self.config.workspace)
        except BaseException:  # also on Ctrl-C, because the caller has no handle to stop the sandbox
            box.stop()
            raise
        if self.config.patch is not None:
            self._write_patch = functools.partial(_write_patch, box, base, self.config.patch)
        self._end = weakref.finalize(self, _end, box, self._write_patch)
        atexit.register(self._end)  # runs before all sandboxes are stopped, because exit handlers run in reverse order
        self._box, self._name = box, task_image.image.name
        _LOG.info("sandbox %s of %s in %.0f ms", box.id, task_image.image.name, 1000 * box.created_in)

    def _variables(self) -> dict[str, str]:
        forwarded = {name: os.environ[name] for name in self.config.forward_env if name in os.environ}
        return forwarded | self.config.env

    def _run(self, command: str, cwd: str, timeout: float) -> dict[str, object]:
        assert self._box is not None
        argv = [*MERGED_STREAMS, *self.config.interpreter, command]
        try:
            return _as_output(self._box.exec(argv, cwd=cwd or None, timeout=timeout), command, timeout)
        except FileAccessError as error:  # the agent has removed the working directory
            return _failed("", type(error).__name__, str(error))
        except InvalidValue as error:
            if _is_encodable(command):
                raise
            return _failed("", type(error).__name__, str(error))

    def _check_finished(self, output: Mapping[str, object]) -> None:
        lines = str(output["output"]).lstrip().splitlines(keepends=True)
        if output["returncode"] != 0 or not lines or lines[0].strip() != SUBMIT:
            return
        submission = "".join(lines[1:])
        self._write_patch()
        extra = {"exit_status": "Submitted", "submission": submission}
        raise Submitted({"role": "exit", "content": submission, "extra": extra})

    def get_template_vars(self, **others: object) -> dict[str, object]:
        """Return the variables of prompt templates: the configuration, uname(1) of the sandbox, and ``others``.

        Raises:
            InvalidValue: there is no sandbox yet. The error stops the run before the first paid request to a model.
        """
        if self._box is None:
            raise _unbound()
        system = platform.uname()._asdict() | {"node": "sandbox"}
        variables: dict[str, object] = recursive_merge(self.config.model_dump(), system, others)
        return variables

    def serialize(self) -> dict[str, object]:
        """Return this environment's entries of a trajectory: configuration, class, image and sandbox."""
        config = {
            "environment": self.config.model_dump(mode="json"),
            "environment_type": f"{type(self).__module__}.{type(self).__qualname__}",
        }
        sandbox = {"id": "" if self._box is None else self._box.id, "image": self._name}
        return {"info": {"config": config, "sandbox": sandbox}}

    def close(self) -> None:
        """Write the patch if configured, and stop the sandbox; further calls do nothing."""
        self._end()


def _nothing() -> None:
    """Do nothing: the exit callback until a sandbox is created."""


def _write_patch(box: Sandbox, base: str | None, path: Path) -> None:
    patch = box.patch(base=base)
    path.write_bytes(patch)
    _LOG.info("%d bytes of changes: git apply %s", len(patch), path)


def _end(box: Sandbox, write_patch: Callable[[], None]) -> None:
    """Write the patch and stop the sandbox; log errors, because there is no caller to handle them."""
    try:
        if box.alive:
            write_patch()
    except (MiniSandboxError, OSError) as error:
        _LOG.error("the patch was not written: %s", error)
    finally:
        box.stop()


def _is_encodable(command: str) -> bool:
    """Return whether a string can be a program's argument: it has neither NUL nor unpaired surrogates."""
    try:
        return b"\0" not in encoded(command)
    except InvalidValue:
        return False


def _unbound() -> InvalidValue:
    return InvalidValue(
        "this environment does not know which image to use",
        reason="mini-swe-agent passes the instance only to its own environment classes",
        hint=f"for a benchmark: -c 'run.env_startup_command={BIND} {{{{instance_id}}}}'; for one image: "
        "-c environment.image=NAME; for a copy of a directory: -c environment.workspace=DIR -c environment.patch=FILE. "
        "-c with the configuration file must come before these",
    )


def _as_output(result: ExecResult, command: str, timeout: float) -> dict[str, object]:
    """Convert a result to the dictionary that mini-swe-agent's own environments return."""
    if result.outcome is Outcome.TIMEOUT:
        problem = f"Command {command!r} timed out after {timeout:g} seconds"
        return _failed(result.stdout, "TimeoutExpired", problem)
    return {"output": result.stdout, "returncode": result.shell_status, "exception_info": ""}


def _failed(output: str, exception_type: str, problem: str) -> dict[str, object]:
    return {
        "output": output,
        "returncode": -1,
        "exception_info": f"An error occurred while executing the command: {problem}",
        "extra": {"exception_type": exception_type, "exception": problem},
    }


_COPY_SECONDS = 300.0
# This script commits the copy, including uncommitted changes, without touching the branch or the index. It removes a
# .git file (of a worktree or submodule), because the file points to a host directory. It turns submodules and nested
# repositories into plain files, because a commit of a gitlink would lack their uncommitted changes.
_COMMIT_COPY = r"""
set -e
[ ! -f .git ] || rm .git
[ -d .git ] || git init -q
export GIT_INDEX_FILE=.git/minisandbox-index
git add -A >&2
while git ls-files -s -z | sed -zn 's/^160000 [^\t]*\t//p' > .git/gitlinks; [ -s .git/gitlinks ]; do
    git update-index --force-remove -z --stdin < .git/gitlinks
    sed -z 's|$|/.git|' .git/gitlinks | xargs -0 rm -rf --
    git add -A >&2
done
git -c user.name=minisandbox -c user.email=minisandbox@localhost commit-tree -m 'as it was copied' "$(git write-tree)"
rm "$GIT_INDEX_FILE" .git/gitlinks
"""


def copy_in(box: Sandbox, directory: Path) -> str:
    """Copy a host directory into a sandbox's working directory, and commit the copy.

    Args:
        box: the sandbox.
        directory: the directory, which is copied together with its ``.git``.

    Returns:
        The commit of the copied state inside the sandbox, for :meth:`.Sandbox.patch`.

    Raises:
        InvalidValue: the path is not a directory.
        FileAccessError: the directory does not fit into the sandbox.
        CommandFailed: git failed.
    """
    if not directory.is_dir():
        raise InvalidValue(f"workspace {directory} is not a directory", hint="give a directory of this machine")
    try:
        box.files.upload(directory, box.image.workdir)
    except FileAccessError as error:
        error.hint = error.hint or "environments and caches count too: remove them, or raise environment.limits.disk"
        raise error.about(str(directory)) from None
    result = box.exec(_COMMIT_COPY, timeout=_COPY_SECONDS)
    result.check()
    return result.stdout.strip()
