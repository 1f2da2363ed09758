"""Carry out file operations in a worker inside the sandbox, so that the host never opens a path an agent controls.

Every operation answers ``error`` if the kernel refuses. Paths resolve as for any program inside the sandbox, except
that links of /proc are refused, because they lead to the worker's own files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator

from minisandbox.launch.kernel import syscalls as sc

from . import descendants, frames, tree_writer, trees
from .frames import integer
from .job import WorkerJob
from .tree_writer import Attributes, FileWriter, TreeBuilder

_PATH_MAX = 4096
_PAGE = 500
_MOST_TEXT = 1 << 26
"""Limit for the names and link targets of a whole list, in characters: a million hard links can share a long target."""
_PAGE_SIZE = 1 << 18
"""Characters of names and targets in one frame of a list, which keeps it below ``frames.MAX_HEADER``."""


def serve(job: WorkerJob) -> None:
    """Serve a file request or a ``usage`` request."""
    verb = str(job.request["verb"])
    try:
        _VERBS[verb](job)
    except OSError as error:
        _fail(job, error, verb)
    except ValueError as error:  # a path that contains a NUL or is malformed
        job.fail(OSError(errno.EINVAL, str(error)), verb, job.request.get("path"))


def _fail(job: WorkerJob, error: OSError, verb: str) -> None:
    path, inner_path = str(job.request.get("path", "")), error.filename
    if isinstance(inner_path, str) and verb in ("send_tree", "take_tree"):
        path = os.path.join(path, inner_path) if inner_path else path
    if isinstance(inner_path, str) and verb == "remove":  # relative to the parent of the removed path
        path = os.path.join(os.path.dirname(path.rstrip("/")), inner_path)
    job.fail(OSError(error.errno, error.strerror or str(error)), verb, path)


def _path(job: WorkerJob, key: str = "path") -> str:
    path = os.path.join(str(job.request["cwd"]), str(job.request[key]))
    if "\0" in path:
        raise OSError(errno.EINVAL, "a NUL character in a path")
    return path


# --- content ---------------------------------------------------------------------------------------------------------


def _read(job: WorkerJob) -> None:
    """Serve ``read``: answer with ``data`` and ``hole`` frames, then ``end``."""
    with sc.closing(_open(_path(job), os.O_RDONLY)) as descriptor:
        size = _require_regular(descriptor).st_size
        tally = trees.Tally(_limit(job), 1)
        tally.check(size)
        for header, payload in trees.content_frames(descriptor, size, tally):
            _send(job, header, payload)
    _send(job, {"event": "end", "size": tally.size})


def _limit(job: WorkerJob) -> int | None:
    limit = job.request.get("limit")
    return limit if isinstance(limit, int) else None


def _write(job: WorkerJob) -> None:
    """Serve ``write``: receive ``data`` and ``hole`` frames up to ``end``, then answer ``done``."""
    path = _path(job)
    _make_parents(path)
    with contextlib.closing(FileWriter(_open(path, os.O_WRONLY | os.O_CREAT))) as file:
        _require_regular(file.fd)
        os.ftruncate(file.fd, 0)
        size = _take_content(job, file)
        mode, mtime = job.request.get("mode"), job.request.get("mtime")
        if isinstance(mode, int):
            os.fchmod(file.fd, mode)
        if isinstance(mtime, int):
            os.utime(file.fd, ns=(mtime, mtime))
    _send(job, {"event": "done", "size": size})


def _take_content(job: WorkerJob, file: FileWriter) -> int:
    while True:
        header, data = job.receive()
        job.counters.charge(len(data))
        file.data(data)
        if header["event"] == "hole":
            file.hole(integer(header, "size"))
        if header["event"] == "end":
            return file.end()


# --- one path --------------------------------------------------------------------------------------------------------


def _list(job: WorkerJob) -> None:
    """Serve ``list``: answer with ``entries`` frames of several hundred entries each, then ``end``."""
    with sc.closing(_open(_path(job), os.O_RDONLY | os.O_DIRECTORY)) as directory:
        if os.fstat(directory).st_dev == _proc():
            raise PermissionError(errno.EACCES, "a directory of /proc: list it by a command")
        count, max_entries = 0, integer(job.request, "most")
        for page in _pages(directory):
            count += len(page)
            if count > max_entries:
                raise OSError(errno.EFBIG, f"more than {max_entries} entries")
            _send(job, {"event": "entries", "entries": page})
    _send(job, {"event": "end"})


def _pages(directory: int) -> Iterator[list[object]]:
    page: list[object] = []
    size = total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                fields = _entry(entry.name, directory)
                page.append(fields)
                size += sum(len(field) for field in fields if isinstance(field, str))
            if len(page) >= _PAGE or size > _PAGE_SIZE:
                total += size
                if total > _MOST_TEXT:
                    raise OSError(errno.EFBIG, f"more than {_MOST_TEXT} characters of names and targets")
                yield page
                page, size = [], 0
    if page:
        yield page


def _entry(name: str, directory: int) -> list[object]:
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    target = os.readlink(name, dir_fd=directory) if stat.S_ISLNK(status.st_mode) else None
    return _entry_fields(name, status, target)


def _entry_fields(name: str, status: os.stat_result, target: str | None) -> list[object]:
    return [name, status.st_mode, status.st_size, status.st_mtime_ns, status.st_uid, status.st_gid, target]


def _stat(job: WorkerJob) -> None:
    """Serve ``stat``: answer with ``entries`` that hold one entry without a name."""
    flags = os.O_PATH | (0 if job.request["follow"] else os.O_NOFOLLOW)
    with sc.closing(_open(_path(job), flags)) as descriptor:
        status = os.fstat(descriptor)
        target = None
        if stat.S_ISLNK(status.st_mode):
            if status.st_dev == _proc():
                raise PermissionError(errno.EACCES, "a link of /proc: read it by a command")
            target = os.readlink("", dir_fd=descriptor)
    _send(job, {"event": "entries", "entries": [_entry_fields("", status, target)]})


def _mkdir(job: WorkerJob) -> None:
    """Serve ``mkdir``: answer ``done``."""
    path = _path(job)
    if job.request["parents"]:
        _make_parents(path)
    try:
        with _parent(path) as (directory, name):
            os.mkdir(name, 0o700, dir_fd=directory)
            with sc.closing(os.open(name, trees.DIRECTORY_FLAGS, dir_fd=directory)) as new_directory:
                os.fchmod(new_directory, integer(job.request, "mode"))
    except OSError as error:
        if not (job.request["exist_ok"] and error.errno in (errno.EEXIST, errno.EINVAL) and os.path.isdir(path)):
            raise
    _send(job, {"event": "done"})


def _remove(job: WorkerJob) -> None:
    """Serve ``remove``: answer ``done``."""
    try:
        with _parent(_path(job)) as (directory, name):
            tree_writer.remove(directory, name, recursive=bool(job.request["recursive"]))
    except FileNotFoundError:
        if not job.request["missing_ok"]:
            raise
    _send(job, {"event": "done"})


def _move(job: WorkerJob) -> None:
    """Serve ``move``: answer ``done``."""
    target = _path(job, "target")
    with _parent(_path(job)) as (directory, name):
        os.stat(name, dir_fd=directory, follow_symlinks=False)  # create no directories for a missing source
        _make_parents(target)
        with _parent(target) as (target_directory, target_name):
            tree_writer.move(directory, name, target_directory, target_name)
    _send(job, {"event": "done"})


# --- trees -----------------------------------------------------------------------------------------------------------


def _send_tree(job: WorkerJob) -> None:
    """Serve ``send_tree``: answer with the frames of a file or tree without a name, then ``end``."""
    with contextlib.closing(trees.DirWalker(_open(_path(job), os.O_RDONLY))) as walker:
        tally = trees.Tally(_limit(job), integer(job.request, "most"))
        for batch in trees.batches(trees.tree_frames(_walk_root(walker), tally)):
            _send_bytes(job, batch)
    _send(job, {"event": "end"})


def _walk_root(walker: trees.DirWalker) -> Iterator[trees.TreeStep]:
    status = os.fstat(walker.fd)
    if not stat.S_ISDIR(status.st_mode):
        yield trees.TreeStep("file", "", _require_regular(walker.fd), descriptor=walker.fd)
        return
    if status.st_dev == _proc():
        raise PermissionError(errno.EACCES, "a directory of /proc")
    yield trees.TreeStep("directory", "", status)
    yield from trees.walk(walker, skipped_device=_proc())
    yield trees.TreeStep("up")


def _take_tree(job: WorkerJob) -> None:
    """Serve ``take_tree``: receive the frames of a directory's content up to ``end``, then answer ``done``."""
    path = _path(job)
    _make_parents(path)
    is_new = True
    try:
        os.mkdir(path, integer(job.request, "mode") & 0o777 | 0o700)
    except FileExistsError:
        is_new = False
    with (
        sc.closing(_open(path, os.O_RDONLY | os.O_DIRECTORY)) as root,
        contextlib.closing(TreeBuilder(os.dup(root), replace=True, exact=True)) as builder,
    ):
        _build(job, builder)
        if is_new:
            os.fchmod(root, integer(job.request, "mode"))
            os.utime(root, ns=(integer(job.request, "mtime"),) * 2)
    _send(job, {"event": "done"})


