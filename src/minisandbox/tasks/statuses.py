"""Read and write ``run_batch_exit_statuses.yaml``, the exit statuses of SWE-agent and mini-swe-agent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from minisandbox.errors import TaskFileError
from minisandbox.tasks.formats.writing import written_whole

STATUSES_NAME = "run_batch_exit_statuses.yaml"
"""The name of the status file in a run directory."""

_KEY = "instances_by_exit_status"


def read_statuses(path: Path) -> dict[str, str]:
    """Read the exit status of each task.

    Args:
        path: the file, or a run directory with a :data:`STATUSES_NAME`. Keys other than ``instances_by_exit_status``
            are ignored, because SWE-agent adds the cost.

    Returns:
        The status by ``instance_id``, in the order of the file. Every status is a string, even ``null``, which
        SWE-agent writes for a task without a status.

    Raises:
        TaskFileError: the file cannot be read or is malformed, or a task has two different statuses.
    """
    file = path / STATUSES_NAME if path.is_dir() else path
    statuses: dict[str, str] = {}
    for status, instance_id in _entries(file):
        earlier = statuses.setdefault(instance_id, status)
        if earlier != status:
            raise TaskFileError(
                f"{file}: {instance_id!r} is under {earlier!r} and under {status!r}",
                path=file,
                reason="the task was run twice in one run, or two files were put together",
                hint="take one of them out; `minisandbox tasks merge` puts files together",
            )
    return statuses


def write_statuses(path: Path, statuses: Mapping[str, str]) -> None:
    """Write the exit status of each task. The file is replaced atomically.

    Args:
        path: the file.
        statuses: the status by ``instance_id``.

    Raises:
        OSError: writing failed; the earlier file is unchanged.
    """
    import yaml  # noqa: PLC0415 - loading task files must not import yaml

    lists: dict[str, list[str]] = {}
    for instance_id, status in statuses.items():
        lists.setdefault(status, []).append(instance_id)
    document = yaml.safe_dump({_KEY: lists}, allow_unicode=True, indent=4, width=200)
    with written_whole(path) as file:
        file.write_text(document, encoding="utf-8")


def _entries(file: Path) -> Iterator[tuple[str, str]]:
    table = _load(file)
    lists = table.get(_KEY) if isinstance(table, dict) else None
    if not isinstance(lists, dict):
        raise TaskFileError(
            f"{file}: it has no object {_KEY!r}",
            path=file,
            reason="it is another file",
            hint=f"give a {STATUSES_NAME}, or the directory that holds one",
        )
    for status, ids in lists.items():
        if not isinstance(ids, list) or not all(isinstance(item, str) for item in ids):
            raise TaskFileError(
                f"{file}: what {status!r} has is not a list of ids", path=file, hint="write one id per line, after '- '"
            )
        for instance_id in ids:
            yield str(status), instance_id


def _load(file: Path) -> object:
    import yaml  # noqa: PLC0415 - loading task files must not import yaml

    try:
        document = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFileError(f"{file} cannot be read", path=file, reason=str(error)) from error
    try:
        # Load every scalar as a string: an id may look like a number, and a status like null.
        return yaml.load(document, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))  # noqa: S506 - this loader creates only strings, lists and dicts
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = None if mark is None else mark.line + 1
        position = "" if line is None else f", line {line}"
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise TaskFileError(f"{file}{position}: not YAML", path=file, line=line, reason=reason) from None
