"""Many container images: looked up first, so that their size is known, then pulled side by side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from minisandbox.errors import MiniSandboxError, RegistryError
from minisandbox.images.image import Image
from minisandbox.images.oci import manifest as m
from minisandbox.images.oci.copies import MEDIA_TYPE
from minisandbox.images.oci.http import RateLimit
from minisandbox.images.oci.pull import KIND, LayerStep, name_of, pull, refuse_other, steps_of, stored, take
from minisandbox.images.oci.reference import Remote, parse_reference
from minisandbox.images.oci.registry import Registry
from minisandbox.images.progress import BuildEvent, Progress, StepState
from minisandbox.images.recipe import OciBase
from minisandbox.store import Store
from minisandbox.store.collect import SizeBudget

_T = TypeVar("_T")
JOBS = 3
"""Images pulled at once; each fetches several blobs at once."""
_LOOKS = 8
_UNPACKED = 2.7
"""Bytes on disk for each byte of a compressed layer, as in images of Debian and Python."""
_RATE = 20e6
"""Compressed bytes a second, where neither this command nor the store's layers tell."""
_ENOUGH = 100 << 20
_LONGEST_WAIT = 86400.0


@dataclass(frozen=True, slots=True)
class PullEstimate:
    """What is to be fetched; each blob that images share counts once.

    Attributes:
        images: the images wanted.
        here: those of them that the store had, or has by now.
        layers: the layers to fetch.
        bytes: their compressed bytes.
        bytes_left: those that are still to come.
        disk: about the bytes that those take on disk.
        seconds: about how long the rest takes.
        unknown: of the images to pull, how many were not looked up yet; they are taken to be like the others.
        limits: by registry, how many images it gives, where it says so.
    """

    images: int
    here: int = 0
    layers: int = 0
    bytes: int = 0
    bytes_left: int = 0
    disk: int = 0
    seconds: float = 0.0
    unknown: int = 0
    limits: Mapping[str, RateLimit] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pulled:
    """The result of pulling many images.

    Attributes:
        images: those that are there now, in the order in which they were asked for.
        failures: what kept the others from being pulled.
    """

    images: Mapping[OciBase, Image]
    failures: Mapping[OciBase, MiniSandboxError]


