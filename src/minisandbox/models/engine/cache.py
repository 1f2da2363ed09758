"""Keys and values of tokens that were read: of answers that are being drawn, and of those that may be gone on with."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from minisandbox.errors import InvalidValue

if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedModel

KeysValues = tuple["torch.Tensor", "torch.Tensor"]
"""Of one layer: [rows, heads, tokens, size] each."""


def check_layers(model: PreTrainedModel) -> None:
    """Check that every layer looks at all tokens before: the caches here know nothing else.

    Raises:
        InvalidValue: a layer has a window, or a state instead of keys and values.
    """
    from transformers import DynamicCache  # noqa: PLC0415 - an extra
    from transformers.cache_utils import DynamicLayer  # noqa: PLC0415 - the same

    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    if others := kinds - {DynamicLayer.__name__}:
        raise InvalidValue(
            f"{type(model).__name__} has layers of the kind {', '.join(sorted(others))}",
            reason="the engine serves models whose layers all have full attention",
            hint="serve it with vLLM",
        )


def growing_cache(layers: Sequence[KeysValues] | int) -> Cache:
    """Return a cache that has room to grow.

    transformers' own copies everything for each token: at 8 rows of 2,000 tokens that doubles the time of a step.

    Args:
        layers: what is in it; or how many layers it has, empty ones.
    """
    from transformers import Cache  # noqa: PLC0415 - an extra
    from transformers.cache_utils import DynamicLayer  # noqa: PLC0415 - the same

    class Growing(DynamicLayer):  # type: ignore[misc] # transformers is not looked at for types
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
    """Return what a cache holds, layer by layer; nothing is copied."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def padded(layers: Iterable[KeysValues], width: int) -> list[KeysValues]:
    """Return layers with zeros before their tokens, or with tokens less, so that they are as wide as told."""
    import torch  # noqa: PLC0415 - an extra

    def fit(one: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(one, (0, 0, width - one.shape[-2], 0))

    return [(fit(keys), fit(values)) for keys, values in layers]


class PrefixStore:
    """What was computed for tokens that a later prompt may begin with; the least recently used is dropped.

    Args:
        capacity: bytes of keys and values; 0 keeps nothing.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: list[tuple[torch.Tensor, list[KeysValues]]] = []  # the latest used last

    def longest(self, prompt: array[int]) -> tuple[list[KeysValues], int]:
        """Return what there is of a prompt's beginning, and how many tokens that is; never the whole prompt."""
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
        """Keep the keys and values of tokens, [1, heads, tokens, size] each; they are copied."""
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
        """Forget everything: the weights have changed."""
        self._entries.clear()


def _common(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many tokens two sequences begin with in common."""
    length = min(len(one), len(other))
    different = (one[:length] != other[:length]).nonzero()
    return int(different[0]) if len(different) else length
