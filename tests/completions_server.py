"""A server with the completions API by token ids, in the shapes of vLLM 0.32 and SGLang 0.5.23, over a tiny model.

vLLM's shape is that of ``vllm/entrypoints/openai/completion/protocol.py``, SGLang's that of
``sglang/srt/entrypoints/openai/protocol.py`` (``CompletionResponse``, ``LogProbs``, ``UsageInfo``).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from typing import Any, Literal

from aiohttp import web

from minisandbox.errors import ContextExceeded
from minisandbox.models import Sampling, TokenRow
from minisandbox.models.engine import recompute_logprobs
from minisandbox.models.protocol import Sample
from tests.unit.tiny_model import tiny_engine

Dialect = Literal["vllm", "sglang"]


class CompletionsServer:
    """The handlers of a server; :meth:`app` serves them.

    Attributes:
        prompts: the prompts received so far, without those of text.
        lists: the number of requests for the models; the first ``failing_lists`` of them fail.
        fail: returns a response to send instead of an answer, or None; called before each answer.

    Args:
        dialect: the shape of responses.
        model: the entry of ``/v1/models``.
        raw: whether log-probabilities are the model's own, as without ``--logprobs-mode processed_logprobs``.
        shift: added to the ids of a text, as from another tokenizer.
    """

    def __init__(
        self, dialect: Dialect = "vllm", *, model: Mapping[str, object] | None = None, raw: bool = False, shift: int = 0
    ) -> None:
        self.dialect, self.raw, self.shift = dialect, raw, shift
        self.entry = {"id": "tiny", "object": "model", "max_model_len": 4096, **(model or {})}
        self.engine = tiny_engine()
        self.prompts: list[list[int]] = []
        self.bodies: list[Mapping[str, Any]] = []
        self.lists = self.failing_lists = 0
        self.fail: Callable[[], web.Response | None] = lambda: None

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _models(self, _request: web.Request) -> web.Response:
        self.lists += 1
        if self.lists <= self.failing_lists:
            return web.json_response({"error": {"message": "starting", "code": 503}}, status=503)
        return web.json_response({"object": "list", "data": [self.entry]})

    async def _chat(self, _request: web.Request) -> web.Response:
        choice = {"index": 0, "message": {"role": "assistant", "content": "word"}, "finish_reason": "stop"}
        return web.json_response({"object": "chat.completion", "model": "tiny", "choices": [choice]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.bodies.append(body)
        if (failure := self.fail()) is not None:
            return failure
        if not 0 <= body.get("temperature", 1.0) <= 2:  # as vLLM's own check
            return web.json_response({"error": {"message": "temperature must be in [0, 2]", "code": 400}}, status=400)
        if isinstance(body["prompt"], str):
            prompt = array("i", [token + self.shift for token in self.engine.renderer.encode(body["prompt"])])
        else:
            prompt = array("i", body["prompt"])
            self.prompts.append(body["prompt"])
        sampling = Sampling(
            temperature=body.get("temperature", 1.0), top_p=body.get("top_p", 1.0), top_k=max(body.get("top_k", 0), 0),
            max_tokens=body["max_tokens"], seed=body.get("seed"), stop=tuple(body.get("stop") or ()),
        )  # fmt: skip
        try:
            sample = await self.engine.generate(prompt, sampling)
        except ContextExceeded as error:
            return web.json_response({"error": {"message": str(error), "type": "BadRequestError"}}, status=400)
        return web.json_response(self._shaped(sample, self._logprobs(sample, sampling)))

    def _logprobs(self, sample: Sample, sampling: Sampling) -> list[float]:
        """Return what this server reports: SGLang's include the temperature, and neither top_p nor top_k."""
        if not self.raw and self.dialect == "vllm":
            return sample.tokens.logprobs.tolist()
        tokens = sample.tokens
        ids, count = tokens.prompt + tokens.sampled, len(tokens.sampled)
        row = TokenRow(ids, array("d", bytes(8 * len(ids))), bytes(len(tokens.prompt)) + b"\1" * count, (0,))
        temperature = 1.0 if self.raw else sampling.temperature
        return recompute_logprobs(self.engine.model, row, temperature=temperature)[-count:].tolist()

    def _shaped(self, sample: Sample, logprobs: list[float]) -> dict[str, object]:
        sampled, count = sample.tokens.sampled.tolist(), len(sample.tokens.sampled)
        ids = {"token_ids": sampled, "prompt_token_ids": sample.tokens.prompt.tolist()}
        words = ["word"] * count
        usage = {"prompt_tokens": len(sample.tokens.prompt), "completion_tokens": count}
        usage["total_tokens"] = sum(usage.values())
        choice: dict[str, object] = {"index": 0, "text": "text", "finish_reason": sample.finish_reason, **ids}
        choice["logprobs"] = {"text_offset": [-1] * count, "token_logprobs": logprobs, "tokens": words}
        body: dict[str, object] = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny"}
        if self.dialect == "vllm":
            choice |= {"stop_reason": None, "prompt_logprobs": None}
            return {**body, "choices": [choice], "usage": usage, "kv_transfer_params": None}
        choice["matched_stop"] = sampled[-1] if sample.finish_reason == "stop" else None
        usage_info = {**usage, "prompt_tokens_details": None, "reasoning_tokens": 0}
        return {**body, "choices": [choice], "usage": usage_info, "metadata": {"weight_version": "default"}}
