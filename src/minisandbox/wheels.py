"""Wheels that are fetched from the package index on demand, into directories of their own."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from minisandbox.index_settings import host_settings, uv_variables


def cache_directory(name: str) -> Path:
    """Return ``$XDG_CACHE_HOME/minisandbox-NAME``, else the same below ``~/.cache``: not in the store.

    Args:
        name: the directory's name.
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: relative values are invalid and are ignored.
    return (Path(chosen) if chosen.startswith("/") else Path("~/.cache").expanduser()) / f"minisandbox-{name}"


def make_once(target: Path, make: Callable[[Path], object], *, waiting: Callable[[], object] = lambda: None) -> Path:
    """Return a directory; one process makes it, and it appears whole or not at all.

    Args:
        target: the directory.
        make: fills a staging directory next to it.
        waiting: called if another process is making it.

    Raises:
        OSError: the directory cannot be written.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        for leftover in target.parent.glob(f".{target.name}.*"):  # of killed processes: we hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            make(staging)
            staging.chmod(0o755)
            staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def fetch_wheels(uv: str, target: Path, pins: Sequence[str], *, timeout: float) -> None:
    """Install wheels without their dependencies.

    Args:
        uv: the path of uv.
        target: the directory that gets them.
        pins: requirements with hashes (``NAME==VERSION --hash=sha256:...``).
        timeout: seconds that it may take.

    Raises:
        subprocess.SubprocessError: a wheel cannot be fetched; see :func:`run_quietly`.
    """
    requirements = target / "requirements.txt"
    requirements.write_text("\n".join(pins), encoding="utf-8")
    settings = host_settings()
    command = [
        uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:",
        "--python", sys.executable, "--target", str(target), "--requirement", str(requirements),
        *(("--no-index",) if settings.no_index else ()),
    ]  # fmt: skip
    run_quietly(command, timeout=timeout, environment={**uv_variables(settings), **os.environ})


def run_quietly(command: Sequence[str], *, timeout: float, environment: Mapping[str, str] | None = None) -> None:
    """Run a command that prints nothing unless it fails.

    Args:
        command: its arguments.
        timeout: seconds that it may take.
        environment: the process's own by default.

    Raises:
        subprocess.SubprocessError: it failed or took too long; :func:`reason_of` reads it.
    """
    subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=timeout, env=environment, cwd="/",
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def reason_of(error: subprocess.SubprocessError) -> str:
    """Return what a failed command printed, or that it took too long."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took longer than {error.timeout:g} s"
    return str(getattr(error, "stderr", "") or error).strip()[-2000:]
