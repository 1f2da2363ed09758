"""Reporters: what tells us, from inside a grading sandbox, what a test runner says of each test, and how.

The lines go through a pipe, as they happen, to a worker that the tests can neither trace nor open (it is not dumpable),
and from there to us: what was written cannot be taken back. Each line is bound to all before it by a hash over a key,
which the plugin read from another pipe before any code of the project ran. Neither is in a file, in the environment or
among the arguments. Code under test that wants to forge a line has to find the plugin's memory first.
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
from minisandbox.types import ExecResult, MiB, Output

_INSIDE = Path(__file__).with_name("inside")

MAX_REPORT = 64 * MiB
"""Bytes of the largest report that is read: about 200,000 tests."""
REPORT_VARIABLE = "MINISANDBOX_REPORT"
"""Tells the reporter where the lines go."""
_KEY, _LINES = 8, 9
# The command's own standard input is empty, and all its output is in one stream, in the order it was written.
_MOVE = f"exec {_KEY}<&0 {_LINES}>&1 </dev/null >&2"
# Where descriptors are not handed on: two FIFOs, which the reporter removes when it has them open.
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
    """Which runner a reporter belongs to, by the file that it is."""

    PYTEST = "report_plugin"
    """A plugin that is named on pytest's command line, and loaded when the interpreter starts."""

    OTHER = "runner_hook"
    """What the interpreter of the test command imports when it starts: for unittest's, Django's and SymPy's runners."""


@dataclass(frozen=True, slots=True)
class Reporter:
    """One reporter in one sandbox.

    Attributes:
        kind: which.
        directory: where it lies inside.
        module: its name.
    """

    kind: RunnerKind
    directory: str
    module: str

    @classmethod
    def make(cls, kind: RunnerKind) -> Reporter:
        """Return one with a random name and place."""
        module = f"report_{secrets.token_hex(6)}" if kind is RunnerKind.PYTEST else "sitecustomize"
        return cls(kind, f"/run/{secrets.token_hex(6)}", module)

    def install(self, box: Sandbox) -> None:
        """Put it into a sandbox; before a submission is, so that a full disk cannot keep it out.

        It is written, not mounted: the host's file may be readable to its owner only.

        Raises:
            FileAccessError: it cannot be written.
            SandboxGone: the sandbox has ended.
        """
        files = {self.kind.value: self.module, "report_lines": f"{self.module}_lines"}
        if self.kind is RunnerKind.PYTEST:
            files["early_start"] = "sitecustomize"
            box.files.write_bytes(f"{self.directory}/repository", _repository(box), mode=0o444)
        for source, name in files.items():
            data = (_INSIDE / f"{source}.py").read_bytes()
            box.files.write_bytes(f"{self.directory}/{name}.py", data, mode=0o444)

    def environment(self, box: Sandbox) -> Mapping[str, str]:
        """Return the variables under which the test command finds it."""
        python_path = dict(box.image.environment).get("PYTHONPATH")
        return {"PYTHONPATH": f"{python_path}:{self.directory}" if python_path else self.directory}


_SUFFIX = re.compile(rb"(?:/__init__)?\.[^/]*$")
_MODULES = """shopt -s nullglob
for place; do printf '%s\\n' "$place"/{*.py,*.so,*/__init__.py}; done"""


def _repository(box: Sandbox) -> bytes:
    """Return the repository's directory and, a line each, the modules that its image has in it, without suffixes."""
    places = sorted(import_roots(dict(box.image.environment), box.image.workdir))
    command = ["bash", "-c", _MODULES, "modules", *(place or "." for place in places)]
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
    chosen: Sequence[str] = (),
    folder: str = "",
    program: str = "",
) -> tuple[ExecResult, Report]:
    """Run a test command whose plugin reports to us.

    Args:
        box: the sandbox.
        command: shell text.
        arguments: what is appended to it, past the shell's own parsing.
        timeout: seconds it may take.
        env: variables for it.
        chosen: the tests to run, as the reporter knows them; all are collected. None: all run.
        folder: a directory inside, for a command that does not hand descriptors on (tox): the pipes have names there.
        program: the name of the program that runs the tests, for reporters that any interpreter loads.

    Returns:
        Its fate, with all it printed as stderr; and the report, damaged where it cannot be the plugin's alone.

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
    data, excess = bytearray(), False
    with box.start(argv, timeout=timeout, env=environment) as process:
        process.write(key + (json.dumps(list(chosen)).encode() if chosen else b""))
        process.close_stdin()
        for event in process.events():
            if isinstance(event, ExecResult):
                report = Report(damage="the report is too large") if excess else Report.parse(bytes(data), key)
                return replace(event, stdout_bytes=b"", dropped_stdout=0), report
            if event.stream == "stdout":
                excess = _take(data, event) or excess
                if excess:
                    process.kill()
    raise AssertionError("a process's last event is its result")


def _take(data: bytearray, event: Output) -> bool:
    """Keep a piece of the report; returns whether there is more than can be its own."""
    data += event.data[: MAX_REPORT + 1 - len(data)]
    return len(data) > MAX_REPORT
