"""Compute the cost of responses, and limit the cost of a run by a budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minisandbox.errors import BudgetExceeded, InvalidValue
from minisandbox.models.protocol import Completion, Model, Request, TokenUsage, prompt_tokens

_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of a model's tokens.

    Attributes:
        prompt: US dollars per million tokens read.
        completion: US dollars per million tokens sampled.
        cached: US dollars per million prompt tokens from the engine's cache; None for the price in ``prompt``.
    """

    prompt: float = 0.0
    completion: float = 0.0
    cached: float | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise InvalidValue(f"Prices.{name} is {value!r}", hint="give US dollars per million tokens, 0 or more")

    def cost(self, usage: TokenUsage) -> float:
        """Return the cost of a response in US dollars."""
        cached = self.prompt if self.cached is None else self.cached
        fresh = max(usage.prompt - usage.cached, 0)
        return (fresh * self.prompt + usage.cached * cached + usage.completion * self.completion) / _MILLION


class Budget:
    """The budget of a run, shared by all its requests. It is checked before each try and charged after each try.

    Requests in flight are not charged yet, so a run can exceed its budget by their cost.

    Args:
        dollars: maximum cost in US dollars; None for no limit.
        tokens: maximum tokens, read and sampled together; None for no limit.
    """

    def __init__(self, dollars: float | None = None, tokens: int | None = None) -> None:
        for name, value in (("dollars", dollars), ("tokens", tokens)):
            if value is not None and not value > 0:
                raise InvalidValue(f"the budget in {name} is {value!r}", hint="give a positive number, or None")
        self._dollars = dollars
        self._tokens = tokens
        self._spent_dollars = 0.0
        self._spent_tokens = 0

    @property
    def spent_dollars(self) -> float:
        """US dollars spent so far."""
        return self._spent_dollars

    @property
    def spent_tokens(self) -> int:
        """Tokens used so far, read and sampled."""
        return self._spent_tokens

    def charge(self, tokens: int, dollars: float) -> None:
        """Charge a response, or the total of all earlier responses when a run resumes."""
        self._spent_tokens += tokens
        self._spent_dollars += dollars

    def check(self) -> None:
        """Check that some budget remains.

        Raises:
            BudgetExceeded: the budget is spent.
        """
        hint = "finished rollouts are kept; the same command with a larger budget resumes"
        if self._dollars is not None and self._spent_dollars >= self._dollars:
            spent = f"{self._spent_dollars:.2f} of {self._dollars:.2f} dollars"
            raise BudgetExceeded(f"the run's budget is spent: {spent}", hint=hint)
        if self._tokens is not None and self._spent_tokens >= self._tokens:
            spent = f"{self._spent_tokens} of {self._tokens} tokens"
            raise BudgetExceeded(f"the run's budget is spent: {spent}", hint=hint)


@dataclass(frozen=True, slots=True)
class Meter:
    """Compute the cost of responses and charge it to a budget.

    Attributes:
        prices: the model's prices.
        budget: the run's budget.
    """

    prices: Prices
    budget: Budget

    def charge(self, usage: TokenUsage) -> float:
        """Charge a response to the budget; return the cost in US dollars."""
        cost = self.prices.cost(usage)
        self.budget.charge(usage.prompt + usage.completion, cost)
        return cost


class Metered:
    """Wrap a model, so that its responses are charged to a budget.

    Args:
        model: the wrapped model.
        meter: the model's prices and the budget.
    """

    def __init__(self, model: Model, meter: Meter) -> None:
        self._model = model
        self._meter = meter

    @property
    def name(self) -> str:
        """The model's name."""
        return self._model.name

    def prompt_tokens(self, request: Request) -> int | None:
        """Return the number of tokens of a request's prompt (:func:`.prompt_tokens`)."""
        return prompt_tokens(self._model, request)

    async def complete(self, request: Request) -> Completion:
        """Complete a conversation within the budget (:meth:`Model.complete`)."""
        self._meter.budget.check()
        completion = await self._model.complete(request)
        return replace(completion, cost=self._meter.charge(completion.usage))

    async def close(self) -> None:
        """Close the model."""
        await self._model.close()
