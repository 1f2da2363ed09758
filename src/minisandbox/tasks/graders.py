"""Configure the graders of tasks; the package ``minisandbox.grade`` runs them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

from minisandbox.tasks.fields import bad_field, keys_of, object_of
from minisandbox.tasks.languages import check_command

REPORTERS = ("pytest", "unittest", "none")
RULES = ("pass_and_fail", "fail_only")
MODES = ("fresh", "live")
_PARSER = re.compile(r"(?:swebench|swebench5|swesmith):\S+")


@dataclass(frozen=True, slots=True)
class PytestGrader:
    """Run pytest with a plugin that sends each result out of the sandbox with a keyed hash; the strongest grader.

    Attributes:
        command: the shell command that runs pytest in the image's working directory; the grader appends files and
            options.
        timeout: the time limit, in seconds, for the tests of one grading.
    """

    kind: ClassVar[str] = "pytest"
    reporter: ClassVar[str] = "pytest"

    command: str = "python -m pytest"
    timeout: float = 300.0

    def __post_init__(self) -> None:
        _check(self.command, self.timeout)
        check_command(self.command)

    def to_row(self) -> dict[str, object]:
        """Return the grader as the value of a row's ``test``."""
        return object_of(self, keys_of(PytestGrader))


@dataclass(frozen=True, slots=True)
class LogGrader:
    """Run a command, and grade its output with a benchmark's own parser and rules.

    Attributes:
        command: the shell command that runs the tests in the image's working directory.
        parser: ``swebench5:parse_log_...`` (swebench 5.0.2), ``swebench:OWNER/NAME`` or ``swebench:parse_log_...``
            (4.1.0), or ``swesmith:PROFILE``.
        rule: SWE-bench's ``eval_type``. A test that is missing from the log has failed with ``pass_and_fail``, and has
            passed with ``fail_only``.
        reporter: a second source of results, which must agree with the log: ``pytest`` (a plugin), ``unittest`` (a hook
            in the runners of unittest, Django and SymPy), or ``none`` if only the log decides.
        timeout: the time limit, in seconds, for the tests of one grading.
    """

    kind: ClassVar[str] = "log"

    command: str
    parser: str
    rule: str = "pass_and_fail"
    reporter: str = "none"
    timeout: float = 300.0

    def __post_init__(self) -> None:
        _check(self.command, self.timeout)
        if not _PARSER.fullmatch(self.parser):
            raise bad_field(
                "test.parser",
                f"is {self.parser!r}",
                reason="the log of a test command is read by a benchmark's own parser",
                hint="give swebench5:parse_log_gotest, swebench:OWNER/NAME or swesmith:PROFILE",
            )
        _check_choice("test.rule", self.rule, RULES)
        _check_choice("test.reporter", self.reporter, REPORTERS)

    def to_row(self) -> dict[str, object]:
        """Return the grader as the value of a row's ``test``."""
        return {"grader": self.kind, **object_of(self, keys_of(LogGrader))}


@dataclass(frozen=True, slots=True)
class ScriptGrader:
    """Run a script that writes the reward to a file, as Harbor's verifiers do.

    Attributes:
        command: the shell command; it starts in ``workdir``.
        files: a host directory that only the grader gets, copied to ``files_at``; or None.
        files_at: the directory of ``files`` inside the sandbox.
        reward_file: the file inside the sandbox to which the script writes the reward, a number. A file with the same
            name and the suffix ``.json`` takes precedence: an object of numbers, whose ``reward`` or only value counts.
            Both files are deleted before the script runs, so the agent cannot forge them.
        mode: ``fresh`` grades in a new sandbox, with the submission applied to clean code. ``live`` grades in the
            agent's sandbox, where the agent's processes may still run. Its verdict is marked, because the agent could
            have changed every tool that the script uses.
        timeout: the script's time limit in seconds.
        environment: environment variables that only the script gets.
        user: the user who runs the script; "" for the image's user.
        workdir: the script's working directory; "" for the image's.
        carry: paths to copy from the agent's sandbox to a clean one, absolute or relative to the image's working
            directory. These paths are the submission in ``fresh`` mode, and when a ``live`` verdict is graded again.
            Without paths, the patch is the submission.
    """

    kind: ClassVar[str] = "script"
    reporter: ClassVar[str] = "none"

    command: str = "bash /tests/test.sh"
    files: Path | None = None
    files_at: str = "/tests"
    reward_file: str = "/logs/verifier/reward.txt"
    mode: str = "fresh"
    timeout: float = 600.0
    environment: tuple[tuple[str, str], ...] = ()
    user: str = ""
    workdir: str = ""
    carry: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self.command, self.timeout)
        _check_choice("test.mode", self.mode, MODES)
        for name in ("files_at", "reward_file"):
            path = PurePosixPath(getattr(self, name))
            if not path.is_absolute() or ".." in path.parts or len(path.parts) < 2:
                raise bad_field(f"test.{name}", f"is {str(path)!r}", hint="give an absolute path inside the sandbox")

    def to_row(self) -> dict[str, object]:
        """Return the grader as the value of a row's ``test``."""
        always = ("command", "files_at", "reward_file", "mode", "timeout")
        return {"grader": self.kind, **object_of(self, always)}


Grader = PytestGrader | LogGrader | ScriptGrader

KINDS: Mapping[str, type[Grader]] = {kind.kind: kind for kind in (PytestGrader, LogGrader, ScriptGrader)}
"""The grader classes, by their name in rows."""


def _check(command: str, timeout: float) -> None:
    if not command.strip():
        raise bad_field("test.command", "is empty", hint="say how the tests are run, e.g. 'python -m pytest'")
    if not 0 < timeout < float("inf"):
        raise bad_field("test.timeout", f"is {timeout}", hint="give seconds, more than 0")


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise bad_field(field, f"is {value!r}", hint=f"known are {', '.join(choices)}")
