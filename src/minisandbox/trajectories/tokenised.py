"""Convert examples to token rows for trainers, with a mask of the tokens that carry loss.

Rows contain the engine's token ids if the engine reported them. For other examples, for instance of published data
sets, a tokenizer and its chat template produce the tokens.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any

from minisandbox.errors import InvalidValue, MissingExtra, TrajectoryError
from minisandbox.trajectories.example import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label of a token without loss, PyTorch's default ``ignore_index``."""


@dataclass(frozen=True, slots=True)
class TokenisedRow:
    """One tokenised training sequence, with its loss mask.

    Attributes:
        traj_id: the id of the example.
        instance_id: the task's id.
        number: the row's index in the example, from 0.
        ids: the token ids (``array('i')``).
        mask: per token, 1 if the token carries loss, else 0.
        logprobs: natural logarithms of the sampling probabilities, 0.0 for context (``array('d')``); None if
            unknown.
        reward: the example's reward.
        versions: the policy versions of the tokens (:attr:`.TokenRow.versions`); empty if unknown.
    """

    traj_id: str
    instance_id: str
    number: int
    ids: array[int]
    mask: bytes
    logprobs: array[float] | None
    reward: float | None
    versions: tuple[tuple[int, int], ...] = ()

    @property
    def labels(self) -> list[int]:
        """The token ids, with -100 for tokens without loss."""
        return [token if loss else IGNORED for token, loss in zip(self.ids, self.mask, strict=True)]

    def to_row(self) -> dict[str, object]:
        """Return the row as columns: tokens, labels, mask, log-probabilities, reward, origin and policy versions."""
        return {
            "input_ids": list(self.ids),
            "labels": self.labels,
            "loss_mask": list(self.mask),
            "logprobs": None if self.logprobs is None else list(self.logprobs),
            "reward": self.reward,
            "instance_id": self.instance_id,
            "traj_id": self.traj_id,
            "row": self.number,
            "versions": [list(run) for run in self.versions] or None,
        }


def captured_rows(example: Example) -> Iterator[TokenisedRow]:
    """Yield the token rows that the inference engine reported for an example, except for rows without loss.

    Args:
        example: the example.
    """
    for number, row in enumerate(example.rows):
        if any(row.mask):
            ids, mask = row.ids, row.mask
            reward, versions = example.reward, row.versions
            yield TokenisedRow(example.traj_id, example.instance_id, number, ids, mask, row.logprobs, reward, versions)


def templated_row(example: Example, tokenizer: PreTrainedTokenizerBase) -> TokenisedRow:
    """Tokenise an example's conversation with a chat template.

    All tokens of a response up to its end-of-turn token carry loss. Tokens that the template adds after the end-of-turn
    token carry no loss.

    Args:
        example: the example.
        tokenizer: a ``transformers`` tokenizer with a chat template.

    Raises:
        TrajectoryError: the template is not prefix-preserving: it changes earlier text as the conversation grows.
        InvalidValue: there is no chat template, or the template rejects the conversation.
    """
    text, answers = _answers(example, tokenizer)
    ids, counts = _split(text, [position for answer in answers for position in answer], tokenizer)
    mask = bytearray(len(ids))
    for first, end in zip(counts[::2], counts[1::2], strict=True):
        loss = _sampled(ids[first:end], tokenizer)
        mask[first : first + loss] = b"\x01" * loss
    return TokenisedRow(example.traj_id, example.instance_id, 0, array("i", ids), bytes(mask), None, example.reward)


