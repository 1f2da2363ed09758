"""The session: what a rollout hands to an agent. All that an agent does goes through it, and is recorded there."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from minisandbox.agents.actions import Edit
from minisandbox.agents.edits import EditError, carry_out, command_of
from minisandbox.errors import FileAccessError, InvalidValue, MiniSandboxError
from minisandbox.models import Completion, Message, Model, Request, Sampling, TokenGraph, TokenRow
from minisandbox.models.history import taken_back
from minisandbox.sandbox import AsyncSandbox, AsyncShell
from minisandbox.types import ExecResult, Outcome

KEPT_OUTPUT = 64 << 10
"""Bytes of each of a command's stdout and stderr that a record keeps: half from the head, half from the tail."""
_MISSING = b"\n[... %d bytes dropped ...]\n"  # as a sandbox writes it


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """What one rollout may take; None for no limit. Reaching one is the agent's own ending, and is graded.

    Attributes:
        steps: answers of the model.
        seconds: wall time of the agent's loop.
        tokens: sampled tokens, all answers together.
        context: tokens of prompt and answer together, of one request. They are known when the answer is there: what was
            said since counts from the next answer on. An engine that has the same bound keeps it exactly.
        cost: US dollars.
    """

    steps: int | None = field(default=75, metadata={"metavar": "N", "help": "answers of the model"})
    seconds: float | None = field(default=None, metadata={"metavar": "SECONDS", "help": "wall time of the agent"})
    tokens: int | None = field(default=None, metadata={"metavar": "N", "help": "sampled tokens, all answers together"})
    context: int | None = field(default=None, metadata={"metavar": "N", "help": "tokens of one prompt and its answer"})
    cost: float | None = field(default=None, metadata={"metavar": "DOLLARS", "help": "what the answers cost"})

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidValue(f"AgentLimits.{name} is {value!r}", hint="give more than 0, or None for no limit")


LimitName = Literal["steps", "seconds", "tokens", "context", "cost"]
EXIT_OF_LIMIT: Mapping[LimitName, str] = {
    "steps": "exit_cost",
    "seconds": "exit_total_execution_time",
    "tokens": "exit_cost",
    "context": "exit_context",
    "cost": "exit_cost",
}
"""The exit status of a limit, in SWE-agent's words, which counts calls and dollars alike as cost."""


