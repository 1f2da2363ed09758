"""Sample token ids with the completions API of a vLLM or SGLang server, after a check of its model and tokenizer."""

from __future__ import annotations

import asyncio
import logging
import os
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from minisandbox.errors import InvalidValue, MissingExtra, ModelRefused
from minisandbox.models.client import OpenAIModel, raw_logprobs
from minisandbox.models.dialect import (
    PROBE,
    Distribution,
    completion_fields,
    constraint_in,
    distribution_of,
    is_processed,
    read_sample,
)
from minisandbox.models.policy import Policy, response_limit
from minisandbox.models.protocol import Completion, Message, QueueTime, Request, Sample, Sampling, Tokens
from minisandbox.models.renderer import Renderer

_LOG = logging.getLogger("minisandbox.models")
_UNKNOWN_CONTEXT = 1 << 30
# A text that different tokenizers split differently: accents, ideographs, an emoji, code, runs of spaces.
_TEXT = Message("user", "def add(a, b):\n        return a + b  # Grüße, 世界 🙂 1234567\n")


class ServerPolicy(Policy):
    """A policy behind a server of vLLM or SGLang.

    Before the first response, and again after each lost connection, the policy checks that the server has the expected
    model, tokenizer and context. It also checks that log-probabilities are of the distribution that is sampled from.

    Args:
        client: the server's client, which is closed with the policy.
        renderer: the renderer of the model's conversations.
        alias: whether the server may name the model differently than the client, which uses the model's directory.
        context: the context in tokens that the server must support; None for any context.
    """

    def __init__(
        self, client: OpenAIModel, renderer: Renderer, *, alias: bool = False, context: int | None = None
    ) -> None:
        super().__init__(renderer)
        self.client = client
        self._alias, self._needed_context = alias, context
        self._name = client.name
        self._context = _UNKNOWN_CONTEXT
        self._checked: set[tuple[str, int]] = set()
        self._checking = asyncio.Lock()

    @property
    def name(self) -> str:
        """The model's name at the server."""
        return self._name

    async def generate(
        self, prompt: array[int], sampling: Sampling, *, session: str = "", queue: QueueTime | None = None
    ) -> Sample:
        """Sample a response (:meth:`.Policy.generate`)."""
        await self.check(sampling)
        limit = response_limit(self._context, prompt, sampling)
        sample = await self._sample(prompt, replace(sampling, max_tokens=limit), session, queue)
        await self.check(sampling)  # if the connection was lost meanwhile, another server may have answered
        return sample

    async def close(self) -> None:
        """Close the client."""
        await self.client.close()

    async def check(self, sampling: Sampling, models: list[dict[str, object]] | None = None) -> None:
        """Check the server, once per kind of sampling and connection.

        Args:
            sampling: the sampling options of requests.
            models: the server's list of models; None to request it.

        Raises:
            ModelRefused: the server has another model or tokenizer, a smaller context, or raw log-probabilities.
        """
        async with self._checking:
            disconnects, kind = self.client.disconnects, distribution_of(sampling)
            if ("model", disconnects) not in self._checked:
                self._read_models(await self.client.models() if models is None else models)
                await self._check_tokenizer()
            if (kind, disconnects) not in self._checked and kind != "model":
                await self._check_logprobs(kind)
            self._checked = {(name, count) for name, count in self._checked if count == disconnects}
            self._checked |= {("model", disconnects), (kind, disconnects)}

    def _read_models(self, models: list[dict[str, object]]) -> None:
        """Find the model in the server's list, and read its name and context."""
        name = self.client.name
        matches = [model for model in models if model["id"] == name]
        if self._alias:  # vLLM has --served-model-name, and may spell the root differently
            matches += [model for model in models if model.get("root") == name or len(models) == 1]
        if models and not matches:
            raise ModelRefused(
                f"{self.client.server} does not serve {name!r}",
                reason=f"it serves {', '.join(str(model['id']) for model in models)}",
                hint="check --model and --api-base, or restart the server with this model",
            )
        if matches:
            self._name = str(matches[0]["id"])
            length = matches[0].get("max_model_len")
            self._context = length if isinstance(length, int) else _UNKNOWN_CONTEXT
        if self._context < (self._needed_context or 0):
            raise ModelRefused(
                f"{self.client.server} holds a context of {self._context} tokens, not of {self._needed_context}",
                hint=f"restart it with --max-model-len {self._needed_context} (SGLang: --context-length), or lower it",
            )

    async def _check_tokenizer(self) -> None:
        """Check that the server and the renderer tokenize a text equally."""
        text = self.renderer.text(Request((_TEXT,)))
        expected = self.renderer.encode(text)
        fields = completion_fields((), Sampling(max_tokens=1), self._name, self.renderer.ends)
        fields.needed.update(prompt=text, add_special_tokens=False)
        ids = (await self.client.post("/completions", fields, read_sample)).tokens.prompt
        if ids[-len(expected) :] != expected or len(ids) > len(expected) + 1:  # SGLang adds its BOS token
            raise ModelRefused(
                f"the tokenizer of {self.client.server} differs from the one that renders the conversations",
                reason="the server has another model, or another version of its tokenizer",
                hint="give the server's own: --tokenizer DIR, or --tokenizer server to send text",
            )

    async def _check_logprobs(self, kind: Distribution) -> None:
        prompt = await asyncio.to_thread(self.renderer.prompt, Request(PROBE))

        async def sample(probe: Sampling) -> Tokens:
            return (await self._sample(prompt, probe)).tokens

        if not await is_processed(sample, kind):
            raise raw_logprobs(self.client.server)

    async def _sample(
        self, prompt: array[int], sampling: Sampling, session: str = "", queue: QueueTime | None = None
    ) -> Sample:
        fields = completion_fields(prompt, sampling, self._name, self.renderer.ends)
        sample = await self.client.post("/completions", fields, read_sample, session=session, queue=queue)
        if sample.tokens.prompt != prompt:
            raise ModelRefused(
                f"{self.client.server} responds to another prompt than the one sent",
                reason="it truncates prompts, or adds tokens to them",
            )
        return sample


