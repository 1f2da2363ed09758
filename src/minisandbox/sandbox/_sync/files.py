# Generated from _async/files.py by tools/make_sync.py: change that file, then run the tool.
"""The file verbs of the synchronous sandbox."""

from __future__ import annotations

import io
from pathlib import Path, PurePosixPath

from minisandbox.sandbox.backend import SandboxCore
from minisandbox.sandbox.io_sync import carry_out
from minisandbox.sandbox.protocol import file_operations
from minisandbox.sandbox.protocol.wire import encoded
from minisandbox.types import FileInfo, GiB, MiB, Transfer


class Files:
    """Reads and writes files of a sandbox, inside it, as its root. Ctrl-C ends a verb inside at once.

    Paths are absolute, or relative to the image's workdir. Names that are not UTF-8 are written with surrogate escapes
    (PEP 383), as Python does everywhere. Every verb raises :class:`.SandboxGone` once the sandbox has ended.

    Args:
        core: the sandbox.
    """

    def __init__(self, core: SandboxCore) -> None:
        self._core = core
        self._cwd = str(core.image.workdir)

    def read_bytes(self, path: str | PurePosixPath, *, limit: int | None = 100 * MiB) -> bytes:
        """Return the content of a regular file.

        Args:
            path: the file.
            limit: most bytes to read; a larger file is an error. None: no limit.

        Returns:
            Its bytes.

        Raises:
            FileAccessError: there is no such file, it is not a regular one, or it is too large.
            SandboxGone: the sandbox has ended.
        """
        sink = io.BytesIO()
        carry_out(self._core, file_operations.read(path, cwd=self._cwd, limit=limit, sink=sink))
        return sink.getvalue()

    def read_text(self, path: str | PurePosixPath, *, limit: int | None = 100 * MiB) -> str:
        """Return the content of a regular file as UTF-8; other bytes become U+FFFD. Raises as :meth:`read_bytes`."""
        data = self.read_bytes(path, limit=limit)
        return data.decode("utf-8", "replace")

    def write_bytes(self, path: str | PurePosixPath, data: bytes, *, mode: int | None = None) -> None:
        """Replace the content of a file; it and missing parent directories are made.

        Args:
            path: the file.
            data: its new content.
            mode: permission bits; None leaves them (0644 for a new file).

        Raises:
            FileAccessError: the file cannot be written, or the disk limit is reached.
            SandboxGone: the sandbox has ended.
        """
        carry_out(self._core, file_operations.write(path, cwd=self._cwd, mode=mode, source=(data,)))

    def write_text(self, path: str | PurePosixPath, text: str, *, mode: int | None = None) -> None:
        """Replace the content of a file by text as UTF-8. Raises as :meth:`write_bytes`."""
        self.write_bytes(path, encoded(text), mode=mode)

    def list(self, path: str | PurePosixPath | None = None) -> tuple[FileInfo, ...]:
        """List a directory, sorted by name; directories in it are not entered.

        Args:
            path: the directory; the image's workdir if None.

        Returns:
            Each entry as :meth:`stat` without following links tells it.

        Raises:
            FileAccessError: there is no such directory, it lies in /proc, or it has more than a million entries.
            SandboxGone: the sandbox has ended.
        """
        return carry_out(self._core, file_operations.list_directory("." if path is None else path, cwd=self._cwd))

    def stat(self, path: str | PurePosixPath, *, follow: bool = True) -> FileInfo:
        """Return what the file system says about a path.

        Args:
            path: the path.
            follow: tell about what a symbolic link points to, not about the link.

        Returns:
            Type, size, permissions, owner, time.

        Raises:
            FileAccessError: there is no such file.
            SandboxGone: the sandbox has ended.
        """
        return carry_out(self._core, file_operations.stat(path, cwd=self._cwd, follow=follow))

    def exists(self, path: str | PurePosixPath) -> bool:
        """Return whether a path exists, links followed: a dangling link does not exist.

        Raises:
            FileAccessError: a directory on the way cannot be searched, or is no directory.
            SandboxGone: the sandbox has ended.
        """
        return carry_out(self._core, file_operations.exists(path, cwd=self._cwd))

    def mkdir(
        self, path: str | PurePosixPath, *, mode: int = 0o755, parents: bool = True, exist_ok: bool = True
    ) -> None:
        """Make a directory; one that exists already is left as it is.

        Args:
            path: the directory.
            mode: its permission bits.
            parents: make missing parents too, with mode 0755.
            exist_ok: a directory that exists already is fine.

        Raises:
            FileAccessError: the path exists, a parent is missing, or the directory cannot be created.
            SandboxGone: the sandbox has ended.
        """
        operation = file_operations.make_directory(path, cwd=self._cwd, mode=mode, parents=parents, exist_ok=exist_ok)
        carry_out(self._core, operation)

    def remove(self, path: str | PurePosixPath, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Remove a file, a link (never what it points to) or a directory.

        Args:
            path: the path.
            recursive: a directory goes with all that is below it.
            missing_ok: nothing to remove is fine.

        Raises:
            FileAccessError: there is no such file, the directory is not empty, or it cannot be removed.
            SandboxGone: the sandbox has ended.
        """
        operation = file_operations.remove(path, cwd=self._cwd, recursive=recursive, missing_ok=missing_ok)
        carry_out(self._core, operation)

    def move(self, source: str | PurePosixPath, target: str | PurePosixPath) -> None:
        """Rename a file, link or directory; missing parents of the target are made.

        Args:
            source: what to move; a link is moved itself.
            target: its new path; a file or an empty directory there is replaced.

        Raises:
            FileAccessError: there is no such source, or the target is a directory with something in it.
            SandboxGone: the sandbox has ended.
        """
        carry_out(self._core, file_operations.move(source, target, cwd=self._cwd))

    def upload(self, local: str | Path, path: str | PurePosixPath, *, mode: int | None = None) -> Transfer:
        """Copy a host file or directory tree into the sandbox, in pieces, with modes, times and holes.

        A tree is merged into the directory at ``path``. Symbolic links arrive as links; FIFOs, sockets and devices are
        skipped. A copy that fails half-way leaves what had arrived.

        Args:
            local: what to copy.
            path: where to; missing parents are made.
            mode: permission bits for a file; None: those of the host file.

        Returns:
            What was copied, and what was left out.

        Raises:
            InvalidValue: ``mode`` is given for a tree.
            FileAccessError: a file cannot be written, or the disk limit is reached.
            SandboxGone: the sandbox has ended.
            OSError: the host file or tree cannot be read.
        """
        return carry_out(self._core, file_operations.upload(local, path, cwd=self._cwd, mode=mode), disk=True)

    def download(self, path: str | PurePosixPath, local: str | Path, *, limit: int | None = 2 * GiB) -> Transfer:
        """Copy a file or directory tree of the sandbox to the host, in pieces; it appears when it is complete.

        Nothing on the host is followed or run. Relative links that stay in the tree are kept; other links, FIFOs,
        sockets and devices are skipped and named.

        Args:
            path: what to copy.
            local: where to; it must not exist, or be a file if a file is copied.
            limit: most bytes of all files together (a sparse file can be larger than any disk); more is an error.
                None: no limit.

        Returns:
            What was copied, and what was left out.

        Raises:
            FileAccessError: there is no such path, it is neither file nor directory, or it is too large.
            SandboxGone: the sandbox has ended.
            OSError: the host path cannot be written.
        """
        return carry_out(self._core, file_operations.download(path, local, cwd=self._cwd, limit=limit), disk=True)
