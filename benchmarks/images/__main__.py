"""Build images of real projects with buildah, compare them with podman, and measure.

    python -m benchmarks.images build
    python -m benchmarks.images compare [--as root|range|one ...] [--from registry|layout|archive ...] [IMAGE ...]
    python -m benchmarks.images measure
    python -m benchmarks.images speed [--pairs N] [--of pull|unpack|build ...]

As root, with Debian's buildah, podman, runc, skopeo, docker-registry and debootstrap. The images are built once, into
the cache: ten minutes and 2 GB. All else that is made lies in the cache, too, and is removed at the end. Progress goes
to standard error. The exit status of ``compare`` is 0 if everything is equal, but for what is documented.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.images.building import build_all
from benchmarks.images.comparing import compare_all, table
from benchmarks.images.engine import in_private_mounts, remove_storage
from benchmarks.images.measuring import measure_all
from benchmarks.images.projects import NAMES
from benchmarks.images.sources import KINDS
from benchmarks.images.speed import QUANTITIES, measure_speed
from benchmarks.images.users import MODES

_PREFIX = "r-"


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("build", "compare", "measure", "speed"))
    parser.add_argument("images", nargs="*", metavar="IMAGE", default=[], help=", ".join(NAMES))
    parser.add_argument("--as", dest="modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--from", dest="kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--of", dest="quantities", nargs="+", choices=QUANTITIES, default=QUANTITIES)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=Path("/var/cache/minisandbox-images"))
    options = parser.parse_intermixed_args()
    if unknown := set(options.images) - set(NAMES):
        parser.error(f"there is no image {', '.join(sorted(unknown))}: {', '.join(NAMES)}")
    if os.geteuid():
        parser.error("root is needed: engines build and mount")
    if (status := in_private_mounts("benchmarks.images")) is not None:
        return status
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with _locked(options.cache):
        layout = build_all(options.cache)
        if options.action == "build":
            print(layout)
            return 0
        with _place(options.cache) as place:
            if options.action == "measure":
                print(measure_all(layout, place))
                return 0
            if options.action == "speed":
                print(measure_speed(options.cache, place, options.quantities, options.pairs))
                return 0
            report = compare_all(layout, place, options.modes, options.kinds, options.images or NAMES)
    print(table(report, options.kinds))
    for line in report.failures:
        print(f"NOT EQUAL: {line}")
    return 1 if report.failures else 0


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Keep other runs away from the cache."""
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another run uses {cache}; name another directory with --cache") from None
        for left in cache.glob(f"{_PREFIX}*"):  # of a run that was killed
            remove_storage(left)
        yield


@contextmanager
def _place(cache: Path) -> Iterator[Path]:
    """A directory for temporary files that every user may enter."""
    place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=cache))
    place.chmod(0o755)
    try:
        yield place
    finally:
        remove_storage(place)


if __name__ == "__main__":
    sys.exit(main())
