"""A started process: its output goes out as it comes, its input and signals come in as they are sent.

Nobody waits inside: frames that the holder does not read stay few, because the process's pipes are then not read
either, and the process waits in write(2). The holder's frames are always read, so that signals and a hang-up get
through.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
import termios
import time
from typing import TYPE_CHECKING

from .capture import Capture
from .command import CHUNK, DRAIN, Leader, Pipes, milliseconds, readable, refusal, timeout_of
from .frames import STDIN_CREDIT, Header
from .link import Link
from .spawn import RefusedError, Stdio, spawn

if TYPE_CHECKING:
    from .worker import Job

_MOST_AT_THE_DOOR = 8
"""How many may come, and how many may go, without a word said or heard."""
_TIOCGPTN, _TIOCSPTLCK = 0x80045430, 0x40045431


def serve(job: Job, wakeup: int) -> None:
    """Carry out a ``start`` request, until the process and whatever it leaves running has ended."""
    link = job.link()
    try:
        started = _Process.start(job.request)
    except RefusedError as error:
        job.fail(error, error.operation, error.path)
        return
    except OSError as error:
        header, complaint = refusal(error)
        job.send({"event": "started", "pid": 0, "dropped": [0, 0], "credit": STDIN_CREDIT})
        job.send({"event": "output", "stream": 1}, complaint)
        job.send(header)
        return
    door = socket.socket(fileno=job.door) if job.door >= 0 else None
    started.leader.counters = job.counters
    _Supervisor(started, link, door, wakeup).run()


class _Process:
    """A process and its descriptors.

    Attributes:
        leader: its first process.
        request: what was asked for.
        terminal: descriptor of its terminal's other side, or -1.
        stdin: descriptor to write to, or -1.
        outputs: descriptors to read from, each with the number of its stream.
    """

    def __init__(self, request: Header, pid: int, stdin: int, outputs: dict[int, int], terminal: int = -1) -> None:
        self.leader = Leader(pid, timeout_of(request))
        self.request = request
        self.stdin = stdin
        self.outputs = outputs
        self.terminal = terminal
        self.slave = -1
        self.unwritten = bytearray()
        self.closing = False

    @classmethod
    def start(cls, request: Header) -> _Process:
        """Start what a request asks for.

        Raises:
            RefusedError: there is no such user or directory.
            OSError: no process could be made.
        """
        size = request.get("pty")
        if isinstance(size, list):
            return cls._on_terminal(request, size)
        with Pipes() as pipes:
            (stdin, stdin_write), (out_read, out), (err_read, err) = pipes.make(), pipes.make(), pipes.make()
            pid = spawn(request, Stdio([(stdin, 0), (out, 1), (err, 2)]))
            pipes.keep(stdin_write, out_read, err_read)
        return cls(request, pid, stdin_write, {out_read: 0, err_read: 1})

    @classmethod
    def _on_terminal(cls, request: Header, size: list[int]) -> _Process:
        with Pipes() as pipes:
            # not /dev/ptmx, which may be anything by now; O_NONBLOCK: so may this be
            flags = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK
            master = pipes.add(os.open("/dev/pts/ptmx", flags))
            fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
            (number,) = struct.unpack("i", fcntl.ioctl(master, _TIOCGPTN, bytes(4)))
            _resize(master, size)
            path = f"/dev/pts/{number}"
            slave = pipes.add(os.open(path, flags))
            pid = spawn(request, Stdio(terminal=path))
            pipes.keep(master, slave)
        made = cls(request, pid, master, {master: 0}, master)
        made.slave = slave  # while we hold it, a leader that closes its own ends does not look ended (pty(7))
        return made

    def write(self) -> int:
        """Write standard input; returns how many bytes are no longer under way."""
        if self.stdin < 0:
            return self._forget_input()
        try:
            written = os.write(self.stdin, self.unwritten[:CHUNK]) if self.unwritten else 0
        except BlockingIOError:
            return 0
        except OSError:  # EPIPE: nobody reads it any more; EIO: the terminal is gone
            written = self._forget_input()
            self.close_stdin()
        else:
            del self.unwritten[:written]
        if self.closing and not self.unwritten:
            self.close_stdin()
        return written

    def _forget_input(self) -> int:
        size = len(self.unwritten)
        self.unwritten.clear()
        return size

    def close_stdin(self) -> None:
        """Close standard input; a terminal stays."""
        self.closing = True
        if self.stdin >= 0 and self.terminal < 0:
            os.close(self.stdin)
        self.stdin = -1

    def close_output(self, descriptor: int) -> None:
        """Forget an output that has come to its end; a terminal stays."""
        del self.outputs[descriptor]
        if descriptor != self.terminal:
            os.close(descriptor)

    def resize(self, size: list[int]) -> None:
        """Change the size of its terminal; the kernel tells the processes on it (SIGWINCH)."""
        if self.terminal >= 0:
            _resize(self.terminal, size)

    def let_go_of_terminal(self) -> None:
        """The leader has ended: from now on the end of its children is the end of the terminal's output."""
        if self.slave >= 0:
            os.close(self.slave)
            self.slave = -1


