"""Report what is to be pulled, and what is left of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from minisandbox.cli.common.output import human_seconds
from minisandbox.host.environment import file_system
from minisandbox.images import PullEstimate
from minisandbox.store import Store
from minisandbox.types import human_size, parse_size

BUDGET_HELP = (
    "the most that all layers of the store may take, such as 200G: the least recently used images are removed for it, "
    "never those in use, kept ones or this command's own"
)


def parse_budget(text: str | None) -> int | None:
    """Return the bytes of ``--budget``; None where it is not given.

    Raises:
        InvalidValue: it is no size.
    """
    return None if text is None else parse_size(text)


def pulls_ahead(estimate: PullEstimate, store: Store) -> Iterator[str]:
    """Yield lines about everything to be pulled: its size and time, where it goes, what could stop it."""
    missing, others = estimate.images - estimate.here, estimate.unknown
    extrapolated = f" ({others} images are not looked up yet and taken to be like the others)" if others else ""
    here = f", {estimate.here} already here" if estimate.here else ""
    yield (
        f"{missing} images to pull{here}: {human_size(estimate.bytes)} in {estimate.layers} layers, each once; about "
        f"{human_size(estimate.disk)} on disk, about {human_seconds(max(estimate.seconds, 1.0))}{extrapolated}"
    )
    place = os.statvfs(store.root)
    free = place.f_bavail * place.f_frsize
    yield f"store {store.root} ({file_system(store.root)}): {human_size(free)} free"
    if estimate.disk > free:
        yield (
            "they will not fit: choose a part with --only, give --budget, or set MINISANDBOX_STORE to a larger local "
            "disk (on a cluster one of each node)"
        )
    for host, limit in estimate.limits.items():
        if limit.left is not None and limit.left < missing:
            yield (
                f"{host} gives {limit} to this address or user, {limit.left} more now: the pull waits where it has to; "
                "logging in raises the limit, a mirror in registries.conf avoids it"
            )


def pulls_left(estimate: PullEstimate) -> str:
    """Return how much is left; empty if nothing is."""
    if estimate.here == estimate.images or not (estimate.bytes_left or estimate.unknown):
        return ""
    done = f"{human_size(estimate.bytes - estimate.bytes_left)} of {human_size(estimate.bytes)}"
    return f"{estimate.here} of {estimate.images} images, {done}, about {human_seconds(max(estimate.seconds, 1))} left"
