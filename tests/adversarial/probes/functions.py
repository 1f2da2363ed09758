"""What must go on working in every sandbox: builds and tests need it."""

from __future__ import annotations

import fcntl
import mmap
import multiprocessing
import os
import pty
import pwd
import resource
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time

from .core import Finding, canary, probe, read, works
from .kernel import call

KIND = "function"
PTRACE_TRACEME = 0


@probe(KIND)
def programs_and_pipes() -> Finding:
    """Start programs, connect them by pipes, use job control signals"""
    done = subprocess.run(["/bin/sh", "-c", "echo a | tr a b; exit 3"], stdout=subprocess.PIPE, check=False)
    sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
    os.killpg(sleeper.pid, signal.SIGTERM)
    return works(done.stdout == b"b\n" and done.returncode == 3 and sleeper.wait() == -signal.SIGTERM)


@probe(KIND)
def devices() -> Finding:
    """Use null, zero, full, random, urandom and the names of standard streams"""
    with open("/dev/null", "wb") as sink:
        sink.write(b"x")
    missing = [name for name in ("null", "zero", "full", "random", "urandom", "tty", "fd", "stdin", "stdout", "ptmx")
               if not os.path.lexists("/dev/" + name)]  # fmt: skip
    return works(read("/dev/zero", 4) == b"\0" * 4 and len(read("/dev/urandom", 8)) == 8 and not missing, str(missing))


@probe(KIND)
def scripts_of_its_own() -> Finding:
    """Write to /tmp and the workspace, and execute what was written"""
    for place in ("/tmp", os.getcwd()):
        directory = tempfile.mkdtemp(dir=place)
        path = os.path.join(directory, "script")
        with open(path, "w", encoding="ascii") as file:
            file.write("#!/bin/sh\necho fine\n")
        os.chmod(path, 0o755)
        done = subprocess.run([path], stdout=subprocess.PIPE, check=False)
        shutil.rmtree(directory)
        if done.stdout != b"fine\n":
            return works(False, place)
    return works(True)


@probe(KIND)
def multiprocessing_with_locks() -> Finding:
    """Use multiprocessing: locks and queues, which need /dev/shm"""
    context = multiprocessing.get_context("fork")
    queue, lock = context.SimpleQueue(), context.Lock()
    with lock:
        worker = context.Process(target=queue.put, args=(7,))
        worker.start()
        worker.join()
    return works(queue.get() == 7)


@probe(KIND)
def services_on_its_own_loopback() -> Finding:
    """Listen and connect on loopback: TCP, UDP, IPv6, names"""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 2):
        server.accept()[0].close()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))
        one.sendto(b"x", one.getsockname())
        fine = one.recv(1) == b"x"
    left, right = socket.socketpair()
    with left, right:
        left.send(b"y")
        return works(fine and right.recv(1) == b"y" and socket.gethostbyname("localhost") == "127.0.0.1")


@probe(KIND)
def terminals() -> Finding:
    """Open a terminal of one's own, and run a program in it"""
    pid, master = pty.fork()
    if pid == 0:
        os.execv("/bin/sh", ["/bin/sh", "-c", "test -t 0 && tty"])
    text = b""
    try:
        while True:
            piece = os.read(master, 100)
            if not piece:
                break
            text += piece
    except OSError:  # the end of a terminal
        pass
    os.waitpid(pid, 0)
    return works(b"/dev/pts/" in text, text.decode())


@probe(KIND)
def threads_timers_events() -> Finding:
    """Use threads, signals, timers, epoll, eventfd, inotify"""
    seen: list[int] = []
    thread = threading.Thread(target=seen.append, args=(1,))
    thread.start()
    thread.join()
    signal.signal(signal.SIGALRM, lambda *_: seen.append(2))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.1)
    reader, writer = os.pipe()
    with select.epoll() as poll:
        poll.register(reader, select.EPOLLIN)
        os.write(writer, b"x")
        return works(seen == [1, 2] and poll.poll(1) == [(reader, select.EPOLLIN)], str(seen))