def _resize(terminal: int, size: list[int]) -> None:
    rows, columns = size
    with contextlib.suppress(OSError):  # it may just have gone
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _readable(outputs: dict[int, int]) -> dict[int, int]:
    return {descriptor: readable(descriptor) for descriptor in outputs}


class _Supervisor:
    """The event loop around a process."""

    def __init__(self, process: _Process, link: Link, door: socket.socket | None, wakeup: int) -> None:
        self._process = process
        self._leader = process.leader
        self._link: Link | None = link
        self._leaving: list[Link] = []
        self._callers: list[Link] = []
        self._door = door
        self._wakeup = wakeup
        self._kept = self._new_captures()
        self._owed = 0
        self._left: dict[int, int] | None = None
        self._drained_at = 0.0
        self._end: Header | None = None
        self._over = False
        link.put(self._introduction())

    def _new_captures(self) -> tuple[Capture, Capture]:
        limit = self._process.request["output"]
        assert isinstance(limit, int)
        return Capture(limit), Capture(limit)

    def _introduction(self) -> Header:
        process = self._process
        return {
            "event": "started",
            "pid": self._leader.pid,
            "dropped": [capture.dropped for capture in self._kept],
            "credit": STDIN_CREDIT - len(process.unwritten),
            "left": self._leader.time_left(),
        }

    def run(self) -> None:
        """Loop until somebody knows how the process ended, and nothing of it is left."""
        if self._link is not None and self._link.waiting:
            self._listen(self._link)
        while not self._over:
            events = dict(self._poll().poll(milliseconds(self._time_left())))
            self._take_ended(events)
            self._take_frames(events)
            self._move_input(events)
            self._move_output(events)
            self._leader.check_deadline()
            self._look_for_the_end()
        self._hang_up_all()
        self._outlive()

    # --- what to wait for ---

    def _poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        wanted: dict[int, int] = {}
        if not self._is_blocked():
            wanted = dict.fromkeys(self._process.outputs, select.POLLIN)
        if self._process.stdin >= 0 and (self._process.unwritten or self._process.closing):
            wanted[self._process.stdin] = wanted.get(self._process.stdin, 0) | select.POLLOUT
        wanted.update((link.fileno(), select.POLLOUT) for link in self._leaving)
        if self._link is not None:
            wanted[self._link.fileno()] = self._link.interest
        wanted.update((caller.fileno(), select.POLLIN) for caller in self._callers)
        if self._door is not None:
            wanted[self._door.fileno()] = select.POLLIN
        for descriptor, interest in wanted.items():
            poll.register(descriptor, interest)
        return poll

    def _is_blocked(self) -> bool:
        """Whether output has to wait for the holder."""
        return self._link is not None and self._link.full

    def _time_left(self) -> float | None:
        if self._leader.ended:
            return self._drained_at - time.monotonic() if self._end is None and not self._is_blocked() else None
        return self._leader.time_left()

    # --- the process's side ---

    def _take_ended(self, events: dict[int, int]) -> None:
        if self._wakeup in events:
            os.read(self._wakeup, 4096)
            self._leader.reap()

    def _move_input(self, events: dict[int, int]) -> None:
        process = self._process
        if events.get(process.stdin, 0) & ~select.POLLIN or process.stdin < 0:
            self._owed += process.write()
        if self._owed and self._link is not None and not self._link.full:
            self._link.put({"event": "credit", "size": self._owed})
            self._owed = 0

    def _move_output(self, events: dict[int, int]) -> None:
        for descriptor in tuple(self._process.outputs):
            if events.get(descriptor, 0) & ~select.POLLOUT and not self._is_blocked():
                self._read(descriptor)

    def _read(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            if self._left is not None:
                self._left[descriptor] = 0
            return
        except OSError:  # EIO: nobody has the terminal open any more (pty(7))
            data = b""
        if not data:
            self._process.close_output(descriptor)
            return
        if self._left is not None:
            self._left[descriptor] = self._left.get(descriptor, 0) - len(data)
        stream = self._process.outputs[descriptor]
        if self._end is not None:  # of background children: nobody's any more
            return
        if self._link is None:
            self._kept[stream].add(data)
        else:
            self._link.put({"event": "output", "stream": stream}, data)

    def _look_for_the_end(self) -> None:
        """Report how it ended, once what it had written by then has gone out and a moment has passed."""
        if not self._leader.ended or self._end is not None:
            self._look_for_a_reader()
            return
        outputs = self._process.outputs
        if self._left is None:
            self._process.let_go_of_terminal()
            # what a terminal's kernel side still carries is not counted: at most so much (tty_buffer.c)
            self._left = dict.fromkeys(outputs, CHUNK) if self._process.terminal >= 0 else _readable(outputs)
            self._drained_at = time.monotonic() + DRAIN
        if time.monotonic() >= self._drained_at:
            self._read_on()
        elif outputs:
            return
        if not any(self._left.get(descriptor, 0) > 0 for descriptor in outputs):
            self._end = self._leader.fate(self._leader.count_left_running())
            if self._link is not None:
                self._link.put(self._end)
            self._look_for_a_reader()

    def _read_on(self) -> None:
        """Read what is left, though nothing may come any more."""
        for descriptor in tuple(self._process.outputs):
            if self._left is not None and self._left.get(descriptor, 0) > 0 and not self._is_blocked():
                self._read(descriptor)

    def _look_for_a_reader(self) -> None:
        """Without a door, sending the result is all there is to do; with one, somebody must say that it was seen."""
        if self._end is not None and self._door is None and not self._is_blocked():
            self._over = True

    # --- the holder's side ---

    def _take_frames(self, events: dict[int, int]) -> None:
        for leaving in tuple(self._leaving):
            if leaving.fileno() in events:
                self._bid_farewell(leaving)
        if self._link is not None and (happened := events.get(self._link.fileno(), 0)):
            self._link.flush()
            if happened & ~select.POLLOUT:
                self._listen(self._link)
        for caller in tuple(self._callers):
            if caller.fileno() in events:
                self._hear(caller)
        if self._door is not None and self._door.fileno() in events:
            self._admit(self._door)

    def _bid_farewell(self, link: Link) -> None:
        """Hang up on who does not have the process any more, once everything has been sent."""
        link.flush()
        if not link.full:
            self._leaving.remove(link)
            link.close()

    def _listen(self, link: Link) -> None:
        try:
            for header, payload in link.receive():
                self._obey(header, payload)
        except (EOFError, OSError, ValueError):
            self._lose()

    def _obey(self, header: Header, payload: bytes) -> None:
        verb, number, size = header["verb"], header.get("number"), header.get("size")
        process = self._process
        if verb == "stdin" and not process.closing:
            process.unwritten += payload
        elif verb == "stdin":
            self._owed += len(payload)
        elif verb == "close_stdin":
            process.closing = True
            if not process.unwritten:
                process.close_stdin()
        elif verb == "signal" and isinstance(number, int):
            self._leader.signal(number)
        elif verb == "kill":  # its background children too, where the leader has ended
            self._leader.kill_tree()
        elif verb == "resize" and isinstance(size, list):
            process.resize(size)
        elif verb == "seen" and self._end is not None:
            self._over = True

    def _lose(self) -> None:
        """The holder hung up: the process ends, or waits for another one."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._door is None:
            self._over = True
            if not self._leader.ended:
                self._leader.kill_tree()

    def _admit(self, door: socket.socket) -> None:
        """Somebody has come to the door, and may only want to know whether it is one."""
        try:
            connection, _ = door.accept()
        except OSError:
            return
        connection.setblocking(True)
        self._callers.append(Link(connection))
        while len(self._callers) > _MOST_AT_THE_DOOR:
            self._callers.pop(0).close()

    def _hear(self, caller: Link) -> None:
        """Somebody takes hold of the process, or goes away."""
        try:
            said = caller.receive()
        except (EOFError, OSError, ValueError):
            self._callers.remove(caller)
            caller.close()
            return
        if said:
            self._callers.remove(caller)
            self._replace(caller)
            for header, payload in said:
                self._obey(header, payload)

    def _replace(self, link: Link) -> None:
        """Give the process another holder: who had it is told, and gets nothing more."""
        if self._link is not None:
            self._link.put({"event": "replaced"})
            self._leaving.append(self._link)
            self._bid_farewell(self._link)
            while len(self._leaving) > _MOST_AT_THE_DOOR:
                self._leaving.pop(0).close()
        self._link = link
        self._hand_over(link)

    def _hand_over(self, link: Link) -> None:
        """Introduce the process, and give what was kept of its output while nobody had it."""
        process, request = self._process, self._process.request
        self._owed = 0
        command = request["script"] if "script" in request else request["argv"]
        link.put(
            {
                **self._introduction(),
                "command": command,
                "pty": process.terminal >= 0,
                "closed": process.closing,
                "state": "ended" if self._leader.ended else "running",
            }
        )
        kept, self._kept = self._kept, self._new_captures()
        for stream, capture in enumerate(kept):
            data = capture.result()
            for start in range(0, len(data), CHUNK):
                link.put({"event": "output", "stream": stream}, data[start : start + CHUNK])
        if self._end is not None:
            link.put(self._end)

    # --- the end ---

    def _hang_up_all(self) -> None:
        if self._door is not None:
            self._door.close()
        for link in (*self._leaving, *self._callers, *([self._link] if self._link else [])):
            link.close()

    def _outlive(self) -> None:
        """Keep background processes reaped and their output flowing, until the last has ended."""
        self._end, self._link, self._door, self._leaving, self._callers = self._end or {}, None, None, [], []
        while self._leader.has_left_running():
            events = dict(self._poll().poll())
            self._take_ended(events)
            self._move_input(events)
            self._move_output(events)
