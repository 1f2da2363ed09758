"""Connect the requests of a command-line agent to its rollout's session."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace

from minisandbox.agents.session import LimitReached, Session
from minisandbox.errors import BudgetExceeded, ContextExceeded, ModelError, ModelUnavailable
from minisandbox.models import Completion, Request
from minisandbox.models.dialect import constraint_in
from minisandbox.models.protocol import prompt_tokens
from minisandbox.types import ExecResult

_CONSTRAINTS = ("tool_choice", "response_format")
_PER_TOKEN = 3
"""Characters per token, for models that cannot count tokens."""


def _characters(request: Request) -> int:
    strings = (
        text
        for message in request.messages
        for text in (message.content, message.reasoning, *(call.arguments for call in message.tool_calls))
    )
    return sum(map(len, strings))


class Relay:
    """The model of one command-line agent: the model of its session, with the limits of the rollout.

    Args:
        session: the rollout's session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        assert session.model is not None  # Setup checks it
        self._model = session.model
        self._histories: list[tuple[int, int]] = []
        self._pending = 0
        self._last_request = session.elapsed
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: ModelError | None = None

    @property
    def name(self) -> str:
        """The model's name."""
        return self._model.name

    async def complete(self, request: Request) -> Completion:
        """Complete a conversation within the rollout's limits, and record the response.

        The rollout's sampling options replace those of the request, but not its token limit, stop strings and
        constraints.

        Raises:
            ContextExceeded: the prompt exceeds the rollout's limit of the context; the agent may shorten its history.
            LimitReached: a limit allows no further response; the agent is stopped.
            ModelError: the model gave no usable response.
        """
        self._pending += 1
        try:
            completion = await self._complete(request)
        except (LimitReached, BudgetExceeded, ModelUnavailable) as error:
            if not self._fatal.done():
                self._fatal.set_exception(error)
            raise
        except ModelError as error:  # the agent may send another request, or end
            self._error = error
            raise
        finally:
            self._pending -= 1
            self._last_request = self._session.elapsed
        self._error = None
        return completion

    async def _complete(self, request: Request) -> Completion:
        context = self._session.limits.context
        if context is not None:
            count = prompt_tokens(self._model, request)
            if (_characters(request) / _PER_TOKEN if count is None else count) >= context:
                raise ContextExceeded(f"the prompt has more than {context} tokens, the rollout's limit")
        began = self._session.elapsed
        rollout_sampling, agent_sampling = self._session.next_sampling(), request.sampling
        limits = [limit for limit in (rollout_sampling.max_tokens, agent_sampling.max_tokens) if limit is not None]
        constraints = {name: agent_sampling.extra[name] for name in _CONSTRAINTS if name in agent_sampling.extra}
        sampling = replace(
            rollout_sampling,
            max_tokens=min(limits, default=None),
            stop=rollout_sampling.stop or agent_sampling.stop,
            extra={**rollout_sampling.extra, **constraints},
        )
        request = Request(request.messages, request.tools, sampling, self._session.name, request.queue)
        completion = await self._session.complete(request)
        is_trained = constraint_in(sampling.extra) is None
        record = self._session.record
        record.add_turn(completion, -1, began, request.queue.seconds, trained=is_trained)
        self._histories.append((len(request.messages), hash((request.messages, completion.message))))
        if len(request.messages) >= len(record.messages):
            record.messages[:] = (*request.messages, completion.message)
        return completion

    def settle(self) -> None:
        """Set the index of each response in the history, which is the longest conversation; -1 outside it."""
        record = self._session.record
        history = tuple(record.messages)
        for number, (index, digest) in enumerate(self._histories):
            if index < len(history) and hash((history[:index], history[index])) == digest:
                record.turns[number] = replace(record.turns[number], message=index)

    async def close(self) -> None:
        """Do nothing, because the model belongs to the batch."""

    async def guard(self, command: Coroutine[object, object, ExecResult], idle: float) -> ExecResult | None:
        """Run the agent's command; kill it after a fatal error, or if it has sent no request for a while.

        Args:
            command: the command.
            idle: the seconds without a request.

        Returns:
            The result; None if the agent was idle.

        Raises:
            LimitReached: a limit of the rollout was reached.
            ModelError: the model is unavailable, or the batch's budget is spent.
        """
        running = asyncio.ensure_future(command)
        self._last_request = self._session.elapsed
        try:
            while True:
                remaining = idle if self._pending else self._last_request + idle - self._session.elapsed
                if remaining <= 0:
                    return None
                await asyncio.wait((running, self._fatal), timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
                if self._fatal.done():
                    self._fatal.result()
                if running.done():
                    return running.result()
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait((running,))
            if self._fatal.done():
                self._fatal.exception()  # mark it as retrieved

    def check(self) -> None:
        """Raise the model's error if no later request succeeded.

        Raises:
            ModelError: the latest request failed.
        """
        if self._fatal.done():
            self._fatal.result()
        if self._error is not None:
            raise self._error
