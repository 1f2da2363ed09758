"""Define the exit statuses that are not errors of :mod:`minisandbox.errors`; docs/reference/exit-codes.md lists all."""

from __future__ import annotations

# argparse exits with 2; 70 and 74 are EX_SOFTWARE and EX_IOERR of sysexits.h; 124 is the status of timeout(1);
# statuses above 128 are 128 plus the number of a signal.
OK = 0
NEGATIVE = 1
USAGE = 2
INTERNAL = 70
SYSTEM = 74
TIMEOUT = 124
INTERRUPTED = 130
BROKEN_PIPE = 141
TERMINATED = 143

MEANINGS: dict[int, str] = {
    OK: "success",
    NEGATIVE: "the command ran, and its result is negative: a task has a fault, a verdict is not the expected one",
    USAGE: "the command line is invalid: an unknown option, a missing argument",
    INTERNAL: "a bug in MiniSandbox; `--debug` shows where",
    SYSTEM: "an operating-system error that no class of error covers",
    TIMEOUT: "`sandbox run`, `sandbox exec`: the command reached `--timeout`",
    INTERRUPTED: "Ctrl-C; the last line reports what was kept",
    BROKEN_PIPE: "the reader of the output has closed it, as `head` does",
    TERMINATED: "SIGTERM; otherwise as after Ctrl-C",
}
