"""A limit on what the layers of a store take while images are pulled and built."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from minisandbox.errors import DiskFull, NotFound
from minisandbox.store.collect import idle_images, remove_images
from minisandbox.store.records import LayerRecord
from minisandbox.store.sizes import Removal, StoreSizes, stack_of
from minisandbox.store.store import Store

_NAMED = 5


@dataclass(slots=True)
class SizeBudget:
    """Room for new layers. Images make room for them, the least recently used first. Threads may share it.

    Images in use, pinned ones and those of this budget's own command stay.

    Attributes:
        store: the store.
        most: bytes that all layers together may take.
        own: names of images that stay: those that the command makes, and those that it needs.
        note: told of the images that were removed.
        needed: keys of layers that stay: those that the command builds upon.
    """

    store: Store
    most: int
    own: set[str]
    note: Callable[[str], None]
    needed: set[str] = field(default_factory=set)
    _size: int = -1
    _reserved: int = 0
    _counted: set[str] = field(default_factory=set)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def room(self, need: int) -> Iterator[None]:
        """Have room for so many bytes while the body runs; it reports what it made to :meth:`add`.

        Raises:
            DiskFull: there is no room, and nothing more can be removed.
        """
        with self._changed:
            while not self._has(need) and not self._make_room(need):
                if not self._reserved:
                    raise self._used_up(need)
                self._changed.wait(30.0)  # others may need less than they have reserved
            self._reserved += need
        try:
            yield
        finally:
            with self._changed:
                self._reserved -= need
                self._changed.notify_all()

    def add(self, layers: Iterable[LayerRecord]) -> None:
        """Count layers that are in the store now."""
        with self._changed:
            for layer in layers:
                if layer.key not in self._counted:
                    self._counted.add(layer.key)
                    self._size += layer.bytes

    def _has(self, need: int) -> bool:
        return self._size >= 0 and self._size + self._reserved + need <= self.most

    def _make_room(self, need: int) -> bool:
        """Remove images until there is room; return whether there is."""
        images = self.store.images()
        sizes = StoreSizes(self.store, images)
        self._size, self._counted = sizes.total, {*sizes.layers}  # exact again: layers share files
        removal, uses, gone, freed = Removal(sizes), Counter(sizes.uses), list[str](), 0
        for _, name in idle_images(self.store, images, keep=self.own | self.store.pins()):
            if self._has(need - freed):
                break
            gone.append(name)
            for key in {*stack_of(sizes.images[name])}:
                uses[key] -= 1
                freed += 0 if uses[key] or key in self.needed else removal.take(key)
        if gone and self._has(need - freed):  # else it would be for nothing
            with suppress(NotFound), self.store.hold(*self.needed & sizes.only_of(gone)):  # another process was quicker
                done = remove_images(self.store, gone)
                self._size = done.size
                names = f"{', '.join(gone[:_NAMED])}{' ...' if len(gone) > _NAMED else ''}"
                self.note(f"removed the {len(gone)} least recently used images ({names}): {gib(done.freed)} freed")
        return self._has(need)

    def _used_up(self, need: int) -> DiskFull:
        return DiskFull(
            f"the budget of {gib(self.most)} for layers is used up",
            reason=f"layers take {gib(self._size)}, about {gib(need)} more are needed; the images that stay belong to "
            "this command, are in use, or are kept",
            hint="everything finished is kept: give more, or make a part of the images with --only",
        )


def gib(size: float) -> str:
    """Format bytes in GiB, or in MiB where they are few."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
