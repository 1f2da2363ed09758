"""The interface of agents, and their session: the access to the sandbox and the model, which records all they do."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from minisandbox.agents.actions import Edit
from minisandbox.agents.edits import EditError, carry_out, command_of
from minisandbox.errors import FileAccessError, InvalidValue, MiniSandboxError
from minisandbox.models import Completion, Message, Model, Request, Sampling, TokenGraph, TokenRow
from minisandbox.models.dialect import for_history
from minisandbox.sandbox import AsyncSandbox, AsyncShell
from minisandbox.tasks import Task
from minisandbox.types import ExecResult, Outcome

KEPT_OUTPUT = 64 << 10
"""Bytes of each of a command's stdout and stderr in a record: half from the head, half from the tail."""
_MISSING = b"\n[... %d bytes dropped ...]\n"  # as a sandbox writes it


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """The limits of one rollout; None for no limit. Reaching one ends the agent, and the rollout is graded.

    Attributes:
        steps: responses of the model.
        seconds: wall time of the agent's loop.
        tokens: sampled tokens of all responses together.
        context: tokens of a request's prompt and response together. They are counted after the response, so messages
            added since then count with the next one. An engine with the same limit enforces it exactly.
        cost: US dollars.
    """

    steps: int | None = field(default=75, metadata={"metavar": "N", "help": "responses of the model"})
    seconds: float | None = field(default=None, metadata={"metavar": "SECONDS", "help": "wall time of the agent"})
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
"""The exit status of each limit. SWE-agent says exit_cost for steps and tokens too."""


class LimitReached(MiniSandboxError):
    """A limit of the rollout ended the agent's loop. The changes made so far are its submission.

    Args:
        limit: the limit.
        value: its value.
    """

    exit_code = 46

    def __init__(self, limit: LimitName, value: float) -> None:
        super().__init__(f"the limit of {value:g} {'dollars' if limit == 'cost' else limit} is reached")
        self.limit: LimitName = limit
        self.exit_status = EXIT_OF_LIMIT[limit]


@dataclass(frozen=True, slots=True)
class Turn:
    """One response of the model.

    Attributes:
        message: the response's index in the history.
        completion: the response, without tokens: the record's graph stores each token once.
        began: seconds from the start of the session to the request.
    """

    message: int
    completion: Completion
    began: float


@dataclass(frozen=True, slots=True)
class Step:
    """One command of an agent.

    Attributes:
        command: the command, as given; for an edit, the tool's name and its arguments as JSON.
        result: its result, with :data:`KEPT_OUTPUT` of each stream; the agent saw all that the sandbox keeps.
        turn: the number of responses before it.
        began: seconds from the start of the session to its start.
        stateful: whether it ran in the session's shell, which keeps its state between commands.
    """

    command: str | tuple[str, ...]
    result: ExecResult
    turn: int = 0
    began: float = 0.0
    stateful: bool = False


@dataclass(slots=True)
class Record:
    """The record of an agent's work. It only grows, and is complete even if the agent is cut off.

    Attributes:
        messages: the history.
        turns: the model's responses.
        steps: the commands.
        tokens: the tokens read and sampled.
    """

    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    tokens: TokenGraph = field(default_factory=TokenGraph)
    _with_tokens: list[int] = field(default_factory=list)

    def add(self, completion: Completion, began: float, tools: Sequence[Mapping[str, object]] = ()) -> None:
        """Append a response of the model, in the form that engines accept back.

        Args:
            completion: the response.
            began: seconds from the start of the session to the request.
            tools: the tools offered to the model.
        """
        if completion.tokens is not None:
            self.tokens.add(completion.tokens)
            self._with_tokens.append(len(self.turns))
        # each prompt repeats all earlier ones: storing them whole would take quadratic space
        completion = replace(completion, tokens=None, message=for_history(completion.message, tools))
        self.turns.append(Turn(len(self.messages), completion, began))
        self.messages.append(completion.message)

    def rows(self) -> tuple[TokenRow, ...]:
        """Return the training rows; their turns are indices of ``turns``."""
        numbers = self._with_tokens
        return tuple(replace(row, turns=tuple(numbers[one] for one in row.turns)) for row in self.tokens.rows())


