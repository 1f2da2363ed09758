"""The interface of agents, and the session through which they use the sandbox and the model and are recorded."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from minisandbox.agents.actions import Edit
from minisandbox.agents.edits import EditError, carry_out, command_of
from minisandbox.agents.record import MOST_PATCH, Record, Step, TurnPatch, shortened
from minisandbox.errors import FileAccessError, InvalidValue, MiniSandboxError
from minisandbox.models import Completion, Message, Model, Request, Sampling
from minisandbox.models.protocol import QueueTime, prompt_tokens
from minisandbox.sandbox import AsyncSandbox, AsyncShell
from minisandbox.tasks import Task
from minisandbox.types import ExecResult, Outcome

_TICK = 0.02
"""Minimum seconds between two checks of a deadline, which queues can postpone."""
_TOKENS_PER_BYTE = 1 / 3
"""Minimum estimate of tokens per byte; tokenizers encode code and English with 3 to 4 bytes per token."""
_PER_MESSAGE = 16
"""Maximum number of tokens that a chat template adds to a message."""


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """The limits of one rollout; None for no limit. A reached limit ends the agent's loop, and the rollout is graded.

    Attributes:
        steps: maximum responses of the model.
        seconds: maximum time of the agent's loop. The time that requests wait in queues (:class:`.QueueTime`) does not
            count.
        tokens: maximum sampled tokens of all responses together.
        context: maximum tokens of a request's prompt and response together. A prompt that leaves no room for a response
            is not sent. If the model cannot count the prompt's tokens, a high estimate is used.
        cost: maximum cost of all responses in US dollars.
    """

    steps: int | None = field(default=75, metadata={"metavar": "N", "help": "responses of the model"})
    seconds: float | None = field(
        default=None, metadata={"metavar": "SECONDS", "help": "time of the agent, queues excluded"}
    )
    tokens: int | None = field(default=None, metadata={"metavar": "N", "help": "sampled tokens of all responses"})
    context: int | None = field(default=None, metadata={"metavar": "N", "help": "tokens of a prompt and its response"})
    cost: float | None = field(default=None, metadata={"metavar": "DOLLARS", "help": "cost of all responses"})

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidValue(f"AgentLimits.{name} is {value!r}", hint="give more than 0, or None for no limit")


LimitName = Literal["steps", "seconds", "tokens", "context", "cost"]
EXIT_OF_LIMIT: Mapping[LimitName, str] = {
    "steps": "exit_steps",
    "seconds": "exit_total_execution_time",
    "tokens": "exit_tokens",
    "context": "exit_context",
    "cost": "exit_cost",
}
"""The exit status of each limit. SWE-agent uses ``exit_cost`` also for steps and tokens."""


_LIMIT_UNITS = {"cost": "dollars", "context": "tokens of context"}


class LimitReached(MiniSandboxError):
    """A limit of the rollout ended the agent's loop. The changes made so far are its submission.

    Args:
        limit: the name of the limit.
        value: the limit's value.
    """

    exit_code = 46

    def __init__(self, limit: LimitName, value: float) -> None:
        super().__init__(f"the limit of {value:g} {_LIMIT_UNITS.get(limit, limit)} is reached")
        self.limit: LimitName = limit
        self.exit_status = EXIT_OF_LIMIT[limit]


class Session:
    """Give an agent access to the sandbox and the model, and record its work.

    Attributes:
        box: the sandbox. Commands are recorded only if :meth:`perform` runs them.
        attempt: the index of the rollout among the task's rollouts, from 0.
        record: the record of the work so far.

    Args:
        box: the running sandbox.
        model: the model; None for agents without a model.
        sampling: the sampling options. If they have a seed, each response's seed is derived from it, the rollout and
            the turn.
        limits: the limits of the rollout.
        attempt: the index of the rollout among the task's rollouts, from 0.
        name: the rollout's name, for the engine's caches and logs.
        changes: returns the workspace's changes as a patch, to be recorded after each turn that ran a command; None
            records none.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        box: AsyncSandbox,
        *,
        model: Model | None = None,
        sampling: Sampling | None = None,
        limits: AgentLimits | None = None,
        attempt: int = 0,
        name: str = "",
        changes: Callable[[], Awaitable[bytes]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.box = box
        self.attempt = attempt
        self.record = Record()
        self._model = model
        self._sampling = sampling or Sampling()
        self._limits = limits or AgentLimits()
        self._name = name
        self._changes = changes
        self._compared_steps = 0
        self._clock = clock
        self._began = clock()
        self._used = {"tokens": 0.0, "cost": 0.0}
        self._queued = 0.0
        self._pending = 0
        self._queue = QueueTime()  # time that the pending request has waited in queues
        self._shell: AsyncShell | None = None

    @property
    def name(self) -> str:
        """The rollout's name."""
        return self._name

    @property
    def model(self) -> Model | None:
        """The model; None for agents without a model."""
        return self._model

    @property
    def limits(self) -> AgentLimits:
        """The limits of the rollout."""
        return self._limits

    @property
    def elapsed(self) -> float:
        """Seconds since the session began."""
        return self._clock() - self._began

    @property
    def charged(self) -> float:
        """Seconds of the agent's time: since the session began, without the time that requests waited in queues."""
        return self.elapsed - self._queued - self._queue.seconds

    def left(self) -> dict[LimitName, float]:
        """Return the remaining steps, seconds, tokens and dollars, for the limits that are set.

        For the context, it is the number of tokens by which the next request may exceed the latest request.
        """
        used: dict[LimitName, float] = {
            "steps": len(self.record.turns),
            "seconds": self.charged,
            "tokens": self._used["tokens"],
            "context": self._context(),
            "cost": self._used["cost"],
        }
        limits = {name: getattr(self._limits, name) for name in used}
        return {name: limits[name] - used[name] for name in used if limits[name] is not None}

    def say(self, *messages: Message) -> None:
        """Append messages to the history."""
        self.record.messages.extend(messages)

    async def ask(self, tools: Sequence[Mapping[str, object]] = ()) -> Completion:
        """Send the history to the model, and append the response.

        The rollout's remaining tokens and seconds limit the response. In the history, tool calls are well-formed
        (:func:`.for_history`): malformed arguments are wrapped in an object, because engines would reject them in
        further requests. The returned response is unchanged.

        Args:
            tools: the tools offered to the model, as JSON schemas in OpenAI's format.

        Returns:
            The response.

        Raises:
            LimitReached: a limit allows no further response, the prompt fills the context, or the time limit was
                reached before the response.
            ModelError: the model gave no usable response.
        """
        await self.record_patch()
        began = self.elapsed
        request = Request(tuple(self.record.messages), tuple(tools), self.next_sampling(), self._name)
        limit = self._limits.context
        if limit is not None and (self.left()["context"] <= 0 or self._prompt_size(request, limit) >= limit):
            raise self._reached("context")
        completion = await self.complete(request)
        self.record.add(completion, began, tools, request.queue.seconds)
        return completion

    async def complete(self, request: Request) -> Completion:
        """Let the model respond to a request that is not recorded; the rollout's limits apply, except for the context.

        Raises:
            LimitReached: a limit allows no further response.
            ModelError: the model gave no usable response.
        """
        if self._model is None:
            raise InvalidValue("this agent needs a model", hint="give one: --model and --api-base, or --model local")
        for name, remaining in self.left().items():
            if remaining <= 0 and name != "context":
                raise self._reached(name)
        is_first, self._pending = not self._pending, self._pending + 1
        if is_first:  # parallel requests of sub-agents wait at the same time
            self._queue = request.queue
        try:
            async with self._until_deadline():
                completion = await self._model.complete(request)
        finally:
            self._pending -= 1
            if is_first:
                self._queued += request.queue.seconds
                self._queue = QueueTime()
        self._used["tokens"] += completion.usage.completion
        self._used["cost"] += completion.cost
        return completion

    async def perform(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None,
        stdin: str | bytes | None = None,
        stateful: bool = False,
        env: Mapping[str, str] | None = None,
        shown: str | None = None,
    ) -> ExecResult:
        """Run a command in the sandbox and record it. A failed command is a normal result, not an exception.

        Args:
            command: shell code for bash, or an argument list.
            timeout: time limit in seconds; the rollout's remaining time applies if it is shorter.
            stdin: the command's standard input; empty if None.
            stateful: whether to run the command in the session's shell, which keeps its directory and variables. The
                shell takes only shell code, without stdin and ``env``.
            env: further variables of the command; they are not recorded.
            shown: the command for the record, if it differs, for instance because of secrets.

        Raises:
            LimitReached: the rollout's time limit was reached first; the command was killed and recorded.
        """
        command = command if isinstance(command, str) else tuple(command)
        remaining = self._seconds()
        limit = min((seconds for seconds in (timeout, remaining) if seconds is not None), default=None)
        began = self.elapsed
        try:
            result = await (
                self._in_shell(command, limit)
                if stateful
                else self.box.exec(command, timeout=limit, stdin=stdin, env=env)
            )
        except FileAccessError as error:  # the agent removed the workdir, or denied access to it
            result = _result(command, 126, stderr=error.what)
        command = command if shown is None else shown
        self.record.steps.append(Step(command, shortened(result), len(self.record.turns), began, stateful))
        if result.outcome is Outcome.TIMEOUT and limit != timeout:
            raise self._reached("seconds")
        return result

    async def edit(self, edit: Edit) -> ExecResult:
        """Perform an edit in the sandbox and record it; if the edit is impossible, the result's stderr has the reason.

        Raises:
            LimitReached: the rollout's time limit is reached.
            SandboxGone: the sandbox has ended.
        """
        began = self.elapsed
        async with self._until_deadline():
            try:
                result = _result(command_of(edit), 0, stdout=await carry_out(edit, self.box.files))
            except EditError as error:
                result = _result(command_of(edit), 1, stderr=error.what)
        self.record.steps.append(Step(result.command, shortened(result), len(self.record.turns), began))
        return result

    async def record_patch(self) -> None:
        """Record the workspace's changes if a command ran since the last call; :meth:`ask` calls it first."""
        if self._changes is None or self._compared_steps == len(self.record.steps):
            return
        self._compared_steps = len(self.record.steps)
        turn = len(self.record.turns)
        try:
            patch = await self._changes()
        except (MiniSandboxError, OSError) as error:
            entry = TurnPatch(turn, None, str(error)[:500])
        else:
            too_large = f"the patch has {len(patch)} bytes, at most {MOST_PATCH} are recorded"
            entry = TurnPatch(turn, None, too_large) if len(patch) > MOST_PATCH else TurnPatch(turn, patch)
        last = self.record.patches[-1] if self.record.patches else TurnPatch(0, b"")
        if (entry.patch, entry.detail) != (last.patch, last.detail):
            self.record.patches.append(entry)

    async def close(self) -> None:
        """Close the shell if it is open; further calls do nothing."""
        shell, self._shell = self._shell, None
        if shell is not None:
            await shell.close()

    async def _in_shell(self, command: str | tuple[str, ...], timeout: float | None) -> ExecResult:
        if not isinstance(command, str):
            raise InvalidValue("a stateful shell takes no argument list", hint="give a string, or stateful=False")
        if self._shell is None:
            async with self._until_deadline():
                self._shell = await self.box.shell()
        return await self._shell.run(command, timeout=timeout)

    def next_sampling(self) -> Sampling:
        """Return the sampling options of the next response, with its own seed and at most the remaining tokens.

        If all responses shared a seed, the rollouts of a group would be equal.
        """
        sampling = self._sampling
        if sampling.seed is not None:
            digest = hashlib.sha256(f"{sampling.seed}\n{self._name}\n{len(self.record.turns)}".encode()).digest()
            sampling = replace(sampling, seed=int.from_bytes(digest[:4]) >> 1)
        remaining = self.left().get("tokens")
        if remaining is None or (sampling.max_tokens is not None and sampling.max_tokens <= remaining):
            return sampling
        return replace(sampling, max_tokens=max(1, int(remaining)))

    @asynccontextmanager
    async def deadline(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Raise ``TimeoutError`` after the given seconds, without the time that requests wait in queues.

        Args:
            seconds: the time limit; None for no limit.
        """
        loop, scope, end = asyncio.get_running_loop(), asyncio.timeout(None), self.charged + (seconds or 0.0)
        timer: asyncio.TimerHandle | None = None

        def check() -> None:
            nonlocal timer
            if (remaining := end - self.charged) > 0:
                timer = loop.call_later(max(remaining, _TICK), check)
            else:
                scope.reschedule(loop.time())

        async with scope:
            if seconds is not None:
                check()
            try:
                yield scope
            finally:
                if timer is not None:
                    timer.cancel()

    @asynccontextmanager
    async def _until_deadline(self) -> AsyncIterator[None]:
        try:
            async with self.deadline(self._seconds()) as deadline:
                yield
        except TimeoutError:
            if not deadline.expired():  # another timeout raised it
                raise
            raise self._reached("seconds") from None

    def _seconds(self) -> float | None:
        """Return the remaining seconds, or None if there is no limit.

        Raises:
            LimitReached: no seconds remain.
        """
        remaining = self.left().get("seconds")
        if remaining is not None and remaining <= 0:
            raise self._reached("seconds")
        return remaining

    def _reached(self, name: LimitName) -> LimitReached:
        return LimitReached(name, getattr(self._limits, name))

    def _context(self) -> int:
        usage = self.record.turns[-1].completion.usage if self.record.turns else None
        return usage.prompt + usage.completion if usage else 0

    def _prompt_size(self, request: Request, limit: int) -> int:
        """Return the number of tokens of a request's prompt, exactly if the model can count them, or an estimate.

        The messages since the latest response are estimated by the tokens per byte of the messages before them. If the
        prompt stays below ``limit`` even at one token per byte, only the tokens of the earlier messages are returned.
        """
        tokens = self._context()
        split = self.record.turns[-1].message + 1 if tokens else 0
        new_bytes = _bytes_of(request.messages[split:])
        if tokens + new_bytes + _PER_MESSAGE * (len(request.messages) - split) < limit:
            return tokens
        assert self._model is not None
        count = prompt_tokens(self._model, request)
        if count is not None:
            return count
        old_bytes = _bytes_of(request.messages[:split]) + sum(len(json.dumps(tool)) for tool in request.tools)
        return tokens + math.ceil(new_bytes * max(_TOKENS_PER_BYTE, min(1.0, tokens / max(old_bytes, 1))))


def _bytes_of(messages: Iterable[Message]) -> int:
    fields = (
        text
        for message in messages
        for text in (message.content, message.reasoning, *(call.name + call.arguments for call in message.tool_calls))
    )
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in fields)


def _result(command: str | tuple[str, ...], status: int, *, stdout: str = "", stderr: str = "") -> ExecResult:
    stdout_bytes, stderr_bytes = (text.encode("utf-8", "surrogateescape") for text in (stdout, stderr))
    return ExecResult(command, Outcome.EXITED, status, None, stdout_bytes, stderr_bytes)


SUBMITTED = "submitted"
"""The exit status of an agent that finished normally."""

EXIT_ERROR = "exit_error"
"""The exit status of an agent that could not continue."""

EXIT_FORMAT = "exit_format"
"""The exit status of an agent whose model wrote too many malformed actions in a row."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an agent's loop ended.

    Attributes:
        exit_status: the reason, in SWE-agent's terms: ``submitted``, ``exit_error``, ``exit_format`` and so on.
        detail: an explanation of the reason, or "".
    """

    exit_status: str = SUBMITTED
    detail: str = ""


class Agent(Protocol):
    """An agent that works on tasks. One instance serves many concurrent rollouts, and keeps no state of a rollout."""

    @property
    def name(self) -> str:
        """The agent's name in logs and trajectories."""
        ...

    @property
    def needs_model(self) -> bool:
        """Whether the agent uses a model."""
        ...

    async def run(self, task: Task, session: Session) -> Ending:
        """Work on a task until the work is finished. The changes in the sandbox's repository are the submission.

        Args:
            task: the task. An honest agent reads only its problem statement; the task also contains the reference.
            session: the access to the sandbox and the model; it records all commands and responses.

        Raises:
            SandboxGone: the sandbox has ended.
            LimitReached: a limit of the rollout was reached.
            ModelError: the model gave no usable response.
        """
        ...
