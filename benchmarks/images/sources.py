"""The three places that images are taken from: a registry, an OCI layout, an archive of podman."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.images.engine import Engine, run, say

KINDS = ("registry", "layout", "archive")


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the images are.

    Attributes:
        place: a directory that every user may enter.
        layout: an OCI layout of all of them, which every user may read.
        host: of the registry.
        engine: what has pulled them, and saves archives.
    """

    place: Path
    layout: Path
    host: str
    engine: Engine

    def at_registry(self, image: str) -> str:
        """Return an image's reference at the registry."""
        return f"{self.host}/testbed/{image}:latest"

    @contextmanager
    def reference(self, kind: str, image: str) -> Iterator[str]:
        """Yield the reference of an image in a kind of source; an archive is removed afterwards."""
        if kind == "registry":
            yield self.at_registry(image)
        elif kind == "layout":
            yield f"oci:{self.layout}:{image}"
        else:
            saved = self.place / "saved.tar"
            self.engine.podman("save", "--quiet", "--output", str(saved), self.at_registry(image))
            try:
                yield f"docker-archive:{saved}"
            finally:
                saved.unlink()


@contextmanager
def registry(place: Path) -> Iterator[str]:
    """Serve a new registry on a free port; yields its host.

    Raises:
        SystemExit: it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    host = f"127.0.0.1:{port}"
    storage = f"storage: {{filesystem: {{rootdirectory: {place}/registry}}}}"
    (place / "registry.yml").write_text(f"version: 0.1\nlog: {{level: error}}\n{storage}\nhttp: {{addr: '{host}'}}\n")
    command = ["docker-registry", "serve", str(place / "registry.yml")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and process.poll() is None:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    yield host
                    return
                time.sleep(0.05)
            raise SystemExit(f"docker-registry does not listen on {host}")
        finally:
            process.send_signal(signal.SIGTERM)


def fill_registry(host: str, layout: Path, engine: Engine, images: Iterable[str]) -> None:
    """Copy images of a layout into a registry."""
    say("filling the registry")
    for image in images:
        skopeo(engine, f"oci:{layout}:{image}", f"docker://{host}/testbed/{image}:latest")


def skopeo(engine: Engine, source: str, target: str) -> None:
    """Copy an image with skopeo."""
    policy = ("--policy", engine.place / "policy.json")
    insecure = [f"--{side}-tls-verify=false" for side, at in (("src", source), ("dest", target)) if "docker:" in at]
    run("skopeo", *policy, "copy", "--quiet", *insecure, source, target)
