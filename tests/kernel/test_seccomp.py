"""The system-call filter in the kernel: what it refuses, and that ordinary programs do not notice it."""

from __future__ import annotations

import errno
import json
import platform
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from minisandbox.launch.kernel import seccomp
from minisandbox.launch.kernel.seccomp_tables import NEWEST
from minisandbox.sandbox import Sandbox

pytestmark = pytest.mark.skipif(
    platform.machine() not in seccomp.AUDIT_ARCHITECTURES, reason="there is no system-call filter for this machine"
)

# A child that goes under the filter, or for control does not, makes calls and prints what they gave.
MAKE_CALLS = """
import ctypes, json, os, sys
from minisandbox.launch.kernel import seccomp, syscalls
libc = ctypes.CDLL(None, use_errno=True)
syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
filtered, calls = json.load(sys.stdin)
os.setsid()  # no terminal to hang up
if filtered:
    seccomp.install()
    seccomp.verify()
for number, arguments in calls:
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_uint64(value) for value in arguments))
    if result == 0 and os.getpid() != os.getsid(0):
        os._exit(0)  # a child that clone(2) should not have made
    print(result if result >= 0 else -ctypes.get_errno(), flush=True)
"""

# Becomes a program under the filter.
BECOME = """
import os, sys
from minisandbox.launch.kernel import seccomp, syscalls
syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
seccomp.install()
seccomp.verify()
os.execvp(sys.argv[1], sys.argv[1:])
"""
ALL_ONES = (2**64 - 1,) * 6
GARBAGE = 0xDEADBEEF << 32


