"""Install wheels from the package index on demand, into cache directories of their own."""

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
    """Return the cache directory ``minisandbox-NAME`` below ``$XDG_CACHE_HOME`` or ``~/.cache``, outside the store.

    Args:
        name: suffix of the directory's name.
    """
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    # Ignore a relative path, as the XDG base directory specification requires.
    return (Path(cache_home) if cache_home.startswith("/") else Path("~/.cache").expanduser()) / f"minisandbox-{name}"


def make_once(target: Path, make: Callable[[Path], object], *, waiting: Callable[[], object] = lambda: None) -> Path:
    """Create a directory atomically and only once, even in concurrent processes; return its path.

    Args:
        target: the directory.
        make: fills a staging directory next to ``target``.
        waiting: called if another process is creating the directory.

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
        for leftover in target.parent.glob(f".{target.name}.*"):  # the lock is held, so their makers were killed
            shutil.rmtree(leftover, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            make(staging)
            staging.chmod(0o755)
            staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def fetch_wheels(uv: str, target: Path, pins: Sequence[str], *, timeout: float, cache: Path | None = None) -> None:
    """Install wheels without their dependencies.

    Args:
        uv: the path of uv.
        target: directory to install to.
        pins: requirements with hashes (``NAME==VERSION --hash=sha256:...``).
        timeout: time limit in seconds.
        cache: directory for downloaded files; None for uv's own.

    Raises:
        subprocess.SubprocessError: the installation failed; see :func:`run_quietly`.
    """
    requirements = target / "requirements.txt"
    requirements.write_text("\n".join(pins), encoding="utf-8")
    settings = host_settings()
    command = [
        uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:",
        "--python", sys.executable, "--target", str(target), "--requirement", str(requirements),
        *(("--no-index",) if settings.no_index else ()), *(("--cache-dir", str(cache)) if cache else ()),
    ]  # fmt: skip
    run_quietly(command, timeout=timeout, environment={**uv_variables(settings), **os.environ})


def run_quietly(command: Sequence[str], *, timeout: float, environment: Mapping[str, str] | None = None) -> None:
    """Run a command, and keep its output only for the error.

    Args:
        command: program and arguments.
        timeout: time limit in seconds.
        environment: environment variables; those of the process by default.

    Raises:
        subprocess.SubprocessError: the command failed or exceeded the time limit; see :func:`reason_of`.
    """
    subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=timeout, env=environment, cwd="/",
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def reason_of(error: subprocess.SubprocessError) -> str:
    """Return the error output of a failed command, or a message about its time limit."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took longer than {error.timeout:g} s"
    return str(getattr(error, "stderr", "") or error).strip()[-2000:]