class Session:
    """An agent's access to the sandbox and the model.

    Attributes:
        box: the sandbox. Run commands with :meth:`perform` to record them.
        attempt: the number of the rollout of this task, from 0.
        record: the work so far.

    Args:
        box: the sandbox, ready.
        model: the model; None for agents without one.
        sampling: the sampling options; each response has its own seed, derived from a given seed, rollout and turn.
        limits: the limits of the rollout.
        attempt: the number of the rollout of this task.
        name: the rollout's name, for the engine's caches and logs.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.box = box
        self.attempt = attempt
        self.record = Record()
        self._model = model
        self._sampling = sampling or Sampling()
        self._limits = limits or AgentLimits()
        self._name = name
        self._clock = clock
        self._began = clock()
        self._used = {"tokens": 0.0, "cost": 0.0}
        self._shell: AsyncShell | None = None

    @property
    def limits(self) -> AgentLimits:
        """The limits of the rollout."""
        return self._limits

    @property
    def elapsed(self) -> float:
        """Seconds since the session began."""
        return self._clock() - self._began

    def left(self) -> dict[LimitName, float]:
        """Return the remainder of each limit that is set: steps, seconds, tokens, dollars.

        For the context it is the number of tokens that the next request may have beyond the latest.
        """
        used: dict[LimitName, float] = {
            "steps": len(self.record.turns),
            "seconds": self.elapsed,
            "tokens": self._used["tokens"],
            "context": self._context(),
            "cost": self._used["cost"],
        }
        limits = {name: getattr(self._limits, name) for name in used}
        return {name: limits[name] - used[name] for name in used if limits[name] is not None}

    def say(self, *messages: Message) -> None:
        """Append messages to the history, which is append-only."""
        self.record.messages.extend(messages)

    async def ask(self, tools: Sequence[Mapping[str, object]] = ()) -> Completion:
        """Send the history to the model, and append the response.

        The response may use the rollout's remaining tokens and seconds. The history gets it in a form that engines
        accept back (:func:`.for_history`), with malformed arguments of calls wrapped in an object. The returned
        response is unchanged.

        Args:
            tools: the tools on offer, as JSON schemas in OpenAI's format.

        Returns:
            The response.

        Raises:
            LimitReached: a limit allows no further response, or the time was over before it came.
            ModelError: the model gave no usable response.
        """
        if self._model is None:
            raise InvalidValue("this agent needs a model", hint="give one: --model and --api-base, or --model local")
        for name, remaining in self.left().items():
            if remaining <= 0:
                raise self._reached(name)
        began = self.elapsed
        request = Request(tuple(self.record.messages), tuple(tools), self._next_sampling(), self._name)
        async with self._until_deadline():
            completion = await self._model.complete(request)
        self._used["tokens"] += completion.usage.completion
        self._used["cost"] += completion.cost
        self.record.add(completion, began, tools)
        return completion

    async def perform(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None,
        stdin: str | bytes | None = None,
        stateful: bool = False,
    ) -> ExecResult:
        """Run a command in the sandbox and record it; a failure is a normal result.

        Args:
            command: shell text for bash, or arguments.
            timeout: time limit in seconds; the rollout's remaining time if that is less.
            stdin: its standard input; empty if None.
            stateful: run it in the session's one shell, which keeps directory and variables. Only text, without stdin.

        Raises:
            LimitReached: the rollout's time ended first; the command was killed and recorded.
        """
        recorded = command if isinstance(command, str) else tuple(command)
        remaining = self._seconds()
        allowed = min((one for one in (timeout, remaining) if one is not None), default=None)
        began = self.elapsed
        try:
            result = await (
                self._in_shell(recorded, allowed) if stateful else self.box.exec(recorded, timeout=allowed, stdin=stdin)
            )
        except FileAccessError as error:  # the agent removed or locked the workdir
            result = _result(recorded, 126, stderr=error.what)
        self.record.steps.append(Step(recorded, _shortened(result), len(self.record.turns), began, stateful))
        if result.outcome is Outcome.TIMEOUT and allowed != timeout:
            raise self._reached("seconds")
        return result

    async def edit(self, edit: Edit) -> ExecResult:
        """Perform an edit in the sandbox and record it; if it is impossible, the result's stderr has the reason.

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
        self.record.steps.append(Step(result.command, _shortened(result), len(self.record.turns), began))
        return result

    async def close(self) -> None:
        """Close the shell, if it is open; calling it again does nothing."""
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

    def _next_sampling(self) -> Sampling:
        """Return the next response's sampling: at most the rollout's remaining tokens, and a seed of its own.

        With one seed for all responses, the rollouts of a group would be equal.
        """
        how = self._sampling
        if how.seed is not None:
            digest = hashlib.sha256(f"{how.seed}\n{self._name}\n{len(self.record.turns)}".encode()).digest()
            how = replace(how, seed=int.from_bytes(digest[:4]) >> 1)
        remaining = self.left().get("tokens")
        if remaining is None or (how.max_tokens is not None and how.max_tokens <= remaining):
            return how
        return replace(how, max_tokens=max(1, int(remaining)))

    @asynccontextmanager
    async def _until_deadline(self) -> AsyncIterator[None]:
        deadline = asyncio.timeout(self._seconds())
        try:
            async with deadline:
                yield
        except TimeoutError:
            if not deadline.expired():  # raised by another timeout
                raise
            raise self._reached("seconds") from None

    def _seconds(self) -> float | None:
        """Return the remaining seconds, or None for no limit.

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


def _result(command: str | tuple[str, ...], status: int, *, stdout: str = "", stderr: str = "") -> ExecResult:
    out, err = (text.encode("utf-8", "surrogateescape") for text in (stdout, stderr))
    return ExecResult(command, Outcome.EXITED, status, None, out, err)


def _shortened(result: ExecResult) -> ExecResult:
    """Return a result with only the ends of its output, since hundreds of records are in memory at once."""
    out, dropped_out = _ends(result.stdout_bytes, result.dropped_stdout)
    err, dropped_err = _ends(result.stderr_bytes, result.dropped_stderr)
    return replace(result, stdout_bytes=out, stderr_bytes=err, dropped_stdout=dropped_out, dropped_stderr=dropped_err)


def _ends(data: bytes, dropped: int) -> tuple[bytes, int]:
    """Return the head and tail of kept output, and the number of its missing bytes."""
    if len(data) <= KEPT_OUTPUT:
        return data, dropped
    marker = len(_MISSING % dropped) if dropped else 0  # the sandbox's own line, which is in the part left out here
    missing = dropped + len(data) - marker - KEPT_OUTPUT
    if missing <= dropped:  # too long only by that line
        return data, dropped
    half = KEPT_OUTPUT // 2
    return data[:half] + _MISSING % missing + data[-half:], missing


SUBMITTED = "submitted"
"""The exit status of an agent that ended normally."""

EXIT_ERROR = "exit_error"
"""The exit status of an agent that could not continue."""

EXIT_FORMAT = "exit_format"
"""The exit status of an agent whose model wrote too many malformed actions in a row."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an agent's loop.

    Attributes:
        exit_status: the reason, in SWE-agent's terms: ``submitted``, ``exit_error``, ``exit_format`` and so on.
        detail: an explanation, if there is more to say.
    """

    exit_status: str = SUBMITTED
    detail: str = ""


class Agent(Protocol):
    """An agent: the loop around a policy. One instance serves many concurrent rollouts, and keeps no state of them."""

    @property
    def name(self) -> str:
        """Its name in logs and trajectories."""
        ...

    @property
    def needs_model(self) -> bool:
        """Whether it uses a model."""
        ...

    async def run(self, task: Task, session: Session) -> Ending:
        """Work on a task until done. The submission is the changes in the sandbox's repository.

        Args:
            task: the task; an honest agent reads only its problem statement.
            session: the sandbox and the model; everything done through it is recorded.

        Raises:
            SandboxGone: the sandbox has ended.
            LimitReached: a limit of the rollout ended it.
            ModelError: the model gave no usable response.
        """
        ...
