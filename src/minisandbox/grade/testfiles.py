"""Prepare a task's own test files for a grading sandbox."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from minisandbox.sandbox.scratch import scratch
from minisandbox.tasks.task import is_inside
from minisandbox.types import Mount

HIDDEN = PurePosixPath("/hidden")
"""The directory inside the sandbox from which test files are copied into place."""
_MOST_MOUNTS = 32


@dataclass(frozen=True, slots=True)
class PreparedFiles:
    """The prepared test files of one sandbox.

    Attributes:
        mounts: the mounts with which the sandbox is created.
        copied: whether :data:`HIDDEN` contains files to copy into place.
        checked: the contents of files that must be the same after the run, by path.
    """

    mounts: tuple[Mount, ...] = ()
    copied: bool = False
    checked: Mapping[str, bytes] = field(default_factory=dict)


def hidden_files(hidden: Path | None, names: Sequence[str]) -> dict[str, bytes]:
    """Return the contents of the named files that the tests layer contains.

    Args:
        hidden: the tests layer, or None.
        names: paths in the repository.
    """
    if hidden is None:
        return {}
    return {name: (hidden / name).read_bytes() for name in names if _is_plain(hidden, name)}


def snapshots_of(hidden: Path | None) -> list[str]:
    """Return the paths of the files with expected output in the tests layer (syrupy, pytest-snapshot)."""
    if hidden is None:
        return []
    paths = (path.relative_to(hidden) for path in hidden.rglob("*") if path.is_file() and not path.is_symlink())
    return [str(path) for path in paths if path.suffix == ".ambr" or "snapshots" in path.parts]


def _is_plain(hidden: Path, name: str) -> bool:
    """Return whether a path is a regular file of the layer that is reached without symbolic links."""
    target = hidden / name  # is_inside() rejects absolute names, which would leave the layer
    real = Path(os.path.realpath(hidden)) / name
    return is_inside(name) and target.is_file() and Path(os.path.realpath(target)) == real


@contextmanager
def prepare_files(
    hidden: Path | None, names: Sequence[str], edited_files: Mapping[str, bytes], workdir: PurePosixPath
) -> Iterator[PreparedFiles]:
    """Prepare the tests layer for one sandbox; the files exist while the block runs.

    Files with the task's tests are mounted read-only, one by one, so that a project can still write next to them. All
    other files are copied into place inside the sandbox. Mounts always show copies of the layer's files, so code under
    test cannot tell whether files were edited.

    Args:
        hidden: the tests layer, or None.
        names: the files that contain the task's tests.
        edited_files: new contents of files, by path.
        workdir: the directory of the repository inside the sandbox.
    """
    if hidden is None:
        yield PreparedFiles()
        return
    with scratch() as directory:
        copied_folder, mounted_folder = directory / "rest", directory / "fixed"
        shutil.copytree(hidden, copied_folder, symlinks=True)
        contents = hidden_files(hidden, names)
        contents |= {path: content for path, content in edited_files.items() if _is_plain(hidden, path)}
        mounts: list[Mount] = []
        for path, content in contents.items():
            (copied_folder / path).unlink(missing_ok=True)
            target = mounted_folder if path.endswith(".py") and len(mounts) < _MOST_MOUNTS else copied_folder
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes(content)
            shutil.copymode(hidden / path, target / path)
            if target is mounted_folder:
                mounts.append(Mount(mounted_folder / path, workdir / path))
        yield PreparedFiles((Mount(copied_folder, HIDDEN), *mounts), True, contents)
