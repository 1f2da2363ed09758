"""Exit statuses. Those of errors are in :mod:`minisandbox.errors`; docs/reference/exit-codes.md lists all of them."""

from __future__ import annotations

OK = 0
NEGATIVE = 1
"""The command did its work, and what it looked at is not as it should be."""
USAGE = 2
"""The command line itself is wrong (argparse's own choice)."""
INTERNAL = 70
"""A mistake of MiniSandbox (sysexits.h: EX_SOFTWARE)."""
SYSTEM = 74
"""The operating system refused something that no class of error covers (sysexits.h: EX_IOERR)."""
TIMEOUT = 124
"""The command of ``sandbox run`` or ``exec`` ran into its timeout, as timeout(1) has it."""
INTERRUPTED = 130
"""Ctrl-C: 128 and SIGINT."""
BROKEN_PIPE = 141
"""Whoever read the output has gone: 128 and SIGPIPE."""
TERMINATED = 143
"""128 and SIGTERM."""

MEANINGS: dict[int, str] = {
    OK: "all went well, and what was looked at is as it should be",
    NEGATIVE: "the command did its work, and what it looked at is not as it should be: a task is not valid, "
    "a verdict is not the expected one",
    USAGE: "the command line itself is wrong: an unknown option, a missing argument",
    INTERNAL: "a mistake of MiniSandbox; `--debug` shows where",
    SYSTEM: "the operating system refused something that no class of error covers",
    TIMEOUT: "`sandbox run`, `sandbox exec`: the command ran into `--timeout`",
    INTERRUPTED: "Ctrl-C; the last line says what was kept",
    BROKEN_PIPE: "whoever read the output has gone, as `head` does",
    TERMINATED: "SIGTERM; as after Ctrl-C",
}
