"""What all steps of one building have in common: the package index, the memory of a step, and its being called off."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from minisandbox.errors import MiniSandboxError
from minisandbox.images.packages import PackageIndex
from minisandbox.sandbox import Sandbox
from minisandbox.store import Store


class CancelledError(Exception):
    """The building was called off; nothing of this step was published. Whoever called it off takes it."""


@dataclass(slots=True)
class Session:
    """One building of one or many images. Use it in a ``with`` block.

    Attributes:
        store: where the layers go.
        index: the package index of its steps.
        memory: bytes that one step may hold; None: no limit.
    """

    store: Store
    index: PackageIndex
    memory: int | None = None
    _boxes: set[Sandbox] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _cancelled: bool = False

    @classmethod
    def begin(cls, store: Store, *, memory: int | None = None) -> Self:
        """Begin a building.

        Args:
            store: where the layers go.
            memory: bytes that one step may hold; None: no limit.
        """
        return cls(store, PackageIndex(store), memory)

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the package index."""
        self.index.__exit__(kind, error, trace)

    @contextmanager
    def running(self, box: Sandbox) -> Iterator[None]:
        """Have a step's sandbox ended when the building is called off while the body runs.

        Raises:
            CancelledError: it was called off, before or meanwhile.
        """
        with self._lock:
            self.check()
            self._boxes.add(box)
        try:
            yield
        except MiniSandboxError as error:
            if self._cancelled:
                raise CancelledError from error
            raise
        finally:
            with self._lock:
                self._boxes.discard(box)

    def check(self) -> None:
        """Raise CancelledError if the building was called off."""
        if self._cancelled:
            raise CancelledError

    def cancel(self) -> None:
        """Call the building off: running steps are ended, no further one begins."""
        with self._lock:
            self._cancelled = True
            boxes = list(self._boxes)
        for box in boxes:
            with suppress(MiniSandboxError):  # it hangs, and ends with this process
                box.stop()
