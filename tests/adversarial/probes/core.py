"""What probes are: how they are declared, what they answer, how they are run."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import select
import signal
import struct
import time
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Mapping, TypeVar

BLOCKED, OPEN, ABSENT, HOST, BROKEN = "blocked", "open", "absent", "host", "broken"
"""Verdicts. ``absent``: cannot be tried here. ``host``: the host sees what it did. ``broken``: a mistake of ours."""
WORKS, FAILS = "works", "fails"
"""Verdicts of functions that a sandbox must keep."""

REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS)
DETAIL = 400
CANARIES: dict[str, Any] = {}
"""What the host has planted (canaries.py says what each key is)."""


@dataclass(frozen=True)
class Finding:
    """What a probe found: a verdict, how it came to it, and of several attempts which got through."""

    verdict: str
    detail: str = ""
    tried: tuple[str, ...] = ()
    through: tuple[str, ...] = ()


@dataclass(frozen=True)
class Probe:
    """One attack, or one function that must keep working.

    ``root``: only root can do it without a sandbox. ``maybe``: whether it can be done at all is up to the kernel's
    build or the machine. ``without``: why it is not tried without a sandbox. ``may_die``: a signal is a refusal.
    """

    name: str
    kind: str
    title: str
    run: Callable[[], Finding]
    root: bool = False
    maybe: bool = False
    without: str = ""
    may_die: bool = False
    patience: float = 30.0


PROBES: dict[str, Probe] = {}
Body = Callable[[], Finding]


class Missing(Exception):
    """Something that a probe needs is not here."""


def probe(
    kind: str,
    name: str = "",
    title: str = "",
    root: bool = False,
    maybe: bool = False,
    without: str = "",
    may_die: bool = False,
    patience: float = 30.0,
) -> Callable[[Body], Body]:
    """Declare a probe; its name and title are those of the function unless given."""

    def declare(body: Body) -> Body:
        full = kind + "-" + (name or body.__name__.replace("_", "-"))
        words = title or (body.__doc__ or "").strip().split("\n")[0].rstrip(".")
        assert full not in PROBES, full
        PROBES[full] = Probe(full, kind, words, body, root, maybe, without, may_die, patience)
        return body

    return declare


def blocked(detail: str = "") -> Finding:
    return Finding(BLOCKED, detail)


def opened(detail: str = "") -> Finding:
    return Finding(OPEN, detail)


def judge(is_open: object, detail: str = "") -> Finding:
    """Open or blocked."""
    return Finding(OPEN if is_open else BLOCKED, detail)


def works(fine: object, detail: str = "") -> Finding:
    return Finding(WORKS if fine else FAILS, detail)


Attempt = Callable[[], object]
Item = TypeVar("Item", str, int)


def attempts(named: Iterable[tuple[str, Attempt]]) -> Finding:
    """Try each; one gets through unless it raises OSError or returns something false but None. Open if any does."""
    tried: list[str] = []
    through: list[str] = []
    errors: dict[str, int] = {}
    for name, attempt in named:
        tried.append(name)
        try:
            if succeeded(attempt()):
                through.append(name)
        except OSError as error:
            word = name_of(error.errno)
            errors[word] = errors.get(word, 0) + 1
    if not tried:
        return Finding(ABSENT, "nothing to try")
    count = f"{len(through)} of {len(tried)} got through"
    words = ", ".join(through[:12]) or ", ".join(f"{word} x{times}" for word, times in sorted(errors.items()))
    return Finding(OPEN if through else BLOCKED, count + (": " + words if words else ""), tuple(tried), tuple(through))


def succeeded(answer: object) -> bool:
    """None is what a call without a result returns when it works."""
    return answer is None or bool(answer)


def each(items: Iterable[Item], attempt: Callable[[Item], object], apart: bool = False) -> Finding:
    """Try the same with each item, if need be in a process of its own."""

    def attempt_on(item: Item) -> Attempt:
        return in_child(lambda: attempt(item)) if apart else lambda: attempt(item)

    return attempts((str(item), attempt_on(item)) for item in items)


def in_child(attempt: Attempt) -> Attempt:
    """The same attempt in a process of its own, because it cannot be undone."""

    def guarded() -> object:
        pid = os.fork()
        if pid == 0:
            status = 255
            try:
                status = 0 if succeeded(attempt()) else 1
            except OSError as error:
                status = min(error.errno or 1, 254)
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            return False
        if os.WEXITSTATUS(status) not in (0, 1):
            raise OSError(os.WEXITSTATUS(status), "in a child")
        return os.WEXITSTATUS(status) == 0

    return guarded


def name_of(number: int | None) -> str:
    """ENOENT for 2."""
    return errno.errorcode.get(number or 0, str(number))


def canary(key: str) -> Any:
    """What the host planted under a key."""
    if CANARIES.get(key) is None:
        raise Missing("nothing was planted for it: " + key)
    return CANARIES[key]


def without_sandbox() -> bool:
    """Whether this is the control run."""
    return bool(CANARIES.get("control"))


def is_secret(data: bytes) -> bool:
    """Whether data contains the secret, of which only the digest is known here; it is a line or a field of its own."""
    digest = CANARIES.get("secret_sha256")
    words = data.replace(b"\0", b"\n").replace(b"=", b"\n").split(b"\n")
    return any(hashlib.sha256(word.strip()).hexdigest() == digest for word in words)


def read(path: str, size: int = 1 << 16) -> bytes:
    """The beginning of a file; never waits."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)


