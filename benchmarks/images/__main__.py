"""Build images of real projects with buildah, compare them with podman, and measure.

    python -m benchmarks.images build|compare|measure [--cache DIR]

As root. The images are built once (ten minutes), into the cache: 1 GB. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.images.building import build_all


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("build", "compare", "measure"))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/minisandbox-images")
    options = parser.parse_args()
    layout = build_all(options.cache)
    print(layout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
