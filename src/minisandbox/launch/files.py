"""File verbs, carried out inside the sandbox by a worker: the host never opens a path that an agent can shape."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from . import syscalls as sc

if TYPE_CHECKING:
    from .worker import Job

_CHUNK = 1 << 20


def serve(job: Job) -> None:
    """Carry out a ``read`` or ``write`` request.

    ``read``: answers ``data`` frames and then ``end``. ``write``: takes ``data`` frames up to ``end``, answers
    ``done``. Either answers ``error`` where the kernel refused or the path is not a regular file.
    """
    request = job.request
    path = os.path.join(str(request["cwd"]), str(request["path"]))
    try:
        if request["verb"] == "read":
            _read(job, path)
        else:
            _write(job, path)
    except OSError as error:
        job.fail(error, str(request["verb"]), request["path"])


def _read(job: Job, path: str) -> None:
    descriptor = _open(path, os.O_RDONLY)
    with open(descriptor, "rb", buffering=0) as source:
        _require_regular(descriptor)
        limit = job.request.get("limit")
        total = 0
        while data := source.read(_CHUNK):
            total += len(data)
            if isinstance(limit, int) and total > limit:
                raise OSError(errno.EFBIG, f"larger than {limit} bytes")
            job.send({"event": "data"}, data)
        job.send({"event": "end", "size": total})


def _write(job: Job, path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = _open(path, os.O_WRONLY | os.O_CREAT)
    with open(descriptor, "wb", buffering=0) as target:
        _require_regular(descriptor)
        os.ftruncate(descriptor, 0)
        total = 0
        while True:
            header, data = job.receive()
            view = memoryview(data)
            while view:
                view = view[target.write(view) :]
            total += len(data)
            if header["event"] == "end":
                break
        mode = job.request.get("mode")
        if isinstance(mode, int):
            os.fchmod(descriptor, mode)
        job.send({"event": "done", "size": total})


def _open(path: str, flags: int) -> int:
    """Open a path of the sandbox as an agent left it.

    A FIFO must not hold us (O_NONBLOCK), and links of /proc must not lead to what is the worker's own: its program is
    a file of the host (openat2(2), RESOLVE_NO_MAGICLINKS).
    """
    flags |= os.O_NONBLOCK | os.O_NOCTTY
    return sc.openat2(sc.AT_FDCWD, path, flags, sc.RESOLVE_NO_MAGICLINKS, 0o644 if flags & os.O_CREAT else 0)


def _require_regular(descriptor: int) -> None:
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if status.st_dev == os.stat("/proc").st_dev:
        raise PermissionError(errno.EACCES, "a file of /proc: read it by a command")
