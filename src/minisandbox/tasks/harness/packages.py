"""Packages of benchmarks in environments of their own, installed on demand: swebench 5 next to 4.1."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uv

from minisandbox.errors import HarnessError

_PACKAGES = {
    "swebench5": (
        "swebench-5.0.2",
        (
            "swebench==5.0.2 --hash=sha256:b7f0416a1e686eca22c2f749b5f816685a202835032f6683080e2b53545bbb62",
            "unidiff==1.0.1 --hash=sha256:5e2ca461eda8a4c761ad0922e3e8a65742f359dc60301a3a055b70fd7c158680",
        ),
    ),
}
"""By family of parsers: its directory, and its packages. Dependencies that the parsers do not import are left out."""
_SECONDS = 300.0


def packages_directory() -> Path:
    """Return where packages are installed: ``$XDG_CACHE_HOME/minisandbox/harness``, else below ``~/.cache``."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: relative values are invalid and are ignored.
    return (Path(chosen) if chosen.startswith("/") else Path("~/.cache").expanduser()) / "minisandbox" / "harness"


def installed(family: str) -> Path | None:
    """Return the directory of a family's package, installed first where it is not; None: this interpreter has it.

    Args:
        family: what stands before the colon of a parser's name.

    Raises:
        HarnessError: it cannot be installed.
    """
    if family not in _PACKAGES:
        return None
    name, wanted = _PACKAGES[family]
    target = packages_directory() / name
    if not target.is_dir():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _install(target, wanted)
        except OSError as error:
            raise HarnessError(f"{name} cannot be installed in {target}", reason=str(error)) from error
    return target


def _install(target: Path, wanted: Sequence[str]) -> None:
    with open(target.parent / f"{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return
        for left in target.parent.glob(f".{target.name}.*"):  # of killed processes: we hold the lock
            shutil.rmtree(left, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            _fetch(staging, wanted)
            staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _fetch(staging: Path, wanted: Sequence[str]) -> None:
    requirements = staging / "requirements.txt"
    requirements.write_text("\n".join(wanted), encoding="utf-8")
    command = [
        uv.find_uv_bin(), "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:",
        "--python", sys.executable, "--target", str(staging), "--requirement", str(requirements),
    ]  # fmt: skip
    environment = dict(os.environ)
    if "PIP_INDEX_URL" in environment:  # uv does not read pip's settings, but should use the same index
        environment.setdefault("UV_DEFAULT_INDEX", environment["PIP_INDEX_URL"])
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_SECONDS, env=environment, cwd="/",
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = str(error.stderr or error).strip()[-2000:]
        raise HarnessError(
            f"{' and '.join(line.split()[0] for line in wanted)} cannot be fetched from the package index",
            reason=said,
            hint=f"retry with the index in reach, or copy {staging.parent} from another machine",
        ) from error
