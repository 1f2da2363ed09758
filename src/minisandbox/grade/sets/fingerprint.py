"""What a result depends on, as a hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from minisandbox.store import canonical_json
from minisandbox.tasks import ScriptGrader, Task


def fingerprint(task: Task, more: tuple[str, ...], image_key: str) -> str:
    """Return a hash of a task's row, the files of its scripts, its image's key, and more."""
    row = canonical_json(task.to_row())  # type: ignore[arg-type] # a row holds what JSON has
    digest = hashlib.sha256(row)
    for part in (image_key, *more, *_script_files(task)):
        digest.update(b"\n" + hashlib.sha256(part.encode("utf-8", "surrogateescape")).digest())
    return digest.hexdigest()


def _script_files(task: Task) -> Iterator[str]:
    """Yield the names and contents, hashed, of the files that a task's scripts bring."""
    grader, solution = task.grader, task.solution
    folders = (
        grader.files if isinstance(grader, ScriptGrader) else None,
        None if solution is None else solution.files,
    )
    for folder in folders:
        for path in () if folder is None else sorted(folder.rglob("*")):
            if path.is_file():
                yield f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}"
