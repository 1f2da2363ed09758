"""Decode with torch: read prompts one by one, sample responses as a batch, and cache keys and values.

Import this module only if torch is installed.
"""

from __future__ import annotations

import bisect
import inspect
from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from minisandbox.errors import InvalidValue
from minisandbox.models.engine.row import Row
from minisandbox.models.protocol import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KeysValues = tuple[Tensor, Tensor]
"""The keys and values of one layer, each of shape [rows, heads, tokens, size]."""

_MOST_PACKED = 4 << 30
"""Maximum bytes of weights to pack. Packing stores a second copy of the weights in memory."""


class Decoder:
    """Decode a batch of responses with a causal language model. Use a decoder from one thread only.

    Each prompt is read alone and without padding, so the first token of its response does not depend on other rows.
    Running rows are padded on the left to the length of the longest row. Attention ignores the padding, so other rows
    change a row's logits only by rounding.

    Args:
        model: a causal language model in evaluation mode.
        ends: ids of the tokens that end a response.
        cache_bytes: maximum bytes of keys and values to cache for later prompts.

    Raises:
        InvalidValue: the model has layers with a sliding window or a recurrent state.
    """

    def __init__(self, model: PreTrainedModel, ends: frozenset[int], *, cache_bytes: int) -> None:
        kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
        if others := kinds - {DynamicLayer.__name__}:
            raise InvalidValue(
                f"{type(model).__name__} has layers of the kind {', '.join(sorted(others))}",
                reason="the engine serves models whose layers all have full attention",
                hint="serve the model with vLLM",
            )
        self.rows: list[Row] = []
        self._model = model
        # Read the signature below peft's wrapper. transformers 5.24 renamed the argument past_key_values to cache.
        forward = getattr(model, "get_base_model", lambda: model)().forward
        self._cache_name = "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
        self._ends = ends
        self._store = PrefixStore(cache_bytes)
        self._packed = PackedLinears(model)
        self._layer_count = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        self._lengths: list[int] = []
        self._cache: Cache = None
        self._logits: Any = None

    def admit(self, row: Row) -> None:
        """Read a row's prompt, and add the row to the running rows."""
        prefix, row.cached = self._store.longest(row.prompt)
        cache = _growing_cache(prefix or repeat(None, self._layer_count))
        ids = torch.tensor([row.prompt[row.cached :]], dtype=torch.long, device=self._model.device)
        positions = torch.arange(row.cached, len(row.prompt), device=self._model.device)[None]
        logits = self._run(cache, input_ids=ids, position_ids=positions, logits_to_keep=1)
        if row.cached < len(row.prompt) // 2:  # a new conversation; others of its group have the same prompt
            self._store.put(row.prompt, _contents(cache))
        if self.rows:
            width = max(*self._lengths, len(row.prompt))
            pairs = zip(_padded(_contents(self._cache), width), _padded(_contents(cache), width), strict=True)
            cache = _growing_cache([(torch.cat((a[0], b[0])), torch.cat((a[1], b[1]))) for a, b in pairs])
            logits = torch.cat((self._logits, logits))
        self.rows.append(row)
        self._lengths.append(len(row.prompt))
        self._cache, self._logits = cache, logits

    def step(self) -> list[Row]:
        """Sample one token per row; remove and return the finished rows."""
        sampling = [row.sampling for row in self.rows]
        tokens, logprobs = draw(self._logits, sampling, [row.uniform() for row in self.rows])
        for row, token, logprob in zip(self.rows, tokens, logprobs, strict=True):
            row.append(token, logprob, self._ends)
        finished = [row for row in self.rows if row.finish]
        for index, row in enumerate(self.rows):
            if row.finish:
                start = max(self._lengths) - self._lengths[index]  # skip the padding
                layers = [tuple(part[index : index + 1, :, start:] for part in pair) for pair in _contents(self._cache)]
                self._store.put((row.prompt + row.sampled)[: self._lengths[index]], layers)
        self.drop(finished)
        if self.rows:
            self._advance()
        return finished

    def drop(self, rows: Sequence[Row]) -> None:
        """Remove rows from the batch."""
        remaining = [index for index, row in enumerate(self.rows) if row not in rows]
        if len(remaining) == len(self.rows):
            return
        self.rows = [self.rows[index] for index in remaining]
        self._lengths = [self._lengths[index] for index in remaining]
        if not remaining:
            self._cache = self._logits = None
            return
        chosen = torch.tensor(remaining, device=self._model.device)
        self._logits = self._logits[chosen]
        layers = [(keys[chosen], values[chosen]) for keys, values in _contents(self._cache)]
        self._cache = _growing_cache(_padded(layers, max(self._lengths)))

    def forget(self) -> None:
        """Drop all rows and caches, because the model's weights have changed."""
        self.drop(list(self.rows))
        self._store.clear()
        self._packed.clear()

    def _advance(self) -> None:
        """Run the model on the latest sampled tokens."""
        device = self._model.device
        ids = torch.tensor([[row.sampled[-1]] for row in self.rows], device=device)
        lengths = torch.tensor(self._lengths, device=device)[:, None]
        width = int(lengths.max()) + 1
        # Mask the padding in a row's first columns. The last column is the new token.
        mask = (torch.arange(width, device=device)[None] >= width - 1 - lengths).long()
        self._logits = self._run(self._cache, input_ids=ids, attention_mask=mask, position_ids=lengths)
        self._lengths = [length + 1 for length in self._lengths]

    def _run(self, cache: Cache, **inputs: object) -> Tensor:
        """Run the model on new tokens and extend the cache; return the logits of every row's last token."""
        with self._packed, torch.inference_mode():
            logits: Tensor = self._model(**inputs, use_cache=True, **{self._cache_name: cache}).logits
        return logits[:, -1]


