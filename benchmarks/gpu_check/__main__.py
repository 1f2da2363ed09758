"""Check sandboxes, engine and trainer on this machine's GPU; without a GPU, run the small form.

    python -m benchmarks.gpu_check [--only NAME ...] [--again] [--seconds N]

Each check prints its figures and stores them in build/gpu-check/results.json. A repeated command resumes: checks that
passed on this device are not repeated, and reinforcement learning continues from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from importlib.util import find_spec

from benchmarks.gpu_check.parts import DIRECTORY, ROOT, SITE, unpack

RESULTS = DIRECTORY / "results.json"


def main() -> int:
    """Run the checks; return 1 if one failed."""
    parser = argparse.ArgumentParser(description="check sandboxes, engine and trainer on a GPU")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these checks")
    parser.add_argument("--again", action="store_true", help="repeat checks that passed")
    parser.add_argument("--seconds", type=float, default=520.0, help="start no check after these (default: 520)")
    options = parser.parse_args()
    if find_spec("minisandbox") is None or find_spec("gguf") is None:
        _restart_with_parts()
    from benchmarks.gpu_check.checks import CHECKS, Machine, is_impossible  # noqa: PLC0415 - needs the packages

    began = time.monotonic()
    machine = Machine.find(DIRECTORY)
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() and not options.again else {}
    print(f"device: {machine.name}" + ("" if machine.has_gpu else "; no GPU, so this is the small form"))
    status = 0
    for check in CHECKS:
        name = check.__name__
        if options.only and name not in options.only:
            continue
        print(f"== {name}: {(check.__doc__ or '').partition('.')[0]}", flush=True)
        if results.get(name, {}).get("device") == machine.name:
            print(f"   passed earlier: {results[name]['figures']}")
            continue
        if time.monotonic() - began > options.seconds:
            print("   not started: no time is left; the same command resumes")
            status = 1
            continue
        start = time.monotonic()
        try:
            figures = check(machine)
        except Exception as error:  # noqa: BLE001 - the other checks still run
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            is_skipped = is_impossible(error)
            print(f"   {'skipped' if is_skipped else 'FAILED'}: {type(error).__name__}: {error}", flush=True)
            if not is_skipped:
                traceback.print_exception(error)
            status = status if is_skipped else 1
            continue
        seconds = round(time.monotonic() - start, 1)
        for key, value in figures.items():
            print(f"   {key:<44} {value}")
        print(f"   {seconds} s", flush=True)
        results[name] = {"device": machine.name, "figures": figures, "seconds": seconds}
        part = RESULTS.with_suffix(".part")
        part.write_text(json.dumps(results, indent=1))
        part.rename(RESULTS)
    print(f"{time.monotonic() - began:.0f} s; {RESULTS.relative_to(ROOT)} has all figures")
    return status


def _restart_with_parts() -> None:
    """Unpack the parts, and run this program with their packages."""
    if SITE.is_dir() and str(SITE) in sys.path:
        sys.exit("gpu-check: the parts do not hold gguf; write them again with make gpu-parts")
    if not (DIRECTORY / "SHA256SUMS").is_file():
        sys.exit(f"gpu-check: there are no packages in {DIRECTORY}; write them elsewhere with make gpu-parts")
    unpack()
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(SITE)])
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(DIRECTORY / "cache")}
    os.execve(sys.executable, [sys.executable, "-m", "benchmarks.gpu_check", *sys.argv[1:]], environment)


if __name__ == "__main__":
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    sys.exit(main())