class LimitReached(MiniSandboxError):
    """A limit of the rollout ends the agent's loop. What it has done until then is its submission.

    Args:
        limit: which.
        value: what it is.
    """

    exit_code = 46

    def __init__(self, limit: LimitName, value: float) -> None:
        super().__init__(f"the limit of {value:g} {'dollars' if limit == 'cost' else limit} is reached")
        self.limit: LimitName = limit
        self.exit_status = EXIT_OF_LIMIT[limit]


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the model.

    Attributes:
        message: the answer's index in the history.
        completion: the answer; its tokens are in the record's graph, where each is kept once.
        began: seconds from the beginning of the session to the request.
    """

    message: int
    completion: Completion
    began: float


@dataclass(frozen=True, slots=True)
class Step:
    """One command of an agent.

    Attributes:
        command: what it ran, as given; of an edit, the tool's name and its arguments as JSON.
        result: how that ended, with :data:`KEPT_OUTPUT` of each stream. The agent had all that the sandbox keeps.
        turn: how many answers of the model came before it.
        began: seconds from the beginning of the session to its start.
        stateful: whether it ran in the session's shell, which keeps its state from one command to the next.
    """

    command: str | tuple[str, ...]
    result: ExecResult
    turn: int = 0
    began: float = 0.0
    stateful: bool = False


@dataclass(slots=True)
class Record:
    """What an agent has done so far. It only grows, and is whole at any moment: also where the agent is cut off.

    Attributes:
        messages: the history.
        turns: the model's answers.
        steps: the commands.
        tokens: what was read and sampled.
    """

    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    tokens: TokenGraph = field(default_factory=TokenGraph)
    _with_tokens: list[int] = field(default_factory=list)

    def add(self, completion: Completion, began: float, tools: Sequence[Mapping[str, object]] = ()) -> None:
        """Append an answer of the model, as engines take it back.

        Args:
            completion: the answer.
            began: seconds from the beginning of the session to the request.
            tools: what the model was offered.
        """
        if completion.tokens is not None:
            self.tokens.add(completion.tokens)
            self._with_tokens.append(len(self.turns))
        # a prompt holds all prompts before it: kept as they are, tokens grow as a square
        completion = replace(completion, tokens=None, message=taken_back(completion.message, tools))
        self.turns.append(Turn(len(self.messages), completion, began))
        self.messages.append(completion.message)

    def rows(self) -> tuple[TokenRow, ...]:
        """Return the tokens as sequences to train on; their turns are indices of ``turns``."""
        numbers = self._with_tokens
        return tuple(replace(row, turns=tuple(numbers[one] for one in row.turns)) for row in self.tokens.rows())


class Session:
    """What an agent works with.

    Attributes:
        box: the sandbox. Commands that are to be in the record go through :meth:`perform`.
        attempt: which rollout of the task it is, from 0.
        record: what was done so far.

    Args:
        box: the sandbox, ready.
        model: what is asked; None for agents that ask nothing.
        sampling: how answers are drawn; of a seed, each answer has one of its own, by the rollout's name and the turn.
        limits: what the rollout may take.
        attempt: which rollout of the task it is.
        name: the rollout's name, for the engine's caches and logs.
        clock: the time, in seconds.
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
        """What the rollout may take."""
        return self._limits

    @property
    def elapsed(self) -> float:
        """Seconds since the session began."""
        return self._clock() - self._began

    def left(self) -> dict[LimitName, float]:
        """Return what is left of each limit that there is: steps, seconds, tokens, dollars.

        The context's is what the next prompt and answer may have beyond the latest.
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
        """Append messages to the history. Nothing in it is ever changed or taken away."""
        self.record.messages.extend(messages)

    async def ask(self, tools: Sequence[Mapping[str, object]] = ()) -> Completion:
        """Have the model answer the history; the answer is appended to it.

        It has as many tokens as are left of the rollout's, and as many seconds. What is appended is what engines take
        back (:func:`.taken_back`): a call whose arguments are no JSON object has them as a text there. What is returned
        is the answer as it came.

        Args:
            tools: what the model may call, as JSON schemas in OpenAI's layout.

        Returns:
            The answer.

        Raises:
            LimitReached: a limit does not allow a further answer, or the time was over before it came.
            ModelError: no answer came.
        """
        if self._model is None:
            raise InvalidValue("this agent asks a model", hint="give one: --model and --api-base, or --model local")
        for name, left in self.left().items():
            if left <= 0:
                raise self._reached(name)
        began = self.elapsed
        request = Request(tuple(self.record.messages), tuple(tools), self._draw(), self._name)
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
        """Run a command in the sandbox and record it; its failure is a result like any other.

        Args:
            command: text for bash, or arguments.
            timeout: seconds it may take; what is left of the rollout's is the most that it gets.
            stdin: its standard input; empty if None.
            stateful: run it in the session's one shell, whose directory and variables stay. Text only, without stdin.

        Raises:
            LimitReached: the rollout's time was over before the command was; it has ended, and is in the record.
            SandboxGone: the sandbox has ended.
        """
        kept = command if isinstance(command, str) else tuple(command)
        left = self._seconds()
        allowed = min((one for one in (timeout, left) if one is not None), default=None)
        began = self.elapsed
        try:
            result = await (
                self._in_shell(kept, allowed) if stateful else self.box.exec(kept, timeout=allowed, stdin=stdin)
            )
        except FileAccessError as error:  # the agent has removed or closed the directory that commands start in
            result = _result(kept, 126, stderr=error.what)
        self.record.steps.append(Step(kept, _shortened(result), len(self.record.turns), began, stateful))
        if result.outcome is Outcome.TIMEOUT and allowed != timeout:
            raise self._reached("seconds")
        return result

    async def edit(self, edit: Edit) -> ExecResult:
        """Make an edit in the sandbox and record it; where it cannot be made, the result's stderr says why.

        Raises:
            LimitReached: the rollout's time is over.
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
        """Close the shell, where there is one; calling it again does nothing."""
        shell, self._shell = self._shell, None
        if shell is not None:
            await shell.close()

    async def _in_shell(self, command: str | tuple[str, ...], timeout: float | None) -> ExecResult:
        if not isinstance(command, str):
            raise InvalidValue("arguments for a stateful shell", hint="give text, or run it without state")
        if self._shell is None:
            async with self._until_deadline():
                self._shell = await self.box.shell()
        return await self._shell.run(command, timeout=timeout)

    def _draw(self) -> Sampling:
        """How the next answer is drawn: no longer than what is left of the rollout's tokens, by a seed of its own.

        One seed for all answers would draw the rollouts of a group alike.
        """
        how = self._sampling
        if how.seed is not None:
            digest = hashlib.sha256(f"{how.seed}\n{self._name}\n{len(self.record.turns)}".encode()).digest()
            how = replace(how, seed=int.from_bytes(digest[:4]) >> 1)
        left = self.left().get("tokens")
        if left is None or (how.max_tokens is not None and how.max_tokens <= left):
            return how
        return replace(how, max_tokens=max(1, int(left)))

    @asynccontextmanager
    async def _until_deadline(self) -> AsyncIterator[None]:
        deadline = asyncio.timeout(self._seconds())
        try:
            async with deadline:
                yield
        except TimeoutError:
            if not deadline.expired():  # somebody else's
                raise
            raise self._reached("seconds") from None

    def _seconds(self) -> float | None:
        """Seconds left, or None for no limit.

        Raises:
            LimitReached: there are none.
        """
        left = self.left().get("seconds")
        if left is not None and left <= 0:
            raise self._reached("seconds")
        return left

    def _reached(self, name: LimitName) -> LimitReached:
        return LimitReached(name, getattr(self._limits, name))

    def _context(self) -> int:
        usage = self.record.turns[-1].completion.usage if self.record.turns else None
        return usage.prompt + usage.completion if usage else 0


def _result(command: str | tuple[str, ...], status: int, *, stdout: str = "", stderr: str = "") -> ExecResult:
    out, err = (text.encode("utf-8", "surrogateescape") for text in (stdout, stderr))
    return ExecResult(command, Outcome.EXITED, status, None, out, err)


def _shortened(result: ExecResult) -> ExecResult:
    """Return a result with the ends of its output: hundreds of records with many of them are in memory at once."""
    out, dropped_out = _ends(result.stdout_bytes, result.dropped_stdout)
    err, dropped_err = _ends(result.stderr_bytes, result.dropped_stderr)
    return replace(result, stdout_bytes=out, stderr_bytes=err, dropped_stdout=dropped_out, dropped_stderr=dropped_err)


def _ends(data: bytes, dropped: int) -> tuple[bytes, int]:
    """Return the head and the tail of what was kept of an output, and how many of its bytes are missing then."""
    if len(data) <= KEPT_OUTPUT:
        return data, dropped
    told = len(_MISSING % dropped) if dropped else 0  # the sandbox's own line, in what is left out here
    missing = dropped + len(data) - told - KEPT_OUTPUT
    if missing <= dropped:  # it is longer by that line alone
        return data, dropped
    half = KEPT_OUTPUT // 2
    return data[:half] + _MISSING % missing + data[-half:], missing
