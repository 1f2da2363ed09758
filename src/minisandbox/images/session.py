"""What all steps of one building have in common: the package index, the memory of a step, and its being called off."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from minisandbox.images.python.packages import PackageIndex
from minisandbox.sandbox.cancellation import Cancellation
from minisandbox.store import Store


@dataclass(slots=True)
class Session:
    """One building of one or many images. Use it in a ``with`` block.

    Attributes:
        store: where the layers go.
        index: the package index of its steps.
        memory: bytes that one step may hold; None: no limit.
        cancellation: calls the building off. Running steps are ended, nothing of them is published.
    """

    store: Store
    index: PackageIndex
    memory: int | None = None
    cancellation: Cancellation = field(default_factory=Cancellation)

    @classmethod
    def begin(cls, store: Store, *, memory: int | None = None, cancellation: Cancellation | None = None) -> Self:
        """Begin a building.

        Args:
            store: where the layers go.
            memory: bytes that one step may hold; None: no limit.
            cancellation: what calls it off; one of its own if None.
        """
        return cls(store, PackageIndex(store), memory, cancellation or Cancellation())

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the package index."""
        self.index.__exit__(kind, error, trace)