class PackedLinears:
    """Use weights in oneDNN's packed layout during a ``with`` block, which doubles a float32 model's speed on a CPU.

    The weights are packed at the first use, and again after :meth:`clear`.

    Args:
        model: the model. Its weights are not packed on a GPU, in another precision, or above :data:`_MOST_PACKED`.
    """

    def __init__(self, model: nn.Module) -> None:
        linears = [module for module in model.modules() if type(module) is nn.Linear]
        weights = [module.weight for module in linears]
        is_float = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
        is_small = sum(weight.nbytes for weight in weights) <= _MOST_PACKED
        self._linears = linears if is_float and is_small and torch.backends.mkldnn.is_available() else []
        self._forwards: list[partial[Tensor]] = []

    def __enter__(self) -> None:
        if not self._forwards:
            operators = torch.ops.mkldnn
            for linear in self._linears:
                weight = operators._reorder_linear_weight(linear.weight.detach(), None)
                self._forwards.append(partial(_multiply, weight, linear.bias))
        for linear, forward in zip(self._linears, self._forwards, strict=True):
            vars(linear)["forward"] = forward  # an instance attribute overrides the method

    def __exit__(self, *_: object) -> None:
        for linear in self._linears:
            del vars(linear)["forward"]

    def clear(self) -> None:
        """Drop the packed copies, because the model's weights have changed."""
        self._forwards.clear()


