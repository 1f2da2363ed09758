"""What a sandbox can reach: nothing, or what an allow-list names, through the proxy."""

from __future__ import annotations

import contextlib
import functools
import http.server
import io
import logging
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import running, settled, stat_fields, until

from minisandbox.errors import InvalidValue, OwnerOnly, SandboxGone
from minisandbox.launch.kernel import identity
from minisandbox.sandbox import Process, Sandbox
from minisandbox.sandbox import network as network_module
from minisandbox.sandbox.controller import current_controller
from minisandbox.types import ImageSpec, Network, Output, Refusals

pytestmark = pytest.mark.kernel

HERE = "127.0.0.2"
"""Where the servers of these tests are: loopback, and not among the names that ``no_proxy`` keeps from the proxy."""


class Handler(http.server.SimpleHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def serving(directory: Path, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """A web server of the host; its port."""
    server = http.server.ThreadingHTTPServer((HERE, 0), functools.partial(Handler, directory=str(directory)))
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    directory = tmp_path_factory.mktemp("site")
    (directory / "hello").write_text("hello\n")
    with serving(directory) as port:
        yield directory, port


def private(*ports: int) -> Network:
    return Network.allow(*(f"{HERE}:{port}" for port in ports), private=True)


def ask(box: Sandbox, *requests: bytes, script: str = "") -> bytes:
    """What the proxy answers to bytes that are sent to it from inside, one after the other; then the end."""
    program = f"""
import socket, sys, time
c = socket.create_connection(("127.0.0.1", 3128))
for piece in {list(requests)!r}:
    c.sendall(piece); time.sleep(0.05)
{script or "c.shutdown(socket.SHUT_WR)"}
try:
    while data := c.recv(65536):
        sys.stdout.buffer.write(data)
except ConnectionResetError:
    sys.stdout.buffer.write(b"(reset)")
"""
    return box.exec(["python3", "-c", program], timeout=60).check().stdout_bytes


# --- off -------------------------------------------------------------------------------------------------------------

ATTEMPTS = """
import socket, time
for family, address in (
    (socket.AF_INET, "192.0.2.1"), (socket.AF_INET, "1.1.1.1"), (socket.AF_INET, "169.254.169.254"),
    (socket.AF_INET6, "2001:db8::1"), (socket.AF_INET6, "fe80::1"),
):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        begun = time.monotonic()
        try:
            socket.socket(family, kind).connect((address, 443))
            print("reached", address)
        except OSError:
            assert time.monotonic() - begun < 60, address  # an unanswered SYN takes two minutes (tcp(7))
begun = time.monotonic()
try:
    print("resolved", socket.getaddrinfo("packages.example.org", 443))
except OSError:
    assert time.monotonic() - begun < 4.5, "it waited for a name server: 5 s, twice (resolv.conf(5))"
print(sorted(name for _, name in socket.if_nameindex()))
"""


def test_without_a_network_connections_fail_at_once(box: Sandbox) -> None:
    assert box.exec(["python3", "-c", ATTEMPTS], timeout=30).check().stdout == "['lo']\n"
    assert "proxy" not in box.exec("env").stdout.lower()
    assert "refused" in box.exec("exec 3<>/dev/tcp/127.0.0.1/3128").stderr.lower()
    assert box.refusals() == Refusals()


# --- allow -----------------------------------------------------------------------------------------------------------


def test_there_is_no_other_way_than_the_proxy(spec: ImageSpec, site: tuple[Path, int]) -> None:
    with Sandbox.create(spec, network=private(site[1])) as box:
        assert box.info().network == "allow"
        assert box.exec(["python3", "-c", ATTEMPTS], timeout=30).check().stdout == "['lo']\n"
        direct = f"import socket; socket.create_connection(('{HERE}', {site[1]}), 5)"
        assert "Connection refused" in box.exec(["python3", "-c", direct]).stderr
        assert box.processes() == ()
        names = box.exec("cat /proc/[0-9]*/cmdline /proc/[0-9]*/comm").stdout_bytes
        assert b"minisandbox-network" not in names
        assert b"minisandbox-gateway" not in names
        taken = "import socket; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1); s.bind("
        assert "in use" in box.exec(["python3", "-c", f"{taken}('127.0.0.1', 3128))"]).stderr


def test_programs_find_the_proxy(spec: ImageSpec, site: tuple[Path, int]) -> None:
    with Sandbox.create(spec, network=private(site[1]), environment={"NO_PROXY": "mine"}) as box:
        lines = {line for line in box.exec("env").stdout.splitlines() if "proxy" in line.lower()}
        url = "http://127.0.0.1:3128"
        assert lines == {
            f"http_proxy={url}", f"https_proxy={url}", f"HTTP_PROXY={url}", f"HTTPS_PROXY={url}", "NO_PROXY=mine",
            "no_proxy=localhost,127.0.0.1,::1",
        }  # fmt: skip
        fetch = f"import urllib.request as u; print(u.urlopen('http://{HERE}:{site[1]}/hello').read())"
        assert box.exec(["python3", "-c", fetch], timeout=30).check().stdout == "b'hello\\n'\n"
        with Sandbox.attach(box.id) as other:
            assert other.exec(["python3", "-c", fetch], timeout=30).check().stdout == "b'hello\\n'\n"
            with pytest.raises(OwnerOnly):
                other.refusals()


def test_requests_and_tunnels(spec: ImageSpec, site: tuple[Path, int]) -> None:
    where = f"{HERE}:{site[1]}".encode()
    with Sandbox.create(spec, network=private(site[1])) as box:
        plain = ask(box, b"GET http://%b/hello HTTP/1.1\r\nHost: %b\r\n\r\n" % (where, where))
        assert plain.startswith(b"HTTP/1.0 200")
        assert plain.endswith(b"\r\n\r\nhello\n")
        head = b"POST http://%b/ HTTP/1.1\r\nHost: %b\r\nContent-Length: 6\r\n\r\nab" % (where, where)
        assert ask(box, head, b"cd", b"ef").endswith(b"\r\n\r\nabcdef")
        tunnel = ask(box, b"CONNECT %b HTTP/1.1\r\n" % where, b"\r\nGET /hello", b" HTTP/1.0\r\n\r\n")
        assert tunnel.startswith(b"HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.0 200")
        assert tunnel.endswith(b"\r\n\r\nhello\n")
        second = b"GET http://%b/hello HTTP/1.1\r\nHost: %b\r\n\r\n" % (where, where)
        assert ask(box, second * 2).startswith(b"HTTP/1.1 403 ")
        assert ask(box, b"X" * 70_000).startswith(b"HTTP/1.1 403 ")
        assert ask(box, b"\0\r\n\r\n").startswith(b"HTTP/1.1 403 ")
        assert ask(box) == b""
        assert box.refusals().count == 3


def test_refusals_are_answered_logged_and_counted(
    spec: ImageSpec, site: tuple[Path, int], caplog: pytest.LogCaptureFixture
) -> None:
    network = Network.allow("localhost", f"{HERE}:{site[1]}", "169.254.0.0.example.org", private=True)
    with Sandbox.create(spec, network=network) as box, caplog.at_level(logging.WARNING, "minisandbox.network"):
        answer = ask(box, b"CONNECT Elsewhere.example.org:443 HTTP/1.1\r\n\r\n")
        why = "elsewhere.example.org:443 is not on this sandbox's allow-list"
        assert answer.startswith(f"HTTP/1.1 403 refused by minisandbox: {why}\r\n".encode())
        assert answer.endswith(f"\r\n\r\nrefused by minisandbox: {why}\n".encode())
        assert box.refusals() == Refusals(1, (why,))
        assert caplog.messages == [f"sandbox {box.id}: refused: {why}"]
        for target in (f"{HERE}:1", "127.0.0.1:80", "[::1]:443", "169.254.169.254:80", "127.1:80", "0:80"):
            assert ask(box, f"CONNECT {target} HTTP/1.1\r\n\r\n".encode()).startswith(b"HTTP/1.1 403 ")
        assert ask(box, b"CONNECT localhost:80 HTTP/1.1\r\n\r\n")[:13] in (b"HTTP/1.1 502 ", b"HTTP/1.1 200 ")
        assert box.refusals().count == 7
    with pytest.raises(SandboxGone):
        box.refusals()


def test_private_addresses_need_a_word(spec: ImageSpec) -> None:
    with pytest.raises(InvalidValue, match="private=True"):
        Sandbox.create(spec, network=Network.allow("127.0.0.1"))
    with Sandbox.create(spec, network=Network.allow("localhost")) as box:
        answer = ask(box, b"CONNECT localhost:443 HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 403 refused by minisandbox: localhost:443: its address is refused")
        assert re.search(r"address (127\.0\.0\.1|::1) is refused: loopback", box.refusals().last[-1])
        assert not re.search(rb"127\.|::1|loopback", answer), "what names are called here is nobody's business there"
    with Sandbox.create(spec, network=Network.allow("localhost:9", private=True)) as box:
        assert ask(box, b"CONNECT localhost:9 HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\nlocalhost:9: Connection refused\n")


def test_a_flood_is_counted_and_told_in_part(
    spec: ImageSpec, site: tuple[Path, int], caplog: pytest.LogCaptureFixture
) -> None:
    script = """
import socket
for number in range(400):
    with socket.create_connection(("127.0.0.1", 3128)) as c:
        c.sendall(b"CONNECT h%d:443 HTTP/1.1\\r\\n\\r\\n" % number)
        c.shutdown(socket.SHUT_WR)
        while c.recv(4096): pass
"""
    with Sandbox.create(spec, network=private(site[1])) as box:
        caplog.set_level(logging.WARNING, "minisandbox.network")
        box.exec(["python3", "-c", script], timeout=60).check()
        refusals = box.refusals()
        assert refusals.count == 400
        assert len(refusals.last) == 100
        assert 100 <= len(caplog.messages) < 130


def test_too_many_connections(spec: ImageSpec, site: tuple[Path, int]) -> None:
    script = """
import socket, time
held = [socket.create_connection(("127.0.0.1", 3128)) for _ in range(256)]
extra = socket.create_connection(("127.0.0.1", 3128))
print(extra.recv(4096).split(b"\\r\\n")[0].decode())
for c in held: c.close()
answer, give_up = b"", time.monotonic() + 60
while b"allow-list" not in answer and time.monotonic() < give_up:
    try:
        c = socket.create_connection(("127.0.0.1", 3128))
        c.sendall(b"CONNECT h:443 HTTP/1.1\\r\\n\\r\\n")
        answer = c.recv(4096)
    except OSError:
        pass
print(answer.split(b"\\r\\n")[0].decode())
"""
    with Sandbox.create(spec, network=private(site[1])) as box, Sandbox.create(spec, network=private(site[1])) as other:
        first, second = box.exec(["python3", "-c", script], timeout=60).check().stdout.splitlines()
        assert "256 connections" in first
        assert "allow-list" in second
        assert other.refusals().count == 0


def test_half_closed_tunnels(spec: ImageSpec) -> None:
    """A client may close its side and still read: the server answers when it has seen the end."""
    with socket.create_server((HERE, 0)) as server, Sandbox.create(spec, network=private(port_of(server))) as box:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                data = b"".join(iter(lambda: connection.recv(65536), b""))
                connection.sendall(b"%d" % len(data) + b"!" * 1_000_000)

        thread = threading.Thread(target=answer)
        thread.start()
        request = f"CONNECT {HERE}:{port_of(server)} HTTP/1.1\r\n\r\n".encode()
        script = "c.sendall(b'x' * 3_000_000); c.shutdown(socket.SHUT_WR)"
        got = ask(box, request, script=script)
        thread.join()
    assert got.endswith(b"\r\n\r\n3000000" + b"!" * 1_000_000)


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


# --- tools -----------------------------------------------------------------------------------------------------------


def test_pip_installs_through_it(spec: ImageSpec, tmp_path: Path) -> None:
    page = tmp_path / "simple" / "tiny-thing"
    page.mkdir(parents=True)
    name = "tiny_thing-1.0-py3-none-any.whl"
    info = "tiny_thing-1.0.dist-info"
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as wheel:
        wheel.writestr("tiny_thing.py", "answer = 42\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"tiny_thing.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    (page / name).write_bytes(data.getvalue())
    (page / "index.html").write_text(f'<a href="{name}">{name}</a>')
    with serving(tmp_path) as port, Sandbox.create(spec, network=private(port)) as box:
        if box.exec("python3 -m pip --version").exit_code != 0:
            pytest.skip("no pip in the host's /usr")
        source = f"--index-url http://{HERE}:{port}/simple --trusted-host {HERE}"
        box.exec(f"python3 -m pip install -q --target /tmp/lib {source} tiny-thing", timeout=120).check()
        assert box.exec("PYTHONPATH=/tmp/lib python3 -c 'import tiny_thing as t; print(t.answer)'").stdout == "42\n"
        assert box.refusals() == Refusals()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_git_clones_through_it(spec: ImageSpec, tmp_path: Path, scheme: str) -> None:
    if shutil.which("git") is None or shutil.which("openssl") is None:
        pytest.skip("needs git and openssl")
    made = f"""
git init -q work && cd work && echo hello > file && git add file
git -c user.name=a -c user.email=a@example.org commit -q -m one && cd ..
git clone -q --bare work repo.git && git -C repo.git update-server-info
openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=t \
    -addext subjectAltName=IP:{HERE} 2> /dev/null
"""
    clean = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["bash", "-ec", made], cwd=tmp_path, env=clean, check=True)
    context = None
    if scheme == "https":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with serving(tmp_path, context) as port, Sandbox.create(spec, network=private(port)) as box:
        if box.exec("git --version").exit_code != 0:
            pytest.skip("no git in the host's /usr")
        box.files.write_bytes("/tmp/cert.pem", (tmp_path / "cert.pem").read_bytes())
        command = f"git -c http.sslCAInfo=/tmp/cert.pem clone -q {scheme}://{HERE}:{port}/repo.git /tmp/r"
        box.exec(f"{command} && cat /tmp/r/file", timeout=60).check()
        assert box.files.read_text("/tmp/r/file") == "hello\n"


# --- lives and deaths ------------------------------------------------------------------------------------------------


def fetch(box: Sandbox, port: int) -> str:
    script = f"import urllib.request as u; print(u.urlopen('http://{HERE}:{port}/hello', timeout=20).read().decode())"
    done = box.exec(["python3", "-c", script], timeout=60)
    return done.stdout.strip() or done.stderr.splitlines()[-1]


def test_it_stays_after_snapshots_resets_and_in_forks(spec: ImageSpec, site: tuple[Path, int]) -> None:
    port = site[1]
    with Sandbox.create(spec, network=private(port)) as box:
        ask(box, b"CONNECT h:443 HTTP/1.1\r\n\r\n")
        with box.snapshot() as snapshot, Sandbox.create(snapshot, network=Network.off()) as cut_off:
            assert fetch(box, port) == "hello"
            assert "hello" not in fetch(cut_off, port)
        box.reset()
        assert fetch(box, port) == "hello"
        ask(box, b"CONNECT h:443 HTTP/1.1\r\n\r\n")
        assert box.refusals().count == 2
        (child,) = box.fork()
        with child:
            assert (fetch(child, port), child.info().network) == ("hello", "allow")
            assert child.refusals().count == 0


def gateway_pid() -> int:
    process = current_controller().gateway._process
    assert process is not None
    return process.pid


def proxies(gateway: int = 0) -> set[int]:
    """The proxy processes that a gateway has."""
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    parent, found = str(gateway or gateway_pid()), set()
    for pid in pids:
        fields = stat_fields(pid)
        if fields is not None and fields[1] == parent and running(pid):
            found.add(pid)
    return found


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_nothing_of_a_sandbox_stays_in_the_gateway(spec: ImageSpec, site: tuple[Path, int]) -> None:
    if os.geteuid() != 0:
        pytest.skip("the descriptors of a process that is not dumpable are root's to see")
    with Sandbox.create(spec, network=private(site[1])) as box:
        fetch(box, site[1])
        pid, (proxy,) = gateway_pid(), proxies()
        with Sandbox.create(spec, network=private(site[1])) as second:
            fetch(second, site[1])
            before = settled(lambda: descriptors(pid))
            assert len(proxies()) == 2
        until(lambda: descriptors(pid) == before - 5)  # listener, pidfd, two for reports, its proxy
        until(lambda: proxies() == {proxy})
        for _ in range(5):
            box.reset()
        assert fetch(box, site[1]) == "hello"
        until(lambda: descriptors(pid) == before - 5)
        assert len(proxies() - {proxy}) == 1
        until(lambda: not running(proxy))
        assert gateway_pid() == pid


def test_the_gateways_death_is_no_sandboxs(
    spec: ImageSpec, site: tuple[Path, int], caplog: pytest.LogCaptureFixture
) -> None:
    with Sandbox.create(spec, network=private(site[1])) as box:
        assert fetch(box, site[1]) == "hello"
        doomed = proxies()
        assert len(doomed) == 1
        os.kill(gateway_pid(), signal.SIGKILL)
        until(lambda: not any(map(running, doomed)))
        until(lambda: "refused" in fetch(box, site[1]))
        assert box.exec("echo alive").stdout == "alive\n"
        assert box.refusals() == Refusals()
        assert "the network's gateway was killed" in caplog.text
        with Sandbox.create(spec, network=private(site[1])) as second:
            assert fetch(second, site[1]) == "hello"
        box.reset()
        assert fetch(box, site[1]) == "hello"


HOLDING = """
import socket, sys, time
held = []
for _ in range(int(sys.argv[2])):
    held.append(socket.create_connection(("127.0.0.1", 3128), 30))
    held[-1].sendall(b"CONNECT %b HTTP/1.1\\r\\n\\r\\n" % sys.argv[1].encode())
    assert b" 200 " in held[-1].recv(4096)
print("held", flush=True)
try:
    print(held[0].recv(1))
except OSError:
    print("cut off")
"""


def first_line(process: Process) -> bytes:
    """The first that it prints."""
    data = b""
    for event in process.events():
        data += event.data if isinstance(event, Output) else b""
        if b"\n" in data:
            break
    return data


def test_a_proxys_death_costs_its_sandbox_its_connections_alone(
    spec: ImageSpec, site: tuple[Path, int], caplog: pytest.LogCaptureFixture
) -> None:
    port = site[1]
    with socket.create_server((HERE, 0)) as server:
        network, where = private(port, port_of(server)), f"{HERE}:{port_of(server)}"
        with Sandbox.create(spec, network=network) as box, Sandbox.create(spec, network=network) as other:
            ask(box, b"CONNECT h:443 HTTP/1.1\r\n\r\n")
            (doomed,) = proxies()
            with box.start(["python3", "-c", HOLDING, where, "1"]) as cut, contextlib.ExitStack() as later:
                assert first_line(cut) == b"held\n"  # the first connection is its
                kept = later.enter_context(other.start(["python3", "-c", HOLDING, where, "1"]))
                assert first_line(kept) == b"held\n"
                os.kill(doomed, signal.SIGKILL)
                assert cut.wait(60).stdout.splitlines()[1] in ("b''", "cut off")
                assert fetch(box, port) == "hello"
                assert fetch(other, port) == "hello"
                assert box.refusals().count == 1
                assert f"sandbox {box.id}: its network proxy was killed" in caplog.text
                server.accept()[0].close()
                connection, _ = server.accept()
                with connection:
                    connection.sendall(b"!")
                    assert kept.wait(60).stdout.splitlines()[1] == "b'!'"


CROWD = """
import resource, socket, sys
from pathlib import Path
from tests.kernel import test_network as t
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec, Limits
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
spec, port = ImageSpec("base", (Path(sys.argv[1]),)), int(sys.argv[2])
with socket.create_server((t.HERE, 0), backlog=1024) as server:
    where = f"{t.HERE}:{t.port_of(server)}"
    network = t.private(port, t.port_of(server))
    boxes = [Sandbox.create(spec, network=network, limits=Limits(open_files=200)) for _ in range(4)]
    holding = [box.start(["python3", "-c", t.HOLDING, where, "120"]) for box in boxes[:3]]
    print([t.first_line(process) for process in holding], t.fetch(boxes[3], port), len(t.proxies()))
    for box in boxes:
        box.stop()
"""


def test_what_one_sandbox_holds_it_does_not_take_from_others(spec: ImageSpec, site: tuple[Path, int]) -> None:
    """Three hold 240 descriptors each of the 300 that a process may have here."""
    done, held = run_program(CROWD, str(spec.layers[0]), str(site[1])), b"held\n"
    assert done.stdout == f"{[held] * 3} hello 4\n", done.stderr


def test_a_proxy_that_nobody_uses_ends(
    spec: ImageSpec, site: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_module, "UNUSED", 0.3)
    with (
        socket.create_server((HERE, 0)) as server,
        Sandbox.create(spec, network=private(site[1], port_of(server))) as box,
    ):
        for number in range(2):
            ask(box, b"CONNECT h:443 HTTP/1.1\r\n\r\n")
            until(lambda: not proxies())
            assert box.refusals().count == number + 1
        with box.start(["python3", "-c", HOLDING, f"{HERE}:{port_of(server)}", "1"]) as process:
            assert first_line(process) == b"held\n"
            (pid,) = proxies()
            assert settled(proxies, seconds=1.0) == {pid}, "it ended with a connection open"


def test_no_connection_is_lost_between_two_proxies(
    spec: ImageSpec, site: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here each ends as soon as it has nothing to do, whatever waits in the queue of the listening socket."""
    script = """
import concurrent.futures, socket
def one(number):
    with socket.create_connection(("127.0.0.1", 3128), 30) as c:
        c.sendall(b"CONNECT h%d:443 HTTP/1.1\\r\\n\\r\\n" % number)
        c.shutdown(socket.SHUT_WR)
        return b" 403 " in b"".join(iter(lambda: c.recv(4096), b""))
with concurrent.futures.ThreadPoolExecutor(3) as threads:
    print(sum(threads.map(one, range(300))))
"""
    monkeypatch.setattr(network_module, "UNUSED", 0.0)
    with Sandbox.create(spec, network=private(site[1])) as box:
        assert box.exec(["python3", "-c", script], timeout=120).check().stdout == "300\n"
        assert box.refusals().count == 300


def run_program(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program that can import what is here."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], env=os.environ | {"PYTHONPATH": path}, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_launcher_that_was_killed_leaves_no_second_gateway(spec: ImageSpec) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from tests.kernel import test_network as t
from tests.waiting import running_with, stat_fields, until
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.controller import current_controller
from minisandbox.types import ImageSpec, Network
def make():
    return Sandbox.create(ImageSpec("base", (Path(sys.argv[1]),)), network=Network.allow("h"))
box, first = make(), current_controller()
os.kill(first.launcher._process.pid, signal.SIGKILL)
until(lambda: not first.launcher.alive)
second = make()
assert current_controller() is not first
t.ask(second)
print(sum(stat_fields(pid)[1] == str(os.getpid()) for pid in running_with(b"minisandbox-gateway")))
second.stop()
"""
    done = run_program(program, str(spec.layers[0]))
    assert done.stdout == "1\n", done.stderr


def test_the_gateway_and_its_proxies_end_with_their_controller(spec: ImageSpec) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from tests.kernel import test_network as t
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec, Network
box = Sandbox.create(ImageSpec("base", (Path(sys.argv[1]),)), network=Network.allow("h"))
t.ask(box, b"CONNECT other:443 HTTP/1.1\\r\\n\\r\\n")
print(t.gateway_pid(), *t.proxies(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run_program(program, str(spec.layers[0]))
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 2
    until(lambda: not any(map(running, pids)))


def test_the_proxy_has_no_privilege_and_says_nothing_of_its_caller(spec: ImageSpec) -> None:
    with Sandbox.create(spec, network=Network.allow("packages.example.org")) as box:
        ask(box)
        (proxy,) = proxies()
        for pid, name in ((proxy, b"minisandbox-network"), (gateway_pid(), b"minisandbox-gateway")):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
            assert status["NoNewPrivs"] == "1"
            if identity.has_privileges():  # uid 0 would be the owner of root's files without capabilities too
                ids = [str(identity.GATEWAY_ID)] * 4
                assert (status["Uid"].split(), status["Gid"].split(), status["Groups"].split()) == (ids, ids, [])
            assert Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0") == name
            if os.geteuid() != 0:
                with pytest.raises(PermissionError):
                    os.listdir(f"/proc/{pid}/fd")
        if os.geteuid() == 0:
            held = {os.readlink(f"/proc/{proxy}/fd/{number}").split(":")[0] for number in range(3, 7)}
            assert held <= {"socket", "anon_inode"}
            assert not any("memfd" in os.readlink(entry) for entry in Path(f"/proc/{proxy}/fd").iterdir())
