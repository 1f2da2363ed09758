"""Decode with vLLM in this process, as the decoder of :class:`.TransformersEngine`, which keeps the conversations.

This module calls ``LLMEngine.add_request``, ``step`` and ``abort_request``. `make test-vllm` tests it with vLLM on the
CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from minisandbox.models.engine.row import Row


def vllm_parameters(**values: object) -> object:
    """Return vLLM's sampling parameters, set to report a request's output only once the request has finished."""
    from vllm import SamplingParams  # noqa: PLC0415 - an optional package
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415 - an optional package

    return SamplingParams(**values, output_kind=RequestOutputKind.FINAL_ONLY)


class VllmDecoder:
    """Sample responses with vLLM instead of :class:`.decoding.Decoder`. Use a decoder from one thread only.

    Args:
        engine: vLLM's ``LLMEngine``. Code that changes its weights must reset its prefix cache.
        ends: ids of the tokens that end a response.
        parameters: a function that creates vLLM's sampling parameters.
    """

    def __init__(
        self, engine: Any, ends: frozenset[int], *, parameters: Callable[..., object] = vllm_parameters
    ) -> None:
        self._engine, self._ends, self._parameters = engine, sorted(ends), parameters
        self._rows: dict[str, Row] = {}  # by the name of their request
        self._numbers = count()

    @property
    def rows(self) -> Sequence[Row]:
        """The running rows."""
        return list(self._rows.values())

    def admit(self, row: Row) -> None:
        """Submit a row to vLLM as a request."""
        options, name = row.sampling, f"minisandbox-{next(self._numbers)}"
        stop = (
            {"stop": list(options.stop), "include_stop_str_in_output": True} if options.stop else {"detokenize": False}
        )
        parameters = self._parameters(
            temperature=options.temperature, top_p=options.top_p, top_k=options.top_k, seed=options.seed, logprobs=0,
            max_tokens=row.limit, stop_token_ids=self._ends, **stop,
        )  # fmt: skip
        self._engine.add_request(name, {"prompt_token_ids": row.prompt.tolist()}, parameters)
        self._rows[name] = row

    def step(self) -> list[Row]:
        """Run one step of vLLM; remove and return the finished rows."""
        ended = []
        for output in self._engine.step():
            row = self._rows.pop(output.request_id, None) if output.finished else None
            if row is not None:
                (response,) = output.outputs
                row.sampled.extend(response.token_ids)
                pairs = zip(response.token_ids, response.logprobs, strict=True)
                row.logprobs.extend(candidates[token].logprob for token, candidates in pairs)
                row.finish = "length" if response.finish_reason == "length" else "stop"
                row.cached = output.num_cached_tokens or 0
                ended.append(row)
        return ended

    def drop(self, rows: Sequence[Row]) -> None:
        """Abort the requests of rows, and remove the rows."""
        names = [name for name, row in self._rows.items() if row in rows]
        if names:
            self._engine.abort_request(names)
        for name in names:
            del self._rows[name]

    def forget(self) -> None:
        """Abort all requests, because the model's weights have changed."""
        self.drop(self.rows)
