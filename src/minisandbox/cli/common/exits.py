"""Define the exit statuses that are not errors of :mod:`minisandbox.errors`; docs/reference/exit-codes.md lists all."""

from __future__ import annotations

OK = 0
NEGATIVE = 1
USAGE = 2  # the status that argparse uses
INTERNAL = 70  # sysexits.h: EX_SOFTWARE
SYSTEM = 74  # sysexits.h: EX_IOERR
TIMEOUT = 124  # as with timeout(1)
INTERRUPTED = 130  # 128 + SIGINT
BROKEN_PIPE = 141  # 128 + SIGPIPE
TERMINATED = 143  # 128 + SIGTERM

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