def _multiply(weight: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return product


class PrefixStore:
    """An LRU cache of keys and values. A prompt reuses the prefix that it shares with an earlier conversation.

    An entry's key is the bytes of its tokens. The keys are sorted, so the entry that shares the longest prefix with a
    prompt is next to where the prompt would be inserted.

    Args:
        capacity: maximum bytes of keys and values; 0 disables the cache.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._bytes = capacity, 0
        self._layers: dict[bytes, list[KeysValues]] = {}  # the most recently used is last
        self._sorted: list[bytes] = []

    def longest(self, prompt: array[int]) -> tuple[list[KeysValues], int]:
        """Return the keys and values of a prompt's longest cached prefix, and the prefix's length in tokens.

        The prefix never covers the whole prompt, because the model must read a token to return logits.
        """
        key = prompt[:-1].tobytes()
        index = bisect.bisect(self._sorted, key)
        best, entry = max(((_common(key, near), near) for near in self._sorted[max(0, index - 1) : index + 1]),
                          default=(0, b""))  # fmt: skip
        if best == 0:
            return [], 0
        layers = self._layers[entry] = self._layers.pop(entry)
        return [(keys[..., :best, :], values[..., :best, :]) for keys, values in layers], best

    def put(self, ids: array[int], layers: Iterable[Sequence[Tensor]]) -> None:
        """Store copies of the keys and values of a token sequence, each of shape [1, heads, tokens, size]."""
        if self._capacity == 0:
            return
        key = ids.tobytes()
        index = bisect.bisect(self._sorted, key)
        if index and key.startswith(self._sorted[index - 1]):  # usually the conversation's previous turn
            self._remove(self._sorted[index - 1])
            index -= 1
        self._sorted.insert(index, key)
        self._layers[key] = [(keys.clone(), values.clone()) for keys, values in layers]
        self._bytes += self._size(key)
        while self._bytes > self._capacity:
            self._remove(next(iter(self._layers)))

    def clear(self) -> None:
        """Drop all entries, because the model's weights have changed."""
        self._layers.clear()
        self._sorted.clear()
        self._bytes = 0

    def _size(self, key: bytes) -> int:
        return sum(part.nbytes for pair in self._layers[key] for part in pair)

    def _remove(self, key: bytes) -> None:
        self._bytes -= self._size(key)
        del self._layers[key], self._sorted[bisect.bisect_left(self._sorted, key)]


def _common(first: bytes, second: bytes) -> int:
    """Return the number of tokens in the common prefix of two keys."""
    size = array("i").itemsize
    low, high = 0, min(len(first), len(second)) // size
    while low < high:
        middle = (low + high + 1) // 2
        if first[: middle * size] == second[: middle * size]:
            low = middle
        else:
            high = middle - 1
    return low


class _GrowingLayer(DynamicLayer):  # type: ignore[misc] # transformers has no type annotations
    """The keys and values of one layer, in buffers with room for further tokens.

    transformers' own layer copies all keys and values for each new token, which doubles the time of a step with 8 rows
    of 2,000 tokens.
    """

    keys: Tensor
    values: Tensor
    buffers: KeysValues | None = None

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> KeysValues:
        """Append keys and values; return all keys and values of the layer."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        start = self.get_seq_length()
        end = start + keys.shape[-2]
        if self.buffers is None or end > self.buffers[0].shape[-2]:
            shape = (*keys.shape[:2], end + end // 4 + 64, keys.shape[-1])
            previous, self.buffers = (self.keys, self.values), (keys.new_empty(shape), values.new_empty(shape))
            for buffer, before in zip(self.buffers, previous if start else (), strict=False):
                buffer[..., :start, :] = before
        for buffer, added in zip(self.buffers, (keys, values), strict=True):
            buffer[..., start:end, :] = added
        self.keys, self.values = (buffer[..., :end, :] for buffer in self.buffers)
        return self.keys, self.values


def _growing_cache(contents: Iterable[KeysValues | None]) -> Cache:
    """Return a cache with the given keys and values of each layer, or an empty layer for None."""
    layers = []
    for pair in contents:
        layer = _GrowingLayer()
        if pair is not None:
            layer.lazy_initialization(*pair)
            layer.keys, layer.values = pair
        layers.append(layer)
    return Cache(layers=layers)


def _contents(cache: Cache) -> list[KeysValues]:
    """Return a cache's keys and values by layer, without copying."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def _padded(layers: Iterable[KeysValues], width: int) -> list[KeysValues]:
    """Pad layers with zeros, or cut them, on the left, to a width in tokens."""
    pad = nn.functional.pad
    return [(pad(keys, (0, 0, width - keys.shape[-2], 0)), pad(values, (0, 0, width - values.shape[-2], 0)))
            for keys, values in layers]  # fmt: skip


def draw(logits: Tensor, sampling: Sequence[Sampling], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """Sample a token for each row.

    The result depends only on the row's own logits and random number, not on the rest of the batch.

    Args:
        logits: the next token's logits, [rows, vocabulary].
        sampling: the sampling options of each row.
        uniforms: a random number in [0, 1) for each row.

    Returns:
        The tokens, and their log-probabilities under the sampled distribution: after temperature, top_k and top_p.
        At temperature 0, the result is the likeliest token with its log-probability at temperature 1, as in vLLM.
    """
    temperatures = torch.tensor([options.temperature or 1.0 for options in sampling], device=logits.device)
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    for index, options in enumerate(sampling):
        if options.temperature and (options.top_k or options.top_p < 1):
            logprobs[index] = _truncated(logprobs[index], options)
    # Invert the cumulative distribution, in double precision because it sums 100,000 small probabilities.
    cumulative = logprobs.exp().double().cumsum(dim=-1)
    aims = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    samples = torch.searchsorted(cumulative, aims, right=True).clamp_(max=logits.shape[-1] - 1).squeeze(-1)
    is_greedy = torch.tensor([not options.temperature for options in sampling], device=logits.device)
    tokens = torch.where(is_greedy, logits.argmax(dim=-1), samples)
    return tokens.tolist(), logprobs.gather(-1, tokens[:, None]).squeeze(-1).tolist()


def _truncated(logprobs: Tensor, options: Sampling) -> Tensor:
    """Restrict a distribution by ``top_k`` and ``top_p``, and normalise it."""
    ordered, indices = logprobs.sort(descending=True)
    count = min(options.top_k or len(ordered), len(ordered))
    # Keep the smallest set of tokens that reaches top_p: each token for which the sum before it is below top_p.
    before = ordered[:count].exp().cumsum(dim=-1) - ordered[:count].exp()
    remaining = indices[:count][before < options.top_p]
    truncated = torch.full_like(logprobs, -torch.inf)
    truncated[remaining] = torch.log_softmax(logprobs[remaining], dim=-1)
    return truncated
