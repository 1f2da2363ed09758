r"""Run scripts in one bash that keeps its state between them.

bash reads commands from a pipe on its standard input (``bash -s``), byte by byte and never ahead. Each run sends one
``eval`` of the quoted script and one ``printf``, which reports the run's number, the working directory and the status
on a separate descriptor. The script cannot break out of its quotes, so a syntax error does not affect the next line.
The script cannot read the pipe either, because the ``eval`` has an empty standard input.

If bash exits (``exit``, ``set -e``, a signal) or is killed by a timeout or an interrupt, the next run starts a new
bash in the last working directory. All other state is lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import select
import signal
import time
from collections import deque
from dataclasses import dataclass

from . import descendants
from .exec import CHUNK, Leader, milliseconds, new_captures, readable, timeout_of, with_output
from .frames import Header
from .job import WorkerJob
from .spawn import Pipes, SpawnError, Stdio, spawn

START_PATIENCE = 30.0
"""Seconds that the first bash may take to start."""
_REPORT = 201
"""The descriptor on which bash reports; high, so that scripts do not use it by accident."""
_MOST_REPORTED = 1 << 16
_PATH_MAX = 4096
_TICKS = os.sysconf("SC_CLK_TCK")

# Backslashes bypass aliases, and "builtin" bypasses functions. DIRSTACK holds the directory even if PWD is unset.
_PREPARE = r"""\builtin shopt -s expand_aliases
\builtin trap '\builtin trap - DEBUG ERR
\builtin printf "\0exit\0%%s\0%%s\0" "${DIRSTACK-${PWD-}}" 0 >&%(report)d' EXIT
"""
# Set $? to the status of the last run. In an && list, a failure triggers neither "set -e" nor a trap.
_STATUS = "(\\builtin exit %d) && \\builtin :\n"
# If the report fails, exit with the run's status: $_ is the last argument of printf.
_RUN = r"""\builtin eval -- %(script)s </dev/null
\builtin printf '\0%%s\0%%s\0%%s\0' %(number)d "${DIRSTACK-${PWD-}}" "$?" >&%(report)d || \builtin exit "$_"
"""


def serve(job: WorkerJob, wakeup: int) -> None:
    """Serve a ``shell`` request until its holder hangs up."""
    shell = _Shell(job, wakeup)
    try:
        shell.begin()
    except SpawnError as error:
        job.fail(error, error.operation, error.path)
    except OSError as error:
        job.fail(error, "start a shell in", job.request["cwd"])
    else:
        shell.run()
    Leader(0).kill_tree()


class _Bash:
    """One bash and its pipes.

    Attributes:
        leader: its process.
        outputs: descriptors of its stdout and stderr.
    """

    def __init__(self, request: Header) -> None:
        self._number = min(_REPORT, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1)
        with Pipes() as pipes:
            (stdin, self._stdin), (self._report, report_write) = pipes.make(), pipes.make()
            (out_read, out_write), (err_read, err_write) = pipes.make(), pipes.make()
            stdio = Stdio([(stdin, 0), (out_write, 1), (err_write, 2), (report_write, self._number)])
            self.leader = Leader(spawn(request, stdio))
            pipes.keep(self._stdin, self._report, out_read, err_read)
        self.outputs = (out_read, err_read)
        self._open = {self._report, *self.outputs}
        self._unwritten = bytearray((_PREPARE % {"report": self._number}).encode())
        self._report_buffer = b""

    def begin(self, number: int, script: bytes, status: int) -> None:
        """Send a script to bash.

        Args:
            number: number of the run, for its report.
            script: the script.
            status: initial value of ``$?``.
        """
        quoted = b"'" + script.replace(b"'", b"'\\''") + b"'"
        lines = _RUN % {"number": number, "report": self._number, "script": quoted.decode("latin-1")}
        self._unwritten += ((_STATUS % status if status else "") + lines).encode("latin-1")
        self._report_buffer = b""
        self.write()

    def write(self) -> None:
        """Write pending input, as much as the pipe accepts now."""
        try:
            while self._unwritten:
                del self._unwritten[: os.write(self._stdin, self._unwritten[:CHUNK])]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # bash has exited or executed another program
            self._unwritten.clear()

    def interest(self) -> dict[int, int]:
        """Return the descriptors and events that poll(2) should look for."""
        events = dict.fromkeys(self._open, select.POLLIN)
        if self._unwritten:
            events[self._stdin] = select.POLLOUT
        return events

    def read(self, descriptor: int) -> bytes:
        """Return available bytes, or b"" if there are none."""
        if descriptor not in self._open:
            return b""
        try:
            chunk = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return b""
        if not chunk:
            self._open.discard(descriptor)
        return chunk

    def take_report(self) -> None:
        """Read its reports."""
        while chunk := self.read(self._report):
            self._report_buffer = (self._report_buffer + chunk)[-_MOST_REPORTED:]

    def report_of(self, number: bytes) -> tuple[str | None, int] | None:
        """Return the reported directory and status of a run, or None if there is no report.

        A script can forge a report, but only its own. The directory is None if the report contains an invalid path.
        """
        match = re.search(rb"\x00%s\x00([^\x00]*)\x00(\d{1,3})\x00" % number, self._report_buffer)
        if match is None:
            return None
        directory = match[1] if match[1].startswith(b"/") and len(match[1]) < _PATH_MAX else None
        return None if directory is None else os.fsdecode(directory), int(match[2]) & 0xFF

    def directory(self) -> str | None:
        """Return the working directory of a busy bash, or None if it cannot be read."""
        with contextlib.suppress(OSError):  # bash runs as another user
            path = os.readlink(f"/proc/{self.leader.pid}/cwd")
            return path if os.path.isdir(path) else None
        return None

    def go_on_if_stopped(self) -> None:
        """Continue a bash that stopped itself."""
        with contextlib.suppress(ChildProcessError):
            if os.waitid(os.P_PID, self.leader.pid, os.WSTOPPED | os.WNOHANG):
                self.leader.signal(signal.SIGCONT)

    def cpu(self) -> tuple[float, float]:
        """Return the CPU seconds of bash and its reaped children: (user, system)."""
        if (usage := self.leader.usage) is not None:
            return usage.ru_utime, usage.ru_stime
        fields = descendants.stat_fields(self.leader.pid)[11:15]
        if len(fields) < 4:
            return 0.0, 0.0
        user, system, child_user, child_system = map(int, fields)
        return (user + child_user) / _TICKS, (system + child_system) / _TICKS

    def close(self) -> None:
        """Close its pipes."""
        for descriptor in (self._stdin, self._report, *self.outputs):
            os.close(descriptor)


@dataclass(slots=True)
class _Run:
    """A script and its progress."""

    number: int
    script: bytes
    timeout: float | None
    started: float = 0.0
    interrupted: bool = False
    timed_out: bool = False

    def time_left(self) -> float | None:
        return None if self.timeout is None else self.started + self.timeout - time.monotonic()


class _Shell:
    """The event loop around a stateful bash; it starts a new bash if the last one has exited."""

    def __init__(self, job: WorkerJob, wakeup: int) -> None:
        self._request = job.request
        self._link = job.link()
        self._counters = job.counters
        self._wakeup = wakeup
        self._cwd = str(job.request["cwd"])
        self._bash: _Bash | None = None
        self._queue: deque[_Run] = deque()
        self._current_run: _Run | None = None
        self._status = 0
        self._cpu = (0.0, 0.0)
        self._background: set[int] = set()
        self._captures = new_captures(job.request)
        self._restarted = False
        self._is_closed = False

    # --- start and loop ---

    def begin(self) -> None:
        """Start the first bash.

        Raises:
            SpawnError: there is no such user or directory.
            OSError: no process could be started, there is no bash, or bash does not start in time.
        """
        self._bash = bash = self._start(is_first=self._request.get("again") is not True)
        deadline = time.monotonic() + START_PATIENCE
        bash.begin(0, b":", 0)
        while (report := bash.report_of(b"0")) is None and not self._is_closed:
            remaining = deadline - time.monotonic()
            if bash.leader.ended:
                self._collect(bash)
                message = self._captures[1].result().decode("utf-8", "replace").strip()
                raise OSError(errno.ENOENT, message or "bash ends at once")
            if remaining <= 0:
                raise OSError(errno.ETIMEDOUT, f"bash does not come up within {START_PATIENCE:.0f} s")
            self._step(remaining)
        self._cwd = (report and report[0]) or self._cwd
        self._link.put({"event": "started", "pid": bash.leader.pid, "cwd": self._cwd})

    def _start(self, *, is_first: bool) -> _Bash:
        """Start bash in the last directory; a later bash falls back to the request's directory, then to ``/``."""
        directories = (self._cwd, str(self._request["cwd"]), "/")
        for directory in directories[:1] if is_first else directories:
            try:
                bash = _Bash({**self._request, "cwd": directory})
            except SpawnError as error:
                if is_first or error.operation != "exec" or directory == "/":
                    raise
            else:
                self._cpu = (0.0, 0.0)
                return bash
        raise AssertionError

    def run(self) -> None:
        """Loop until the holder hangs up."""
        self._listen()
        while not self._is_closed:
            self._begin_next()
            self._step(None if self._current_run is None else self._current_run.time_left())
            self._check()

    def _step(self, wait: float | None) -> None:
        """Wait for events and handle them."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        poll.register(self._link, self._link.interest)
        bash = self._bash
        for descriptor, interest in (bash.interest() if bash else {}).items():
            poll.register(descriptor, interest)
        events = dict(poll.poll(milliseconds(wait)))
        if self._wakeup in events:
            os.read(self._wakeup, 4096)
            if bash is not None:
                bash.go_on_if_stopped()
            (bash.leader if bash else Leader(0)).reap()
        if bash is not None:
            bash.write()
            for capture, descriptor in zip(self._captures, bash.outputs, strict=True):
                if descriptor in events:
                    capture.add(bash.read(descriptor))
            bash.take_report()
        if link_events := events.get(self._link.fileno(), 0):
            self._link.flush()
            if link_events & ~select.POLLOUT:
                self._listen()

    # --- the holder ---

    def _listen(self) -> None:
        try:
            for header, payload in self._link.receive():
                number = header["run"]
                assert isinstance(number, int)
                if header["verb"] == "run":
                    self._queue.append(_Run(number, payload, timeout_of(header)))
                else:
                    self._interrupt(number)
        except (EOFError, OSError, ValueError):
            self._is_closed = True

    def _interrupt(self, number: int) -> None:
        for run in (*self._queue, *([self._current_run] if self._current_run else [])):
            if run.number == number:
                run.interrupted = True

    # --- runs ---

    def _begin_next(self) -> None:
        """Send the next run to bash; start a new bash if there is none."""
        while self._current_run is None and self._queue and not self._link.is_full:
            run = self._queue.popleft()
            if run.interrupted:
                self._answer(run, signal.SIGINT)
                continue
            run.started = time.monotonic()
            try:
                self._bash = self._bash or self._start(is_first=False)
            except OSError as error:
                self._captures[1].add(f"cannot start bash: {error.strerror}\n".encode())
                self._answer(run, 126 << 8, restarted=True)
                continue
            self._current_run = run
            self._bash.begin(run.number, run.script, self._status)

    def _check(self) -> None:
        """Finish the current run if bash has reported, has exited, or must be killed."""
        bash, run = self._bash, self._current_run
        if bash is None:
            return
        if run is not None and (report := bash.report_of(b"%d" % run.number)) is not None:
            self._cwd, self._status = report[0] or self._cwd, report[1]
            self._collect(bash)
            self._background = descendants.descendants() - {bash.leader.pid}
            self._answer(run, self._status << 8, cpu=bash.cpu())
        elif bash.leader.ended:
            self._lose(bash)
        elif run is not None and (run.interrupted or ((remaining := run.time_left()) is not None and remaining <= 0)):
            run.timed_out = not run.interrupted
            self._cwd = bash.directory() or self._cwd
            descendants.kill_all(bash.leader.reap, self._background)
            bash.leader.reap()
            self._lose(bash)

    def _lose(self, bash: _Bash) -> None:
        """Answer the current run after bash has exited; the next run starts a new bash."""
        self._collect(bash)
        bash.take_report()
        if (report := bash.report_of(b"exit")) is not None:
            self._cwd = report[0] or self._cwd
        run, self._bash, self._status = self._current_run, None, 0
        bash.close()
        if run is None:
            self._restarted = True
            return
        status = signal.SIGKILL if bash.leader.status is None else bash.leader.status
        self._background = descendants.descendants()
        self._answer(run, signal.SIGINT if run.interrupted else status, restarted=True, cpu=bash.cpu())

    def _collect(self, bash: _Bash) -> None:
        """Read the output that is available now; later output of background processes belongs to the next run."""
        for capture, descriptor in zip(self._captures, bash.outputs, strict=True):
            remaining = readable(descriptor)
            while remaining > 0 and (chunk := bash.read(descriptor)):
                capture.add(chunk)
                remaining -= len(chunk)

    def _answer(
        self, run: _Run, status: int, *, restarted: bool = False, cpu: tuple[float, float] | None = None
    ) -> None:
        cpu = cpu or self._cpu
        leader = Leader(0)
        leader.status, leader.timed_out, leader.counters = int(status), run.timed_out, self._counters
        leader.duration = time.monotonic() - run.started if run.started else 0.0
        cpu_seconds = [max(0.0, total - previous_total) for total, previous_total in zip(cpu, self._cpu, strict=True)]
        header = {**leader.exit_header(len(self._background)), "usage": [*cpu_seconds, 0]}
        self._counters.mark()
        header |= {"run": run.number, "restarted": restarted or self._restarted, "cwd": self._cwd}
        self._current_run, self._restarted, self._cpu = None, False, cpu
        captures, self._captures = self._captures, new_captures(self._request)
        self._link.put(*with_output(header, captures))
