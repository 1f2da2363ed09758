"""Docker, by a daemon that is started for the measurement on a socket and in directories of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import time

from benchmarks.engines.containers import Containers
from benchmarks.engines.engine import NotRun

_PATIENCE = 60.0  # seconds until the daemon has to answer, and to end


class Docker(Containers):
    """A daemon with overlay2, without networks."""

    _daemon: subprocess.Popen[bytes] | None = None

    def open(self) -> str:
        """Start the daemon and import the images."""
        daemon, client = shutil.which("dockerd"), shutil.which("docker", path=f"/usr/bin:{os.environ['PATH']}")
        if daemon is None or client is None:
            raise NotRun("dockerd or its client is not installed")
        self.environment, place = dict(os.environ), self.place
        self.command = (client, "--host", f"unix://{place}/socket")
        with open(place / "log", "wb") as log:
            self._daemon = subprocess.Popen(
                [
                    daemon, *self.command[1:], "--data-root", f"{place}/data", "--exec-root", f"{place}/exec",
                    "--pidfile", f"{place}/pid", "--iptables=false", "--ip6tables=false", "--bridge=none",
                    "--storage-driver=overlay2", "--exec-opt", "native.cgroupdriver=cgroupfs",
                    "--default-ulimit", "nofile=16384:16384",
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + _PATIENCE
        while (version := self._version()) is None:
            if self._daemon.poll() is not None or time.monotonic() > deadline:
                raise NotRun(f"dockerd does not answer: {(place / 'log').read_text(errors='replace')[-500:]}")
            time.sleep(0.2)
        self.import_images()
        return f"docker {version}"

    def _version(self) -> str | None:
        try:
            return self.call("version", "--format", "{{.Server.Version}}")
        except NotRun:
            return None

    def close(self) -> None:
        """End the daemon, which ends its containerd."""
        if self._daemon is not None:
            self._daemon.terminate()
            self._daemon.wait(_PATIENCE)