def can_open(path: str, flags: int) -> bool:
    """Whether a file opens so; raises OSError if not."""
    os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
    return True


def status_field(name: str, pid: str = "self") -> str:
    """A field of /proc/PID/status."""
    for line in read(f"/proc/{pid}/status").decode().splitlines():
        if line.startswith(name + ":"):
            return line.split(":", 1)[1].strip()
    return ""


def all_pids() -> list[int]:
    """Every process that /proc shows."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def foreign_pids() -> list[int]:
    """Whoever watches over this program: its ancestors and pid 1 with its children. Not what it started itself.

    Without a sandbox, only the process that plants canaries: nobody else's are touched.
    """
    if without_sandbox():
        return [int(canary("harness"))]
    runner = int(canary("runner"))
    parents = {pid: parent_of(pid) for pid in all_pids()}
    ancestors, pid = set(), runner
    while pid > 1:
        pid = parents.get(pid, 0)
        ancestors.add(pid)
    found = ancestors | {1} | {pid for pid, parent in parents.items() if parent == 1}
    return sorted(pid for pid in found - {0, runner} if pid != 1 or not hosts_pid_namespace())


def parent_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1])
    return 0


def hosts_pid_namespace() -> bool:
    """Whether pid 1 is the host's, which no probe may touch."""
    if without_sandbox():
        return True
    try:
        return bool(namespace("pid") == canary("namespaces")["pid"])
    except OSError:
        return False


def namespace(kind: str, pid: str = "self") -> str:
    """The name of a process's namespace."""
    return os.readlink(f"/proc/{pid}/ns/{kind}")


# --- running ---------------------------------------------------------------------------------------------------------


def carry_out(item: Probe) -> Finding:
    """Run a probe in a child with a session of its own, and end all that it started."""
    if without_sandbox() and item.without:
        return Finding(ABSENT, "not tried without a sandbox: " + item.without)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _answer(item, writer)
    os.close(writer)
    answer = _listen(reader, item.patience)
    os.close(reader)
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if answer:
        verdict, detail, tried, through = json.loads(answer.decode())
        return Finding(verdict, detail, tuple(tried), tuple(through))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        verdict = BLOCKED if item.may_die or number == signal.SIGSYS else BROKEN
        return Finding(verdict, f"killed by signal {number}")
    return Finding(BROKEN, "no answer")


def _answer(item: Probe, writer: int) -> None:
    """In the child."""
    try:
        os.setsid()
        try:
            finding = item.run()
        except Missing as error:
            finding = Finding(ABSENT, str(error))
        except OSError as error:
            finding = Finding(FAILS if item.kind == "function" else BLOCKED, f"{error}")
        except Exception as error:  # noqa: BLE001 - the run goes on; the test of this probe fails
            finding = Finding(BROKEN, f"{type(error).__name__}: {error}")
        text = json.dumps([finding.verdict, finding.detail[:DETAIL], finding.tried[:200], finding.through[:200]])
        data = struct.pack("=I", len(text.encode())) + text.encode()
        while data:
            data = data[os.write(writer, data) :]
    finally:
        os._exit(0)


def _listen(reader: int, patience: float) -> bytes:
    """The child's whole answer, or nothing."""
    data, deadline = b"", time.monotonic() + patience
    while len(data) < 4 or len(data) < 4 + struct.unpack_from("=I", data)[0]:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(reader, 1 << 16) if ready else b""
        if not piece:
            return b""
        data += piece
    return data[4:]


def as_line(item: Probe, finding: Finding) -> str:
    """A finding as a line of JSON."""
    row: Mapping[str, object] = {
        "name": item.name,
        "kind": item.kind,
        "title": item.title,
        "verdict": finding.verdict,
        "detail": finding.detail,
        "tried": finding.tried,
        "through": finding.through,
    }
    return json.dumps(row)
