"""Supervise a streaming process: forward its output, input and signals as they arrive.

The process has at most one *holder*: the handle that started it or, for a process that outlives its handle, a handle
that attached after the last one hung up. The supervisor never blocks on the holder. While the holder does not read, the
supervisor stops reading the process's pipes, so the process waits in write(2). It always reads the holder's frames, so
that signals and a hang-up get through.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import termios
import time

from .exec import CHUNK, DRAIN, Leader, milliseconds, new_captures, readable, refusal, timeout_of
from .frames import STDIN_CREDIT, Header, encode
from .job import Link, WorkerJob
from .spawn import Pipes, SpawnError, Stdio, spawn

_TIOCGPTN, _TIOCSPTLCK = 0x80045430, 0x40045431
_BUSY: Header = {"event": "error", "errno": errno.EBUSY, "message": "it is held", "operation": "attach", "path": ""}


def serve(job: WorkerJob, wakeup: int) -> None:
    """Serve a ``start`` request until the process and its background processes have exited."""
    link = job.link()
    try:
        process = _Process.start(job.request)
    except SpawnError as error:
        job.fail(error, error.operation, error.path)
        return
    except OSError as error:
        header, message = refusal(error)
        job.send({"event": "started", "pid": 0, "dropped": [0, 0], "credit": STDIN_CREDIT})
        job.send({"event": "output", "stream": 1}, message)
        job.send(header)
        return
    listener = socket.socket(fileno=job.listener) if job.listener >= 0 else None
    process.leader.counters = job.counters
    _Supervisor(process, link, listener, wakeup).run()


class _Process:
    """A process and its descriptors.

    Attributes:
        leader: its first process.
        request: the request that started it.
        terminal: descriptor of the master side of its terminal, or -1.
        stdin: descriptor to write its standard input to, or -1.
        outputs: descriptors to read its output from, with the number of the stream.
        unwritten: standard input that is not written yet.
        closing: whether to close standard input once ``unwritten`` is written.
    """

    def __init__(self, request: Header, pid: int, stdin: int, outputs: dict[int, int], terminal: int = -1) -> None:
        self.leader = Leader(pid, timeout_of(request))
        self.request = request
        self.stdin = stdin
        self.outputs = outputs
        self.terminal = terminal
        self.unwritten = bytearray()
        self.closing = False
        self._slave = -1

    @classmethod
    def start(cls, request: Header) -> _Process:
        """Start the process of a request.

        Raises:
            SpawnError: there is no such user or directory.
            OSError: no process could be started.
        """
        size = request.get("pty")
        if isinstance(size, list):
            return cls._on_terminal(request, size)
        with Pipes() as pipes:
            (stdin, stdin_write), (out_read, out_write) = pipes.make(), pipes.make()
            err_read, err_write = pipes.make()
            pid = spawn(request, Stdio([(stdin, 0), (out_write, 1), (err_write, 2)]))
            pipes.keep(stdin_write, out_read, err_read)
        return cls(request, pid, stdin_write, {out_read: 0, err_read: 1})

    @classmethod
    def _on_terminal(cls, request: Header, size: list[int]) -> _Process:
        with Pipes() as pipes:
            # a command may have replaced /dev/ptmx, and even this path; O_NONBLOCK keeps a FIFO from blocking
            flags = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK
            master = pipes.add(os.open("/dev/pts/ptmx", flags))
            fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
            (number,) = struct.unpack("i", fcntl.ioctl(master, _TIOCGPTN, bytes(4)))
            _resize(master, size)
            path = f"/dev/pts/{number}"
            slave = pipes.add(os.open(path, flags))
            pid = spawn(request, Stdio(terminal=path))
            pipes.keep(master, slave)
        process = cls(request, pid, master, {master: 0}, master)
        process._slave = slave  # keep it open: the output must not end if the leader closes the terminal (pty(7))
        return process

    def introduction(self, dropped: list[int]) -> Header:
        """Return the first frame for a new holder.

        Args:
            dropped: bytes dropped per stream while the process had no holder.
        """
        request = self.request
        return {
            "event": "started",
            "pid": self.leader.pid,
            "dropped": dropped,
            "credit": STDIN_CREDIT - len(self.unwritten),
            "left": self.leader.time_left(),
            "command": request["script"] if "script" in request else request["argv"],
            "pty": self.terminal >= 0,
            "closed": self.closing,
        }

    def write(self) -> int:
        """Write pending standard input; return the number of bytes that were written or dropped."""
        if self.stdin < 0:
            return self._drop_input()
        try:
            written = os.write(self.stdin, self.unwritten[:CHUNK]) if self.unwritten else 0
        except BlockingIOError:
            return 0
        except OSError:  # EPIPE: every reader has closed the pipe; EIO: the terminal has hung up
            written = self._drop_input()
            self.close_stdin()
        else:
            del self.unwritten[:written]
        if self.closing and not self.unwritten:
            self.close_stdin()
        return written

    def _drop_input(self) -> int:
        size = len(self.unwritten)
        self.unwritten.clear()
        return size

    def close_stdin(self) -> None:
        """Close standard input; keep a terminal open, because it carries the output too."""
        self.closing = True
        if self.stdin >= 0 and self.terminal < 0:
            os.close(self.stdin)
        self.stdin = -1

    def close_output(self, descriptor: int) -> None:
        """Close an output pipe that has ended; keep a terminal open."""
        del self.outputs[descriptor]
        if descriptor != self.terminal:
            os.close(descriptor)

    def resize(self, size: list[int]) -> None:
        """Resize its terminal; the kernel sends SIGWINCH to the processes on it."""
        if self.terminal >= 0:
            _resize(self.terminal, size)

    def release_terminal(self) -> None:
        """Close the slave side once the leader has exited, so that the output ends with the leader's children."""
        if self._slave >= 0:
            os.close(self._slave)
            self._slave = -1

    def remaining(self) -> dict[int, int]:
        """Return the unread bytes of each output; a guess for a terminal, whose buffer hides some (tty_buffer.c)."""
        if self.terminal >= 0:
            return dict.fromkeys(self.outputs, CHUNK)
        return {descriptor: readable(descriptor) for descriptor in self.outputs}


