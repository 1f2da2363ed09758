"""Pull many container images: request all manifests first to know the total size, then pull in parallel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from minisandbox.errors import MiniSandboxError, NotFound, RegistryError
from minisandbox.images.image import Image, image_of
from minisandbox.images.oci import manifest as m
from minisandbox.images.oci.copies import MEDIA_TYPE, parse_copy
from minisandbox.images.oci.http import RegistryClient
from minisandbox.images.oci.pull import (
    JOBS,
    LayerStep,
    compressed_size,
    copied_layers,
    name_of,
    pull,
    refuse_other,
    require_space,
    steps_of,
    stored,
    take,
)
from minisandbox.images.oci.registry import Registry
from minisandbox.images.progress import BuildEvent, Progress, StepState
from minisandbox.spec import OciBase, Remote, parse_reference
from minisandbox.store import Store
from minisandbox.values import human_size

_T = TypeVar("_T")
_LOOKUPS = 8
_LONGEST_WAIT = 86400.0


@dataclass(frozen=True, slots=True)
class Pulled:
    """The result of pulling many images.

    Attributes:
        images: the pulled and the cached images, in the requested order.
        failures: the errors of the failed pulls, by image.
    """

    images: Mapping[OciBase, Image]
    failures: Mapping[OciBase, MiniSandboxError]


def pull_all(
    bases: Sequence[OciBase],
    *,
    store: Store,
    jobs: int = JOBS,
    again: Collection[OciBase] = (),
    names: Mapping[OciBase, str] | None = None,
    private: bool = False,
    progress: Progress | None = None,
    on_remaining: Callable[[str], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> Pulled:
    """Pull many images; a failed image does not stop the others.

    Each manifest is requested once, before any layer. If a registry's rate limit is exceeded, the pull waits. An
    interrupted call keeps finished layers and partial downloads, so that another call resumes the pull.

    Args:
        bases: the images.
        store: the store for the images.
        jobs: the number of images to pull in parallel.
        again: images to look up in the registry even if the store has them, because a tag may have moved.
        names: names of images in the store; by default, names are derived from references.
        private: whether the images may be private copies from another store, whose records are trusted.
        progress: called from several threads when the pull of each image starts and ends.
        on_remaining: called from several threads with a description of the remaining pulls; "" if nothing remains.
        note: called with the total size before the first download, and with the reason of each wait.

    Returns:
        The images and the failures.

    Raises:
        DiskFull: the layers do not fit into the store; nothing was pulled.
    """
    pulls = _Pulls(store, progress or (lambda _: None), on_remaining or (lambda _: None), note or (lambda _: None))
    pulls.names, pulls.private = names or {}, private
    pulls.run(list(dict.fromkeys(bases)), jobs, frozenset(again))
    return Pulled(
        {base: pulls.images[base] for base in bases if base in pulls.images},
        {base: pulls.failures[base] for base in bases if base in pulls.failures},
    )


@dataclass(slots=True)
class _Lookup:
    """An image to pull from a registry.

    Attributes:
        platform: the requested platform.
        registry: the source of the image.
        missing: the layers that were missing in the store when the manifest was read.
    """

    platform: m.Platform
    registry: Registry
    missing: Sequence[LayerStep] = ()

    @property
    def host(self) -> str:
        return self.registry.reference.host


class _Pulls:
    """The state of pulling many images, shared by the threads that pull them."""

    def __init__(
        self, store: Store, progress: Progress, on_remaining: Callable[[str], None], note: Callable[[str], None]
    ) -> None:
        self.images: dict[OciBase, Image] = {}
        self.failures: dict[OciBase, MiniSandboxError] = {}
        self._store, self._progress, self._on_remaining, self._note = store, progress, on_remaining, note
        self.names: Mapping[OciBase, str] = {}
        self.private = False
        self._total = 0
        self._clients: dict[tuple[str, str], RegistryClient] = {}
        self._lookups: dict[OciBase, _Lookup] = {}
        self._layers: dict[str, m.Layer] = {}  # layers to fetch, by key
        self._fetched = set[str]()
        self._claimed = set[str]()  # keys of the layers that a pull is fetching
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._patience = _Patience(self._stopped, note)

    def run(self, bases: Sequence[OciBase], jobs: int, refresh: Collection[OciBase]) -> None:
        """Look up all images, check that they fit into the store, and pull them."""
        self._total = len(bases)
        self._each(bases, _LOOKUPS, lambda base: self._find(base, refresh=base in refresh))
        if self._lookups:
            self._announce()
        settled = {*self.images, *self.failures}
        self._each([base for base in bases if base not in settled], jobs, self._pull)

    def _each(self, bases: Sequence[OciBase], threads: int, function: Callable[[OciBase], None]) -> None:
        """Call a function for each image in a thread pool; record a MiniSandboxError as the failure of its image.

        Raises:
            BaseException: the wait was interrupted, or a thread raised another error.
        """

        def try_base(base: OciBase) -> None:
            try:
                if not self._stopped.is_set():
                    function(base)
            except MiniSandboxError as error:
                self.failures[base] = error.about(base.reference)

        with ThreadPoolExecutor(threads, "pull") as pool:
            try:
                jobs = [pool.submit(try_base, base) for base in bases]
                for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
                    job.result()
            except BaseException:  # also on Ctrl-C, stop the downloads first
                self._stopped.set()
                for lookup in [*self._lookups.values()]:
                    lookup.registry.close()
                raise

    # --- looking up ---

    def _find(self, base: OciBase, *, refresh: bool) -> None:
        """Find an image in the store, or else request its manifest from its registry."""
        reference = parse_reference(base.reference)
        cached = None if refresh else self._stored(base)
        if cached is not None:
            self.images[base] = cached
        elif isinstance(reference, Remote):
            if not self.private:  # take_copy() compares the records
                refuse_other(self._store, self._name_of(base), reference)
            registry = Registry(reference, self._store, connect=self._connect)
            lookup = self._lookups[base] = _Lookup(m.platform_or_own(base.platform), registry)
            lookup.registry.on_layer = partial(self._published, lookup)
            if self._patience.is_waiting(reference.host):  # _take() looks up the image later
                return
            try:
                self._look_up(lookup)
            except RegistryError as error:
                self._patience.note_limit(reference.host, error)

    def _look_up(self, lookup: _Lookup) -> None:
        """Request the manifest of an image, and record its missing layers."""
        manifest, registry = lookup.registry.manifest(lookup.platform), lookup.registry
        if manifest.kind != MEDIA_TYPE:
            steps = steps_of(m.container(manifest, registry.name, lookup.platform))
        elif self.private:
            steps = copied_layers(parse_copy(manifest.config, registry.name), manifest, registry.name)
        else:  # the pull raises the error
            return
        lookup.missing = [step for step in steps if not self._store.has_layer(step.key)]
        with self._changed:
            self._layers.update((step.key, step.layer) for step in lookup.missing)

    def _announce(self) -> None:
        """Report the total size of all pulls, and the registries whose rate limit the pulls will exceed.

        Raises:
            DiskFull: the layers do not fit into the store.
        """
        lookups = [lookup for base, lookup in self._lookups.items() if base not in self.failures]
        cached_note = f", {len(self.images)} already here" if self.images else ""
        delayed_count = sum(lookup.registry.cached_manifest is None for lookup in lookups)
        delay_note = f" ({delayed_count} images are not looked up yet)" if delayed_count else ""
        free = require_space(self._store, self._layers.values(), f"pull {len(lookups)} images")
        size = human_size(compressed_size(self._layers.values()))
        self._note(
            f"{len(lookups)} images to pull{cached_note}: {size} compressed in {len(self._layers)} layers, each once"
            f"{delay_note}; {human_size(free)} free in {self._store.root}"
        )
        limits = {lookup.host: lookup.registry.limit for lookup in lookups if lookup.registry.limit is not None}
        for host, limit in limits.items():
            if limit.remaining is not None and limit.remaining < len(lookups):
                self._note(
                    f"{host} gives {limit} to this address or user, {limit.remaining} more now: then the pull waits; "
                    "logging in raises the limit, a mirror in registries.conf avoids it"
                )
        self._report_remaining()

    def _stored(self, base: OciBase) -> Image | None:
        """Return the image that the store has; look for an image of a set by its name and digest."""
        if base not in self.names:
            return stored(self._store, base.reference, base.platform)
        with suppress(NotFound):
            record = self._store.image(self.names[base])
            if base.reference.endswith(f"@{record.notes.get('digest')}"):
                return image_of(record, self._store)
        return None

    def _name_of(self, base: OciBase) -> str:
        return self.names.get(base) or name_of(base.reference, m.platform_or_own(base.platform))

    def _connect(self, remote: Remote) -> RegistryClient:
        """Return the client of a repository, which all of its images share."""
        with self._changed:
            return self._clients.setdefault((remote.host, remote.repository), RegistryClient(remote, self._pause))

    def _pause(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise RegistryError("the pull was cancelled")

    # --- pulling ---

    def _pull(self, base: OciBase) -> None:
        started = time.monotonic()
        self._progress(BuildEvent(base.reference, "pull", StepState.STARTED, ""))
        if (lookup := self._lookups.get(base)) is not None:
            image = self._take(base, lookup)
        else:
            image = pull(base.reference, store=self._store, platform=base.platform or None)
        with self._changed:
            self.images[base] = image
        seconds, size = time.monotonic() - started, sum(record.bytes for record in image.records())
        self._progress(BuildEvent(base.reference, "pull", StepState.FINISHED, image.key, seconds, size))
        self._report_remaining()

    def _take(self, base: OciBase, lookup: _Lookup) -> Image:
        name, registry = self._name_of(base), lookup.registry

        def attempt() -> Image:
            return take(
                self._store, registry, registry.reference, name, lookup.platform, private=self.private, replace=False,
                report=lambda _: None,
            )  # fmt: skip

        try:
            self._patience.try_until_allowed(lookup.host, lambda: self._look_up(lookup))
            with self._claim(lookup):
                return self._patience.try_until_allowed(lookup.host, attempt)
        finally:
            registry.close()

    @contextmanager
    def _claim(self, lookup: _Lookup) -> Iterator[None]:
        """Wait while other pulls fetch layers of this image, then claim them, so that no layer is fetched twice."""
        keys = {step.key for step in lookup.missing}
        with self._changed:
            while keys & self._claimed and not self._stopped.is_set():
                self._changed.wait(1.0)
            keys -= self._fetched
            self._claimed |= keys
        try:
            yield
        finally:
            with self._changed:
                self._claimed -= keys
                self._changed.notify_all()

    def _published(self, lookup: _Lookup, layer: m.Layer) -> None:
        """Record that a layer is in the store, and release its claim."""
        keys = {step.key for step in lookup.missing if step.layer == layer}
        with self._changed:
            self._fetched |= keys
            self._claimed -= keys
            self._changed.notify_all()
        self._report_remaining()

    def _report_remaining(self) -> None:
        with self._changed:
            total = compressed_size(self._layers.values())
            fetched = compressed_size(self._layers[key] for key in self._fetched)
            image_count = len(self.images)
        sizes = f"{human_size(fetched)} of {human_size(total)}"
        self._on_remaining("" if image_count == self._total else f"{image_count} of {self._total} images, {sizes}")


class _Patience:
    """Delays requests to a registry while its rate limit is exceeded.

    Args:
        stopped: an event that cancels every wait.
        note: called with the reason of each wait.
    """

    def __init__(self, stopped: threading.Event, note: Callable[[str], None]) -> None:
        self._stopped, self._note = stopped, note
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()

    def is_waiting(self, host: str) -> bool:
        """Return whether requests to a registry are currently delayed."""
        return self._until.get(host, 0.0) > time.monotonic()

    def note_limit(self, host: str, error: RegistryError) -> None:
        """Delay all requests to a registry for as long as its rate-limit error requests.

        Raises:
            RegistryError: the error is not about a rate limit, or requests a delay of more than a day.
        """
        if error.wait is None or error.wait > _LONGEST_WAIT:
            raise error
        with self._lock:
            if not self.is_waiting(host):
                end_time = time.strftime("%H:%M:%S", time.localtime(time.time() + error.wait))
                self._note(f"{error.what} ({error.reason}): waiting until {end_time}; {error.hint}")
            self._until[host] = time.monotonic() + error.wait

    def try_until_allowed(self, host: str, function: Callable[[], _T]) -> _T:
        """Call a function; if the registry's rate limit is exceeded, wait and call the function again.

        Raises:
            RegistryError: the pull was cancelled, the request failed, or the rate limit is exceeded for over a day.
        """
        started = time.monotonic()
        while True:
            while (delay := self._until.get(host, 0.0) - time.monotonic()) > 0:
                if self._stopped.wait(delay):
                    raise RegistryError(f"the wait for registry {host} was cancelled")
            try:
                return function()
            except RegistryError as error:
                if time.monotonic() - started > _LONGEST_WAIT:
                    raise
                self.note_limit(host, error)
