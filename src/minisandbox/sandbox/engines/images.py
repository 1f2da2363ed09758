"""Import images of the store into an engine, and pass host directories to containers."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import IO

from minisandbox.errors import Unsupported
from minisandbox.sandbox._sync.process import Process
from minisandbox.sandbox.core import Core
from minisandbox.sandbox.engines.client import LABEL, Client
from minisandbox.sandbox.protocol.commands import process_channel
from minisandbox.types import ExecResult, ImageSpec

_turn = threading.Lock()  # lets one sandbox at a time check for and import an image
_PACK = "exec tar --create --one-file-system --numeric-owner --directory / --exclude ./usr --file - ."


def reference_of(image: ImageSpec) -> str:
    """Return the engine's reference for an image: its name and a hash of its layers."""
    content = "\n".join([str(image.host_usr), *map(str, image.layers)])
    name = re.sub("[^a-z0-9]+", "-", image.name.lower()).strip("-") or "image"
    return f"localhost/minisandbox/{name[:80]}:{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def ensure_image(client: Client, image: ImageSpec) -> tuple[str, bool]:
    """Import an image into the engine unless it is there already.

    Returns:
        The engine's reference, and whether this call imported the image.

    Raises:
        Unsupported: the image shows this machine's /usr, and the engine runs elsewhere or a layer changes /usr.
        HostError: the engine refused, or the image lacks tar.
    """
    _check_usr(client, image)
    reference = reference_of(image)
    with _turn:
        is_missing = not client.succeeds("image", "inspect", reference)
        if is_missing:
            _import(client, image, reference)
    return reference, is_missing


def image_size(client: Client, reference: str) -> int:
    """Return the size of an image in bytes, as reported by the engine.

    Raises:
        HostError: the engine has no such image.
    """
    return int(client.run("image", "inspect", "--format", "{{.Size}}", reference))


def _check_usr(client: Client, image: ImageSpec) -> None:
    if not image.host_usr:
        return
    hint = "build the image from a container image: --environment image, or a Dockerfile"
    if client.remote:
        raise Unsupported(f"image {image.name!r} shows this machine's /usr, which a remote engine lacks", hint=hint)
    if any(next((layer / "usr").glob("*"), None) for layer in image.layers):
        raise Unsupported(f"image {image.name!r} changes this machine's /usr, which engines show unchanged", hint=hint)


def _import(client: Client, image: ImageSpec, reference: str) -> None:
    """Pipe a tar archive of the image's root from a sandbox into the engine."""
    command = ("import", "--change", f"LABEL {LABEL}=image", "-", reference)
    importer = client.open(*command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert importer.stdin is not None
    try:
        result = _pack(image, importer.stdin)
    except BaseException:  # even on Ctrl-C, keep the engine from importing half an archive
        importer.kill()
        raise
    finally:
        _, errors = importer.communicate()
    if importer.returncode != 0:
        raise client.failure("import", errors)
    if not result.ok:
        client.succeeds("image", "rm", reference)
        result.check()


def _pack(image: ImageSpec, archive_file: IO[bytes]) -> ExecResult:
    command = _PACK if image.host_usr else _PACK.replace("--exclude ./usr", "")
    core = Core.create(replace(image, backend=""))
    channel = process_channel(
        core, command, timeout=None, cwd="/", env=None, user=0, pty=None, lifetime="handle"
    )  # fmt: skip
    try:
        with Process._started(core, channel, owned=True) as process:
            for event in process.events():
                if isinstance(event, ExecResult):
                    return event
                if event.stream == "stdout":
                    with suppress(BrokenPipeError):  # the engine has failed; its stderr has the reason
                        archive_file.write(event.data)
    finally:
        core.stop()
    raise AssertionError("a process's last event is its result")


def mount_options(sources: Sequence[tuple[Path, PurePosixPath]]) -> list[str]:
    """Return the options that mount host paths read-only, for an engine on this machine."""
    return [
        option
        for source, target in sources
        for option in ("--mount", f"type=bind,source={source},destination={target},readonly")
    ]


def copy_in(client: Client, container: str, sources: Sequence[tuple[Path, PurePosixPath]]) -> None:
    """Copy host paths into a container before it starts, for a remote engine.

    Raises:
        HostError: the engine refused.
    """
    with tempfile.TemporaryFile() as archive:
        with tarfile.open(fileobj=archive, mode="w") as archive_file:
            for source, target in sources:
                archive_file.add(source, str(target.relative_to("/")), filter=_as_root)
        archive.seek(0)
        client.run("cp", "-", f"{container}:/", stdin=archive)


def _as_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