class ServedModel:
    """A model behind a server. Requests contain token ids if possible, and otherwise messages.

    Args:
        client: the server's client.
        tokenizer: the directory of the server's tokenizer, whose mismatch is an error; "" for the tokenizer that the
            server names, if this machine has it.
        tokens: whether the responses must have token ids (``yes``, ``auto``).
    """

    def __init__(self, client: OpenAIModel, tokenizer: str = "", *, tokens: str = "auto") -> None:
        self._client, self._tokenizer, self._tokens = client, tokenizer, tokens
        self._policy: ServerPolicy | None = None
        self._opening = asyncio.Lock()
        self._opened = False
        self._empty_lists = 0

    @property
    def name(self) -> str:
        """The model's name at the server."""
        return self._client.name

    def prompt_tokens(self, request: Request) -> int | None:
        """Return the number of tokens of a request's prompt, or None if the server tokenizes it."""
        return None if self._policy is None else self._policy.prompt_tokens(request)

    async def complete(self, request: Request) -> Completion:
        """Complete a conversation (:meth:`.Model.complete`)."""
        async with self._opening:
            if not self._opened:
                self._policy = await self._open(request.sampling)
                self._opened = True
        policy = self._policy
        if (
            policy is None
            or constraint_in(request.sampling.extra)
            or (request.tools and not policy.renderer.reads_calls)
        ):
            completion = await self._client.complete(request)
            if self._empty_lists == 1:  # the server may have been down before: ask for its models once more
                self._empty_lists, self._opened = 2, False
            return completion
        return await policy.complete(request)

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()

    async def _open(self, sampling: Sampling) -> ServerPolicy | None:
        """Return the policy, or None if the server must tokenize messages; log the reason once."""
        models = None if self._tokenizer else await self._client.models()
        if models == []:
            self._empty_lists += 1
        try:
            renderer = await asyncio.to_thread(Renderer.load, self._tokenizer or self._local_tokenizer(models or ()))
            policy = ServerPolicy(self._client, renderer)
            await policy.check(sampling, models)
        except (InvalidValue, MissingExtra, ModelRefused) as error:
            if self._tokenizer:
                raise
            report = _LOG.warning if self._tokens == "yes" else _LOG.info
            report(
                "%s tokenizes the conversations (%s): a turn may fork its row; to send token ids, %s",
                self._client.server, error.what,
                error.hint if isinstance(error, MissingExtra) else "give --tokenizer DIR",
            )  # fmt: skip
            return None
        if renderer.rewrites_history:
            _LOG.warning("the chat template of %s changes earlier turns, so each turn becomes a row", self.name)
        return policy

    def _local_tokenizer(self, models: Iterable[Mapping[str, object]]) -> str:
        """Return the model's directory or name, as the server reports it, if this machine has its tokenizer.

        Raises:
            InvalidValue: this machine does not have the tokenizer.
            MissingExtra: transformers is not installed.
        """
        if find_spec("transformers") is None:
            raise MissingExtra("the package transformers is not installed")
        for model in models:
            root = model.get("root") or model["id"]
            if self._client.name in (model["id"], root) and isinstance(root, str) and _is_local(root):
                return root
        raise InvalidValue("this machine does not have the server's tokenizer")


def _is_local(name: str) -> bool:
    """Return whether a name is a directory with a tokenizer, or a model in the local Hugging Face cache."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    return (Path(name) / "tokenizer_config.json").is_file() or (cache / f"models--{name.replace('/', '--')}").is_dir()
