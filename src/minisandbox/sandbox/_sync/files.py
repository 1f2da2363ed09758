# Generated from _async/files.py by tools/make_sync.py: change that file, then run the tool.
"""Read, write and copy files of a sandbox."""

from __future__ import annotations

import io
from pathlib import Path, PurePosixPath

from minisandbox.sandbox.backend import SandboxCore
from minisandbox.sandbox.io_sync import carry_out
from minisandbox.sandbox.protocol import file_operations
from minisandbox.sandbox.protocol.wire import encoded
from minisandbox.types import FileInfo, Transfer
from minisandbox.values import GiB, MiB


class Files:
    """Reads and writes files of a sandbox, from inside it and as its root user.

    Paths are absolute, or relative to the image's workdir. Names that are not UTF-8 are written with surrogate escapes
    (PEP 383), as everywhere in Python. Ctrl-C stops the operation inside at once. Every method raises
    :class:`.SandboxGone` once the sandbox has ended.

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
            limit: maximum size in bytes; a larger file is an error. None: no limit.

        Returns:
            The content.

        Raises:
            FileAccessError: there is no such file, it is not a regular file, or it is too large.
            SandboxGone: the sandbox has ended.
        """
        sink = io.BytesIO()
        carry_out(self._core, file_operations.read(path, cwd=self._cwd, limit=limit, sink=sink))
        return sink.getvalue()

    def read_text(self, path: str | PurePosixPath, *, limit: int | None = 100 * MiB) -> str:
        """Return the content of a regular file as UTF-8; invalid bytes become U+FFFD. Raises as :meth:`read_bytes`."""
        data = self.read_bytes(path, limit=limit)
        return data.decode("utf-8", "replace")

    def write_bytes(self, path: str | PurePosixPath, data: bytes, *, mode: int | None = None) -> None:
        """Replace the content of a file; create the file and its parent directories if they are missing.

        Args:
            path: the file.
            data: its new content.
            mode: permission bits; None keeps those of the file (0644 for a new file).

        Raises:
            FileAccessError: the file cannot be written, or the disk limit is reached.
            SandboxGone: the sandbox has ended.
        """
        carry_out(self._core, file_operations.write(path, cwd=self._cwd, mode=mode, source=(data,)))

    def write_text(self, path: str | PurePosixPath, text: str, *, mode: int | None = None) -> None:
        """Replace the content of a file with text encoded as UTF-8. Raises as :meth:`write_bytes`."""
        self.write_bytes(path, encoded(text), mode=mode)

    def list(self, path: str | PurePosixPath | None = None) -> tuple[FileInfo, ...]:
        """List the entries of a directory, sorted by name and without descending into subdirectories.

        Args:
            path: the directory; the image's workdir if None.

        Returns:
            The status of each entry, as from :meth:`stat` with ``follow=False``.

        Raises:
            FileAccessError: there is no such directory, it lies in /proc, or it has more than a million entries.
            SandboxGone: the sandbox has ended.
        """
        return carry_out(self._core, file_operations.list_directory("." if path is None else path, cwd=self._cwd))

    def stat(self, path: str | PurePosixPath, *, follow: bool = True) -> FileInfo:
        """Return the status of a path.

        Args:
            path: the path.
            follow: whether to follow a symbolic link, instead of describing the link itself.

        Returns:
            Type, size, permissions, owner and modification time.

        Raises:
            FileAccessError: there is no such file.
            SandboxGone: the sandbox has ended.
        """
        return carry_out(self._core, file_operations.stat(path, cwd=self._cwd, follow=follow))

    def exists(self, path: str | PurePosixPath) -> bool:
        """Return whether a path exists, following links; False for a dangling link.

        Raises:
            FileAccessError: a directory on the way cannot be searched.
            SandboxGone: the sandbox has ended.
        """
        return carry_out(self._core, file_operations.exists(path, cwd=self._cwd))

    def mkdir(
        self, path: str | PurePosixPath, *, mode: int = 0o755, parents: bool = True, exist_ok: bool = True
    ) -> None:
        """Create a directory; leave an existing directory unchanged.

        Args:
            path: the directory.
            mode: its permission bits.
            parents: whether to create missing parents too, with mode 0755.
            exist_ok: whether to accept an existing directory.

        Raises:
            FileAccessError: the path exists, a parent is missing, or the directory cannot be created.
            SandboxGone: the sandbox has ended.
        """
        operation = file_operations.make_directory(path, cwd=self._cwd, mode=mode, parents=parents, exist_ok=exist_ok)
        carry_out(self._core, operation)

    def remove(self, path: str | PurePosixPath, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Remove a file, a directory, or a link (but not its target).

        Args:
            path: the path.
            recursive: whether to remove a directory with everything below it.
            missing_ok: whether to accept a missing path.

        Raises:
            FileAccessError: there is no such file, the directory is not empty, or it cannot be removed.
            SandboxGone: the sandbox has ended.
        """
        operation = file_operations.remove(path, cwd=self._cwd, recursive=recursive, missing_ok=missing_ok)
        carry_out(self._core, operation)

    def move(self, source: str | PurePosixPath, target: str | PurePosixPath) -> None:
        """Rename a file, link or directory; create missing parents of the target.

        Args:
            source: the path to move; a link itself is moved, not its target.
            target: the new path; an existing file or empty directory is replaced.

        Raises:
            FileAccessError: there is no such source, or the target is a non-empty directory.
            SandboxGone: the sandbox has ended.
        """
        carry_out(self._core, file_operations.move(source, target, cwd=self._cwd))

    def upload(self, local: str | Path, path: str | PurePosixPath, *, mode: int | None = None) -> Transfer:
        """Copy a host file or directory tree into the sandbox, with modes, modification times and holes.

        A tree is merged into the directory at ``path``. Symbolic links are copied as links; FIFOs, sockets and devices
        are skipped. If the copy fails, the part copied so far remains.

        Args:
            local: host path to copy.
            path: destination in the sandbox; missing parents are created.
            mode: permission bits for a file; None: those of the host file.

        Returns:
            The number of files and bytes copied, and the skipped entries.

        Raises:
            InvalidValue: ``mode`` is given for a tree.
            FileAccessError: a file cannot be written, or the disk limit is reached.
            SandboxGone: the sandbox has ended.
            OSError: the host file or tree cannot be read.
        """
        return carry_out(self._core, file_operations.upload(local, path, cwd=self._cwd, mode=mode), disk=True)

    def download(self, path: str | PurePosixPath, local: str | Path, *, limit: int | None = 2 * GiB) -> Transfer:
        """Copy a file or directory tree of the sandbox to the host; it appears there once it is complete.

        The copy follows no link on the host and runs nothing there. Relative links that stay in the tree are kept;
        other links, FIFOs, sockets and devices are skipped and reported.

        Args:
            path: path in the sandbox to copy.
            local: destination on the host. It must not exist; for a file it may be an existing file.
            limit: maximum bytes of all files together, because a sparse file can be larger than any disk; more is an
                error. None: no limit.

        Returns:
            The number of files and bytes copied, and the skipped entries.

        Raises:
            FileAccessError: there is no such path, it is neither a file nor a directory, or it is too large.
            SandboxGone: the sandbox has ended.
            OSError: the host path cannot be written.
        """
        return carry_out(self._core, file_operations.download(path, local, cwd=self._cwd, limit=limit), disk=True)
