"""The base class of models that sample token ids for a prompt of token ids, which is rendered in this process."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from array import array

from minisandbox.errors import ContextExceeded
from minisandbox.models.protocol import Completion, QueueTime, Request, Sample, Sampling, TokenUsage
from minisandbox.models.renderer import Renderer

_MAX_COUNTED = 64
"""Maximum prompts to keep that were counted and not yet sent."""


class Policy(ABC):
    """A :class:`.Model` that reads and samples token ids, so that sampled ids are never tokenized again.

    A subclass samples ids. The renderer converts messages to ids and back.

    Attributes:
        renderer: the renderer of the policy's conversations.
    """

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self._counted: dict[str, tuple[object, array[int]]] = {}

    @property
    @abstractmethod
    def name(self) -> str:
        """The model's name in logs and trajectories."""

    @abstractmethod
    async def generate(
        self, prompt: array[int], sampling: Sampling, *, session: str = "", queue: QueueTime | None = None
    ) -> Sample:
        """Sample a response; stop sampling if the caller is cancelled.

        Args:
            prompt: the ids of the prompt.
            sampling: the sampling options.
            session: the name of the rollout, by which a router can choose the engine that has cached the conversation.
            queue: the clock for the time that the request waits.

        Raises:
            ContextExceeded: the prompt and ``max_tokens`` do not fit the context.
            ModelUnavailable: the engine has failed, or all retries failed.
            ModelRefused: the server rejects the request, or serves another model or tokenizer.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release connections and threads; further calls do nothing."""

    def prompt_tokens(self, request: Request) -> int:
        """Return the number of tokens of a request's prompt. The prompt is kept for :meth:`complete`.

        Raises:
            ModelRefused: the chat template rejects the messages.
        """
        prompt = self.renderer.prompt(request)
        self._counted[request.session] = (request.messages, request.tools), prompt
        if len(self._counted) > _MAX_COUNTED:  # requests that were counted, but not sent
            del self._counted[next(iter(self._counted))]
        return len(prompt)

    def _prompt(self, request: Request) -> array[int]:
        conversation, prompt = self._counted.pop(request.session, (None, array("i")))
        return prompt if conversation == (request.messages, request.tools) else self.renderer.prompt(request)

    async def complete(self, request: Request) -> Completion:
        """Complete a conversation (:meth:`.Model.complete`).

        Raises:
            ModelRefused: the chat template rejects the messages.
        """
        began = time.monotonic()
        prompt = await asyncio.to_thread(self._prompt, request)
        sample = await self.generate(prompt, request.sampling, session=request.session, queue=request.queue)
        tokens = sample.tokens
        message = await asyncio.to_thread(self.renderer.response, request, tokens)
        return Completion(
            message,
            "tool_calls" if message.tool_calls else sample.finish_reason,
            TokenUsage(len(tokens.prompt), len(tokens.sampled), sample.cached),
            tokens,
            cost=sample.cost,
            seconds=time.monotonic() - began,
            tries=sample.tries,
            model=self.name,
        )


def response_limit(context: int, prompt: array[int], sampling: Sampling) -> int:
    """Return the maximum length of a response in tokens.

    Args:
        context: maximum tokens of prompt and response together.
        prompt: the ids of the prompt.
        sampling: the sampling options.

    Raises:
        ContextExceeded: the response does not fit the context.
    """
    remaining = context - len(prompt)
    limit = sampling.max_tokens or max(remaining, 1)
    if limit > remaining:
        # vLLM's wording, because agents search error messages for it
        raise ContextExceeded(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{len(prompt) + limit} tokens ({len(prompt)} in the messages, {limit} in the completion). "
            "Please reduce the length of the messages or completion."
        )
    return limit