def _build(job: WorkerJob, builder: TreeBuilder) -> None:
    name = ""
    try:
        while (header := _take_frame(job, builder)) is not None:
            name = str(header.get("name", name))
    except OSError as error:
        inner_path = error.filename if isinstance(error.filename, str) else name
        raise OSError(error.errno, error.strerror, builder.walker.path(inner_path)) from error


def _take_frame(job: WorkerJob, builder: TreeBuilder) -> frames.Header | None:
    header, payload = job.receive()
    event, name = header["event"], str(header.get("name"))
    if event == "data":
        job.counters.charge(len(payload))
        builder.data(payload)
    elif event == "hole":
        builder.hole(integer(header, "size"))
    elif event == "eof":
        builder.end()
    elif event == "up":
        builder.up()
    elif event == "end":
        return None
    else:
        attributes = Attributes(integer(header, "mode"), integer(header, "mtime"))
        if event == "directory":
            builder.directory(name, attributes)
        elif event == "file":
            builder.file(name, attributes)
        else:
            builder.link(name, str(header["detail"]), attributes)
    return header


def _usage(job: WorkerJob) -> None:
    """Serve ``usage``: answer with the current resource use of the sandbox, measured from inside."""
    _send(job, {"event": "usage", **descendants.usage(job.counters.upper)})


