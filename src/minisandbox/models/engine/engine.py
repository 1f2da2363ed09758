"""The engine: a transformers causal language model that serves many conversations at once, with exact tokens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from minisandbox.errors import ContextExceeded, InvalidValue, ModelError, ModelUnavailable
from minisandbox.models.engine.chat import ChatFormat
from minisandbox.models.engine.conversations import Conversations
from minisandbox.models.engine.decoding import Decoder, Decoding, Row
from minisandbox.models.engine.extra import require
from minisandbox.models.protocol import Completion, Request, Tokens, TokenUsage

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Dtype = Literal["float32", "bfloat16"]


@dataclass(slots=True, eq=False)
class _Job:
    """A submitted request."""

    request: Request
    future: Future[Completion]
    row: Row | None = None


class TransformersEngine:
    """A :class:`Model` that runs a transformers model on the CPU or one GPU.

    One thread owns the model. It samples up to ``max_batch`` responses together; requests join at any token or wait.
    Tokens come with the log-probabilities that they were sampled with, and the next prompt of a
    conversation starts with exactly the tokens of its earlier turns.

    A request's ``seed`` makes its response repeatable up to rounding: other rows of the batch change logits in the
    seventh digit, which can flip a sample close to a boundary. With ``max_batch=1, kept=0`` it is exact.

    Args:
        model: a causal language model; may be shared with a trainer, which changes it only in :meth:`paused`.
        tokenizer: its tokenizer, with a chat template.
        name: the engine's name.
        max_batch: maximum number of responses sampled at once.
        context: maximum tokens of prompt and response; None: the model's own limit.
        kept: bytes of keys and values to keep for continued conversations.
        decoder: makes a replacement for the decoding loop from the tokens that end a response; None: use the model.

    Raises:
        MissingExtra: torch or transformers is not installed.
        InvalidValue: the model has layers without full attention.
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
        kept: int = 1 << 30,
        decoder: Callable[[frozenset[int]], Decoding] | None = None,
    ) -> None:
        require()
        if max_batch < 1:
            raise InvalidValue(f"max_batch is {max_batch}", hint="give 1 or more")
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._name = name
        self._max_batch = max_batch
        self._context = context or int(model.config.get_text_config(decoder=True).max_position_embeddings)
        self._format = ChatFormat(tokenizer)
        self._ends = _ends(model, tokenizer)
        marks = [str(tokenizer.convert_ids_to_tokens(token)) for token in sorted(self._ends)]
        self._conversations = Conversations(self._encode, marks)
        self._decoder: Decoding = (
            Decoder(self._model, self._ends, kept=kept) if decoder is None else decoder(self._ends)
        )
        self._jobs: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._changed = threading.Condition()
        self._pauses = 0
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
        kept: int = 1 << 30,
    ) -> Self:
        """Load a model and its tokenizer from a directory, as ``save_pretrained`` writes them.

        Args:
            directory: the directory.
            name: the engine's name; None: the directory's name.
            dtype: the weights' type. Recomputed log-probabilities equal captured ones within 1e-4 in float32 only.
            device: ``cpu``, or one GPU: ``cuda``, ``cuda:1``.
            max_batch: as for the class.
            context: as for the class.
            kept: as for the class.

        Raises:
            MissingExtra: torch or transformers is not installed.
            InvalidValue: the directory has no model, or it cannot be loaded.
            ModelRefused: its tokenizer has no chat template.
        """
        if not (directory / "config.json").is_file():
            raise InvalidValue(f"{directory} has no model", hint="give a directory written by save_pretrained")
        require()
        import torch  # noqa: PLC0415 - an extra
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - the same
        from transformers.utils import logging  # noqa: PLC0415 - the same

        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory)
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to(device)
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidValue(f"{directory}: the model cannot be loaded", reason=str(error)) from error
        finally:
            if shown:
                logging.enable_progress_bar()
        return cls(model, tokenizer, name=name or directory.name, max_batch=max_batch, context=context, kept=kept)

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

    def prompt_tokens(self, request: Request) -> int:
        """Return the number of tokens of a request's prompt.

        Raises:
            ModelRefused: the chat template rejects the messages.
        """
        return len(self._conversations.encode(self._format.render(request), request.session))

    async def complete(self, request: Request) -> Completion:
        """Complete a conversation; cancelling the caller stops the sampling.

        Raises:
            ContextExceeded: the prompt and ``max_tokens`` do not fit the context.
            ModelRefused: the chat template rejects the messages.
            ModelUnavailable: the engine is closed, or has failed.
        """
        began = time.monotonic()
        completion = await asyncio.wrap_future(self.submit(request))
        return replace(completion, seconds=time.monotonic() - began)

    def submit(self, request: Request) -> Future[Completion]:
        """Submit a request from any thread; the errors of :meth:`complete` are set on the future."""
        job = _Job(request, Future())
        with self._changed:
            if self._closed:
                job.future.set_exception(_closed())
                return job.future
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="model-engine", daemon=True)
                self._thread.start()
            request.queue.begin()
            self._jobs.append(job)
            self._changed.notify_all()
        return job.future

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the engine while its weights are changed.

        It waits until the running responses have ended, so that each comes from one set of weights; new requests wait.
        Cached keys and values are dropped. It blocks: call it from a thread, not from the event loop.
        """
        with self._changed:
            self._pauses += 1
            self._changed.wait_for(lambda: not self._running)
        try:
            yield
        finally:
            self._model.eval()
            self._decoder.forget()
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace weights while paused; weights without an entry are unchanged.

        Raises:
            InvalidValue: the model has no weight of that name or shape.
        """
        with self.paused():
            try:
                unexpected = self._model.load_state_dict(state, strict=False).unexpected_keys
            except RuntimeError as error:
                raise InvalidValue("the weights do not fit the model", reason=str(error)) from error
        if unexpected:
            raise InvalidValue(f"the model has no weights named {', '.join(sorted(unexpected)[:5])}")

    async def close(self) -> None:
        """Stop the engine's thread and fail pending requests; calling it again does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    # --- the thread that owns the model ------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._next():
            try:
                self._decoder.drop([job.row for job in self._running if job.row and job.future.cancelled()])
                ended = self._decoder.step() if self._decoder.rows else []
            except Exception as error:  # noqa: BLE001 - out of memory, a broken model: reported to the callers
                self._fail(self._running, ModelUnavailable(f"the engine failed: {error!r}"))
                self._decoder.forget()
                ended = []
            for job in self._running:
                if job.row in ended:
                    self._answer(job)
            with self._changed:
                self._running = [job for job in self._running if job.row in self._decoder.rows]
                self._changed.notify_all()

    def _next(self) -> bool:
        """Admit waiting requests up to the batch size; return False if the engine is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._running or (self._jobs and not self._pauses))
            if self._closed:
                self._fail([*self._running, *self._jobs], _closed())
                self._running = []
                self._changed.notify_all()
                return False
            taken = []
            while self._jobs and not self._pauses and len(self._running) < self._max_batch:
                taken.append(self._jobs.popleft())
                self._running.append(taken[-1])
        for job in taken:
            self._admit(job)
        return True

    def _admit(self, job: _Job) -> None:
        job.request.queue.end()
        if job.future.cancelled():
            return
        try:
            job.row = self._row(job.request)
            self._decoder.admit(job.row)
        except ModelError as error:
            self._fail([job], error)
        except Exception as error:  # noqa: BLE001 - a prompt may exceed the memory; the others continue
            self._fail([job], ModelUnavailable(f"the engine failed at a prompt: {error!r}"))

    def _row(self, request: Request) -> Row:
        """Tokenize the prompt, and check that the response fits the context."""
        prompt = self._conversations.encode(self._format.render(request), request.session)
        remaining, stop = self._context - len(prompt), request.sampling.stop
        wanted = request.sampling.max_tokens or max(remaining, 1)
        if wanted > remaining:
            # vLLM's wording: agents look for it
            raise ContextExceeded(
                f"This model's maximum context length is {self._context} tokens. However, you requested "
                f"{len(prompt) + wanted} tokens ({len(prompt)} in the messages, {wanted} in the completion). "
                "Please reduce the length of the messages or completion."
            )
        return Row(prompt, request.sampling, wanted, self._stopper(stop) if stop else None)

    def _stopper(self, stop: tuple[str, ...]) -> Callable[[array[int]], bool]:
        # a token has at least one character, except the bytes of an incomplete one
        reach = 8 + max(len(text.encode()) for text in stop)
        return lambda sampled: any(text in self._decode(sampled[-reach:]) for text in stop)

    def _answer(self, job: _Job) -> None:
        assert job.row is not None
        row, request = job.row, job.request
        try:
            text = self._decode(row.sampled)
            stops = [text.find(stop) for stop in request.sampling.stop if stop in text]
            message = self._format.read(text[: min(stops)] if stops else text, request)
            ids = row.prompt + row.sampled
            before, whole = self._format.render_unasked(request), self._format.render(request, message)
            self._conversations.keep(before, whole, ids, request.session)
        except ModelError as error:
            self._fail([job], error)
            return
        except Exception as error:  # noqa: BLE001 - reported to the caller; the others continue
            self._fail([job], ModelUnavailable(f"the engine failed at a response: {error!r}"))
            return
        usage = TokenUsage(len(row.prompt), len(row.sampled), row.cached)
        finish = "tool_calls" if message.tool_calls else row.finish or "stop"
        tokens = Tokens(row.prompt, row.sampled, row.logprobs)
        with contextlib.suppress(InvalidStateError):  # cancelled just now
            job.future.set_result(Completion(message, finish, usage, tokens, model=self._name))

    def _fail(self, jobs: list[_Job], error: ModelError) -> None:
        for job in jobs:
            with contextlib.suppress(InvalidStateError):  # completed or cancelled
                job.future.set_exception(error)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _decode(self, ids: array[int]) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _closed() -> ModelUnavailable:
    return ModelUnavailable("the engine is closed")


def _ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end a response: the tokenizer's, and those in the model's generation config."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    several = configured if isinstance(configured, list) else [configured]
    return frozenset(int(token) for token in (*several, tokenizer.eos_token_id) if token is not None)