@probe(KIND)
def a_repository() -> Finding:
    """Make a git repository, commit, look at it"""
    directory = tempfile.mkdtemp()
    script = (
        "git init -q . && echo a > a && git add a && git commit -qm one && git log --oneline && git status --porcelain"
    )
    who = dict.fromkeys(("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"), "a@example.org")
    who.update(dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"), "a"), HOME=directory)
    done = subprocess.run(["/bin/sh", "-c", script], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, **who}, check=False)  # fmt: skip
    shutil.rmtree(directory, ignore_errors=True)
    return works(done.returncode == 0, done.stdout[-100:].decode())


@probe(KIND)
def files_of_every_sort() -> Finding:
    """Use links, renames, modes, locks, mappings, sparse files, attributes, temporary files in the workspace"""
    directory = tempfile.mkdtemp(dir=os.getcwd())
    path = os.path.join(directory, "a")
    with open(path, "wb") as file:
        file.write(b"x" * 5000)
    os.link(path, path + "-hard")
    os.symlink("a", path + "-soft")
    os.rename(path + "-hard", path + "-moved")
    os.chmod(path, 0o755)
    os.utime(path, (5, 5))
    os.mkfifo(path + "-fifo")
    with open(path, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.lockf(file, fcntl.LOCK_EX)
        with mmap.mmap(file.fileno(), 0) as mapped:
            mapped[0] = 65
    fine = os.stat(path).st_nlink == 2 and read(path + "-soft", 1) == b"A"
    shutil.rmtree(directory)
    return works(fine)


@probe(KIND)
def debuggers() -> Finding:
    """Trace a process of one's own, as debuggers do"""
    pid = os.fork()
    if pid == 0:
        call("ptrace", PTRACE_TRACEME, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    stopped = os.WIFSTOPPED(status)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return works(stopped)


@probe(KIND)
def a_user_with_a_home() -> Finding:
    """Be a user with a name and a home that can be written"""
    entry, home = pwd.getpwuid(os.getuid()), os.environ.get("HOME", "")
    if canary("control"):
        home = home or entry.pw_dir
    return works(entry.pw_name and home and os.access(home, os.W_OK), f"{entry.pw_name} {home}")


@probe(KIND)
def what_programs_ask_of_the_kernel() -> Finding:
    """Read cpuinfo, meminfo, stat, limits, load and the number of processors"""
    names = ("cpuinfo", "meminfo", "stat", "uptime", "self/stat", "self/status", "self/limits", "sys/kernel/osrelease",
             "filesystems", "version")  # fmt: skip
    empty = [name for name in names if not read("/proc/" + name)]
    return works(
        not empty and (os.cpu_count() or 0) > 0 and resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64, str(empty)
    )


@probe(KIND)
def change_what_is_there() -> Finding:
    """Change, replace and remove files that came with the image, and see it"""
    path = canary("image_file")
    with open(path, "a", encoding="ascii") as file:
        file.write("more\n")
    fine = read(path).endswith(b"more\n")
    os.rename(path, path + "-renamed")
    os.unlink(path + "-renamed")
    with open(path, "w", encoding="ascii") as file:
        file.write("new\n")
    return works(fine and read(path) == b"new\n")


@probe(KIND)
def fast_system_calls() -> Finding:
    """Use what fast programs use: memfd, copy_file_range, pidfd, getrandom; copies go on without sendfile"""
    descriptor = os.memfd_create("probe")
    os.write(descriptor, b"x" * 100)
    other = os.memfd_create("other")
    copied = os.copy_file_range(descriptor, other, 100, 0)
    held = call("pidfd_open", os.getpid(), 0)
    with tempfile.TemporaryFile() as file, socket.create_server(("127.0.0.1", 0)) as server:
        file.write(b"y" * 100)
        file.seek(0)
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as two:
            sent = one.sendfile(file)
            fine = sent == len(two.recv(100, socket.MSG_WAITALL)) == 100
    return works(fine and copied == 100 and held >= 0 and len(os.getrandom(8)) == 8)