def make_calls(*calls: tuple[int, tuple[int, ...]], filtered: bool = True) -> list[int]:
    """What the calls gave: a result, or the negative errno."""
    done = subprocess.run(
        [sys.executable, "-c", MAKE_CALLS],
        input=json.dumps([filtered, calls]), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def call(name: str, *arguments: int, filtered: bool = True) -> int:
    return make_calls((numbers()[name], arguments), filtered=filtered)[0]


def numbers() -> dict[str, int]:
    return {known.name: known.number for known in seccomp.calls()}


def under_filter(*command: str, cwd: Path | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BECOME, *command],
        cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def run_ok(*command: str, cwd: Path | None = None) -> str:
    done = under_filter(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def need(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} here")


# --- refused ---------------------------------------------------------------------------------------------------------


def test_every_refused_call_gets_the_verdict_that_the_interpreter_foretells() -> None:
    """All bits set: no descriptor, address or flag word that any of these calls would take, were they let through."""
    machine = seccomp.machine()
    foretold = {c.name: seccomp.simulate(machine, c.number, ALL_ONES) for c in seccomp.calls()}
    refused = [name for name, verdict in foretold.items() if verdict]
    results = make_calls(*((numbers()[name], ALL_ONES) for name in refused))
    assert dict(zip(refused, results, strict=True)) == {name: -foretold[name] for name in refused}
    assert len(refused) > 85


def test_numbers_beyond_the_newest_are_unknown() -> None:
    beyond = [NEWEST + 1, 600, 1023, 0x40000000 | 39, 0x40000000 | 272, 0x7FFFFFFF]
    assert make_calls(*((number, ALL_ONES) for number in beyond)) == [-errno.ENOSYS] * len(beyond)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="int 0x80 is of x86")
def test_the_i386_door_is_shut() -> None:
    """``int 0x80`` with i386's number of getpid, from a page of machine code."""
    script = (
        "import ctypes, mmap, sys\n"
        "from minisandbox.launch.kernel import seccomp, syscalls\n"
        "page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)\n"
        "page.write(bytes.fromhex('b814000000' 'cd80' 'c3'))  # mov eax, 20; int 0x80; ret\n"
        "enter = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))\n"
        "syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)\n"
        "sys.argv[1:] and seccomp.install()\n"
        "print(enter(), flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, "filter"], capture_output=True, text=True, check=False)
    no_such_door = -signal.SIGSEGV  # a kernel without 32-bit emulation
    assert done.returncode == no_such_door or int(done.stdout) == -errno.ENOSYS, done.stderr
    control = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert control.returncode == no_such_door or int(control.stdout) > 0


def test_without_the_filter_the_probes_reach_the_kernel() -> None:
    """The control: a probe that the kernel itself answers alike would prove nothing."""
    known = numbers()
    probes = [(known["unshare"], (0,)), (known["clone3"], (0, 0)), (known["kcmp"], ALL_ONES)]
    refused, answered = make_calls(*probes), make_calls(*probes, filtered=False)
    assert refused == [-errno.EPERM, -errno.ENOSYS, -errno.EPERM]
    assert all(one != other for one, other in zip(refused, answered, strict=True))


@pytest.mark.parametrize("flag", [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000])
def test_clone_makes_no_namespaces(flag: int) -> None:
    for flags in (flag | signal.SIGCHLD, flag | signal.SIGCHLD | GARBAGE):
        assert call("clone", flags, 0, 0, 0, 0) == -errno.EPERM


@pytest.mark.parametrize(
    ("family", "kind", "protocol", "refusal"),
    [
        (40, 1, 0, errno.EAFNOSUPPORT),  # AF_VSOCK
        (38, 5, 0, errno.EAFNOSUPPORT),  # AF_ALG
        (17, 3, 0, errno.EAFNOSUPPORT),  # AF_PACKET
        (15, 3, 2, errno.EAFNOSUPPORT),  # AF_KEY
        (31, 5, 0, errno.EAFNOSUPPORT),  # AF_BLUETOOTH
        (44, 3, 0, errno.EAFNOSUPPORT),  # AF_XDP
        (30, 4, 0, errno.EAFNOSUPPORT),  # AF_TIPC
        (2, 3, 1, errno.EPERM),
        (10, 3, 58, errno.EPERM),
        (2, 10, 3, errno.EPERM),
        (2, 1, 132, errno.EPROTONOSUPPORT),
        (2, 2, 1, errno.EPROTONOSUPPORT),
        (16, 3, 9, errno.EPROTONOSUPPORT),
        (16, 3, 12, errno.EPROTONOSUPPORT),
    ],
)
def test_sockets_that_are_not_there(family: int, kind: int, protocol: int, refusal: int) -> None:
    plain, garbled = (tuple(v | high for v in (family, kind, protocol)) for high in (0, GARBAGE))
    socket = numbers()["socket"]
    assert make_calls((socket, plain), (socket, garbled)) == [-refusal, -refusal]


def test_limits_of_others_cannot_be_set() -> None:
    script = (
        "import os, resource\n"
        "core = resource.RLIMIT_CORE\n"
        "print(resource.prlimit(os.getppid(), core) == resource.prlimit(os.getppid(), core))\n"
        "resource.setrlimit(core, (0, 0)); resource.prlimit(0, core, (0, 0))\n"
        "for pid in (os.getppid(), os.getpid(), 1):\n"
        "    try: resource.prlimit(pid, core, (0, 0))\n"
        "    except PermissionError: print('refused')\n"
    )
    assert run_ok(sys.executable, "-c", script).split() == ["True", "refused", "refused", "refused"]


def test_pid_1_keeps_its_priority() -> None:
    """With the values it has, and a user that does not exist: nothing would come of a call let through."""
    script = (
        "import os\n"
        "nice = os.getpriority(os.PRIO_PROCESS, 0)\n"
        "os.setpriority(os.PRIO_PROCESS, 0, nice); os.setpriority(os.PRIO_PROCESS, os.getpid(), nice + 1)\n"
        "os.sched_setaffinity(os.getpid(), os.sched_getaffinity(0))\n"
        "calls = [\n"
        "    lambda: os.setpriority(os.PRIO_PROCESS, 1, os.getpriority(os.PRIO_PROCESS, 1)),\n"
        "    lambda: os.setpriority(os.PRIO_USER, 2**31 - 2, 0),\n"
        "    lambda: os.sched_setaffinity(1, os.sched_getaffinity(1)),\n"
        "    lambda: os.sched_setscheduler(1, os.sched_getscheduler(1), os.sched_param(0)),\n"
        "]\n"
        "for call in calls:\n"
        "    try: call()\n"
        "    except PermissionError: print('refused')\n"
    )
    assert run_ok(sys.executable, "-c", script).split() == ["refused"] * 4


def test_a_terminal_cannot_be_typed_into() -> None:
    script = (
        "import ctypes, errno, fcntl, os, pty, termios\n"
        "leader, follower = pty.openpty()\n"
        "fcntl.ioctl(follower, termios.TIOCGWINSZ, b'\\0' * 8); termios.tcgetattr(follower)\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "letter = ctypes.create_string_buffer(b'x')\n"
        "for request in (termios.TIOCSTI, termios.TIOCSTI | 1 << 32, 0x541C, 0x541C | 7 << 40, termios.TIOCSETD):\n"
        "    print(libc.ioctl(follower, ctypes.c_ulong(request), letter), errno.errorcode[ctypes.get_errno()])\n"
    )
    assert run_ok(sys.executable, "-c", script).splitlines() == ["-1 EPERM"] * 5


def test_without_no_new_privs_an_ordinary_process_gets_no_filter() -> None:
    script = (
        "import errno, os\n"
        "from minisandbox.launch.kernel import seccomp, syscalls\n"
        "os.getuid() or syscalls.capset(0)\n"
        "try: seccomp.install()\n"
        "except syscalls.CallError as error: print(error.errno == errno.EACCES)\n"
        "try: seccomp.verify()\n"
        "except OSError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    refused, complaint = done.stdout.splitlines()
    assert refused == "True"
    assert "unshare is not refused" in complaint


def test_the_filter_stays_across_programs_and_none_can_be_added() -> None:
    status = run_ok("bash", "-c", "cat /proc/self/status")
    assert "Seccomp:\t2" in status
    more = (
        "from minisandbox.launch.kernel import seccomp as s\n"
        "try:\n    s.install()\nexcept OSError as error:\n    print(error.errno)\n"
        "print(open('/proc/self/status').read())"
    )
    said = run_ok(sys.executable, "-c", more)
    assert said.splitlines()[0] == str(errno.EINVAL)  # as of a kernel without them
    assert count_filters(said) == count_filters(status)


def count_filters(status: str) -> int:
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("Seccomp_filters")), 0)


# --- not noticed -----------------------------------------------------------------------------------------------------

PYTHON_SCRIPTS = {
    "threads": """
        import threading
        threads = [threading.Thread(target=print, args=(n,)) for n in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    """,
    "subprocess": """
        import subprocess
        assert subprocess.check_output(["echo", "a"]) == b"a\\n"
        subprocess.run("true", shell=True, check=True)
        subprocess.run(["true"], start_new_session=True, preexec_fn=lambda: None, check=True)
    """,
    "sockets": """
        import socket
        listener = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        client.sendall(b"x")
        assert accepted.recv(1) == b"x"
        accepted.close(), client.close(), listener.close()
        [end.close() for end in socket.socketpair()]
        socket.getaddrinfo("localhost", 80)
        assert socket.if_nameindex()
    """,
    "asyncio": """
        import asyncio
        async def main():
            process = await asyncio.create_subprocess_exec("echo", "x", stdout=asyncio.subprocess.PIPE)
            assert (await process.communicate())[0] == b"x\\n"
            server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
            await asyncio.to_thread(len, "")
            server.close()
        asyncio.run(main())
    """,
    "multiprocessing": """
        import concurrent.futures, multiprocessing
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, [-1, 2]) == [1, 2]
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
            assert pool.submit(abs, -1).result() == 1
        queue = multiprocessing.Queue()
        queue.put(1)
        assert queue.get() == 1
    """,
    "shared_memory": """
        from multiprocessing import shared_memory
        memory = shared_memory.SharedMemory(create=True, size=10)
        memory.close()
        memory.unlink()
    """,
    "signals": """
        import os, select, signal
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        signal.pause()
        epoll = select.epoll()
        epoll.register(os.eventfd(1))
        assert epoll.poll(1)
        child = os.fork() or os._exit(0)
        os.waitid(os.P_PIDFD, os.pidfd_open(child), os.WEXITED)
    """,
    "files": """
        import fcntl, mmap, os, shutil, tempfile
        with tempfile.TemporaryDirectory() as place, open(place + "/a", "w+b") as file:
            file.write(b"x" * 9000)
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX)
            mmap.mmap(file.fileno(), 0)[0]
            shutil.copy2(place + "/a", place + "/b")
            os.mkfifo(place + "/p")
            os.link(place + "/a", place + "/c")
            os.symlink("a", place + "/s")
            os.posix_fallocate(file.fileno(), 0, 9999)
            os.utime(place + "/a")
            os.chmod(place + "/a", 0o600)
            os.truncate(place + "/a", 1)
            os.close(os.memfd_create("x"))
            os.statvfs(place), list(os.scandir(place))
    """,
    "terminals": """
        import os, pty
        child, leader = pty.fork()
        if child == 0:
            os.execvp("stty", ["stty", "size"])
        assert os.read(leader, 99) == b"0 0\\r\\n"
        assert os.waitpid(child, 0)[1] == 0
    """,
    "sqlite": """
        import sqlite3, tempfile
        with tempfile.TemporaryDirectory() as place:
            database = sqlite3.connect(place + "/x")
            database.execute("pragma journal_mode=wal")
            database.execute("create table t(x)")
            database.commit()
            database.close()
    """,
    "sendfile": """
        import os, tempfile
        with tempfile.TemporaryFile() as file:
            file.write(b"x" * 9000)
            file.flush()
            reader, writer = os.pipe()
            assert os.sendfile(writer, file.fileno(), 0, 9000) == 9000
            assert os.splice(reader, file.fileno(), 9000, offset_dst=0) == 9000
    """,
    "limits": """
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.getrlimit(resource.RLIMIT_AS), resource.getrusage(resource.RUSAGE_CHILDREN)
    """,
}


@pytest.mark.parametrize("script", PYTHON_SCRIPTS.values(), ids=PYTHON_SCRIPTS)
def test_python_works(script: str) -> None:
    run_ok(sys.executable, "-c", textwrap.dedent(script))


def test_bash_job_control_works() -> None:
    script = """
        set -m; sleep 5 & kill -STOP %1; jobs
        kill %1; kill -CONT %1; wait %1
        cat <(echo a) | sort; ulimit -n; time true
    """
    assert "a" in run_ok("bash", "-c", script).split()


SHELL_SCRIPTS = {
    "git": """
        export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
        git init -q .; echo x > a; git add -A
        git -c user.name=a -c user.email=a@b commit -qm x
        git status --porcelain; git log --oneline; git gc -q; git fsck
        git clone -q . clone; git -C clone worktree add -q ../tree; git diff --no-index a tree/a
    """,
    "gcc": """
        printf '%s\\n' '#include <pthread.h>' 'void *f(void *x) { return x; }' \\
            'int main() { pthread_t t; return pthread_create(&t, 0, f, 0) || pthread_join(t, 0); }' > a.c
        gcc -pthread a.c -o a; ./a
    """,
    "make": "printf 'all: a b\\na b:\\n\\techo $@ > $@\\n' > Makefile; make -j4 -s; test -f a -a -f b",
    "tar": """
        mkdir d e; mkfifo d/p; echo x > d/f; ln -s f d/l
        tar czf a.tgz d; tar xpzf a.tgz -C e; test -p e/d/p
    """,
    "find": "mkdir -p a/b; touch a/b/c; find . -name c -exec ls -l {} + | grep c; du -s .; cp -a a z; rm -r z",
    "sort": "seq 100000 | sort --parallel=4 -S 1M -rn > out; test $(head -1 out) = 100000",
    "sed": "echo abc > f; sed -i s/b/x/ f; grep -q axc f; awk '{print $1}' f; xargs echo < f; cut -c1 f",
    "perl": "test $(perl -e 'my $p = fork // die; exit 0 unless $p; waitpid $p, 0; print `echo hi`') = hi",
    "node": """
        cat > a.js <<end
            require("fs").readdirSync(".")
            require("child_process").execSync("echo hi")
            require("net").createServer().listen(0, "127.0.0.1", function () { this.close() })
            new (require("worker_threads").Worker)("1", { eval: true })
end
        node a.js
    """,
    "curl": """
        exec 3< <("$PYTHON" -u -m http.server -b 127.0.0.1 0 2> log)
        read -ru3 _ _ _ _ _ port _
        curl -sf http://127.0.0.1:$port/ > page; kill $!
    """,
    "gdb": """
        echo 'int main(void) { return 0; }' > a.c; gcc -g a.c -o a
        gdb -q -batch -nx -ex 'break main' -ex run -ex bt ./a > log 2>&1; grep '#0 *main' log
    """,
    "dpkg": "dpkg -l > list; dpkg-query -W bash; test -s list",
    "timeout": "timeout 5 nice -n 5 true; nohup true; setsid true; stdbuf -oL echo a; taskset -c 0 true; flock f true",
    "openssl": "openssl rand -hex 8; openssl genpkey -algorithm ed25519 -out key",
}


@pytest.mark.parametrize("program", SHELL_SCRIPTS)
def test_programs_work(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need(program)
    if program == "gdb":
        need("gcc")
    monkeypatch.setenv("PYTHON", sys.executable)
    run_ok("bash", "-euo", "pipefail", "-c", SHELL_SCRIPTS[program], cwd=tmp_path)


def test_pip_and_venv_work(tmp_path: Path) -> None:
    assert run_ok(sys.executable, "-m", "pip", "--version").startswith("pip")
    run_ok(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    assert run_ok(str(tmp_path / "venv/bin/python"), "-c", "print(1)") == "1\n"


def test_sanitizers_work(tmp_path: Path) -> None:
    """LeakSanitizer attaches to its own process with ptrace(2); refused, every clean program would end with 1."""
    need("gcc")
    (tmp_path / "a.c").write_text("int main(void) { return 0; }\n")
    build = ["gcc", "-fsanitize=address", "a.c", "-o", "a"]
    if subprocess.run(build, cwd=tmp_path, capture_output=True, check=False).returncode != 0:
        pytest.skip("there is no AddressSanitizer here")
    run_ok("./a", cwd=tmp_path)


HUGE_PAGES = """
import ctypes, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
for flags in (0x22, 0x40022):
    print(libc.mmap(None, ctypes.c_size_t(2 << 20), 3, flags, -1, ctypes.c_size_t(0)) != ctypes.c_void_p(-1).value)
for attempt in (lambda: os.memfd_create("huge", 4), lambda: os.memfd_create("plain")):
    try:
        print(attempt() > 0)
    except OSError as error:
        print(error.strerror)
"""


def test_huge_pages_are_not_to_be_had(box: Sandbox) -> None:
    result = box.exec(["python3", "-c", HUGE_PAGES]).check()
    assert result.stdout.splitlines() == ["True", "False", "Invalid argument", "True"]
