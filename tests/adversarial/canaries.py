"""What the attack suite plants on the host: secrets, a process, services, shared objects, a terminal, descriptors.

The probes get to know where it is, and of the secret only the digest. Root plants more than an ordinary user can.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pty
import pwd
import secrets
import selectors
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.adversarial.probes.kernel import call

IPC_CREATE, IPC_REMOVE, SESSION_RING = 0o1666, 0, -3
KEYCTL_JOIN, KEYCTL_UNLINK, KEYCTL_RING = 1, 9, 0
LOCKED = "/usr/bin/env"  # a file of the host that sandboxes show
GREETING = "host-service"
NAMESPACES = ("mnt", "pid", "net", "ipc", "uts", "user", "cgroup")
PRIVATE = ("shadow", "gshadow", "shadow-", "sudoers", "security/opasswd", "ssh/ssh_host_ed25519_key")
SECRET_VARIABLE = "ATTACK_API_KEY"

Told = dict[str, object]


@dataclass(slots=True)
class Canaries:
    """What was planted.

    Attributes:
        run: id of this run.
        base: directory of the run in the host's /tmp; others may pass through.
        secret: what must not be found.
        told: what probes are told, as JSON.
        files: files that must not change.
    """

    run: str
    base: Path
    secret: str
    told: Told
    files: list[Path] = field(default_factory=list)
    process: int = 0

    def fingerprints(self) -> dict[str, tuple[str, int, int, int]]:
        """Content, mode, size and time of change of every planted file."""
        return {str(path): fingerprint(path) for path in self.files}


def fingerprint(path: Path) -> tuple[str, int, int, int]:
    try:
        status = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return "", 0, 0, 0
    return digest, status.st_mode, status.st_uid, status.st_mtime_ns


@contextlib.contextmanager
def planted() -> Iterator[Canaries]:
    """Plant everything that this user can, and take it away again."""
    run = secrets.token_hex(4)
    with contextlib.ExitStack() as stack:
        base = Path(tempfile.mkdtemp(prefix="minisandbox-attack-", dir="/tmp"))
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        base.chmod(0o755)
        made = Canaries(run, base, secrets.token_hex(16), {})
        made.told |= {"run": run, "harness": os.getpid(), "secret_name": f"secret-{run}", "greeting": GREETING}
        made.told["secret_sha256"] = hashlib.sha256(made.secret.encode()).hexdigest()
        _plant_files(made, stack)
        _plant_file_of_usr(made, stack)
        _plant_process(made, stack)
        _plant_use(stack)
        _plant_services(made, stack)
        _plant_objects(made, stack)
        _plant_key(made, stack)
        _plant_terminal(made, stack)
        _leak(made, stack)
        made.told |= _identities(made)
        yield made


def _plant_files(made: Canaries, stack: contextlib.ExitStack) -> None:
    places = {
        "home": Path.home() / f".minisandbox-attack-{made.run}",
        "tmp": made.base / "private",
        "var": Path("/var/lib" if os.geteuid() == 0 else "/var/tmp", f"minisandbox-attack-{made.run}"),
        "srv": Path("/srv", f"minisandbox-attack-{made.run}"),
        "shm": Path("/dev/shm", f"minisandbox-attack-{made.run}"),
    }
    told: dict[str, str] = {}
    for name, directory in places.items():
        with contextlib.suppress(OSError):
            directory.mkdir(mode=0o700)
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            path = directory / f"secret-{made.run}"
            path.write_text(f"{made.secret}\n", encoding="ascii")
            path.chmod(0o600)
            told[name] = str(path)
            made.files.append(path)
    drop = made.base / "drop"
    drop.mkdir()
    drop.chmod(0o1777)
    made.told |= {"secrets": told, "drop": str(drop), "leak_path": str(made.base)}
    made.told["shm_names"] = [places["shm"].name] if "shm" in told else None


def _plant_file_of_usr(made: Canaries, stack: contextlib.ExitStack) -> None:
    """Root alone can, and it is taken away: a file that sandboxes show."""
    marker = Path(f"/usr/local/share/minisandbox-attack-{made.run}-made")
    path = Path(f"/usr/local/share/minisandbox-attack-{made.run}")
    made.told |= {"usr_marker": str(marker), "usr_file": None}
    stack.callback(marker.unlink, missing_ok=True)
    with contextlib.suppress(OSError):
        path.write_text("of the host\n", encoding="ascii")
        for name in (path, path.with_name(path.name + ".moved"), path.with_name(path.name + ".linked")):
            stack.callback(name.unlink, missing_ok=True)
        made.files.append(path)
        made.told["usr_file"] = str(path)
    locked = os.open(LOCKED, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, locked)
    with contextlib.suppress(BlockingIOError):  # somebody else runs this suite: that lock does as well
        fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
    made.told |= {"lock_file": LOCKED, "lease_file": "/usr/bin/true", "host_devices": [os.stat("/usr/bin").st_dev]}


def _plant_use(stack: contextlib.ExitStack) -> None:
    """Somebody on the host who opens a program again and again."""
    over = threading.Event()

    def use() -> None:
        while not over.wait(0.05):
            os.close(os.open(LOCKED, os.O_RDONLY | os.O_CLOEXEC))

    user = threading.Thread(target=use, daemon=True)
    user.start()
    stack.callback(user.join)
    stack.callback(over.set)


def _plant_process(made: Canaries, stack: contextlib.ExitStack) -> None:
    token, program = f"minisandbox-attack-{made.run}-process", os.path.realpath("/bin/sleep")
    environment = {"PATH": "/usr/bin:/bin", SECRET_VARIABLE: made.secret}
    process = subprocess.Popen(
        [token, "600"], executable=program, env=environment, start_new_session=True, stdin=subprocess.DEVNULL
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    made.process = process.pid
    made.told |= {"token": token, "host_pid": process.pid, "host_group": process.pid, "host_exe": program}
    made.told["daemon"] = f"minisandbox-attack-{made.run}-daemon"


def _plant_services(made: Canaries, stack: contextlib.ExitStack) -> None:
    abstract = {name: f"minisandbox-attack-{made.run}-{name}" for name in ("stream", "datagram", "seqpacket")}
    path = str(made.base / "service")
    local = socket.AF_UNIX
    sockets = [socket.create_server(("127.0.0.1", 0)), socket.create_server(("0.0.0.0", 0))]
    sockets += [socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket(local), socket.socket(local)]
    sockets += [socket.socket(local, socket.SOCK_DGRAM), socket.socket(local, socket.SOCK_SEQPACKET)]
    near, everywhere, udp, named, stream, datagram, packets = sockets
    for each in sockets:
        stack.enter_context(each)
    udp.bind(("127.0.0.1", 0))
    named.bind(path)
    os.chmod(path, 0o666)
    for name, each in zip(abstract, (stream, datagram, packets), strict=True):
        each.bind("\0" + abstract[name])
    for each in (named, stream, packets):
        each.listen()
    made.told |= {"tcp_port": near.getsockname()[1], "tcp_port_everywhere": everywhere.getsockname()[1]}
    made.told |= {"udp_port": udp.getsockname()[1], "abstract": abstract, "unix_path": path, "addresses": _addresses()}
    _serve(stack, [near, everywhere, named, stream, packets], [udp, datagram])


def _addresses() -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out, contextlib.suppress(OSError):
        out.connect(("192.0.2.1", 9))
        return [str(out.getsockname()[0])]
    return []


def _serve(stack: contextlib.ExitStack, listeners: list[socket.socket], datagrams: list[socket.socket]) -> None:
    """Greet whoever comes, in a thread, until the stack closes."""
    wake, wakened = socket.socketpair()
    stack.enter_context(wake)
    stack.enter_context(wakened)
    selector = stack.enter_context(selectors.DefaultSelector())
    for each in (*listeners, *datagrams, wakened):
        selector.register(each, selectors.EVENT_READ)

    def serve() -> None:
        while True:
            for key, _ in selector.select():
                if key.fileobj is wakened:
                    return
                assert isinstance(key.fileobj, socket.socket)
                with contextlib.suppress(OSError):
                    _greet(key.fileobj, listening=key.fileobj in listeners)

    thread = threading.Thread(target=serve, name="services")
    thread.start()
    stack.callback(thread.join)
    stack.callback(wake.send, b"x")


def _greet(service: socket.socket, *, listening: bool) -> None:
    if listening:
        connection, _ = service.accept()
        with connection:
            connection.sendall(GREETING.encode())
    else:
        _, address = service.recvfrom(64)
        service.sendto(GREETING.encode(), address)


def _plant_objects(made: Canaries, stack: contextlib.ExitStack) -> None:
    """System V memory, semaphores, queue, and a POSIX queue."""
    shm_key, sem_key, msg_key = (secrets.randbelow(1 << 30) + 1 for _ in range(3))
    memory = call("shmget", shm_key, 4096, IPC_CREATE)
    stack.callback(call, "shmctl", memory, IPC_REMOVE, None)
    semaphores, queue = call("semget", sem_key, 1, IPC_CREATE), call("msgget", msg_key, IPC_CREATE)
    stack.callback(subprocess.run, ["ipcrm", "-s", str(semaphores), "-q", str(queue)], check=False, capture_output=True)
    name = f"minisandbox-attack-{made.run}"
    descriptor = call("mq_open", name.encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
    stack.callback(call, "mq_unlink", name.encode())
    stack.callback(os.close, descriptor)
    made.told |= {"shm_key": shm_key, "shm_id": memory, "sem_key": sem_key, "msg_key": msg_key, "mq_name": name}


def _plant_key(made: Canaries, stack: contextlib.ExitStack) -> None:
    """A key in the session keyring of this process, which the launcher inherits."""
    made.told |= {"key_name": None, "key_number": None, "key_ring": None}
    try:
        call("keyctl", KEYCTL_JOIN, None)
        name, secret = f"minisandbox-attack-{made.run}", made.secret.encode()
        number = call("add_key", b"user", name.encode(), secret, len(secret), SESSION_RING)
    except OSError:  # a kernel, or a filter around us, without keyrings
        return
    stack.callback(call, "keyctl", KEYCTL_UNLINK, number, SESSION_RING)
    ring = call("keyctl", KEYCTL_RING, SESSION_RING, 0)
    made.told |= {"key_name": name, "key_number": number, "key_ring": ring}


def _plant_terminal(made: Canaries, stack: contextlib.ExitStack) -> None:
    master, slave = pty.openpty()
    stack.callback(os.close, master)
    stack.callback(os.close, slave)
    status, directory = os.fstat(slave), os.stat("/dev/pts")
    made.told |= {"terminal": os.ttyname(slave), "terminal_identity": [status.st_dev, status.st_rdev]}
    made.told["pts_identity"] = [directory.st_dev, directory.st_ino]
    terminals = [os.fstat(number) for number in range(3) if os.isatty(number)]
    made.told["host_terminals"] = [[each.st_dev, each.st_rdev] for each in terminals]


def _leak(made: Canaries, stack: contextlib.ExitStack) -> None:
    """Inheritable descriptors, and the secret in this process's environment."""
    paths = (("/", os.O_RDONLY | os.O_DIRECTORY), (str(made.files[0]), os.O_RDONLY))
    for path, flags in paths:
        descriptor = os.open(path, flags)
        os.set_inheritable(descriptor, True)
        stack.callback(os.close, descriptor)
    os.environ[SECRET_VARIABLE] = made.secret
    stack.callback(os.environ.pop, SECRET_VARIABLE)


def _identities(made: Canaries) -> Told:
    """What tells the host from anything else."""
    root = os.stat("/")
    private = [Path("/etc", name) for name in PRIVATE]
    readable = [path for path in private if os.access(path, os.R_OK)]
    users = [entry for entry in pwd.getpwall() if 100 <= entry.pw_uid != 65534 or entry.pw_uid == os.getuid() != 0]
    machine = Path("/etc/machine-id")
    return {
        "namespaces": {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in NAMESPACES},
        "root_identity": [root.st_dev, root.st_ino],
        "root_device": [os.major(root.st_dev), os.minor(root.st_dev)],
        "etc_identities": [[path.stat().st_dev, path.stat().st_ino] for path in private if path.exists()],
        "etc_digests": [hashlib.sha256(path.read_bytes()).hexdigest() for path in readable],
        "machine_id_sha256": hashlib.sha256(machine.read_bytes().strip()).hexdigest() if machine.exists() else None,
        "hostname": os.uname().nodename,
        "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text(encoding="ascii")),
        "home": str(Path.home()),
        "host_users": [entry.pw_name for entry in users] or None,
        "host_ids": [os.getuid() or 1000],
        "groups": [group for group in os.getgroups() if group],
    }
