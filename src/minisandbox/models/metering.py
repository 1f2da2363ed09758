"""What answers cost, and how much of it a run may spend."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minisandbox.errors import BudgetExceeded, InvalidValue
from minisandbox.models.protocol import Completion, Model, Request, TokenUsage

_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Prices:
    """What a model's tokens cost.

    Attributes:
        prompt: US dollars for a million tokens read.
        completion: for a million tokens sampled.
        cached: for a million tokens of prompts that the engine had seen before; None: as much as the others.
    """

    prompt: float = 0.0
    completion: float = 0.0
    cached: float | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise InvalidValue(f"Prices.{name} is {value!r}", hint="give US dollars for a million tokens")

    def cost(self, usage: TokenUsage) -> float:
        """Return what an answer cost, in US dollars."""
        cached = self.prompt if self.cached is None else self.cached
        fresh = max(usage.prompt - usage.cached, 0)
        return (fresh * self.prompt + usage.cached * cached + usage.completion * self.completion) / _MILLION


class Budget:
    """What all requests of a run may spend together. It is looked at before each try and charged after it.

    What is in flight is not known yet: a run spends at most the answers in flight beyond its budget.

    Args:
        dollars: US dollars; None for no limit.
        tokens: tokens, read and sampled; None for no limit.
    """

    def __init__(self, dollars: float | None = None, tokens: int | None = None) -> None:
        for name, value in (("dollars", dollars), ("tokens", tokens)):
            if value is not None and not value > 0:
                raise InvalidValue(f"the budget in {name} is {value!r}", hint="give more than 0, or None for no limit")
        self._dollars = dollars
        self._tokens = tokens
        self._spent_dollars = 0.0
        self._spent_tokens = 0

    @property
    def spent_dollars(self) -> float:
        """US dollars so far."""
        return self._spent_dollars

    @property
    def spent_tokens(self) -> int:
        """Tokens so far, read and sampled."""
        return self._spent_tokens

    def charge(self, tokens: int, dollars: float) -> None:
        """Count what was spent; a run that goes on begins with what it had spent before."""
        self._spent_tokens += tokens
        self._spent_dollars += dollars

    def check(self) -> None:
        """See that there is something left.

        Raises:
            BudgetExceeded: there is not.
        """
        hint = "finished rollouts are kept; the same command with a larger budget goes on"
        if self._dollars is not None and self._spent_dollars >= self._dollars:
            spent = f"{self._spent_dollars:.2f} of {self._dollars:.2f} dollars"
            raise BudgetExceeded(f"the run's budget is spent: {spent}", hint=hint)
        if self._tokens is not None and self._spent_tokens >= self._tokens:
            spent = f"{self._spent_tokens} of {self._tokens} tokens"
            raise BudgetExceeded(f"the run's budget is spent: {spent}", hint=hint)


@dataclass(frozen=True, slots=True)
class Meter:
    """Prices answers and charges a budget with them.

    Attributes:
        prices: of the model.
        budget: of the run.
    """

    prices: Prices
    budget: Budget

    def charge(self, usage: TokenUsage) -> float:
        """Count an answer; returns what it cost, in US dollars."""
        cost = self.prices.cost(usage)
        self.budget.charge(usage.prompt + usage.completion, cost)
        return cost


class Metered:
    """A model whose answers are priced, and counted against a budget.

    Args:
        model: what answers.
        meter: its prices and the budget.
    """

    def __init__(self, model: Model, meter: Meter) -> None:
        self._model = model
        self._meter = meter

    @property
    def name(self) -> str:
        """The name of what answers."""
        return self._model.name

    async def complete(self, request: Request) -> Completion:
        """Answer a conversation, while there is budget (:meth:`Model.complete`)."""
        self._meter.budget.check()
        completion = await self._model.complete(request)
        return replace(completion, cost=self._meter.charge(completion.usage))

    async def close(self) -> None:
        """Close what answers."""
        await self._model.close()