def _resize(terminal: int, size: list[int]) -> None:
    rows, columns = size
    with contextlib.suppress(OSError):  # the process has just exited
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class _Supervisor:
    """The event loop around a process.

    Args:
        process: the process.
        link: connection of the handle that started the process.
        listener: listening socket on which another handle can attach; None if the process is killed with its handle.
        wakeup: descriptor that is readable after a SIGCHLD.
    """

    def __init__(self, process: _Process, link: Link, listener: socket.socket | None, wakeup: int) -> None:
        self._process = process
        self._leader = process.leader
        self._holder: Link | None = link
        self._listener = listener
        self._wakeup = wakeup
        self._captures = new_captures(process.request)
        self._consumed_size = 0
        self._unread: dict[int, int] | None = None
        self._drained_at = 0.0
        self._final_frame: Header | None = None
        self._is_over = False
        link.put(process.introduction([0, 0]))

    def run(self) -> None:
        """Loop until a holder has received the result and all processes have exited."""
        if self._holder is not None and self._holder.has_pending:
            self._listen(self._holder)
        while not self._is_over:
            events = dict(self._poll().poll(milliseconds(self._time_left())))
            self._take_ended(events)
            self._take_frames(events)
            self._move_input(events)
            self._move_output(events)
            self._leader.check_deadline()
            self._look_for_the_end()
        self._outlive()

    def _poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        events: dict[int, int] = {}
        if not self._is_blocked():
            events = dict.fromkeys(self._process.outputs, select.POLLIN)
        if self._process.stdin >= 0 and (self._process.unwritten or self._process.closing):
            events[self._process.stdin] = events.get(self._process.stdin, 0) | select.POLLOUT
        if self._holder is not None:
            events[self._holder.fileno()] = self._holder.interest
        if self._listener is not None:
            events[self._listener.fileno()] = select.POLLIN
        for descriptor, interest in events.items():
            poll.register(descriptor, interest)
        return poll

    def _is_blocked(self) -> bool:
        """Return whether output must wait, because the holder does not read."""
        return self._holder is not None and self._holder.is_full

    def _time_left(self) -> float | None:
        if not self._leader.ended:
            return self._leader.time_left()
        return self._drained_at - time.monotonic() if self._final_frame is None and not self._is_blocked() else None

    def _take_ended(self, events: dict[int, int]) -> None:
        if self._wakeup in events:
            os.read(self._wakeup, 4096)
            self._leader.reap()

    def _move_input(self, events: dict[int, int]) -> None:
        process = self._process
        if events.get(process.stdin, 0) & ~select.POLLIN or process.stdin < 0:
            self._consumed_size += process.write()
        if self._consumed_size and self._holder is not None and not self._holder.is_full:
            self._holder.put({"event": "credit", "size": self._consumed_size})
            self._consumed_size = 0

    def _move_output(self, events: dict[int, int]) -> None:
        for descriptor in tuple(self._process.outputs):
            if events.get(descriptor, 0) & ~select.POLLOUT and not self._is_blocked():
                self._read(descriptor)

    def _read(self, descriptor: int) -> None:
        try:
            chunk = os.read(descriptor, CHUNK)
        except BlockingIOError:
            if self._unread is not None:
                self._unread[descriptor] = 0
            return
        except OSError:  # EIO: every process closed the terminal (pty(7))
            chunk = b""
        if not chunk:
            self._process.close_output(descriptor)
            return
        if self._unread is not None:
            self._unread[descriptor] = self._unread.get(descriptor, 0) - len(chunk)
        stream = self._process.outputs[descriptor]
        if self._final_frame is not None:  # drop output that background children write after the result
            return
        if self._holder is None:
            self._captures[stream].add(chunk)
        else:
            self._holder.put({"event": "output", "stream": stream}, chunk)

    def _look_for_the_end(self) -> None:
        """Report the result once the leader's output is sent and the drain time of background children has passed."""
        if self._leader.ended and self._final_frame is None:
            self._drain()
        # without a listener, finish once the result is sent; with one, wait until a holder confirms that it has it
        if self._final_frame is not None and self._listener is None and not self._is_blocked():
            self._is_over = True

    def _drain(self) -> None:
        outputs = self._process.outputs
        if self._unread is None:
            self._process.release_terminal()
            self._unread = self._process.remaining()
            self._drained_at = time.monotonic() + DRAIN
        if outputs and time.monotonic() < self._drained_at:
            return
        for descriptor in tuple(outputs):
            if self._unread.get(descriptor, 0) > 0 and not self._is_blocked():
                self._read(descriptor)
        if not any(self._unread.get(descriptor, 0) > 0 for descriptor in outputs):
            self._final_frame = self._leader.exit_header(self._leader.count_left_running())
            if self._holder is not None:
                self._holder.put(self._final_frame)

    def _take_frames(self, events: dict[int, int]) -> None:
        if self._holder is not None and (link_events := events.get(self._holder.fileno(), 0)):
            self._holder.flush()
            if link_events & ~select.POLLOUT:
                self._listen(self._holder)
        if self._listener is not None and self._listener.fileno() in events:
            self._admit(self._listener)

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
            self._consumed_size += len(payload)
        elif verb == "close_stdin":
            process.closing = True
            if not process.unwritten:
                process.close_stdin()
        elif verb == "signal" and isinstance(number, int):
            self._leader.signal(number)
        elif verb == "kill":  # includes background children, even after the leader has exited
            self._leader.kill_tree()
        elif verb == "resize" and isinstance(size, list):
            process.resize(size)
        elif verb == "seen" and self._final_frame is not None:
            self._is_over = True

    def _lose(self) -> None:
        """Handle a holder that hung up: kill the process, unless it has a listener for the next holder."""
        if self._holder is not None:
            self._holder.close()
            self._holder = None
        if self._listener is None:
            self._is_over = True
            if not self._leader.ended:
                self._leader.kill_tree()

    def _admit(self, listener: socket.socket) -> None:
        """Let a handle attach, or refuse it while another handle holds the process."""
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        while self._holder is not None and self._holder.has_hung_up:  # process the hang-up of the old holder first
            self._listen(self._holder)
        if not self._is_over and self._holder is None:
            self._holder = Link(connection)
            self._send_captured(self._holder)
            return
        with connection, contextlib.suppress(OSError):  # the new holder has hung up
            if not self._is_over:
                connection.send(encode(_BUSY), socket.MSG_DONTWAIT)

    def _send_captured(self, link: Link) -> None:
        """Send a new holder the first frame, and the output that was kept while there was no holder."""
        self._consumed_size = 0  # the first frame states the credit
        captures, self._captures = self._captures, new_captures(self._process.request)
        link.put(self._process.introduction([capture.dropped for capture in captures]))
        for stream, capture in enumerate(captures):
            output = capture.result()
            for start in range(0, len(output), CHUNK):
                link.put({"event": "output", "stream": stream}, output[start : start + CHUNK])
        if self._final_frame is not None:
            link.put(self._final_frame)

    def _outlive(self) -> None:
        """Hang up; reap background processes and discard their output until the last one has exited."""
        if self._listener is not None:
            self._listener.close()
        if self._holder is not None:
            self._holder.close()
        self._final_frame, self._holder, self._listener = self._final_frame or {}, None, None
        while self._leader.has_left_running():
            events = dict(self._poll().poll())
            self._take_ended(events)
            self._move_input(events)
            self._move_output(events)
