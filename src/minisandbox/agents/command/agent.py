"""The agent that runs another agent's command line, whose only host is the capture proxy."""

from __future__ import annotations

import re
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from minisandbox.agents.command.recipe import AgentRecipe
from minisandbox.agents.command.relay import Relay
from minisandbox.agents.session import SUBMITTED, Ending, Session
from minisandbox.errors import MiniSandboxError
from minisandbox.models import Model
from minisandbox.models.capture import CaptureProxy, CaptureSession
from minisandbox.tasks import Task
from minisandbox.types import ExecResult, Network, Outcome

EXIT_COMMAND = "exit_command"
"""The exit status of a command-line agent whose command failed."""
EXIT_NETWORK = "exit_network"
"""The exit status of a command-line agent that failed after requests to other hosts, which were refused."""
EXIT_IDLE = "exit_idle"
"""The exit status of a command-line agent that sent no request for a long time; it may wait for a terminal."""
EXIT_NO_REQUEST = "exit_no_request"
"""The exit status of a command-line agent that got no response from the model; the rollout has no reward."""

ROOT = "/opt/minisandbox/agent"
SERVER = "http://127.0.0.1:3128"
_MESSAGE_FILE = "/tmp/task-message"  # noqa: S108 - in the sandbox
_LONGEST_ARGUMENT = 128 * 1024 - 1  # MAX_ARG_STRLEN of execve(2), with its NUL
_TAIL = 2000


class AgentFailed(MiniSandboxError):
    """The agent's program failed for a reason that says nothing about the model, so the rollout has no reward.

    Args:
        exit_status: the exit status of the rollout.
        what: the description.
    """

    exit_code = 49

    def __init__(self, exit_status: str, what: str, *, hint: str | None = None) -> None:
        super().__init__(what, hint=hint)
        self.exit_status = exit_status


class CommandAgent:
    """Run an agent's command line in the sandbox. Use it inside :meth:`serving`.

    Args:
        recipe: the agent's recipe.

    Attributes:
        layers: the directories of the installed program's layers, by the root of the store.
    """

    needs_model = True

    def __init__(self, recipe: AgentRecipe) -> None:
        self.recipe = recipe
        self.name = recipe.name
        self.layers: dict[Path, list[Path]] = {}
        self._proxy: CaptureProxy | None = None
        self._users = 0

    @property
    def network(self) -> Network:
        """The network of sandboxes for this agent."""
        assert self._proxy is not None, "CommandAgent.serving"
        return Network("allow", (urlsplit(self._proxy.base_url).netloc,), private=True, server=True)

    @asynccontextmanager
    async def serving(self, model: Model) -> AsyncIterator[None]:
        """Run the capture proxy of a model while the block runs; concurrent blocks share it."""
        self._users += 1
        try:
            if self._proxy is None:
                self._proxy = CaptureProxy(model)
                await self._proxy.start()
            yield
        finally:
            self._users -= 1
            if not self._users and self._proxy is not None:
                proxy, self._proxy = self._proxy, None
                await proxy.stop()

    async def run(self, task: Task, session: Session) -> Ending:
        """Run the command line on a task (:meth:`.Agent.run`).

        Raises:
            AgentFailed: the agent got no response from the model.
        """
        assert self._proxy is not None, "CommandAgent.serving"
        relay = Relay(session)
        key = self._proxy.session(session.name, model=relay).key
        try:
            result = await self._run_command(task, session, relay, key)
        finally:
            captured = self._proxy.close_session(key)
            relay.settle()
        relay.check()
        return await self._ending(result, session, captured)

    async def _run_command(self, task: Task, session: Session, relay: Relay, key: str) -> ExecResult | None:
        """Run the command; return None if the agent was stopped because it was idle."""
        recipe, message = self.recipe, self.recipe.prompt.replace("{message}", task.problem_statement)
        replacements = {
            "message": message, "message_file": _MESSAGE_FILE, "server_url": SERVER, "base_url": f"{SERVER}/v1",
            "key": key, "model": recipe.model or relay.name, "workdir": str(session.box.image.workdir), "agent": ROOT,
        }  # fmt: skip
        argv = [fill(argument, replacements) for argument in recipe.command]
        if max(len(argument.encode("utf-8", "surrogateescape")) for argument in argv) > _LONGEST_ARGUMENT:
            raise AgentFailed(
                EXIT_COMMAND, "the task's message is too long for an argument", hint="use stdin or {message_file}"
            )
        for path, content in {_MESSAGE_FILE: "{message}", **recipe.files}.items():
            await self._write(session, path, fill(content, replacements))
        path = f"{ROOT}/bin:{(await session.box.exec(['printenv', 'PATH'])).stdout.strip()}"
        environment = {"PATH": path, **{name: fill(text, replacements) for name, text in recipe.environment.items()}}
        return await relay.guard(
            session.perform(
                argv, timeout=None, env=environment, shown=shlex.join(recipe.command),
                stdin=message if recipe.stdin == "message" else None,
            ),
            recipe.idle,
        )  # fmt: skip

    async def _write(self, session: Session, path: str, content: str) -> None:
        if path.startswith("~/"):
            path = (await session.box.exec(["printenv", "HOME"])).stdout.strip() + path[1:]
        await session.box.files.mkdir(path.rpartition("/")[0], parents=True, exist_ok=True)
        await session.box.files.write_text(path, content)

    async def _ending(self, result: ExecResult | None, session: Session, captured: CaptureSession) -> Ending:
        refusals = await session.box.refusals()
        other_hosts = "; ".join(dict.fromkeys(refusals.last))
        notes = [f"refused: {other_hosts}"] if refusals.count else []
        notes += [f"{captured.forks} responses are not continued as they were sampled"] if captured.forks else []
        if result is not None and not result.ok:
            fate = result.fate if result.outcome is not Outcome.TIMEOUT else "timeout"
            notes.insert(0, f"{fate}: {(result.stderr or result.stdout)[-_TAIL:].strip()}")
        if not session.record.turns:
            raise AgentFailed(
                EXIT_NO_REQUEST, "; ".join(["the agent got no response from the model", *notes]),
                hint="check the recipe: its key, address and model; the first step of the trajectory has the output",
            )  # fmt: skip
        if result is None:
            return Ending(EXIT_IDLE, "; ".join([f"no request for {self.recipe.idle:g} s", *notes]))
        failed = EXIT_NETWORK if refusals.count else EXIT_COMMAND
        return Ending(SUBMITTED if result.ok else failed, "; ".join(notes))


def fill(text: str, replacements: Mapping[str, str]) -> str:
    """Replace words in braces, each once, because a message may contain such words too."""
    return re.sub(r"\{(\w+)\}", lambda match: replacements.get(match[1], match[0]), text)
