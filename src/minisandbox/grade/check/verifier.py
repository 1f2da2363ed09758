"""Check whether an agent can forge a script grader's files: forge them, and see if the untouched code passes."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from minisandbox.grade.graders.script import grade_work
from minisandbox.grade.grading import grade
from minisandbox.grade.startup import task_sandbox
from minisandbox.grade.verdict import Grade
from minisandbox.sandbox import Sandbox
from minisandbox.tasks import ScriptGrader, Task
from minisandbox.values import MiB

if TYPE_CHECKING:
    from minisandbox.images import Image

_STEP_TIMEOUT = 60.0
_MOST = 5
_SYSTEM = ("/bin/", "/dev/", "/etc/", "/lib", "/proc/", "/sbin/", "/sys/", "/usr/")
"""Directories that are not checked: an agent that can change system tools can defeat every live verifier."""
_WORD = re.compile(r"[\w.+~/-]*/[\w.+/-]+|[\w.+-]+\.(?:sh|bash|py)\b")
# Prints the arguments that are scripts and that the current user can write.
_WRITABLE = r"""
for path; do
    [ -f "$path" ] && [ -w "$path" ] && [ ! -L "$path" ] || continue
    case $path in *.sh|*.bash|*.py) echo "$path"; continue ;; esac
    [ "$(head -c 2 "$path" 2> /dev/null | tr -d '\0')" != '#!' ] || echo "$path"
done
"""
_SHELL = "#!/bin/sh\nmkdir -p {0}; echo 1 > {1}\n:\n"
_PYTHON = """\
#!/usr/bin/env python3
try:
    open({1!r}, "w").write("1")
except OSError:
    pass


def test_forged():
    pass
"""


def forgeable(task: Task, image: Image, timeout: float | None = None) -> tuple[str, ...]:
    """Return the files whose forged copies make the verifier pass the untouched code.

    The candidates are scripts in the image that the verifier names, outside of system directories, and that the agent's
    user can write. Each is replaced, in an agent's sandbox, by a script that only writes the reward.

    Args:
        task: a task that the untouched code does not resolve. Without a script grader, there are no candidates.
        image: the task's image.
        timeout: the verifier's time limit in seconds; None for the task's own.
    """
    if not isinstance(task.grader, ScriptGrader):
        return ()
    names = _named(task.grader, image.workdir)
    if not names:
        return ()
    with Sandbox.create(image.spec(), limits=task.needs.limits(None)) as box:
        listing = box.exec(["sh", "-c", _WRITABLE, "writable", *names], timeout=_STEP_TIMEOUT)
    paths = listing.stdout.splitlines()[:_MOST]
    return tuple(path for path in paths if _forged(task, task.grader, image, path, timeout).resolved)


def _named(grader: ScriptGrader, workdir: PurePosixPath) -> list[str]:
    """Return the paths that the verifier's scripts mention, without the grader's own files."""
    files = [] if grader.files is None else [file for file in grader.files.rglob("*") if file.is_file()]
    small_files = [file for file in files if not file.is_symlink() and file.stat().st_size <= MiB]
    scripts = [grader.command, *(file.read_text("utf-8", "replace") for file in small_files)]
    paths = {str(workdir / word) for script in scripts for word in _WORD.findall(script)}
    excluded = (f"{grader.files_at}/", *_SYSTEM)
    return sorted(path for path in paths if not path.startswith(excluded))


def _forged(task: Task, grader: ScriptGrader, image: Image, path: str, timeout: float | None) -> Grade:
    reward_file = grader.reward_file
    with task_sandbox(task, image.spec(), None, task.needs.network) as box:
        first_line = box.exec(["head", "-n", "1", path], timeout=_STEP_TIMEOUT).stdout
        template = _PYTHON if path.endswith(".py") or "python" in first_line else _SHELL
        script = template.format(PurePosixPath(reward_file).parent, reward_file)
        box.exec(["sh", "-c", 'cat > "$1"', "forge", path], stdin=script.encode(), timeout=_STEP_TIMEOUT)
        if grader.mode == "live" or grader.carry:
            return grade_work(task, box, image.spec(), timeout=timeout)
        patch = box.patch()
    return grade(task, image, patch, timeout=timeout)
