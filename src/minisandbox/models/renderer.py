"""Render conversations to token ids with a model's chat template, and convert sampled ids to messages.

A text does not determine its tokens: a model may sample ``ab`` as ``a`` and ``b``, where the tokenizer returns one
token. So the renderer stores the ids of each conversation under its rendered text, up to the end of the latest
response. If a later conversation starts with that text, the renderer reuses the ids that were read and sampled, and
tokenizes only the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Self

from minisandbox.errors import InvalidValue, MissingExtra, ModelRefused
from minisandbox.models.protocol import Message, Request, Tokens, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Qwen, Hermes and SmolLM3 write a tool call as one JSON object between these tags.
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_TOOL: Mapping[str, object] = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


def require(*packages: str) -> None:
    """Check that packages of the extra ``[local]`` can be imported.

    Args:
        packages: names of the packages; torch and transformers if there are none.

    Raises:
        MissingExtra: a package is not installed.
    """
    # Otherwise transformers queries the Hugging Face hub even for local directories.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Idle OpenMP threads spin by default, so a step of the engine takes ten times as long on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name in packages or ("torch", "transformers"):
        try:
            import_module(name)
        except ImportError as error:
            raise MissingExtra(
                f"the package {name} is not installed",
                reason=str(error),
                hint="pip install torch==2.13.0 (a build for the CPU), then pip install 'swe-minisandbox[local]'",
            ) from error


class Renderer:
    """Convert conversations to prompts, and sampled ids to messages, from any thread.

    Attributes:
        ends: the ids of tokens that end a response.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        ends: ids that end a response, in addition to the tokenizer's own.
        capacity: maximum tokens of all stored conversations together.

    Raises:
        ModelRefused: the tokenizer has no chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: Iterable[int] = (), *, capacity: int = 1 << 24
    ) -> None:
        if not tokenizer.chat_template:
            raise ModelRefused(
                "the model's tokenizer has no chat template",
                reason="it is a base model, not tuned on conversations",
                hint="use an instruction-tuned model, or give the tokenizer a template",
            )
        self._tokenizer = tokenizer
        self._template = str(tokenizer.chat_template)
        self.ends = frozenset(ends) | ({tokenizer.eos_token_id} - {None})
        end_texts = [str(tokenizer.convert_ids_to_tokens(token)) for token in sorted(self.ends)]
        self._conversations = Conversations(self.encode, end_texts, capacity=capacity)

    @classmethod
    def load(cls, source: Path | str) -> Self:
        """Load the tokenizer of a model.

        Args:
            source: a directory with the tokenizer, or the name of a model in the local cache of Hugging Face.

        Raises:
            MissingExtra: transformers is not installed.
            InvalidValue: the tokenizer cannot be loaded.
            ModelRefused: the tokenizer has no chat template.
        """
        require("transformers")
        from transformers import AutoTokenizer, GenerationConfig  # noqa: PLC0415 - an optional package

        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
        except Exception as error:  # missing files or packages, or errors in the model's own code
            hint = "give a directory that contains tokenizer.json and the chat template"
            raise InvalidValue(f"{source}: the tokenizer cannot be loaded", reason=str(error), hint=hint) from error
        try:
            return cls(tokenizer, end_ids(GenerationConfig.from_pretrained(source).eos_token_id))
        except OSError:  # no generation_config.json
            return cls(tokenizer)

    def prompt(self, request: Request) -> array[int]:
        """Return the ids of a conversation, up to the start of the model's response.

        Raises:
            ModelRefused: the template does not support these messages, or tools.
        """
        return self._conversations.encode(self.text(request), request.session)

    def response(self, request: Request, tokens: Tokens) -> Message:
        """Convert sampled ids to a message, and store all ids for later prompts of the conversation.

        Args:
            request: the conversation.
            tokens: the ids of prompt and response.
        """
        text = self.decode(tokens.sampled)
        stops = [text.find(stop) for stop in request.sampling.stop if stop in text]
        message = self.message(text[: min(stops)] if stops else text, request)
        before = self._render(request, (), generation_prompt=False)
        ids = tokens.prompt + tokens.sampled
        self._conversations.keep(before, self.text(request, message), ids, request.session)
        return message

    def encode(self, text: str) -> array[int]:
        """Return the ids of a text, without adding special tokens."""
        return array("i", self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def text(self, request: Request, *response: Message) -> str:
        """Render a conversation as text; without a response, the text ends with the template's generation prompt.

        Raises:
            ModelRefused: the template does not support these messages, or tools.
        """
        return self._render(request, response, generation_prompt=not response)

    def message(self, text: str, request: Request) -> Message:
        """Parse a sampled text into a message with reasoning, content and, if tools were offered, tool calls."""
        reasoning, text = self._split_thoughts(text, request)
        matches = list(_written_calls(text)) if request.tools else []
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        calls = [
            _tool_call(call, f"{len(request.messages)}.{index}.{digest}") for index, (_, call) in enumerate(matches)
        ]
        if not matches or None in calls:  # keep malformed calls as text, which the agent reports to the model
            return Message("assistant", text, reasoning=reasoning)
        content = text[: matches[0][0]].strip()
        return Message("assistant", content, tuple(call for call in calls if call), reasoning=reasoning)

    @cached_property
    def reads_calls(self) -> bool:
        """Whether :meth:`message` can parse the template's tool calls; other formats need the server's parser."""
        call = ToolCall("call_1", "run", '{"command": "ls"}')
        user = Message("user", "List the files.")
        request = Request((user,), (_TOOL,))
        try:
            before = self._render(request, (), generation_prompt=False)
            written = self.text(request, Message("assistant", "", (call,))).removeprefix(before)
        except ModelRefused:
            return False
        calls = self.message(written, request).tool_calls
        return [(call.name, call.arguments) for call in calls] == [("run", '{"command": "ls"}')]

    @cached_property
    def rewrites_history(self) -> bool:
        """Whether the template renders an earlier response differently once the conversation continues."""
        request = Request((Message("user", "Hello"),))
        answer = Message("assistant", "Hello.", reasoning="A greeting." if _THOUGHT_END in self._template else "")
        before = self._render(request, (answer,), generation_prompt=False)
        later = Request((*request.messages, answer, Message("user", "Go on.")))
        return not self.text(later).startswith(before.rstrip())

    def _render(self, request: Request, response: Sequence[Message], *, generation_prompt: bool) -> str:
        if request.tools and "tools" not in self._template:
            raise ModelRefused(
                "the model's chat template does not support tools",
                hint="use an action format in text, or another model",
            )
        options = request.sampling.extra.get("chat_template_kwargs") or {}

        def render(messages: Sequence[Message]) -> str:
            return str(
                self._tokenizer.apply_chat_template(
                    [message.for_template() for message in messages],
                    tools=[dict(tool) for tool in request.tools] or None,
                    add_generation_prompt=generation_prompt,
                    tokenize=False,
                    **(options if isinstance(options, Mapping) else {}),
                )
            )

        messages = [*request.messages, *response]
        # Templates such as Qwen3.5's reject system messages after the first message, which Claude Code sends.
        one_system = messages[:1] + [replace(m, role="user") if m.role == "system" else m for m in messages[1:]]
        try:
            return render(messages)
        except Exception as error:  # a template is a program and may raise any exception
            with suppress(Exception):
                if one_system != messages:
                    return render(one_system)
            raise ModelRefused(f"the model's chat template rejected the messages: {error}") from error

    def _split_thoughts(self, text: str, request: Request) -> tuple[str, str]:
        """Split a sampled text into reasoning and the rest. Without thinking tags in the template, all is the rest."""
        if _THOUGHT_END not in self._template:
            return "", text
        opened = text.lstrip().startswith(_THOUGHT)
        thought, end, content = text.partition(_THOUGHT_END)
        if not end and not (opened or self.text(request).rstrip().endswith(_THOUGHT)):
            return "", text
        return thought.lstrip().removeprefix(_THOUGHT).strip("\n"), content.lstrip("\n")


class Conversations:
    """An LRU cache of the token ids of conversations, by rendered text.

    Args:
        encode: tokenizes a text without adding tokens.
        ends: the texts of tokens that end a response.
        capacity: maximum tokens of all conversations together.
    """

    def __init__(self, encode: Callable[[str], Iterable[int]], ends: Sequence[str], *, capacity: int = 1 << 24) -> None:
        self._encode = encode
        self._ends = re.compile("|".join(map(re.escape, sorted(filter(None, ends), key=len, reverse=True))) or r"(?!)")
        self._capacity = capacity
        self._token_count = 0
        self._lock = threading.Lock()
        self._stored: OrderedDict[tuple[str, bytes], array[int]] = OrderedDict()

    def encode(self, text: str, session: str = "") -> array[int]:
        """Return a prompt's ids: the stored ids of the longest conversation that it starts with, then the rest's.

        Args:
            text: the rendered prompt.
            session: the name of the rollout. Its own conversations take precedence over those of other rollouts, which
                may have equal text but different ids.
        """
        ids, end_start, end = array("i"), 0, 0
        with self._lock:
            for start, position, digest in self._prefixes(text):
                for key in ((session, digest), ("", digest)):
                    if key in self._stored:
                        self._stored.move_to_end(key)
                        ids, end_start, end = self._stored[key], start, position
                        break
        # Tokenize the rest together with the end token before it. Alone, the rest might start with an additional space
        # mark, or with spaces that belong to the end token.
        new_ids = array("i", self._encode(text[end_start:]))
        if end_start < end:
            new_ids = new_ids[1:] if new_ids[:1] == ids[-1:] else array("i", self._encode(text[end:]))
        return ids + new_ids

    def keep(self, before: str, text: str, ids: array[int], session: str = "") -> None:
        """Store a conversation that ends with a response.

        Args:
            before: the text without the response.
            text: the text with the response; the template's text after the response's end is ignored.
            ids: the ids of prompt and response.
            session: the name of the rollout.
        """
        ends = [match.start() for match in self._ends.finditer(text, len(before))]
        if not text.startswith(before) or not ends:
            return  # the template ends responses differently than the model, so no later text can match
        # A truncated response has no end token: the template adds one that is not among the ids.
        match = self._ends.match(text, ends[-1])
        complete = match is not None and ids[-1:] == array("i", self._encode(match[0]))
        end = match.end() if match is not None and complete else ends[-1]
        digest = hashlib.sha256(text[:end].encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            for key in {(session, digest), ("", digest)}:
                self._token_count += len(ids) - len(self._stored.pop(key, ()))
                self._stored[key] = ids
            while self._token_count > self._capacity:
                self._token_count -= len(self._stored.popitem(last=False)[1])

    def _prefixes(self, text: str) -> Iterator[tuple[int, int, bytes]]:
        """Yield each end token's start, a position where a conversation may end, and the hash of the text up to it."""
        digest, hashed = hashlib.sha256(), 0
        for match in self._ends.finditer(text):
            for position in (match.start(), match.end()):
                digest.update(text[hashed:position].encode("utf-8", "surrogatepass"))
                hashed = position
                yield match.start(), position, digest.copy().digest()


def end_ids(configured: int | list[int] | None) -> list[int]:
    """Return the ids in a generation configuration's ``eos_token_id``."""
    return configured if isinstance(configured, list) else [] if configured is None else [configured]


def _written_calls(text: str) -> Iterator[tuple[int, str]]:
    """Yield the start and the JSON text of each call, in time linear in the text's length."""
    position = 0
    while (start := text.find(_CALL, position)) >= 0:
        position = opening = _skip_space(text, start + len(_CALL))
        if not text.startswith("{", opening):
            continue
        while (position := text.find(_CALL_END, position)) >= 0:
            closing = _skip_space(text, position - 1, -1)
            position += len(_CALL_END)
            if text[closing] == "}":
                yield start, text[opening : closing + 1]
                break
        else:
            return  # without an end tag here, later calls have none either


def _skip_space(text: str, position: int, step: int = 1) -> int:
    while 0 <= position < len(text) and text[position].isspace():
        position += step
    return position


def _tool_call(text: str, seed: str) -> ToolCall | None:
    try:
        body = json.loads(text)
        if not isinstance(body, dict) or not isinstance(body.get("name"), str):
            return None
        arguments = json.dumps(body.get("arguments", {}), ensure_ascii=False)
    except (ValueError, RecursionError):  # a degenerate sample may repeat an opening bracket a thousand times
        return None
    # Do not choose the id at random, because a seeded response must be reproducible.
    name = hashlib.sha256(seed.encode()).hexdigest()[:24]
    return ToolCall(f"call_{name}", body["name"], arguments)
