"""Run the tests, or those of some files, as an ordinary user, from root: `make test-all` calls it.

    python tests/as_user.py [FILE ...]

Makes a user of its own, gives it a copy of this working tree, and runs `make test` as that user, with nothing of
root's: no groups, no environment but the package index's address, no descriptor, no file. First with the user's own id
alone; then, where newuidmap(1) can be had, those tests again that a range of ids makes a difference to. Removes the
user and all it made, however it ends; what a killed run left is removed by the next.

Exit status: that of the tests; 0 with the reason where they cannot be run (no interpreter that others may execute).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PREFIX, BASE_PREFIX = "msbtest-", "minisandbox-user-"
# The user's whole environment besides its own directories: how to reach a package index from here. Certificates are not
# among them: the system's have to do.
INDEX_SETTINGS = (
    "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_TRUSTED_HOST",
    "PIP_PROXY", "PIP_DEFAULT_TIMEOUT", "PIP_RETRIES",
    "UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX", "UV_OFFLINE",
    "UV_INDEX_STRATEGY", "UV_INSECURE_HOST", "UV_HTTP_TIMEOUT",
    "http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
)  # fmt: skip
INDEX_FILES = (".config/pip/pip.conf", ".pip/pip.conf", ".config/uv/uv.toml")
OWN_SETTINGS = ("MINISANDBOX_TEST_STRICT", "MINISANDBOX_TEST_OFFLINE", "PYTEST_ARGS", "WORKERS")
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
PYTHONS = ("python3", "python3.14", "python3.13", "python3.12", "python3.11")
PROBE = "import sys, ctypes, ssl, venv; sys.exit(sys.version_info < (3, 11))"
LONGEST = 20 * 60.0  # seconds
RANGE_TESTS = (
    "tests/conformance/test_conformance.py tests/kernel/test_isolation.py tests/kernel/test_users.py "
    "tests/kernel/test_snapshots.py tests/kernel/test_poor_machines.py"
)
RANGE_SIZE = 65536


@dataclass(frozen=True, slots=True)
class User:
    """The temporary user."""

    name: str
    uid: int
    gid: int
    base: Path  # holds everything of it: home, tmp, the copy of the working tree

    def run(self, command: list[str], **options: object) -> subprocess.Popen[bytes]:
        """Start a command as this user and nobody else: no supplementary groups, a session of its own."""
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return] # the options are passed on as they are
            command, user=self.uid, group=self.gid, extra_groups=[], umask=0o022, start_new_session=True,
            stdin=subprocess.DEVNULL, env=self.environment(), **options,
        )  # fmt: skip

    def environment(self) -> dict[str, str]:
        """A login's environment, made from nothing."""
        home = self.base / "home"
        kept = {name: os.environ[name] for name in (*INDEX_SETTINGS, *OWN_SETTINGS) if name in os.environ}
        return kept | {
            "HOME": str(home), "USER": self.name, "LOGNAME": self.name, "SHELL": "/bin/bash", "LANG": "C.UTF-8",
            "PATH": PATH, "TMPDIR": str(self.base / "tmp"), "XDG_CACHE_HOME": str(home / ".cache"),
            "XDG_RUNTIME_DIR": str(self.base / "run"),
            "XDG_CONFIG_HOME": str(home / ".config"), "XDG_DATA_HOME": str(home / ".local/share"),
        }  # fmt: skip


# --- the user --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def temporary_user() -> Iterator[User]:
    """A new user with a directory of its own; both gone afterwards, with every process of it."""
    base = Path(tempfile.mkdtemp(prefix=BASE_PREFIX, dir=common_directory()))
    base.chmod(0o755)
    name = f"{PREFIX}{secrets.token_hex(4)}"
    try:
        add_user(name, base / "home")
        entry = pwd.getpwnam(name)
        user = User(name, entry.pw_uid, entry.pw_gid, base)
        remove_ipc(user.uid)  # the number may have been somebody else's who left some: they count against this one
        for directory in (base / "home", base / "tmp", base / "run", base / "src"):
            directory.mkdir(exist_ok=True)
            os.chown(directory, user.uid, user.gid)
            directory.chmod(0o700)
        copy_index_settings(user)
        yield user
    finally:
        remove_user(name, base)


def common_directory() -> str:
    """A directory for temporary files that every user may pass through."""
    for candidate in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        path = Path(candidate).resolve()
        if all(p.stat().st_mode & 0o001 for p in (path, *path.parents)):
            return str(path)
    raise SystemExit("no directory for temporary files that an ordinary user may enter: set TMPDIR to one")


