"""Run tests with a reporter, which sends the runner's results from inside a grading sandbox.

A pipe passes each line at once to a worker process, which the tests can neither trace nor open (it is not dumpable).
The worker passes the line to this process, so a written line cannot be revoked. A hash over a key binds each line to
all earlier ones. The plugin reads the key from another pipe before any code of the project runs. No file, environment
variable or argument contains the key. To forge a line, code under test must find the plugin's state in memory.
"""

from __future__ import annotations

import enum
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from minisandbox.grade.policy import import_roots
from minisandbox.grade.report import Report
from minisandbox.sandbox import Sandbox
from minisandbox.types import ExecResult, Output
from minisandbox.values import MiB

_INSIDE = Path(__file__).with_name("inside")

MAX_REPORT = 64 * MiB
"""The maximum size of a report in bytes, enough for about 200,000 tests."""
REPORT_VARIABLE = "MINISANDBOX_REPORT"
"""The variable that names the reporter's pipes."""
_KEY, _LINES = 8, 9
# The command's stdin is empty, and all its output is in one stream, which preserves the order.
_MOVE = f"exec {_KEY}<&0 {_LINES}>&1 </dev/null >&2"
# For commands whose children do not inherit file descriptors: the reporter opens two FIFOs, and unlinks them.
_BY_NAME = f"""\
mkfifo -m 600 "$1/key" "$1/lines"
cat <&{_KEY} > "$1/key" & cat < "$1/lines" >&{_LINES} &
exec {_KEY}<&- {_LINES}>&-
folder=$1; shift
"""
_THEN = """
status=$?
if [ -p "$folder/lines" ]; then kill $(jobs -p); fi 2> /dev/null
wait
exit $status"""


class RunnerKind(enum.Enum):
    """The kind of a test runner; the value is the name of the reporter's source file."""

    PYTEST = "report_plugin"
    """A plugin on pytest's command line, loaded when the interpreter starts."""

    OTHER = "runner_hook"
    """A ``sitecustomize`` for unittest's, Django's and SymPy's runners."""


@dataclass(frozen=True, slots=True)
class Reporter:
    """A reporter in one sandbox.

    Attributes:
        kind: the kind of the test runner.
        directory: the reporter's directory inside the sandbox.
        module: the name of the reporter's module.
    """

    kind: RunnerKind
    directory: str
    module: str

    @classmethod
    def make(cls, kind: RunnerKind) -> Reporter:
        """Create a reporter with a random name and directory."""
        module = f"report_{secrets.token_hex(6)}" if kind is RunnerKind.PYTEST else "sitecustomize"
        return cls(kind, f"/run/{secrets.token_hex(6)}", module)

    def install(self, box: Sandbox) -> None:
        """Install the reporter before the submission is applied, so that a full disk cannot prevent it.

        The files are written, not mounted, because the host's files may be readable by their owner only.

        Raises:
            FileAccessError: a file cannot be written.
            SandboxGone: the sandbox has ended.
        """
        files = {self.kind.value: self.module, "report_lines": f"{self.module}_lines"}
        if self.kind is RunnerKind.PYTEST:
            files["early_start"] = "sitecustomize"
            box.files.write_bytes(f"{self.directory}/repository", _repository(box), mode=0o444)
        for source, name in files.items():
            source_code = (_INSIDE / f"{source}.py").read_bytes()
            box.files.write_bytes(f"{self.directory}/{name}.py", source_code, mode=0o444)

    def environment(self, box: Sandbox) -> Mapping[str, str]:
        """Return the environment variables through which the test command loads the reporter."""
        python_path = dict(box.image.environment).get("PYTHONPATH")
        return {"PYTHONPATH": f"{python_path}:{self.directory}" if python_path else self.directory}


_SUFFIX = re.compile(rb"(?:/__init__)?\.[^/]*$")
_MODULES = """shopt -s nullglob
for place; do printf '%s\\n' "$place"/{*.py,*.so,*/__init__.py}; done"""


def _repository(box: Sandbox) -> bytes:
    """Return the repository's directory and, one per line, its modules in the image, without suffixes."""
    roots = sorted(import_roots(dict(box.image.environment), box.image.workdir))
    command = ["bash", "-c", _MODULES, "modules", *(root or "." for root in roots)]
    files = box.exec(command, timeout=60.0).stdout_bytes.splitlines()
    modules = {_SUFFIX.sub(b"", file.removeprefix(b"./")) for file in files if file}
    return b"\n".join((os.fsencode(box.image.workdir), *sorted(modules)))


def run_reported(
    box: Sandbox,
    command: str,
    arguments: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str],
    test_names: Sequence[str] = (),
    folder: str = "",
    program: str = "",
) -> tuple[ExecResult, Report]:
    """Run a test command, and read the lines of its reporter.

    Args:
        box: the sandbox.
        command: the shell command.
        arguments: arguments to append to the command; the shell does not parse them.
        timeout: the time limit in seconds.
        env: environment variables for the command.
        test_names: the tests to run, by the reporter's names; empty for all. All tests are collected.
        folder: a directory inside the sandbox for FIFOs, if the command's children do not inherit descriptors (tox).
        program: the program that runs the tests; other programs that load the reporter ignore it. Empty for pytest.

    Returns:
        The command's result, with all output as stderr, and the report, damaged if the plugin did not write every line.

    Raises:
        SandboxGone: the sandbox has ended.
    """
    key = secrets.token_hex(32).encode()
    if folder:
        argv = ["bash", "-c", f'{_MOVE}\n{_BY_NAME}{command} "$@"{_THEN}', "tests", folder, *arguments]
    else:
        argv = ["bash", "-c", f'{_MOVE}\n{command} "$@"', "tests", *arguments]
    pipes = f"{folder}/key:{folder}/lines" if folder else f"{_KEY}:{_LINES}"
    environment = {**env, REPORT_VARIABLE: f"{pipes}={program}" if program else pipes}
    payload, excess = bytearray(), False
    with box.start(argv, timeout=timeout, env=environment) as process:
        process.write(key + (json.dumps(list(test_names)).encode() if test_names else b""))
        process.close_stdin()
        for event in process.events():
            if isinstance(event, ExecResult):
                report = Report(damage="the report is too large") if excess else Report.parse(bytes(payload), key)
                return replace(event, stdout_bytes=b"", dropped_stdout=0), report
            if event.stream == "stdout":
                excess = _append(payload, event) or excess
                if excess:
                    process.kill()
    raise AssertionError("a process's last event is its result")


def _append(payload: bytearray, event: Output) -> bool:
    """Append a piece of the report; return whether the report exceeds its limit."""
    payload += event.data[: MAX_REPORT + 1 - len(payload)]
    return len(payload) > MAX_REPORT
