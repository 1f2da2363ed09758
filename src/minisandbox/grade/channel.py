"""The report channel: how the plugin inside a grading sandbox tells us what it sees.

The lines go through a pipe, as they happen, to a worker that the tests can neither trace nor open (it is not dumpable),
and from there to us: what was written cannot be taken back. Each line is bound to all before it by a hash over a key,
which the plugin read from another pipe before any code of the project ran. Neither is in a file, in the environment or
among the arguments. Code under test that wants to forge a line has to find the plugin's memory first.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from minisandbox.grade.report import Report
from minisandbox.sandbox import Sandbox
from minisandbox.types import ExecResult, MiB, Output

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


def run_reported(
    box: Sandbox,
    command: str,
    arguments: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str],
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
    place = f"{folder}/key:{folder}/lines" if folder else f"{_KEY}:{_LINES}"
    environment = {**env, REPORT_VARIABLE: f"{place}={program}" if program else place}
    data, excess = bytearray(), False
    with box.start(argv, timeout=timeout, env=environment) as process:
        process.write(key)
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