def _sampled(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of a response's tokens that the model samples: all up to the last special token."""
    special = set(tokenizer.all_special_ids)
    ends = [count for count, token in enumerate(tokens, start=1) if token in special]
    return ends[-1] if ends else len(tokens)


def _answers(example: Example, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[tuple[int, int]]]:
    """Render the conversation up to its last response; return the text, and the start and end of each response."""
    conversation, answers = "", []
    messages = [message.for_template() for message in example.messages]
    for number, message in enumerate(example.messages):
        if message.role != "assistant":
            continue
        start = len(conversation)
        for count, is_answer in ((number, False), (number + 1, True)):
            text = _rendered(example, messages[:count], tokenizer, prompt=not is_answer)
            if not text.startswith(conversation):
                raise _not_a_beginning(example, number, text, conversation)
            start, conversation = len(conversation), text
        answers.append((start, len(conversation)))
    return conversation, answers


def _split(text: str, positions: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Tokenise a text as a whole, and count the tokens before each of the ascending positions.

    Tokenising the parts separately would produce different tokens: many tokenizers start each text with a space mark,
    and some special tokens include the whitespace around them. A token that spans a position counts as before it.
    """
    if not tokenizer.is_fast:  # a slow tokenizer reports no offsets, so compare prefixes
        ids = _ids(text, tokenizer)
        return ids, [_common_length(ids, _ids(text[:position], tokenizer)) for position in positions]
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets, counts, count = encoding["offset_mapping"], [], 0
    for position in positions:
        # some tokenizers give a space token an empty span, with both offsets at the end of the space
        while count < len(offsets) and (offsets[count][0] < position or offsets[count][1] <= position):
            count += 1
        counts.append(count)
    return list(encoding["input_ids"]), counts


def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _rendered(
    example: Example, messages: list[dict[str, object]], tokenizer: PreTrainedTokenizerBase, *, prompt: bool
) -> str:
    tools = [dict(tool) for tool in example.tools] or None
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
    except Exception as error:  # a template may raise any exception
        raise InvalidValue(
            f"{example.traj_id}: the chat template rejects its conversation",
            reason=f"{type(error).__name__}: {error}",
            hint="try another style (--to xml has neither tools nor tool messages) or another "
            "template (--chat-template FILE)",
        ) from error
    assert isinstance(text, str)
    return text


def _not_a_beginning(example: Example, number: int, text: str, earlier: str) -> TrajectoryError:
    common = _common_length(earlier, text)
    return TrajectoryError(
        f"{example.traj_id}: adding message {number} makes the chat template change earlier text: "
        f"{earlier[common : common + 60]!r} became {text[common : common + 60]!r}",
        reason="the template is not prefix-preserving: it may remove thoughts from earlier answers, for instance",
        hint="train with a template that only appends: --chat-template FILE",
    )


def open_tokenizer(name: str, *, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Open a ``transformers`` tokenizer.

    Args:
        name: a directory, or a model on the Hugging Face hub.
        chat_template: replaces the tokenizer's own template.

    Raises:
        MissingExtra: ``transformers`` is not installed.
        InvalidValue: there is no such tokenizer, or the tokenizer has no chat template.
    """
    try:
        transformers: Any = importlib.import_module("transformers")  # import on use, because it takes seconds
    except ImportError as error:
        raise MissingExtra(
            "cannot open a tokenizer: the package 'transformers' is not installed",
            hint="pip install transformers; the extra 'local' has it too",
        ) from error
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # reading files, the network and the hub raise many classes of errors
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidValue(f"cannot open the tokenizer {name}", reason=reason, hint="name its directory") from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if not tokenizer.chat_template:
        raise InvalidValue(f"the tokenizer {name} has no chat template", hint="give one: --chat-template FILE")
    opened: PreTrainedTokenizerBase = tokenizer
    return opened


def count_tokens(example: Example, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens of a conversation under a tokenizer's chat template."""
    text = _rendered(example, [message.for_template() for message in example.messages], tokenizer, prompt=False)
    return len(_ids(text, tokenizer))


def shown_mask(row: TokenisedRow, tokenizer: PreTrainedTokenizerBase | None = None) -> Iterator[str]:
    """Format a row's mask for printing, as spans of tokens with and without loss.

    Args:
        row: the row.
        tokenizer: decodes the tokens; None shows their ids.

    Yields:
        A heading for each span, then the span's text.
    """
    start = 0
    for loss, group in groupby(row.mask):
        end = start + len(list(group))
        ids = row.ids[start:end].tolist()
        yield f"=== {'LOSS' if loss else 'context'}: tokens {start} to {end - 1} ({end - start})"
        yield str(tokenizer.decode(ids)) if tokenizer is not None else " ".join(map(str, ids))
        start = end
