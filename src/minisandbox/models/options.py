"""Define the options of a model, which each run records, and open the model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from minisandbox.errors import InvalidValue
from minisandbox.models.client import Gate, OpenAIModel, check_key
from minisandbox.models.dialect import TokensWanted
from minisandbox.models.http import Timeouts, check_base
from minisandbox.models.metering import Budget, Meter, Metered, Prices
from minisandbox.models.protocol import Model, Sampling
from minisandbox.models.scripted import Script, ScriptedModel
from minisandbox.models.served import ServedModel

LOCAL = "local"
"""The name of the embedded model."""

SCRIPTED = "scripted:"
"""The prefix of a scripted model's name; the path of the script follows."""

SERVER_TOKENIZER = "server"
"""The value of the tokenizer option that sends messages for the server to tokenize."""

_KEY = "OPENAI_API_KEY"
_LOG = logging.getLogger("minisandbox.models")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The name of a model and its options. They contain no secrets.

    Attributes:
        model: the model's name at its server; ``local`` or ``local:...``; ``scripted:FILE``.
        api_base: the address of the server's API: ``http://localhost:8000/v1``.
        api_key_env: the environment variable that holds the server's key.
        sampling: the sampling options of requests.
        tokenizer: the directory of the server's tokenizer, to send token ids; ``server`` to send text; "" for the
            tokenizer that the server names, if this machine has it.
        tokens: whether to request token ids and log-probabilities: ``yes`` requires them, ``auto`` accepts an engine
            that does not report them.
        timeout: time limit of one try in seconds.
        connect_timeout: time limit to connect in seconds.
        read_timeout: seconds until the first data and between two reads; None for the value of ``timeout``.
        retries: retries after transient failures.
        concurrency: maximum concurrent requests.
        requests_per_minute: maximum tries started per minute; None for no limit.
        budget_dollars: maximum cost of the run in US dollars; None for no limit.
        budget_tokens: maximum tokens read and sampled in the run; None for no limit.
        prices: the prices of the model's tokens.
    """

    model: str
    api_base: str | None = None
    api_key_env: str = _KEY
    sampling: Sampling = field(default_factory=Sampling)
    tokenizer: str = ""
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
            raise InvalidValue("--model is empty", hint="give a name that the server's /models lists, or local")
        self.timeouts, self.gate(), self.budget()  # validate the options
        if self.api_base is not None:
            check_base(self.api_base)
        if self.budget_dollars is not None and self.prices == Prices():
            hint = "give dollars per million tokens: --price prompt=3 --price completion=15"
            raise InvalidValue("a budget in dollars needs prices", hint=hint)
        if self.served == (self.api_base is None):
            raise InvalidValue(
                f"--model {self.model} {'needs an' if self.served else 'takes no'} --api-base",
                hint="for instance --api-base http://localhost:8000/v1" if self.served else "leave one of them out",
            )

    @property
    def served(self) -> bool:
        """Whether the model runs on a server, not in this process."""
        return self.model.partition(":")[0] != LOCAL and not self.model.startswith(SCRIPTED)

    @property
    def timeouts(self) -> Timeouts:
        """The time limits of one try."""
        return Timeouts(self.connect_timeout, self.read_timeout, self.timeout)

    def gate(self) -> Gate:
        """Return a gate that limits the requests of a run."""
        return Gate(self.concurrency, self.requests_per_minute)

    def budget(self) -> Budget:
        """Return the budget of a run, unspent."""
        return Budget(self.budget_dollars, self.budget_tokens)


def open_model(
    options: ModelOptions,
    budget: Budget | None = None,
    api_key: str | None = None,
    *,
    report: Callable[[str], object] = _LOG.warning,
) -> Model:
    """Open a model; the caller closes it.

    Args:
        options: the model and its options.
        budget: the budget of a resumed run, with its earlier usage; None for a new budget.
        api_key: the server's key; None to read the environment variable in the options.
        report: receives progress messages during the first download of ``local``, which takes minutes; by default they
            are logged as warnings.

    Raises:
        InvalidValue: a key or a script is malformed.
        MissingExtra: ``local`` needs packages that are not installed.
    """
    meter = Meter(options.prices, budget or options.budget())
    if options.model.startswith(SCRIPTED):
        script = Script.load(Path(options.model.removeprefix(SCRIPTED)))
        return Metered(ScriptedModel(script, name=options.model, tokens=options.tokens != "no"), meter)
    if not options.served:
        # import only here, because the engine needs optional packages
        open_local: Callable[..., Model] = import_module("minisandbox.models.engine").open_local
        return Metered(open_local(options, report=report), meter)
    assert options.api_base is not None  # checked by ModelOptions
    client = OpenAIModel(
        options.model,
        options.api_base,
        api_key=_key(options.api_key_env) if api_key is None else check_key(api_key),
        tokens=options.tokens,
        timeouts=options.timeouts,
        retries=options.retries,
        gate=options.gate(),
        meter=meter,
    )
    if options.tokens == "no" or options.tokenizer == SERVER_TOKENIZER:
        return client
    return ServedModel(client, options.tokenizer, tokens=options.tokens)


def _key(variable: str) -> str:
    """Return the key in an environment variable. Only the default variable may be unset, for servers without keys."""
    if not variable:
        return ""
    key = os.environ.get(variable)
    if key is None and variable != _KEY:
        raise InvalidValue(f"the environment variable {variable} is not set (--api-key-env)", hint="set it to the key")
    try:
        return check_key(key or "")
    except InvalidValue as error:
        raise error.about(variable) from None
