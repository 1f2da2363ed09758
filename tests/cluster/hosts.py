"""Hosts of our own on this machine: network namespaces with addresses, on a switch that is one too, and Ray in each.

Nothing is made in the host's own network, and no file or mount keeps a namespace: when its processes end it is gone,
with its links. Needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests import waiting

NETWORK = "10.77.0"
PORT = 6379
RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_worker_prestart": "0",
}


def missing() -> str | None:
    """Why no hosts can be made here, if so."""
    if os.geteuid() != 0:
        return "network namespaces with addresses need root"
    for tool in ("ip", "unshare", "nsenter", "setpriv"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (Debian: iproute2, util-linux)"
    return None


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=60)


@dataclass
class Namespace:
    """A network namespace, kept by a process."""

    anchor: subprocess.Popen[bytes]
    inode: int = 0

    @classmethod
    def make(cls) -> Namespace:
        ours = os.stat("/proc/self/ns/net").st_ino
        anchor = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"])
        made = cls(anchor)
        made.inode = waiting.until(lambda: (found := made._look()) != ours and found)
        waiting.until(lambda: b"sleep" in Path(f"/proc/{anchor.pid}/cmdline").read_bytes()[:5])
        _run(*made.entered("ip", "link", "set", "lo", "up"))
        return made

    def _look(self) -> int:
        return os.stat(f"/proc/{self.anchor.pid}/ns/net").st_ino

    def entered(self, *words: str) -> list[str]:
        """A command, inside."""
        return ["nsenter", "-t", str(self.anchor.pid), "-n", *words]

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
        give_up = time.monotonic() + 60
        while self.processes() and time.monotonic() < give_up:
            self.signal(signal.SIGKILL)
            time.sleep(0.05)
        self.anchor.kill()
        self.anchor.wait()


@dataclass
class Host:
    """A machine of the test's own."""

    number: int
    namespace: Namespace
    store: Path
    log: Path
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number + 1}"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **RAY, "MINISANDBOX_STORE": str(self.store), **self.extra}

    def popen(self, *words: str, **options: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.namespace.entered(*words), text=True, env=self.environment, stdin=subprocess.DEVNULL, **options
        )  # type: ignore[call-overload,no-any-return] # options of Popen

    def start(self, *where: str, sandboxes: int, options: Sequence[str] = ()) -> subprocess.Popen[str]:
        """Make it a node, by our own command."""
        with self.log.open("a") as log:
            return self.popen(
                "nice", sys.executable, "-m", "minisandbox", "cluster", *where, "--node-ip", self.address,
                "--sandboxes", str(sandboxes), "--block", *options, "--", "--num-cpus", "1",
                "--object-store-memory", str(100 << 20),
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip


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

    def wait(self, count: int) -> None:
        """Wait until so many nodes offer sandboxes."""
        script = (
            "import ray, sys, time; ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)\n"
            "def there(): return sum(n['Alive'] and 'sandboxes' in n['Resources'] for n in ray.nodes())\n"
            "end = time.monotonic() + 150\n"
            "while there() < int(sys.argv[2]) and time.monotonic() < end: time.sleep(0.2)\n"
            "sys.exit(there() < int(sys.argv[2]))\n"
        )
        give_up = time.monotonic() + 180
        while True:
            with self.all[0].popen(
                sys.executable, "-c", script, self.head, str(count), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            ) as asking:
                said = asking.communicate(timeout=300)[0]
            if asking.returncode == 0:
                return
            assert time.monotonic() < give_up, said + "".join(host.log.read_text() for host in self.all)
            time.sleep(0.5)


@contextmanager
def hosts(place: Path, count: int, sandboxes: int, *options: str) -> Iterator[Hosts]:
    """Make hosts, and a cluster of them; all of it ends with the block."""
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
            stack.callback(namespace.end)
            pid, port = str(namespace.anchor.pid), f"port{number}"
            _run(*switch.entered("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid))
            _run(*switch.entered("ip", "link", "set", port, "master", "switch", "up"))
            host = Host(number, namespace, place / f"store{number}", place / f"host{number}.log", {"RAY_TMPDIR": str(temp)})
            _run(*namespace.entered("ip", "address", "add", f"{host.address}/24", "dev", "eth0"))
            _run(*namespace.entered("ip", "link", "set", "eth0", "up"))
            host.store.mkdir(exist_ok=True)
            made.append(host)
        them = Hosts(made, sandboxes, temp, options)
        for number in range(count):
            them.start(number)
            if number == 0:
                them.wait(1)
        them.wait(count)
        yield them
