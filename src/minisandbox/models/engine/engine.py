"""Serve many conversations at once with a transformers causal language model, and report exact tokens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from minisandbox.errors import InvalidValue, ModelUnavailable
from minisandbox.models.engine.row import Decoding, Row
from minisandbox.models.policy import Policy, response_limit
from minisandbox.models.protocol import QueueTime, Sample, Sampling, Tokens
from minisandbox.models.renderer import Renderer, end_ids, require

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Dtype = Literal["float32", "bfloat16"]


@dataclass(slots=True, eq=False)
class _Job:
    """A submitted row, with the future that receives its sample."""

    row: Row
    future: Future[Sample]
    queue: QueueTime


class TransformersEngine(Policy):
    """A policy that runs a transformers model on the CPU or one GPU.

    One thread owns the model and samples up to ``max_batch`` responses together. A new request joins the running batch
    before its next token, or waits until a response has ended.

    A request's ``seed`` makes its response repeatable, apart from rounding: other rows of the batch change logits in
    the seventh digit, which may change a sampled token. With ``max_batch=1, cache_bytes=0`` responses repeat exactly.

    Args:
        model: a causal language model. It may be shared with a trainer that changes it only in :meth:`paused`.
        tokenizer: its tokenizer, with a chat template.
        name: the engine's name.
        max_batch: maximum number of responses sampled at once.
        context: maximum tokens of prompt and response; None for the model's own limit.
        cache_bytes: maximum bytes of keys and values to cache for continued conversations.
        decoder: a function that creates another decoder from the ids of the tokens that end a response; None to decode
            with the model.

    Attributes:
        version: the version of the weights, from 0, which is recorded with each sampled token.

    Raises:
        MissingExtra: torch or transformers is not installed.
        InvalidValue: the model has layers without full attention, or fewer positions than ``context``.
        ModelRefused: the tokenizer has no chat template.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str = "local",
        max_batch: int = 8,
        context: int | None = None,
        cache_bytes: int = 1 << 30,
        decoder: Callable[[frozenset[int]], Decoding] | None = None,
    ) -> None:
        require()
        from minisandbox.models.engine.decoding import Decoder  # noqa: PLC0415 - imports torch

        if max_batch < 1:
            raise InvalidValue(f"max_batch is {max_batch}", hint="give 1 or more")
        configured = model.generation_config.eos_token_id if model.generation_config is not None else None
        super().__init__(Renderer(tokenizer, end_ids(configured)))
        positions = int(model.config.get_text_config(decoder=True).max_position_embeddings)
        if context is not None and context > positions:
            hint = f"lower the context to {positions}, or use a model with more positions"
            raise InvalidValue(f"{name} cannot hold a context of {context}: it has {positions} positions", hint=hint)
        self._model = model.eval()
        self._name = name
        self._max_batch = max_batch
        self._context = context or positions
        self._decoder: Decoding = (
            Decoder(self._model, self.renderer.ends, cache_bytes=cache_bytes)
            if decoder is None
            else decoder(self.renderer.ends)
        )
        self._jobs: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._changed = threading.Condition()
        self._pauses = self.version = self._ended_tokens = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        name: str | None = None,
        dtype: Dtype = "float32",
        device: str = "cpu",
        max_batch: int = 8,
        context: int | None = None,
        cache_bytes: int = 1 << 30,
    ) -> Self:
        """Load a model and its tokenizer from a directory, as ``save_pretrained`` writes them.

        Args:
            directory: the directory.
            name: the engine's name; None for the directory's name.
            dtype: the weights' type. Only in float32 do recomputed log-probabilities equal captured ones within 1e-4.
            device: ``cpu``, or one GPU: ``cuda``, ``cuda:1``.
            max_batch: as for the class.
            context: as for the class.
            cache_bytes: as for the class.

        Raises:
            MissingExtra: torch or transformers is not installed.
            InvalidValue: the directory has no model, or the model cannot be loaded.
            ModelRefused: the tokenizer has no chat template.
        """
        if not (directory / "config.json").is_file():
            raise InvalidValue(f"{directory} has no model", hint="give a directory written by save_pretrained")
        require()
        import torch  # noqa: PLC0415 - an optional package
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - an optional package
        from transformers.utils import logging  # noqa: PLC0415 - an optional package

        has_progress_bar = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory)
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to(device)
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidValue(f"{directory}: the model cannot be loaded", reason=str(error)) from error
        finally:
            if has_progress_bar:
                logging.enable_progress_bar()
        return cls(
            model, tokenizer, name=name or directory.name, max_batch=max_batch, context=context, cache_bytes=cache_bytes
        )

    @property
    def name(self) -> str:
        """The engine's name."""
        return self._name

    @property
    def context(self) -> int:
        """Maximum tokens of prompt and response together."""
        return self._context

    @property
    def model(self) -> PreTrainedModel:
        """The model itself. Change it only in :meth:`paused`."""
        return self._model

    @property
    def sampled(self) -> int:
        """Number of tokens that were sampled so far, unfinished responses included."""
        with self._changed:
            return self._ended_tokens + sum(len(job.row.sampled) for job in self._running)

    async def generate(
        self,
        prompt: array[int],
        sampling: Sampling,
        *,
        session: str = "",  # noqa: ARG002 - needed only to choose among several engines
        queue: QueueTime | None = None,
    ) -> Sample:
        """Sample a response (:meth:`.Policy.generate`)."""
        limit, stop = response_limit(self._context, prompt, sampling), sampling.stop
        job = _Job(Row(prompt, sampling, limit, self._stopper(stop) if stop else None), Future(), queue or QueueTime())
        with self._changed:
            if self._closed:
                raise _closed()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="model-engine", daemon=True)
                self._thread.start()
            job.queue.begin()
            self._jobs.append(job)
            self._changed.notify_all()
        return await asyncio.wrap_future(job.future)

    @contextlib.contextmanager
    def paused(self, version: int | None = None) -> Iterator[None]:
        """Pause the engine during a ``with`` block that changes its weights.

        The block starts when all running responses have ended, so that each response comes from one set of weights.
        Cached keys and values are then dropped, and new requests wait until the block ends. Entering the block stops
        the calling thread until the responses have ended, so never enter it on the event loop.

        Args:
            version: the version of the new weights; None to increase the version by 1.
        """
        with self._changed:
            self._pauses += 1
            self._changed.wait_for(lambda: not self._running)
        self._decoder.forget()  # before the block, so that training has the memory
        try:
            yield
        finally:
            self._model.eval()
            with self._changed:
                self._pauses -= 1
                self.version = self.version + 1 if version is None else version
                self._changed.notify_all()

    def cancel(self) -> None:
        """Cancel all requests; their callers receive CancelledError."""
        with self._changed:
            for job in (*self._running, *self._jobs):
                job.future.cancel()

    async def close(self) -> None:
        """Stop the engine's thread and fail pending requests; further calls do nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    # --- the thread that owns the model ------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._next():
            try:
                self._decoder.drop([job.row for job in self._running if job.future.cancelled()])
                ended = self._decoder.step() if self._decoder.rows else []
            except Exception as error:  # noqa: BLE001 - for instance out of memory; reported to the callers
                self._fail(self._running, ModelUnavailable(f"the engine failed: {error!r}"))
                self._decoder.forget()
                ended = []
            for job in self._running:
                if job.row in ended:
                    # A response has a single version, because a pause waits for running responses.
                    versions = ((self.version, len(job.row.sampled)),)
                    tokens = Tokens(job.row.prompt, job.row.sampled, job.row.logprobs, versions)
                    sample = Sample(tokens, job.row.finish or "stop", job.row.cached)
                    with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
                        job.future.set_result(sample)
            with self._changed:
                self._ended_tokens += sum(len(job.row.sampled) for job in self._running if job.row in ended)
                self._running = [job for job in self._running if job.row in self._decoder.rows]
                self._changed.notify_all()

    def _next(self) -> bool:
        """Wait for work, and admit waiting requests up to the batch size; return False if the engine is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._running or (self._jobs and not self._pauses))
            if self._closed:
                self._fail([*self._running, *self._jobs], _closed())
                self._running = []
                self._changed.notify_all()
                return False
            admitted = []
            while self._jobs and not self._pauses and len(self._running) < self._max_batch:
                admitted.append(self._jobs.popleft())
            self._running += admitted
        for job in admitted:
            self._admit(job)
        return True

    def _admit(self, job: _Job) -> None:
        job.queue.end()
        if job.future.cancelled():
            return
        try:
            self._decoder.admit(job.row)
        except Exception as error:  # noqa: BLE001 - the prompt may exceed the memory; other requests continue
            self._fail([job], ModelUnavailable(f"the engine failed at a prompt: {error!r}"))

    def _stopper(self, stop: tuple[str, ...]) -> Callable[[array[int]], bool]:
        # Decode only the latest tokens: each has at least one character, except the tokens of a split character.
        reach = 8 + max(len(text.encode()) for text in stop)
        return lambda sampled: any(text in self.renderer.decode(sampled[-reach:]) for text in stop)

    def _fail(self, jobs: list[_Job], error: ModelUnavailable) -> None:
        for job in jobs:
            with contextlib.suppress(InvalidStateError):  # already completed or cancelled
                job.future.set_exception(error)


def _closed() -> ModelUnavailable:
    return ModelUnavailable("the engine is closed")
