r"""A stateful bash, framed by its supervisor.

bash reads commands from its standard input (``bash -s``), a pipe of ours that it reads byte by byte, never ahead. For
each run it is sent one ``eval`` of the quoted script, and one ``printf`` that tells the run's number, the working
directory and the status on a descriptor of its own. The script cannot break out of its quotes, so that no syntax error
disturbs the next line; it never sees the pipe, because the ``eval`` has an empty standard input.

bash that ends (``exit``, ``set -e``, an error that ends a script) tells its state in an EXIT trap, and the next run
starts another bash that begins with it. What has to be interrupted is ended in the same way, by a signal. If bash has
taken everything we sent and says nothing (``set -n``, a function called ``builtin``), it is lost and replaced too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import descendants
from .capture import Capture
from .command import CHUNK, Leader, Pipes, milliseconds, readable, timeout_of, with_output
from .frames import Header
from .spawn import RefusedError, Stdio, spawn

if TYPE_CHECKING:
    from .worker import Job

_REPORT = 201
"""The descriptor on which bash reports: too high to be anybody's by chance."""
_MOST_STATE = 16 << 20
_MOST_DIGITS = 10
_PATH_MAX = 4096
START_PATIENCE = 30.0
"""Seconds after which a bash that has not come up, whatever it is that is called so, is given up."""
_PATIENCE = 2.0
"""Seconds that bash has for telling its state when it is interrupted."""
_LOST_AFTER = 1.0
"""Seconds after which a bash that has taken everything, sleeps and says nothing is lost."""
_LOST_AFTER_WITH_CHILDREN = 10.0
"""The same where it may be waiting for a child, such as that of a DEBUG trap."""
_INTERRUPT = signal.SIGVTALRM
"""Ends bash by its EXIT trap, and is nobody's own."""

_TICKS = os.sysconf("SC_CLK_TCK")

# Backslashes keep aliases away. Nothing is defined that a script could see or change, but for the trap.
# DEBUG traps must not write into the state; ``|| :`` because the shell may have been left by set -e.
_PREPARE = r"""\builtin shopt -s expand_aliases
\builtin trap '\builtin trap - DEBUG ERR; \builtin printf "exit\0%%s\0" "${DIRSTACK-${PWD-}}" >&%(report)d; { \builtin set +t; \builtin shopt -p; \builtin declare -fp; \builtin declare -p; \builtin alias -p; \builtin set +o; } >&%(report)d 2>/dev/null || \builtin :; \builtin printf "\0" >&%(report)d' EXIT
\builtin eval -- %(restore)s </dev/null >/dev/null 2>&1
"""  # noqa: E501 - lines of bash
_READY = r"""
\builtin printf 'ready\0%%s\0\0' "${DIRSTACK-}" >&%d
"""
# The status a script sees as $? is that of the run before; in an && list, it neither ends the shell nor calls a trap.
_STATUS = "(\\builtin exit %d) && \\builtin :\n"
# $_ is the status again: where the report cannot be made, it becomes bash's own.
_RUN = r"""\builtin eval -- %(script)s </dev/null
\builtin printf '%(number)d\0%%s\0%%s\0' "${DIRSTACK-${PWD-}}" "$?" >&%(report)d || \builtin exit "$_"
"""


