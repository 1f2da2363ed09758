"""Half-made things: one locked directory each, which the next process removes if its maker died."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from minisandbox.store.disk.locks import try_flock
from minisandbox.store.disk.trees import remove_tree

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Staging:
    """The directory ``staging/``.

    Attributes:
        root: its path.
    """

    root: Path

    @contextmanager
    def directory(self, label: str) -> Iterator[Path]:
        """Make a private directory, held by a lock while the body runs, removed afterwards whatever happened.

        Args:
            label: what it is for; part of its name.

        Raises:
            OSError: it cannot be made or removed.
        """
        path = self.root / f"{label[:40]}.{secrets.token_hex(6)}"
        fd = self._make(path)
        try:
            yield path
        finally:
            try:
                remove_tree(path)
            finally:
                os.close(fd)

    def reclaim(self) -> int:
        """Remove what dead makers left behind; what is locked is in use and stays.

        Returns:
            How many directories were removed.
        """
        removed = 0
        for name in os.listdir(self.root):
            if not name.startswith("."):
                removed += self._reclaim_one(self.root / name)
        return removed

    def _make(self, path: Path) -> int:
        with self._gate():  # between mkdir and flock no process may take it for a leftover
            path.mkdir(mode=0o700)
            fd = os.open(path, _DIRECTORY)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:  # the descriptor must not leak, whatever ended it
                os.close(fd)
                raise
        return fd

    def _reclaim_one(self, path: Path) -> bool:
        with self._gate():
            try:
                fd = os.open(path, _DIRECTORY)
            except OSError:  # gone, or no directory: not a maker's
                return False
            dead = try_flock(fd)
        try:
            if dead:
                # What cannot be removed (foreign owner, mount) must not keep the store from opening.
                with suppress(OSError):
                    remove_tree(path)
                    return True
            return False
        finally:
            os.close(fd)

    @contextmanager
    def _gate(self) -> Iterator[None]:
        fd = os.open(self.root / ".gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # held for microseconds, never across a wait
            yield
        finally:
            os.close(fd)