def add_user(name: str, home: Path) -> None:
    """useradd; another one may hold the lock of /etc/passwd for a moment."""
    owner = f"MiniSandbox tests of process {os.getpid()} started {start_time(os.getpid())}"
    command = ["useradd", "--no-log-init", "--user-group", "--create-home", "--home-dir", str(home)]
    for _ in range(50):
        done = subprocess.run(
            [*command, "--comment", owner, "--shell", "/bin/bash", name], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return
        if "lock" not in done.stderr:
            break
        time.sleep(0.2)
    raise SystemExit(f"useradd {name} failed: {done.stderr.strip()}")


def remove_user(name: str, base: Path) -> None:
    """End the user's processes, then forget it; nothing of this may stop the rest."""
    with contextlib.suppress(KeyError):
        uid = pwd.getpwnam(name).pw_uid
        end_processes(uid)
        remove_ipc(uid)
        subprocess.run(["userdel", name], capture_output=True, check=False)
        # userdel takes the group along unless something else is in it
        subprocess.run(["groupdel", name], capture_output=True, check=False)
    shutil.rmtree(base, ignore_errors=True)


def end_processes(uid: int) -> None:
    """Kill what runs as a user that only we have, until nothing does."""
    deadline = time.monotonic() + 30.0
    while (left := processes_of(uid)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def processes_of(uid: int) -> list[int]:
    """Pids of a user's processes, zombies left out."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if real_uid(pid) == uid]


def remove_ipc(uid: int) -> None:
    """Remove a user's System V objects and POSIX message queues, which no process's end takes away."""
    for kind, option in (("msg", "-q"), ("sem", "-s"), ("shm", "-m")):
        with contextlib.suppress(OSError):
            names, *rows = (line.split() for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines())
            for row in rows:
                if row[names.index("uid")] == str(uid):
                    subprocess.run(["ipcrm", option, row[1]], capture_output=True, check=False)
    queues = f"mount -t mqueue none /mnt && find /mnt -xdev -type f -uid {uid} -delete"  # of a mount namespace alone
    with contextlib.suppress(OSError):
        subprocess.run(["unshare", "--mount", "sh", "-c", queues], capture_output=True, check=False)


def real_uid(pid: int) -> int | None:
    """The real uid of a process that is not a zombie; by status, because /proc/PID of one that hides is root's."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        rows = dict(line.split(":", 1) for line in lines if ":" in line)
        return None if rows["State"].split()[0] == "Z" else int(rows["Uid"].split()[0])
    return None


def start_time(pid: int) -> str | None:
    """When a process started, in ticks since boot; None for a zombie or none."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    return None


def remove_leftovers() -> None:
    """Remove the users of runs that were killed."""
    for entry in pwd.getpwall():
        words, base = entry.pw_gecos.split(), Path(entry.pw_dir).parent
        ours = entry.pw_name.startswith(PREFIX) and base.name.startswith(BASE_PREFIX) and len(words) == 7
        if ours and start_time(int(words[4])) != words[6]:
            remove_user(entry.pw_name, base)


def copy_index_settings(user: User) -> None:
    """Give the user root's package-index settings, where they are in files."""
    for name in INDEX_FILES:
        source, target = Path.home() / name, user.base / "home" / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            for path in (target, *target.relative_to(user.base / "home").parents):
                os.chown(user.base / "home" / path, user.uid, user.gid)


# --- the tests -------------------------------------------------------------------------------------------------------


def find_python(user: User) -> str | None:
    """An interpreter >= 3.11 that the user can execute: root's own is often in root's home."""
    directories = [Path(part) for part in PATH.split(":") if part.endswith("bin")]
    candidates = [Path(sys.executable).resolve(), *(d / name for d in directories for name in PYTHONS)]
    for candidate in candidates:
        with contextlib.suppress(OSError):
            probe = user.run([str(candidate), "-I", "-c", PROBE], cwd="/", stderr=subprocess.DEVNULL)
            if probe.wait(60) == 0:
                return str(candidate)
    return None


def copy_tree(user: User) -> Path:
    """Copy what belongs to the working tree to a place the user can read and write."""
    target = user.base / "src"
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=False,
    )  # fmt: skip
    if listed.returncode == 0:
        names = [os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    else:
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
        names = [name for name in names if not name.startswith((".git/", ".venv")) and "__pycache__" not in name]
    for name in names:
        # A tracked file may be deleted in the working tree; a link may lead to a directory, or nowhere.
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name, follow_symlinks=False)
    for path in (target, *target.rglob("*")):
        os.chown(path, user.uid, user.gid, follow_symlinks=False)
    return target


def run_both_ways(user: User, python: str, files: list[str]) -> int:
    """All tests, or those of some files, with one id, then some with a range of ids."""
    tree = copy_tree(user)
    print(f"== tests as an ordinary user with one id: uid {user.uid}, {python}", flush=True)
    settings = {"MINISANDBOX_ONE_ID": "1", "MINISANDBOX_TEST_IDS": "one"}
    if files:
        settings["PYTEST_ARGS"] = " ".join([os.environ.get("PYTEST_ARGS", ""), *files])
    status = run_tests(user, python, tree, settings, "test")
    if status:
        return status
    try:
        mappers = find_mappers(user)
        give_range(user)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"== tests with a range of ids are skipped: {error}", flush=True)
        return 0
    print(f"== tests as an ordinary user with a range of ids: uid {user.uid}, {mappers}/newuidmap", flush=True)
    settings = {"PATH": f"{mappers}:{PATH}", "MINISANDBOX_TEST_IDS": "range"}
    return run_tests(user, python, tree, settings, "test-kernel", f"KERNEL_TESTS={RANGE_TESTS}")


