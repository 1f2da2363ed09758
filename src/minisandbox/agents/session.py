"""The session: what a rollout hands to an agent. All that an agent does goes through it, and is recorded there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from minisandbox.errors import InvalidValue, MiniSandboxError
from minisandbox.models import Completion, Message, Model, Request, Sampling, TokenGraph, TokenRow
from minisandbox.sandbox import AsyncSandbox
from minisandbox.types import ExecResult


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """What one rollout may take; None for no limit. Reaching one is the agent's own ending, and is graded.

    Attributes:
        steps: answers of the model.
        seconds: wall time of the agent's loop.
        tokens: sampled tokens, all answers together.
        context: tokens of prompt and answer together, of one request.
        cost: US dollars.
    """

    steps: int | None = 75
    seconds: float | None = None
    tokens: int | None = None
    context: int | None = None
    cost: float | None = None

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
        command: what it ran, as given.
        result: how that ended.
        turn: how many answers of the model came before it.
        began: seconds from the beginning of the session to its start.
    """

    command: str | tuple[str, ...]
    result: ExecResult
    turn: int = 0
    began: float = 0.0


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

    def add(self, completion: Completion, began: float) -> None:
        """Append an answer of the model.

        Args:
            completion: the answer.
            began: seconds from the beginning of the session to the request.
        """
        if (
            completion.tokens is not None
        ):  # a prompt holds all prompts before it: kept as they are, they grow as a square
            self.tokens.add(completion.tokens)
            self._with_tokens.append(len(self.turns))
            completion = replace(completion, tokens=None)
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
        sampling: how answers are drawn.
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

        Raises:
            LimitReached: a limit does not allow a further answer.
            ModelError: no answer came.
        """
        if self._model is None:
            raise InvalidValue("this agent asks a model", hint="give one: --model and --api-base, or --model local")
        for name, left in self.left().items():
            if left <= 0:
                raise LimitReached(name, getattr(self._limits, name))
        began = self.elapsed
        request = Request(tuple(self.record.messages), tuple(tools), self._sampling, self._name)
        completion = await self._model.complete(request)
        self._used["tokens"] += completion.usage.completion
        self._used["cost"] += completion.cost
        self.record.add(completion, began)
        return completion

    async def perform(
        self, command: str | Sequence[str], *, timeout: float | None, stdin: str | bytes | None = None
    ) -> ExecResult:
        """Run a command in the sandbox and record it; its failure is a result like any other.

        Raises:
            SandboxGone: the sandbox has ended.
        """
        kept = command if isinstance(command, str) else tuple(command)
        began = self.elapsed
        result = await self.box.exec(kept, timeout=timeout, stdin=stdin)
        self.record.steps.append(Step(kept, result, len(self.record.turns), began))
        return result

    def _context(self) -> int:
        usage = self.record.turns[-1].completion.usage if self.record.turns else None
        return usage.prompt + usage.completion if usage else 0
