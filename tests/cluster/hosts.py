"""Hosts of our own on this machine: namespaces of network and mounts, with addresses on a switch that is one too.

Nothing is made in this machine's own network and mounts, and nothing but processes keeps a namespace: when they end it
is gone, with its links. Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeAlias

from tests import waiting

Command: TypeAlias = "subprocess.Popen[str]"
NETWORK = "10.77.0"
PORT = 6379
RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # 15 else: nothing moves beside whatever else a busy machine does
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_agent_register_timeout_ms": "120000",  # a raylet ends whose agent takes longer to begin
    "RAY_health_check_failure_threshold": "15",
}


def missing() -> str | None:
    """Why no hosts can be made here, if so."""
    if os.geteuid() != 0:
        return "network namespaces with addresses need root"
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (Debian: iproute2, util-linux)"
    return None


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=60)


# It holds a namespace, and ends all that is in it when nobody holds the other end of its standard input any more.
_GUARD = """
import os, signal, sys, time
os.write(1, b"!")
sys.stdin.read()
ours = os.stat("/proc/self/ns/net").st_ino
while True:
    there = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[0]
            if os.stat(f"/proc/{name}/ns/net").st_ino == ours and int(name) != os.getpid() and state not in "ZX":
                os.kill(int(name), signal.SIGKILL)
                there += 1
        except OSError:
            pass
    if not there:
        break
    time.sleep(0.05)
"""


@dataclass
class Namespace:
    """A network namespace, with mounts of its own, kept by a process."""

    anchor: subprocess.Popen[bytes]
    inode: int = 0

    @classmethod
    def make(cls) -> Namespace:
        anchor = subprocess.Popen(
            ["unshare", "--net", "--mount", sys.executable, "-c", _GUARD],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert anchor.stdout is not None
        assert anchor.stdout.read(1) == b"!"
        made = cls(anchor, os.stat(f"/proc/{anchor.pid}/ns/net").st_ino)
        _run(*made.entered("ip", "link", "set", "lo", "up"))
        return made

    def entered(self, *words: str) -> list[str]:
        """A command, inside."""
        return ["nsenter", "-t", str(self.anchor.pid), "-n", "-m", f"--wdns={os.getcwd()}", *words]

    def processes(self) -> list[int]:
        """Who is inside, the anchor aside."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if os.stat(f"/proc/{name}/ns/net").st_ino == self.inode and int(name) != self.anchor.pid:
                    found.append(int(name))
        return [pid for pid in found if waiting.running(pid)]

    def signal(self, number: int) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """End all that is inside, and the namespace."""
        self.anchor.communicate(timeout=120)


@dataclass
class Host:
    """A machine of the test's own."""

    number: int
    namespace: Namespace
    store: Path
    log: Path
    extra: Mapping[str, str] = field(default_factory=dict)
    nodes: list[Command] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number + 1}"

    @property
    def environment(self) -> dict[str, str]:
        whole = {**os.environ, **RAY, "MINISANDBOX_STORE": str(self.store), **self.extra}
        return {name: value for name, value in whole.items() if value}

    def popen(self, *words: str, out: IO[str] | int | None = None, err: IO[str] | int | None = None) -> Command:
        """Begin a command inside, in a session of its own."""
        return subprocess.Popen(
            self.namespace.entered(*words), text=True, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=out, stderr=err, start_new_session=True,
        )  # fmt: skip

    def start(self, *where: str, sandboxes: int, options: Sequence[str] = ()) -> None:
        """Make it a node, by our own command."""
        with self.log.open("a") as log:
            node = self.popen(
                sys.executable, "-m", "minisandbox", "cluster", *where, "--node-ip", self.address,
                "--sandboxes", str(sandboxes), "--block", *options, "--", "--num-cpus", "1",
                "--object-store-memory", str(100 << 20),
                out=log, err=log,
            )  # fmt: skip
        self.nodes.append(node)

    def end(self) -> None:
        """End all that runs on it."""
        self.namespace.end()
        for node in self.nodes:
            node.wait(60)