# --- shared helpers --------------------------------------------------------------------------------------------------


def _open(path: str, flags: int) -> int:
    """Open a path that an agent controls.

    O_NONBLOCK keeps a FIFO from blocking the worker. RESOLVE_NO_MAGICLINKS (openat2(2)) refuses the links of /proc,
    which lead to the worker's own files: its program is a file of the host.
    """
    if not flags & os.O_PATH:
        flags |= os.O_NONBLOCK | os.O_NOCTTY
    try:
        return sc.openat2(sc.AT_FDCWD, path, flags, sc.RESOLVE_NO_MAGICLINKS, 0o644 if flags & os.O_CREAT else 0)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a FIFO without a reader (open(2))
            raise OSError(errno.EINVAL, "not a regular file") from error
        raise


@contextlib.contextmanager
def _parent(path: str) -> Iterator[tuple[int, str]]:
    """Open the parent directory of a path; yield its descriptor and the last component of the path."""
    parent, name = os.path.split(path.rstrip("/"))
    if name in ("", ".", ".."):
        raise OSError(errno.EINVAL, "not the name of something in a directory")
    with sc.closing(_open(parent or "/", os.O_PATH | os.O_DIRECTORY)) as directory:
        yield directory, name


def _make_parents(path: str) -> None:
    """Create the missing parent directories of a path, following symbolic links."""
    parent = os.path.dirname(path.rstrip("/")) or "/"
    if os.path.isdir(parent):
        return
    if len(os.fsencode(path)) >= _PATH_MAX:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    names = parent.split("/")
    for depth in range(2, len(names) + 1):
        with contextlib.suppress(FileExistsError):
            os.mkdir("/".join(names[:depth]), 0o755)
    if not os.path.isdir(parent):  # a file or a dangling link
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def _require_regular(descriptor: int) -> os.stat_result:
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if status.st_dev == _proc():
        raise PermissionError(errno.EACCES, "a file of /proc: read it by a command")
    return status


def _proc() -> int:
    return os.stat("/proc").st_dev


def _send(job: WorkerJob, header: frames.Header, payload: bytes = b"") -> None:
    _send_bytes(job, frames.encode(header, payload))


def _send_bytes(job: WorkerJob, data: bytes) -> None:
    """Send encoded frames; raise EOFError, which ends the job, if the controller hung up."""
    try:
        job.connection.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        raise EOFError from None


_VERBS: dict[str, Callable[[WorkerJob], None]] = {
    "read": _read,
    "write": _write,
    "list": _list,
    "stat": _stat,
    "mkdir": _mkdir,
    "remove": _remove,
    "move": _move,
    "send_tree": _send_tree,
    "take_tree": _take_tree,
    "usage": _usage,
}
