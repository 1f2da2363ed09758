"""Measure the quickstart in a store of its own: from nothing, again, and again with every rollout done anew.

python benchmarks/bench_quickstart.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    """Run it three times and print what each took."""
    with tempfile.TemporaryDirectory(dir=Path.home()) as directory:
        for name, options in (("from nothing", ()), ("again", ()), ("again, every rollout anew", ("--fresh",))):
            start = time.monotonic()
            report = quickstart(Path(directory), options)
            seconds = time.monotonic() - start
            print(f"{name:<28} {seconds:6.1f} s   load {os.getloadavg()[0]:.2f}   "
                  f"{report['as_expected']} tasks as expected, {report['disk_bytes'] / 2**20:.1f} MiB")  # fmt: skip


def quickstart(directory: Path, options: tuple[str, ...]) -> dict[str, float]:
    """Run ``minisandbox quickstart`` and return its report."""
    command = [sys.executable, "-m", "minisandbox", "quickstart", "--json", *options]
    environment = {**os.environ, "MINISANDBOX_STORE": str(directory)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    report: dict[str, float] = json.loads(done.stdout)
    return report


if __name__ == "__main__":
    main()
