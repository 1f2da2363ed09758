"""Podman as root, with a store and a configuration of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.engines.containers import Containers
from benchmarks.engines.engine import NotRun

# Limits above the caller's own are refused where CAP_SYS_RESOURCE is missing.
_CONFIGURATION = """\
[containers]
default_ulimits = ["nofile=16384:16384", "nproc=32768:32768"]
[engine]
events_logger = "file"
lock_type = "file"
"""
_UNIFIED = Path("/sys/fs/cgroup/unified")


class Podman(Containers):
    """Podman with crun, else with runc."""

    removal = ("rm", "--force", "--time", "0")

    def open(self) -> str:
        """Write the configuration and import the images."""
        runtime = next(filter(shutil.which, ("crun", "runc")), None)
        if shutil.which("podman") is None or runtime is None:
            raise NotRun("podman is not installed, or neither crun nor runc is")
        if runtime == "crun" and _UNIFIED.is_mount():  # crun refuses controllers of both versions
            subprocess.run(["umount", _UNIFIED], check=True)  # of this engine's mount namespace only
        configuration = self.place / "containers.conf"
        configuration.write_text(_CONFIGURATION)
        self.environment = {**os.environ, "CONTAINERS_CONF": str(configuration)}
        self.command = (
            "podman", "--root", f"{self.place}/root", "--runroot", f"{self.place}/run", "--tmpdir", f"{self.place}/tmp",
            "--cgroup-manager", "cgroupfs", "--storage-driver", "overlay", "--runtime", runtime,
        )  # fmt: skip
        self.import_images()
        return f"podman {self.call('version', '--format', '{{.Client.Version}}')} with {runtime}"
