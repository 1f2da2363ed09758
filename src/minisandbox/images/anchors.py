"""Which commit of a repository the trees of its other commits are stored over.

The first commit of a repository that a store gets is stored whole: its *anchor*. Of every other one only what differs
is stored, as a layer over the anchor's: directories and lists of files, which can share nothing, are there once. Which
commit it is decides nothing but where bytes lie: no image's key depends on it. Of many that are asked for together it
is the one in the middle: task sets are in the order of time, mostly, and the first would be far from the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from minisandbox.errors import InvalidValue
from minisandbox.images.index import shown
from minisandbox.images.mirrors import mirror_name
from minisandbox.images.recipe import GitSource
from minisandbox.store import Store
from minisandbox.store.durable import write_atomic
from minisandbox.store.faults import store_faults


@dataclass(slots=True)
class Anchors:
    """The anchors of a store's repositories, and those that are being made.

    Attributes:
        store: whose.
    """

    store: Store
    _chosen: dict[str, str] = field(default_factory=dict)
    _middle: dict[str, str] = field(default_factory=dict)
    _unfit: set[tuple[str, str]] = field(default_factory=set)

    def expect(self, sources: Iterable[GitSource]) -> None:
        """Take note of sources that will be asked for, in their order, so that the one in the middle is an anchor.

        Args:
            sources: of any repositories.
        """
        commits: dict[str, dict[str, None]] = {}
        for source in sources:
            name = mirror_name(source.url)
            if (name, source.commit) not in self._unfit:
                commits.setdefault(name, {})[source.commit] = None
        self._middle = {name: list(known)[len(known) // 2] for name, known in commits.items()}

    def choose(self, source: GitSource, is_there: Callable[[GitSource], bool]) -> GitSource:
        """Return the anchor of a source's repository; where there is none yet, one that is expected, or the source.

        Args:
            source: a commit of the repository.
            is_there: whether the store has a source as a whole.
        """
        name = mirror_name(source.url)
        if name not in self._chosen:
            known = self._recorded(source)
            there = known is not None and is_there(known)
            self._chosen[name] = known.commit if known and there else self._middle.get(name, source.commit)
        return replace(source, commit=self._chosen[name])

    def drop(self, source: GitSource) -> None:
        """Never choose a source again, for it cannot be had."""
        name = mirror_name(source.url)
        self._unfit.add((name, source.commit))
        if self._chosen.get(name) == source.commit:
            del self._chosen[name]

    def record(self, source: GitSource) -> None:
        """Note in the store that a source is a repository's anchor.

        Raises:
            StoreError: the store refuses.
        """
        path = self.store.root / "repositories" / f"{mirror_name(source.url)}.anchor"
        with store_faults(f"note the anchor of {shown(source.url)}"):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomic(path, f"{source.commit}\n".encode())

    def _recorded(self, source: GitSource) -> GitSource | None:
        name = mirror_name(source.url)
        try:
            text = (self.store.root / "repositories" / f"{name}.anchor").read_text("ascii", "replace")
            anchor = replace(source, commit=text.strip())
        except (FileNotFoundError, InvalidValue):  # none, or damaged: the next one that is stored whole replaces it
            return None
        return None if (name, anchor.commit) in self._unfit else anchor