@dataclass
class Hosts:
    """Some hosts on a switch, the first of them the head of a cluster."""

    all: list[Host]
    sandboxes: int
    temp: Path
    options: Sequence[str] = ()

    @property
    def head(self) -> str:
        return f"{self.all[0].address}:{PORT}"

    def start(self, number: int) -> None:
        host = self.all[number]
        if number == 0:
            host.start(
                "head", sandboxes=self.sandboxes,
                options=[*self.options],
            )  # fmt: skip
        else:
            host.start("worker", "--address", self.head, sandboxes=self.sandboxes, options=self.options)

    def _again(self) -> None:
        """Begin the nodes once more that have not begun: on a busy machine Ray's own deadlines pass."""
        for number, host in enumerate(self.all):
            if host.nodes and host.nodes[-1].poll() is not None:
                self.start(number)

    def wait(self, count: int) -> None:
        """Wait until so many nodes offer sandboxes."""
        script = (
            "import sys, time; from minisandbox.rollouts.cluster.joining import connect\n"
            "connect(sys.argv[1])\n"
            "import ray\n"
            "def there(): return sum(n['Alive'] and 'sandboxes' in n['Resources'] for n in ray.nodes())\n"
            "end = time.monotonic() + 60\n"
            "while there() < int(sys.argv[2]) and time.monotonic() < end: time.sleep(0.2)\n"
            "sys.exit(there() < int(sys.argv[2]))\n"
        )
        give_up = time.monotonic() + 600
        while True:
            with self.all[0].popen(
                sys.executable, "-c", script, self.head, str(count), out=subprocess.PIPE, err=subprocess.STDOUT
            ) as asking:
                said = asking.communicate(timeout=600)[0]
            if asking.returncode == 0:
                return
            self._again()
            assert time.monotonic() < give_up, said + "".join(host.log.read_text() for host in self.all)
            time.sleep(0.5)


@contextmanager
def hosts(
    place: Path,
    count: int,
    sandboxes: int,
    *options: str,
    extra: Mapping[int, Mapping[str, str]] | None = None,
    disks: Mapping[int, int] | None = None,
) -> Iterator[Hosts]:
    """Make hosts, and a cluster of them; all of it ends with the block.

    ``extra`` are variables of single hosts, empty to remove them; ``disks`` gives single hosts' stores so many bytes
    and no more.
    """
    with ExitStack() as stack:
        temp = Path(tempfile.mkdtemp(prefix="msr", dir="/tmp"))  # paths of sockets are short
        stack.callback(shutil.rmtree, temp, ignore_errors=True)
        switch = Namespace.make()
        stack.callback(switch.end)
        _run(*switch.entered("ip", "link", "add", "switch", "type", "bridge"))
        _run(*switch.entered("ip", "link", "set", "switch", "up"))
        made = []
        for number in range(count):
            namespace = Namespace.make()
            variables = {"RAY_TMPDIR": str(temp), **((extra or {}).get(number) or {})}
            host = Host(number, namespace, place / f"store{number}", place / f"host{number}.log", variables)
            stack.callback(host.end)
            pid, port = str(namespace.anchor.pid), f"port{number}"
            _run(*switch.entered("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid))
            _run(*switch.entered("ip", "link", "set", port, "master", "switch", "up"))
            # Ray's names of sockets and logs are those of one machine
            _run(*namespace.entered("mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(temp)))
            _run(*namespace.entered("ip", "address", "add", f"{host.address}/24", "dev", "eth0"))
            _run(*namespace.entered("ip", "link", "set", "eth0", "up"))
            host.store.mkdir(exist_ok=True)
            if disks and number in disks:
                size = f"size={disks[number]},mode=755"
                _run(*namespace.entered("mount", "-t", "tmpfs", "-o", size, "tmpfs", str(host.store)))
            made.append(host)
        them = Hosts(made, sandboxes, temp, options)
        for number in range(count):
            them.start(number)
            if number == 0:
                them.wait(1)
        them.wait(count)
        yield them
