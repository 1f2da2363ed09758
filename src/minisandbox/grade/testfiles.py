"""The task's own test files, laid out for one grading sandbox."""

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
"""Where the files that are copied into place lie inside."""
_MOST_MOUNTS = 32


@dataclass(frozen=True, slots=True)
class LaidOut:
    """Test files as one sandbox gets them.

    Attributes:
        mounts: for its creation.
        copied: whether there are files at :data:`HIDDEN` to be copied into place.
        checked: named files, with the content that they must still have after the run.
    """

    mounts: tuple[Mount, ...] = ()
    copied: bool = False
    checked: Mapping[str, bytes] = field(default_factory=dict)


def hidden_files(hidden: Path | None, names: Sequence[str]) -> dict[str, bytes]:
    """Return the content of those of the named files that are in the tests layer.

    Args:
        hidden: the tests layer, or None.
        names: paths in the repository.
    """
    if hidden is None:
        return {}
    return {name: (hidden / name).read_bytes() for name in names if _is_plain(hidden, name)}


def snapshots_of(hidden: Path | None) -> list[str]:
    """Return the paths of files of the tests layer that hold expected output (syrupy, pytest-snapshot)."""
    if hidden is None:
        return []
    paths = (path.relative_to(hidden) for path in hidden.rglob("*") if path.is_file() and not path.is_symlink())
    return [str(path) for path in paths if path.suffix == ".ambr" or "snapshots" in path.parts]


def _is_plain(hidden: Path, name: str) -> bool:
    """Whether a path leads to a regular file of the layer, without a link on the way."""
    target = hidden / name  # which an absolute path would lead out of
    real = Path(os.path.realpath(hidden)) / name
    return is_inside(name) and target.is_file() and Path(os.path.realpath(target)) == real


@contextmanager
def lay_out(
    hidden: Path | None, names: Sequence[str], edited: Mapping[str, bytes], workdir: PurePosixPath
) -> Iterator[LaidOut]:
    """Lay out the tests layer for the time of one sandbox.

    The files that hold the task's tests are mounted where they belong, read-only, each by itself: what a project
    writes next to them it can still write. All other files are copied into place inside. Both are copies of the
    layer's, so that a sandbox with edited files is like one without.

    Args:
        hidden: the tests layer, or None.
        names: files that hold the task's tests.
        edited: files that are to have another content.
        workdir: the repository inside.
    """
    if hidden is None:
        yield LaidOut()
        return
    with scratch() as directory:
        copied, fixed = directory / "rest", directory / "fixed"
        shutil.copytree(hidden, copied, symlinks=True)
        named = hidden_files(hidden, names)
        named |= {path: content for path, content in edited.items() if _is_plain(hidden, path)}
        mounts: list[Mount] = []
        for path, content in named.items():
            (copied / path).unlink(missing_ok=True)
            target = fixed if path.endswith(".py") and len(mounts) < _MOST_MOUNTS else copied
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes(content)
            shutil.copymode(hidden / path, target / path)
            if target is fixed:
                mounts.append(Mount(fixed / path, workdir / path))
        yield LaidOut((Mount(copied, HIDDEN), *mounts), True, named)