def serve(job: Job, wakeup: int) -> None:
    """Carry out a ``shell`` request, until its holder hangs up."""
    shell = _Shell(job, wakeup)
    try:
        shell.begin()
    except RefusedError as error:
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
        outputs: descriptors to read its stdout and stderr from.
        report: descriptor to read its reports from.
        ready: whether it has said that it takes runs.
        born: when it was started, as time.monotonic() counts.
        restores: whether it began with the state of another one.
    """

    def __init__(self, request: Header, state: bytes) -> None:
        number = min(_REPORT, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1)
        with Pipes() as pipes:
            (stdin, self._stdin), (self.report, report) = pipes.make(), pipes.make()
            (out_read, out), (err_read, err) = pipes.make(), pipes.make()
            self.leader = Leader(spawn(request, Stdio([(stdin, 0), (out, 1), (err, 2), (report, number)])))
            pipes.keep(self._stdin, self.report, out_read, err_read)
        self.outputs = (out_read, err_read)
        self.ready = False
        self.born = time.monotonic()
        self.restores = bool(state)
        self._number = number
        self._last_sent = 0
        self._unwritten = bytearray()
        self._said = bytearray()
        self._open = {self.report, *self.outputs}
        self._broken = False
        restore = _quoted(state + (_READY % number).encode())
        self._say((_PREPARE % {"report": number, "restore": restore.decode("latin-1")}).encode("latin-1"))

    def _say(self, lines: bytes) -> None:
        self._unwritten += lines
        self.write()

    def begin(self, number: int, script: bytes, status: int) -> None:
        """Send a run."""
        before = _STATUS % status if status else ""
        lines = _RUN % {"number": number, "report": self._number, "script": _quoted(script).decode("latin-1")}
        self._last_sent = len(before) + len(lines)
        self._say((before + lines).encode("latin-1"))

    def write(self) -> None:
        """Write what bash takes now."""
        with contextlib.suppress(BlockingIOError):
            try:
                while self._unwritten:
                    del self._unwritten[: os.write(self._stdin, self._unwritten[:CHUNK])]
            except BrokenPipeError:  # it has ended, or become another program
                self._broken = True

    @property
    def has_taken_all(self) -> bool:
        """Whether it has read every line that it was sent: it reads the last one only when the script is over."""
        return not self._broken and not self._unwritten and readable(self._stdin) == 0

    @property
    def has_begun(self) -> bool:
        """Whether it has read anything of the last run, or has ended without."""
        return len(self._unwritten) + readable(self._stdin) < self._last_sent

    def interest(self) -> dict[int, int]:
        """What poll(2) should look for."""
        wanted = dict.fromkeys(self._open, select.POLLIN)
        if self._unwritten and not self._broken:
            wanted[self._stdin] = select.POLLOUT
        return wanted

    def read(self, descriptor: int) -> bytes:
        """Some bytes, if there are any now."""
        if descriptor not in self._open:
            return b""
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return b""
        if not data:
            self._open.discard(descriptor)
        return data

    def reports(self) -> list[list[bytes]]:
        """What it has reported since the last time: what, working directory, and status or state."""
        while len(self._said) <= _MOST_STATE and (data := self.read(self.report)):
            self._said += data
        *fields, rest = bytes(self._said).split(b"\0")
        complete = len(fields) - len(fields) % 3
        if complete:
            self._said = bytearray(b"\0".join([*fields[complete:], rest]))
        elif len(self._said) > _MOST_STATE:  # nothing of ours
            self._said.clear()
        return [fields[start : start + 3] for start in range(0, complete, 3)]

    def half_a_report(self) -> list[bytes]:
        """What has come of a report that was cut off."""
        return bytes(self._said).split(b"\0")

    def go_on_if_stopped(self) -> None:
        """Nobody else would wake a shell that has stopped itself."""
        with contextlib.suppress(ChildProcessError):
            if os.waitid(os.P_PID, self.leader.pid, os.WSTOPPED | os.WNOHANG):
                self.leader.signal(signal.SIGCONT)

    @property
    def is_late(self) -> bool:
        """Whether it should have come up by now."""
        return not self.ready and time.monotonic() >= self.born + START_PATIENCE

    @property
    def is_asleep(self) -> bool:
        """Whether it waits for something, rather than for a processor."""
        return descendants.stat_fields(self.leader.pid)[:1] == [b"S"]

    def cpu(self) -> tuple[float, float]:
        """Seconds that it and the children it waited for have used: in user mode, in the kernel."""
        if (usage := self.leader.usage) is not None:
            return usage.ru_utime, usage.ru_stime
        fields = descendants.stat_fields(self.leader.pid)[11:15]
        if len(fields) < 4:
            return 0.0, 0.0
        user, system, of_children, of_children_system = map(int, fields)
        return (user + of_children) / _TICKS, (system + of_children_system) / _TICKS

    def close(self) -> None:
        """Close its pipes."""
        for descriptor in (self._stdin, self.report, *self.outputs):
            os.close(descriptor)


def _quoted(text: bytes) -> bytes:
    """Text as one word of bash, whatever is in it."""
    return b"'" + text.replace(b"'", b"'\\''") + b"'"


def _is_directory(said: bytes) -> bool:
    """Whether what was reported can be a working directory: anything may write a report."""
    return said.startswith(b"/") and len(said) < _PATH_MAX


@dataclass(slots=True)
class _Run:
    """A script that was asked for, and how it goes."""

    number: int
    script: bytes
    timeout: float | None
    started: float = 0.0
    cpu: tuple[float, float] = (0.0, 0.0)
    earlier: frozenset[int] = frozenset()
    again: bool = False
    interrupted: bool = False
    timed_out: bool = False


class _Shell:
    """The event loop around a stateful bash; the bash may be another one after a run."""

    def __init__(self, job: Job, wakeup: int) -> None:
        self._request = job.request
        self._link = job.link()
        self._counters = job.counters
        self._wakeup = wakeup
        self._cwd = str(job.request["cwd"])
        self._state = b""
        self._status = 0
        self._waiting: deque[_Run] = deque()
        self._current: _Run | None = None
        self._lost_since: float | None = None
        self._captures = self._new_captures()
        self._closed = False
        self._silently_replaced = False
        self.bash: _Bash | None = None

    def _new_captures(self) -> list[Capture]:
        limit = self._request["output"]
        assert isinstance(limit, int)
        return [Capture(limit), Capture(limit)]

    # --- its life ---

    def begin(self) -> None:
        """Start bash for the first time.

        Raises:
            RefusedError: there is no such user or directory.
            OSError: no process could be made, or there is no bash, or it does not come up.
        """
        self.bash = bash = self._start(again=self._request.get("again") is True)
        while not bash.ready and not bash.leader.ended and not bash.is_late and not self._closed:
            self._step()
        if not bash.ready:
            self._collect()
            if bash.is_late:
                raise OSError(errno.ETIMEDOUT, f"bash does not come up within {START_PATIENCE:.0f} s")
            raise OSError(2, self._captures[1].result().decode("utf-8", "replace").strip() or "bash ends at once")
        self._link.put({"event": "started", "pid": bash.leader.pid, "cwd": self._cwd})

    def _start(self, *, again: bool) -> _Bash:
        """A bash in the current directory; where that is gone and bash has run before, in another one."""
        request = {**self._request, "cwd": self._cwd}
        if self._state:  # which says what the environment is
            request["env"] = []
        for directory in (self._cwd, str(self._request["cwd"]), "/"):
            try:
                return _Bash({**request, "cwd": directory}, self._state)
            except RefusedError as error:
                if not again or error.operation != "exec" or directory == "/":
                    raise
        raise AssertionError

    def run(self) -> None:
        """Loop until the holder hangs up."""
        self._listen()
        while not self._closed:
            self._begin_next()
            self._step()
            self._check_current()

    def _step(self) -> None:
        """Wait for something to happen, and take it in."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        poll.register(self._link, self._link.interest)
        bash = self.bash
        for descriptor, interest in (bash.interest() if bash else {}).items():
            poll.register(descriptor, interest)
        events = dict(poll.poll(milliseconds(self._time_left())))
        if self._wakeup in events:
            os.read(self._wakeup, 4096)
            if bash is not None:
                bash.go_on_if_stopped()
                bash.leader.reap()
            else:
                Leader(0).reap()
        if bash is not None:
            self._take_output(bash)
        if happened := events.get(self._link.fileno(), 0):
            self._link.flush()
            if happened & ~select.POLLOUT:
                self._listen()

    def _take_output(self, bash: _Bash) -> None:
        bash.write()
        for capture, descriptor in zip(self._captures, bash.outputs, strict=True):
            capture.add(bash.read(descriptor))
        self._take_reports(bash)

    def _time_left(self) -> float | None:
        run, bash = self._current, self.bash
        if run is None:
            return None if bash is None or bash.ready else max(0.0, bash.born + START_PATIENCE - time.monotonic())
        waits = [_LOST_AFTER]
        if run.timeout is not None:
            waits.append(run.started + run.timeout - time.monotonic())
        return min(waits)

    # --- the holder ---

    def _listen(self) -> None:
        try:
            for header, payload in self._link.receive():
                number = header["run"]
                assert isinstance(number, int)
                if header["verb"] == "run":
                    self._waiting.append(_Run(number, payload, timeout_of(header)))
                else:
                    self._interrupt(number)
        except (EOFError, OSError, ValueError):
            self._closed = True

    def _interrupt(self, number: int) -> None:
        for run in (*self._waiting, *([self._current] if self._current else [])):
            if run.number == number:
                run.interrupted = True

    # --- runs ---

    def _begin_next(self) -> None:
        """Start the next run, and a bash for it if there is none."""
        if self._current is not None or not self._waiting or self._link.full:
            return
        run = self._waiting.popleft()
        if run.interrupted:
            self._answer(run, signal.SIGINT, replaced=False)
            return
        run.started = time.monotonic()
        if self.bash is None:
            try:
                self.bash = self._start(again=True)
            except OSError as error:
                self._captures[1].add(f"cannot start bash: {error.strerror}\n".encode())
                self._answer(run, 126 << 8, replaced=True)
                return
        self._send(self.bash, run)

    def _send(self, bash: _Bash, run: _Run) -> None:
        run.earlier = frozenset(descendants.descendants() - {bash.leader.pid})
        run.cpu = bash.cpu()
        self._current, self._lost_since = run, None
        bash.begin(run.number, run.script, self._status)

    def _take_reports(self, bash: _Bash) -> None:
        for what, directory, value in bash.reports():
            run = self._current
            is_answer = run is not None and what == b"%d" % run.number and value.isdigit() and len(value) < _MOST_DIGITS
            if not is_answer and what not in (b"ready", b"exit"):
                continue  # written by somebody else
            if _is_directory(directory):
                self._cwd = os.fsdecode(directory)
            bash.ready = bash.ready or what != b"exit"
            self._state = value if what == b"exit" else b""
            if is_answer:
                self._finish(bash, int(value) & 0xFF)

    def _finish(self, bash: _Bash, status: int) -> None:
        """The current run is over, and bash takes the next one."""
        run = self._current
        assert run is not None
        self._status = status
        self._collect()
        left = len(descendants.descendants() - {bash.leader.pid})
        self._answer(run, status << 8, replaced=False, left_running=left)

    def _check_current(self) -> None:
        """See whether bash has ended, is lost, or has to be ended."""
        bash, run = self.bash, self._current
        if bash is None:
            return
        if bash.leader.ended:
            self._lose(bash)
        elif run is not None:
            now = time.monotonic()
            run.timed_out = run.timeout is not None and now >= run.started + run.timeout
            if run.timed_out or run.interrupted or bash.is_late or self._is_lost(bash, now):
                self._break(bash, run)

    def _is_lost(self, bash: _Bash, now: float) -> bool:
        """Whether it waits for us as we wait for it."""
        if not bash.has_taken_all or not bash.is_asleep:
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = now
        elif now - self._lost_since >= _LOST_AFTER:
            has_children = bool(descendants.child_processes(bash.leader.pid))
            return not has_children or now - self._lost_since >= _LOST_AFTER_WITH_CHILDREN
        return False

    def _break(self, bash: _Bash, run: _Run) -> None:
        """End a run and what it has started, and bash with it, which may tell its state before.

        All of it is stopped first: nothing of the script is carried out after its end.
        """
        descendants.stop_all(run.earlier)
        self._take_output(bash)
        if self._current is None:  # it had just finished
            descendants.signal_all(descendants.descendants(run.earlier), signal.SIGCONT)
            return
        give_up = time.monotonic() + _PATIENCE
        self._kill_others(bash, run)
        bash.leader.signal(_INTERRUPT)
        bash.leader.signal(signal.SIGCONT)
        while not bash.leader.ended and time.monotonic() < give_up:
            self._take_output(bash)
            bash.leader.reap()
            time.sleep(0.001)
        bash.leader.signal(signal.SIGKILL)
        self._kill_others(bash, run)
        give_up = time.monotonic() + descendants.KILL_PATIENCE
        while not bash.leader.ended and time.monotonic() < give_up:
            bash.leader.reap()
            time.sleep(0.0005)
        if bash.leader.status is None:
            bash.leader.status = signal.SIGKILL
        self._lose(bash)

    def _kill_others(self, bash: _Bash, run: _Run) -> None:
        """Kill what the run has started; what earlier ones have started may go on making more."""
        give_up = time.monotonic() + _PATIENCE
        while (others := descendants.descendants(run.earlier) - {bash.leader.pid}) and time.monotonic() < give_up:
            descendants.signal_all(others, signal.SIGKILL)
            bash.leader.reap()
            time.sleep(0.0005)

    def _lose(self, bash: _Bash) -> None:
        """Bash has ended: take its last words, and answer for it."""
        run = self._current
        self._collect()
        self._take_reports(bash)
        what, *rest = bash.half_a_report()
        if what == b"exit" and rest and _is_directory(rest[0]):
            self._cwd = os.fsdecode(rest[0])
        if not bash.ready and bash.restores:  # it did not survive the state of its predecessor
            self._state = b""
        self.bash = None
        if run is None:
            self._silently_replaced = True
        elif bash.has_begun or run.again or run.timed_out or run.interrupted:
            self._answer_end(bash, run)
        else:
            self._current, run.again = None, True
            self._waiting.appendleft(run)
            if bash.restores:
                self._state = b""
        bash.close()

    def _answer_end(self, bash: _Bash, run: _Run) -> None:
        status = bash.leader.status or 0
        self._status = 0
        if run.interrupted:
            status = int(signal.SIGINT)
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == _INTERRUPT:
            status = int(signal.SIGKILL)  # ours, because it was lost
        left = len(descendants.descendants())
        self._answer(run, status, replaced=True, left_running=left, cpu=bash.cpu())

    def _collect(self) -> None:
        """Read what was written before now; of what background processes write on, the next run gets the rest."""
        bash = self.bash
        if bash is None:
            return
        for capture, descriptor in zip(self._captures, bash.outputs, strict=True):
            left = readable(descriptor)
            while left > 0 and (data := bash.read(descriptor)):
                capture.add(data)
                left -= len(data)

    def _answer(
        self,
        run: _Run,
        status: int,
        *,
        replaced: bool,
        left_running: int = 0,
        cpu: tuple[float, float] | None = None,
    ) -> None:
        now = cpu or (self.bash.cpu() if self.bash else run.cpu)
        leader = Leader(0)
        leader.status, leader.timed_out, leader.counters = status, run.timed_out, self._counters
        leader.duration = time.monotonic() - run.started if run.started else 0.0
        used = [max(0.0, after - before) for after, before in zip(now, run.cpu, strict=True)]
        header = {**leader.fate(left_running), "usage": [*used, 0]}
        self._counters.mark()
        header |= {"run": run.number, "replaced": replaced or self._silently_replaced, "cwd": self._cwd}
        self._current, self._silently_replaced = None, False
        captures, self._captures = self._captures, self._new_captures()
        self._link.put(*with_output(header, captures))
