"""File verbs, carried out inside the sandbox by a worker: the host never opens a path that an agent can shape."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

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
    # O_NONBLOCK: a FIFO that an agent put there must not hold us (open(2))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
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
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o644)
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


def _require_regular(descriptor: int) -> None:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file")