def find_mappers(user: User) -> Path:
    """Where newuidmap and newgidmap are; taken from their Debian package where they are not installed."""
    installed = shutil.which("newuidmap", path=PATH)
    if installed:
        return Path(installed).parent
    place = user.base / "uidmap"
    place.mkdir()
    if not succeeds(["apt-get", "download", "uidmap"], place):
        succeeds(["apt-get", "update"], place)
        succeeds(["apt-get", "download", "uidmap"], place)
    packages = sorted(place.glob("uidmap_*.deb"))
    if not packages or not succeeds(["dpkg-deb", "-x", packages[-1].name, "."], place):
        raise FileNotFoundError("no newuidmap here, and no Debian package of it can be had")
    for name in ("newuidmap", "newgidmap"):
        (place / "usr/bin" / name).chmod(0o4755)
    place.chmod(0o755)
    return place / "usr/bin"


def succeeds(command: list[str], directory: Path) -> bool:
    """Whether a program is there and does what it should."""
    try:
        return subprocess.run(command, cwd=directory, capture_output=True, check=False, timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def give_range(user: User) -> None:
    """See to it that the user has subordinate ids; userdel takes them away again."""
    for kind in ("uid", "gid"):
        table = Path(f"/etc/sub{kind}")
        table.touch(mode=0o644)
        rows = [row.split(":") for row in table.read_text().splitlines() if row.count(":") == 2]
        if not any(name == user.name for name, _, _ in rows):
            first = max([1 << 20, *(int(start) + int(count) for _, start, count in rows)])
            ids = f"{first}-{first + RANGE_SIZE - 1}"
            subprocess.run(["usermod", f"--add-sub{kind}s", ids, user.name], check=True, capture_output=True)


def run_tests(user: User, python: str, tree: Path, settings: dict[str, str], *words: str) -> int:
    """Run make as the user; its output is ours."""
    venv = user.base / "home" / "venv"
    command = ["make", "--no-print-directory", "-C", str(tree), *words, f"PYTHON={python}", f"VENV={venv}"]
    tests = user.run(["env", *(f"{name}={value}" for name, value in settings.items()), *command])
    try:
        status = tests.wait(LONGEST)
    except subprocess.TimeoutExpired:
        print(f"== the tests as an ordinary user took longer than {LONGEST:.0f} s and were ended", flush=True)
        return 1
    return status or left_processes(user)


def left_processes(user: User) -> int:
    """Whether the tests left processes: nobody else runs anything as this user."""
    deadline = time.monotonic() + 30.0
    while (left := processes_of(user.uid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            print(f"== left behind: process {pid}: {command}", flush=True)
    return 1 if left else 0


def main() -> int:
    """Run the tests as somebody else, if we may."""
    if os.geteuid() != 0:
        print("== already an ordinary user")
        return 0
    if shutil.which("useradd") is None:
        print("== tests as an ordinary user are skipped: there is no useradd here")
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    remove_leftovers()
    with temporary_user() as user:
        python = find_python(user)
        if python is None:
            print("== tests as an ordinary user are skipped: no Python >= 3.11 that other users can execute was found")
            return 0
        return run_both_ways(user, python, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
