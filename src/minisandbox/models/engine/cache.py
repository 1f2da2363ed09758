"""Caches of keys and values: of responses being decoded, and of prefixes that later prompts may share."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from minisandbox.errors import InvalidValue

if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedModel

KeysValues = tuple["torch.Tensor", "torch.Tensor"]
"""Keys and values of one layer, [rows, heads, tokens, size] each."""


def check_layers(model: PreTrainedModel) -> None:
    """Check that every layer has full attention, which the caches here require.

    Raises:
        InvalidValue: a layer has a sliding window, or a recurrent state.
    """
    from transformers import DynamicCache  # noqa: PLC0415 - an extra
    from transformers.cache_utils import DynamicLayer  # noqa: PLC0415 - the same

    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    if others := kinds - {DynamicLayer.__name__}:
        raise InvalidValue(
            f"{type(model).__name__} has layers of the kind {', '.join(sorted(others))}",
            reason="the engine serves models whose layers all have full attention",
            hint="serve the model with vLLM",
        )


def growing_cache(layers: Sequence[KeysValues] | int) -> Cache:
    """Return a cache with room to grow.

    transformers' own cache copies everything for each token: twice the time of a step at 8 rows of 2,000 tokens.

    Args:
        layers: the initial contents; or the number of empty layers.
    """
    from transformers import Cache  # noqa: PLC0415 - an extra
    from transformers.cache_utils import DynamicLayer  # noqa: PLC0415 - the same

    class Growing(DynamicLayer):  # type: ignore[misc] # transformers has no types
        keys: torch.Tensor
        values: torch.Tensor
        room: KeysValues | None = None

        def update(self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object) -> KeysValues:
            if not self.is_initialized:
                self.lazy_initialization(keys, values)
            start = self.get_seq_length()
            end = start + keys.shape[-2]
            if self.room is None or end > self.room[0].shape[-2]:
                shape = (*keys.shape[:2], end + end // 4 + 64, keys.shape[-1])
                old, self.room = (self.keys, self.values), (keys.new_empty(shape), values.new_empty(shape))
                for new, before in zip(self.room, old if start else (), strict=False):
                    new[..., :start, :] = before
            for new, added in zip(self.room, (keys, values), strict=True):
                new[..., start:end, :] = added
            self.keys, self.values = (new[..., :end, :] for new in self.room)
            return self.keys, self.values

    made = []
    for one in range(layers) if isinstance(layers, int) else layers:
        layer = Growing()
        if not isinstance(one, int):
            layer.lazy_initialization(*one)
            layer.keys, layer.values = one
        made.append(layer)
    return Cache(layers=made)


def contents(cache: Cache) -> list[KeysValues]:
    """Return a cache's contents by layer, without copying."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def padded(layers: Iterable[KeysValues], width: int) -> list[KeysValues]:
    """Return layers padded with zeros on the left, or cut there, to a width in tokens."""
    import torch  # noqa: PLC0415 - an extra

    def fit(one: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(one, (0, 0, width - one.shape[-2], 0))

    return [(fit(keys), fit(values)) for keys, values in layers]


class PrefixStore:
    """Keys and values of prefixes that later prompts may share; drops the least recently used.

    Args:
        capacity: bytes of keys and values; 0 disables the store.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: list[tuple[torch.Tensor, list[KeysValues]]] = []  # the most recently used is last

    def longest(self, prompt: array[int]) -> tuple[list[KeysValues], int]:
        """Return the longest stored prefix of a prompt and its length; never the whole prompt."""
        import torch  # noqa: PLC0415 - an extra

        ids = torch.tensor(prompt[:-1], dtype=torch.int32)
        lengths = [_common(ids, entry[0]) for entry in self._entries]
        best = max(lengths, default=0)
        if best == 0:
            return [], 0
        entry = self._entries.pop(lengths.index(best))
        self._entries.append(entry)
        return [(keys[..., :best, :], values[..., :best, :]) for keys, values in entry[1]], best

    def put(self, ids: array[int], layers: Iterable[KeysValues]) -> None:
        """Store copies of the keys and values of tokens, [1, heads, tokens, size] each."""
        import torch  # noqa: PLC0415 - an extra

        if self._capacity == 0:
            return
        tokens = torch.tensor(ids, dtype=torch.int32)
        self._entries = [entry for entry in self._entries if _common(tokens, entry[0]) < len(entry[0])]
        self._entries.append((tokens, [(keys.clone(), values.clone()) for keys, values in layers]))
        sizes = [sum(part.nbytes for pair in entry[1] for part in pair) for entry in self._entries]
        while sum(sizes) > self._capacity:
            del self._entries[0], sizes[0]

    def clear(self) -> None:
        """Drop everything, after a change of the weights."""
        self._entries.clear()


def _common(one: torch.Tensor, other: torch.Tensor) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(one), len(other))
    different = (one[:length] != other[:length]).nonzero()
    return int(different[0]) if len(different) else length
