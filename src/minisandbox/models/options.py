"""Which model, where, and how it is asked: one value that is kept with a run, and the model that it stands for."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from minisandbox.errors import InvalidValue
from minisandbox.models.client import OpenAIModel, check_key
from minisandbox.models.dialect import TokensWanted
from minisandbox.models.endpoint import Timeouts, check_base
from minisandbox.models.gate import Gate
from minisandbox.models.metering import Budget, Meter, Metered, Prices
from minisandbox.models.protocol import Model, Sampling
from minisandbox.models.scripted import Script, ScriptedModel

LOCAL = "local"
"""The model that comes with MiniSandbox."""

SCRIPTED = "scripted:"
"""What stands before the file of a scripted model's answers."""

_KEY = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, where, and how it is asked. Nothing in it is secret.

    Attributes:
        model: the name that a server knows it by; ``local`` or ``local:...``; ``scripted:FILE``.
        api_base: where the server's API is: ``http://localhost:8000/v1``.
        api_key_env: the environment variable that holds the server's key.
        sampling: how answers are drawn, for whoever makes the requests.
        tokens: whether token ids and log-probabilities are asked for: ``yes`` insists on them, ``auto`` takes them
            where the engine has them.
        timeout: seconds that one try may take.
        connect_timeout: seconds until there is a connection.
        read_timeout: seconds between two pieces of an answer, and until its first; None: as long as the whole.
        retries: further tries after failures that may pass.
        concurrency: requests in flight at once.
        requests_per_minute: tries that begin in a minute; None for no limit.
        budget_dollars: US dollars that the run may spend; None for no limit.
        budget_tokens: tokens that the run may take, read and sampled; None for no limit.
        prices: of the model's tokens.
    """

    model: str
    api_base: str | None = None
    api_key_env: str = _KEY
    sampling: Sampling = field(default_factory=Sampling)
    tokens: TokensWanted = "auto"
    timeout: float = 600.0
    connect_timeout: float = 20.0
    read_timeout: float | None = None
    retries: int = 8
    concurrency: int = 256
    requests_per_minute: float | None = None
    budget_dollars: float | None = None
    budget_tokens: int | None = None
    prices: Prices = field(default_factory=Prices)

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidValue("--model is empty", hint="a name that the server's /models lists, or local")
        self.timeouts, self.gate(), self.budget()  # each looks at its own values
        if self.api_base is not None:
            check_base(self.api_base)
        if self.budget_dollars is not None and self.prices == Prices():
            raise InvalidValue(
                "a budget in dollars, and no prices",
                hint="--price prompt=3 --price completion=15: dollars for a million tokens",
            )
        if self.served == (self.api_base is None):
            raise InvalidValue(
                f"--model {self.model} {'without' if self.served else 'with'} --api-base",
                hint="--api-base http://localhost:8000/v1" if self.served else "leave one of them out",
            )

    @property
    def served(self) -> bool:
        """Whether a server answers."""
        return self.model.partition(":")[0] != LOCAL and not self.model.startswith(SCRIPTED)

    @property
    def timeouts(self) -> Timeouts:
        """The time limits of one try."""
        return Timeouts(self.connect_timeout, self.read_timeout, self.timeout)

    def gate(self) -> Gate:
        """Return a gate for the requests of a run."""
        return Gate(self.concurrency, self.requests_per_minute)

    def budget(self) -> Budget:
        """Return the budget of a run, untouched."""
        return Budget(self.budget_dollars, self.budget_tokens)


def open_model(options: ModelOptions, budget: Budget | None = None, api_key: str | None = None) -> Model:
    """Open a model. Whoever opens it closes it.

    Args:
        options: which, and how.
        budget: of a run that goes on, with what it has spent; else a new one.
        api_key: the server's key; None: as the options say.

    Raises:
        InvalidValue: a key or a script cannot be used.
        MissingExtra: ``local`` needs packages that are not installed.
    """
    meter = Meter(options.prices, budget or options.budget())
    if options.model.startswith(SCRIPTED):
        script = Script.load(Path(options.model.removeprefix(SCRIPTED)))
        return Metered(ScriptedModel(script, name=options.model, tokens=options.tokens != "no"), meter)
    if not options.served:
        # loads torch
        open_local: Callable[[ModelOptions], Model] = import_module("minisandbox.models.engine").open_local
        return Metered(open_local(options), meter)
    assert options.api_base is not None  # the options have seen to it
    return OpenAIModel(
        options.model,
        options.api_base,
        api_key=_key(options.api_key_env) if api_key is None else check_key(api_key),
        tokens=options.tokens,
        timeouts=options.timeouts,
        retries=options.retries,
        gate=options.gate(),
        meter=meter,
    )


def _key(variable: str) -> str:
    """The key in an environment variable. Only the usual variable may be missing: many servers want none."""
    if not variable:
        return ""
    key = os.environ.get(variable)
    if key is None and variable != _KEY:
        raise InvalidValue(f"--api-key-env {variable}: there is no such variable in the environment")
    try:
        return check_key(key or "")
    except InvalidValue as error:
        raise error.about(variable) from None