def pull_all(
    wanted: Sequence[OciBase],
    *,
    store: Store,
    jobs: int = JOBS,
    again: Collection[OciBase] = (),
    budget: SizeBudget | None = None,
    progress: Progress | None = None,
    on_estimate: Callable[[PullEstimate], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> Pulled:
    """Pull many images; one that fails does not stop the others.

    The manifests come first, and are asked for once. A registry that limits requests is waited for. What interrupts the
    call keeps finished layers and received parts, and the same call resumes.

    Args:
        wanted: the images.
        store: where they go.
        jobs: how many are pulled at once.
        again: those that are asked for even if the store has them: a tag may be another image by now.
        budget: what all layers may take.
        progress: told of each image as its pull starts and ends, by several threads.
        on_estimate: told how much there is to fetch, and then how much is left, by several threads.
        note: told why nothing happens for a while.

    Returns:
        The images and the failures.
    """
    work = _Pulling(
        store, budget, progress or (lambda _: None), on_estimate or (lambda _: None), note or (lambda _: None)
    )
    work.run(wanted, jobs, frozenset(again))
    return Pulled(
        {base: work.images[base] for base in wanted if base in work.images},
        {base: work.failures[base] for base in wanted if base in work.failures},
    )


@dataclass(slots=True)
class _Looked:
    """An image that has to be pulled from a registry.

    Attributes:
        platform: for what it is.
        registry: where it comes from.
        steps: its layers, once it was looked up.
        missing: those that the store had not when that was last seen.
    """

    platform: m.Platform
    registry: Registry
    steps: Sequence[LayerStep] = ()
    missing: Sequence[LayerStep] = ()

    @property
    def host(self) -> str:
        return self.registry.reference.host


class _Pulling:
    """Pulling many images."""

    def __init__(
        self,
        store: Store,
        budget: SizeBudget | None,
        progress: Progress,
        on_estimate: Callable[[PullEstimate], None],
        note: Callable[[str], None],
    ) -> None:
        self.images: dict[OciBase, Image] = {}
        self.failures: dict[OciBase, MiniSandboxError] = {}
        self._store, self._budget, self._progress, self._on_estimate = store, budget, progress, on_estimate
        self._wanted = 0
        self._sources: dict[OciBase, _Looked] = {}
        self._layers: dict[str, int] = {}  # by the keys of layers to fetch, their compressed bytes
        self._left: dict[str, int] = {}
        self._claimed = set[str]()  # of them, those that a pull is making
        self._news = threading.Condition()
        self._over = threading.Event()
        self._patience = _Patience(self._over, note)
        self._rate = _usual_rate(store)
        self._began, self._came = 0.0, 0  # when the pulls did, and the compressed bytes since then

    def run(self, wanted: Sequence[OciBase], jobs: int, again: Collection[OciBase]) -> None:
        """Look up and pull."""
        bases = list(dict.fromkeys(wanted))
        self._wanted = len(bases)
        self._each(bases, _LOOKS, lambda base: self._find(base, again=base in again))
        self._tell()
        self._began = time.monotonic()
        done = {*self.images, *self.failures}
        self._each([base for base in bases if base not in done], jobs, self._pull)

    def _each(self, bases: Sequence[OciBase], threads: int, work: Callable[[OciBase], None]) -> None:
        """Do something for each in threads; errors become failures.

        Raises:
            BaseException: what interrupts the wait, or what a thread met that is no failure of an image.
        """

        def one(base: OciBase) -> None:
            try:
                if not self._over.is_set():
                    work(base)
            except MiniSandboxError as error:
                self.failures[base] = error.about(base.reference)

        with ThreadPoolExecutor(threads, "pull") as pool:
            try:
                jobs = [pool.submit(one, base) for base in bases]
                for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
                    job.result()
            except BaseException:  # Ctrl-C above all: downloads end before the caller goes on
                self._over.set()
                for source in [*self._sources.values()]:
                    source.registry.close()
                raise

    # --- looking up ---

    def _find(self, base: OciBase, *, again: bool) -> None:
        """Find an image in the store, or look it up in its registry."""
        reference = parse_reference(base.reference)
        if self._budget is not None:
            self._budget.own.add(_name_of(base))
        here = None if again else stored(self._store, base.reference, base.platform)
        if here is not None:
            self.images[base] = here
        elif isinstance(reference, Remote):
            refuse_other(self._store, _name_of(base), reference)
            source = self._sources[base] = _Looked(_platform_of(base), Registry(reference, self._store))
            source.registry.on_layer = partial(self._published, source)
            if self._patience.is_waiting(reference.host):  # it is looked up when its turn comes
                return
            try:
                self._look_up(source)
            except RegistryError as error:
                self._patience.note_limit(reference.host, error)

    def _look_up(self, source: _Looked) -> None:
        """Look an image up, and count its layers."""
        found = source.registry.manifest(source.platform)
        if found.kind != MEDIA_TYPE:  # a private copy is refused when its turn comes
            source.steps = steps_of(m.container(found, source.registry.name, source.platform))
        source.registry.rest()
        if self._budget is not None:
            self._budget.needed.update(step.key for step in source.steps)
        source.missing = [step for step in source.steps if not self._store.has_layer(step.key)]
        with self._news:
            for step in source.missing:
                if step.key not in self._layers:
                    self._layers[step.key] = self._left[step.key] = step.layer.blob.size

    # --- pulling ---

    def _pull(self, base: OciBase) -> None:
        began = time.monotonic()
        self._progress(BuildEvent(base.reference, "pull", StepState.STARTED, ""))
        source = self._sources.get(base)
        image = (
            self._taken(base, source)
            if source
            else pull(base.reference, store=self._store, platform=base.platform or None)
        )
        records = image.records()
        if self._budget is not None:
            self._budget.add(records)
        with self._news:
            self.images[base] = image
        seconds, size = time.monotonic() - began, sum(record.bytes for record in records)
        self._progress(BuildEvent(base.reference, "pull", StepState.FINISHED, image.key, seconds, size))
        self._tell()

    def _taken(self, base: OciBase, source: _Looked) -> Image:
        name = _name_of(base)

        def taken() -> Image:
            registry, platform = source.registry, source.platform
            return take(
                self._store, registry, registry.reference, name, platform, private=False, replace=False,
                tell=lambda _: None,
            )  # fmt: skip

        try:
            self._patience.try_until_allowed(source.host, lambda: self._look_up(source))
            with self._claim(source) as need, self._room(need):
                return self._patience.try_until_allowed(source.host, taken)
        finally:
            source.registry.close()

    def _room(self, need: int) -> AbstractContextManager[None]:
        """Have room for compressed bytes while they become layers."""
        return nullcontext() if self._budget is None else self._budget.room(int(need * _UNPACKED))

    @contextmanager
    def _claim(self, source: _Looked) -> Iterator[int]:
        """Wait for layers that another pull is making, so that none is fetched twice; yield the bytes that are left."""
        keys = {step.key for step in source.missing}
        with self._news:
            while keys & self._claimed and not self._over.is_set():
                self._news.wait(1.0)
            keys &= self._left.keys()
            self._claimed |= keys
            need = sum(self._left[key] for key in keys)
        try:
            yield need
        finally:
            with self._news:
                self._claimed -= keys
                self._news.notify_all()

    def _published(self, source: _Looked, layer: m.Layer) -> None:
        """Note that a layer is there now."""
        with self._news:
            for step in source.missing:
                if step.layer == layer:
                    self._came += self._left.pop(step.key, 0)
                    self._claimed.discard(step.key)
            self._news.notify_all()
        self._tell()

    def _tell(self) -> None:
        with self._news:
            estimate = self._estimate()
        self._on_estimate(estimate)

    def _estimate(self) -> PullEstimate:
        sources = [source for base, source in self._sources.items() if base not in self.failures]
        looked = [source for source in sources if source.registry.found is not None]
        size, left = sum(self._layers.values()), sum(self._left.values())
        others = size / len(looked) * (len(sources) - len(looked)) if looked else 0.0
        return PullEstimate(
            self._wanted, len(self.images), len(self._layers), int(size + others), int(left + others),
            int((left + others) * _UNPACKED), self._seconds(left + others), len(sources) - len(looked),
            {source.host: source.registry.limit for source in looked if source.registry.limit is not None},
        )  # fmt: skip

    def _seconds(self, left: float) -> float:
        """About how long compressed bytes take."""
        known = self._came > _ENOUGH
        return left / (self._came / (time.monotonic() - self._began) if known else self._rate)


class _Patience:
    """Waits for registries that limit requests.

    Args:
        over: ends every wait.
        note: told of each.
    """

    def __init__(self, over: threading.Event, note: Callable[[str], None]) -> None:
        self._over, self._note = over, note
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()

    def is_waiting(self, host: str) -> bool:
        """Whether a registry has to be left alone now."""
        return self._until.get(host, 0.0) > time.monotonic()

    def note_limit(self, host: str, error: RegistryError) -> None:
        """Wait from now on for as long as an error says; raise one that says nothing."""
        if error.wait is None or error.wait > _LONGEST_WAIT:
            raise error
        with self._lock:
            if not self.is_waiting(host):
                moment = time.strftime("%H:%M:%S", time.localtime(time.time() + error.wait))
                self._note(f"{error.what} ({error.reason}): waiting until {moment}; {error.hint}")
            self._until[host] = time.monotonic() + error.wait

    def try_until_allowed(self, host: str, work: Callable[[], _T]) -> _T:
        """Do something as often as the registry limits requests.

        Raises:
            RegistryError: it was given up, or limits requests for more than a day.
        """
        began = time.monotonic()
        while True:
            while (wait := self._until.get(host, 0.0) - time.monotonic()) > 0:
                if self._over.wait(wait):
                    raise RegistryError(f"the wait for registry {host} was given up")
            try:
                return work()
            except RegistryError as error:
                if time.monotonic() - began > _LONGEST_WAIT:
                    raise
                self.note_limit(host, error)


def _usual_rate(store: Store) -> float:
    """How many compressed bytes a second became layers before."""
    layers = [record for record in store.layers() if record.step.get("kind") == KIND]
    size, seconds = sum(record.bytes for record in layers), sum(record.seconds for record in layers)
    return size / seconds / _UNPACKED if size > _ENOUGH and seconds else _RATE


def _platform_of(base: OciBase) -> m.Platform:
    return m.parse_platform(base.platform) if base.platform else m.own_platform()


def _name_of(base: OciBase) -> str:
    """The name of an image in the store."""
    return name_of(base.reference, _platform_of(base))
