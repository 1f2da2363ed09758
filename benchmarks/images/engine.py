"""Podman and buildah as root, with a storage of their own that is removed at the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

# Limits above the caller's own are refused where CAP_SYS_RESOURCE is missing.
_CONFIGURATION = """\
[containers]
default_ulimits = ["nofile=16384:16384", "nproc=32768:32768"]
[engine]
events_logger = "file"
lock_type = "file"
cgroup_manager = "cgroupfs"
runtime = "{runtime}"
tmp_dir = "{place}/tmp"
"""
_STORAGE = """\
[storage]
driver = "{driver}"
graphroot = "{place}/root"
runroot = "{place}/run"
"""
_POLICY = '{"default": [{"type": "insecureAcceptAnything"}]}'
TIMEOUT = 1800.0  # seconds for one command
_PRIVATE = "MINISANDBOX_PRIVATE_MOUNTS"


def in_private_mounts(module: str) -> int | None:
    """Run a module again in a mount namespace, so that mounts of the engines end with it, however it ends.

    Returns:
        The exit status of that run; None in it.
    """
    if _PRIVATE in os.environ:
        return None
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", module, *sys.argv[1:]]
    return subprocess.run(command, env={**os.environ, _PRIVATE: "1"}, check=False).returncode


def run(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    """Run a program; returns what it prints.

    Raises:
        SystemExit: it failed, with what it printed.
    """
    done = subprocess.run(
        list(map(str, command)), env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        errors="replace", check=False, timeout=TIMEOUT,
    )  # fmt: skip
    if done.returncode:
        shown = " ".join(map(str, command))
        raise SystemExit(f"{shown} failed with {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return done.stdout


def say(text: str) -> None:
    """Report progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Engine:
    """Podman and buildah over one storage.

    Attributes:
        place: the directory of the storage; short, as podman allows its run directory 50 characters.
        driver: how layers are stored: overlay or vfs.
        runtime: what starts containers.
    """

    place: Path
    driver: str = "overlay"
    runtime: str = "runc"
    environment: dict[str, str] = field(default_factory=dict)
    """With it, ``podman`` without options uses this storage, too."""

    @property
    def storage(self) -> Path:
        """The directory of images and containers."""
        return self.place / "root"

    @property
    def _options(self) -> tuple[str, ...]:
        return "--root", f"{self.place}/root", "--runroot", f"{self.place}/run", "--storage-driver", self.driver

    def buildah(self, *words: str) -> str:
        """Run buildah."""
        return run("buildah", *self._options, *words, environment=self.environment).strip()

    def podman_words(self, *words: str) -> list[str]:
        """Return the command line of podman."""
        return ["podman", *self._options, "--tmpdir", f"{self.place}/tmp", "--cgroup-manager", "cgroupfs",
                "--runtime", self.runtime, *words]  # fmt: skip

    def podman(self, *words: str) -> str:
        """Run podman."""
        return run(*self.podman_words(*words), environment=self.environment).strip()

    @contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        """Mount an image."""
        yield Path(self.podman("image", "mount", image))
        self.podman("image", "umount", "--force", image)


@contextmanager
def private_engine(place: Path, driver: str = "overlay", *, resume: bool = False) -> Iterator[Engine]:
    """An engine with a storage of its own, which is removed.

    Args:
        place: the directory of its storage.
        driver: how layers are stored.
        resume: whether the storage stays after a failure, for the next attempt; else it is empty at first.

    Raises:
        SystemExit: a program is missing.
    """
    needed = ("podman", "buildah", "skopeo", "docker-registry", "debootstrap", "runc")
    missing = [name for name in needed if shutil.which(name) is None]
    if missing or os.geteuid():
        raise SystemExit(f"needs root and Debian's packages of {', '.join(missing or needed)}")
    if not resume:
        remove_storage(place)
    place.mkdir(parents=True, exist_ok=True)
    engine = Engine(place, driver, environment={
        **os.environ, "CONTAINERS_CONF": f"{place}/containers.conf",
        "CONTAINERS_STORAGE_CONF": f"{place}/storage.conf", "TMPDIR": str(place),
    })  # fmt: skip
    (place / "containers.conf").write_text(_CONFIGURATION.format(runtime=engine.runtime, place=place))
    (place / "storage.conf").write_text(_STORAGE.format(driver=driver, place=place))
    (place / "policy.json").write_text(_POLICY)
    failed = True
    try:
        yield engine
        failed = False
    finally:
        if not (resume and failed):
            remove_storage(place)


def remove_storage(place: Path) -> None:
    """Unmount and remove a storage."""
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        target = line.split()[4]
        if target.startswith(f"{place}/"):
            subprocess.run(["umount", "--lazy", target], check=False)
    shutil.rmtree(place, ignore_errors=True)
