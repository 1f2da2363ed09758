"""The doctor, and creation, as typed on machines that lack something: the cause, the exact fix, never a stack trace.

The lack is real where the kernel can be bent to it: namespaces, mounts, a system-call filter. Only a kernel whose
overlay refuses user namespaces is played, by our own wrapper of fsopen(2).
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from minisandbox.errors import HostError, SandboxCreationError
from minisandbox.host import environment, fixes

pytestmark = pytest.mark.kernel("user-namespaces")

# A process of its own: {bend} makes the machine poorer, then the command line runs there.
TYPE = """
import os, sys
from pathlib import Path
from minisandbox.launch.kernel import syscalls as sc
from minisandbox.launch.kernel.identity import enter_outer_namespace
{bend}
from minisandbox.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
# With one id mapped, root is as ordinary as anybody; mounts of a namespace of its own can then be bent.
ORDINARY = """
enter_outer_namespace()
sc.unshare(sc.CLONE_NEWNS)
"""
NO_USER_NAMESPACES = """
enter_outer_namespace()
Path("/proc/sys/user/max_user_namespaces").write_text("0")
"""
NO_NETWORK_NAMESPACES = """
enter_outer_namespace()
Path("/proc/sys/user/max_net_namespaces").write_text("0")
"""
NO_CAPABILITIES = """
for number in range(41):
    sc.prctl(sc.PR_CAPBSET_DROP, number)
sc.capset(0)
"""
# What Docker's filter does without CAP_SYS_ADMIN: unshare(CLONE_NEWUSER) is EPERM (linux/filter.h, linux/seccomp.h).
FILTERED = """
import ctypes, os, struct
number = {"x86_64": 272, "aarch64": 97}[os.uname().machine]
lines = [
    (0x20, 0, 0, 0),  # A = number of the call
    (0x15, 0, 3, number),  # another: allow
    (0x20, 0, 0, 16),  # A = low half of the first argument
    (0x45, 0, 1, 0x10000000),  # not CLONE_NEWUSER: allow
    (0x06, 0, 0, 0x50001),  # EPERM
    (0x06, 0, 0, 0x7FFF0000),
]
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
program = ctypes.create_string_buffer(struct.pack("@HP", len(lines), ctypes.addressof(code)))
sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
sc.prctl(22, 2, ctypes.addressof(program))
"""
# What it does to sethostname(2) in a container whose /proc is unmasked.
FILTERED_NAMES = FILTERED.replace("272", "170").replace("97", "161").replace("0, 1, 0x10000000", "0, 0, 0")
# AppArmor's sysctl as Ubuntu has it, shown by a /proc/sys/kernel of our own; the refusal itself is that of a limit.
APPARMOR = (
    ORDINARY
    + """
Path("/proc/sys/user/max_user_namespaces").write_text("0")
sc.mount("tmpfs", "/proc/sys/kernel", "tmpfs", 0)
Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").write_text("1")
"""
)
NO_CGROUPS = ORDINARY + 'sc.mount("tmpfs", "/sys/fs/cgroup", "tmpfs", 0)\n'
# The interpreter of the trials and the launcher, on a kernel that {change} makes another.
OTHER_KERNEL = """#!{python} -I
import os, sys
sys.path[:0] = {path!r}
from minisandbox.launch.kernel import syscalls as sc
{change}
_, program, *arguments = sys.argv[sys.argv.index("-c") :]
sys.argv[:] = ["-c", *arguments]
exec(program)
"""
# Its overlay cannot be mounted in a user namespace (before Linux 5.11).
OLD_OVERLAY = """
real = sc.fsopen
def fsopen(name):
    if name == "overlay":
        raise sc.CallError(1, "fsopen", name)
    return real(name)
sc.fsopen = fsopen
"""
# Nothing below /proc/sys can be written.
READ_ONLY_SETTINGS = """
from minisandbox.launch.kernel import identity
def refuse(*_):
    raise OSError(30, "Read-only file system")
real, identity._set_limit = sc.write_setting, refuse
sc.write_setting = lambda path, *rest: refuse() if path.startswith("sys/") else real(path, *rest)
"""
# Its overlay takes any option, and fails to be made where it does not know one (before Linux 6.5).
TMPFS_WITHOUT_MAPS = """
setattr, filesystem, tmpfs = sc.mount_setattr, sc.new_filesystem, set()
def note(fstype, *arguments, **options):
    made = filesystem(fstype, *arguments, **options)
    (tmpfs.add if fstype == "tmpfs" else tmpfs.discard)(made)
    return made
def refuse(mount_fd, set_flags, **options):
    if set_flags & sc.MOUNT_ATTR_IDMAP and mount_fd in tmpfs:
        raise sc.CallError(22, "mount_setattr", hex(set_flags))
    setattr(mount_fd, set_flags, **options)
sc.mount_setattr, sc.new_filesystem = refuse, note
"""
TMPFS_WITHOUT_ATTRIBUTES = """
import os
def refuse(*_):
    raise OSError(95, os.strerror(95))
os.setxattr = refuse
"""
CREDULOUS_OVERLAY = """
given, fsconfig, fsmount = set(), sc.fsconfig, sc.fsmount
def note(fs, key, value=None):
    given.add(fs) if key == "lowerdir+" else fsconfig(fs, key, value)
def refuse(fs, attributes=0, label=""):
    if fs in given:
        given.remove(fs)
        raise sc.CallError(22, "fsconfig", label)
    return fsmount(fs, attributes, label)
sc.fsconfig, sc.fsmount = note, refuse
"""


def other_kernel(directory: Path, change: str) -> str:
    """What bends the machine so that the trials and the launcher find another kernel."""
    interpreter = directory / "python"
    path = [path for path in sys.path if path]
    interpreter.write_text(OTHER_KERNEL.format(python=sys.executable, path=path, change=change))
    interpreter.chmod(0o755)
    return (
        f"import os; sys.executable = {str(interpreter)!r}\n"
        "from minisandbox.sandbox import helper_process\n"  # it is a script
        "helper_process.sealed_loader = lambda path: helper_process.Loader(path, (path,), os.memfd_create('none'))\n"
    )


@dataclass(frozen=True, slots=True)
class Said:
    """What a command line said.

    Attributes:
        status: its exit status.
        text: both streams.
    """

    status: int
    text: str

    def fix(self, feature: str) -> str:
        """The line below 'fix for FEATURE:'."""
        lines = self.text.splitlines()
        return lines[lines.index(f"fix for {feature}:") + 1].strip()


def typed(bend: str, store: Path, *words: str, **environment: str) -> Said:
    """Type a command line on a machine that was bent."""
    done = subprocess.run(
        [sys.executable, "-c", TYPE.format(bend=bend), *words],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "MINISANDBOX_STORE": str(store), **environment},
    )  # fmt: skip
    text = done.stdout + done.stderr
    assert "Traceback" not in text, text
    assert "a bug in MiniSandbox" not in text, text
    return Said(done.returncode, text)


@pytest.fixture
def path_without_newuidmap(tmp_path: Path) -> str:
    """A PATH with all that is asked for but newuidmap."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("bash", "git", "tar", "apt-get", "dnf"):
        found = shutil.which(name)
        if found:
            (directory / name).symlink_to(found)
    return str(directory)


@pytest.mark.parametrize(
    ("bend", "fix"),
    [
        pytest.param(FILTERED, fixes._SECCOMP, id="refused by a container's filter"),
        pytest.param(NO_USER_NAMESPACES, "sudo sysctl -w user.max_user_namespaces=65536", id="switched off"),
        pytest.param(
            APPARMOR,
            "sudo sysctl -w user.max_user_namespaces=65536 && "
            + fixes._PROFILE.format(program=Path(sys.executable).resolve()),
            id="AppArmor",
        ),
    ],
)
def test_without_user_namespaces(tmp_path: Path, bend: str, fix: str) -> None:
    said = typed(bend, tmp_path, "doctor")
    assert said.status == HostError.exit_code
    assert said.fix("user-namespaces") == fix
    assert said.text.splitlines()[-1] == "NOT ready: missing user-namespaces, mode"
    refused = typed(bend, tmp_path / "store", "sandbox", "run", "--", "true")
    assert refused.status in (HostError.exit_code, 11), refused.text
    assert "minisandbox doctor" in refused.text


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only uid 0 needs the capability")
def test_root_without_capabilities(tmp_path: Path) -> None:
    said = typed(NO_CAPABILITIES, tmp_path, "doctor")
    assert said.status == HostError.exit_code, said.text
    assert "without CAP_SETFCAP" in said.text
    assert said.fix("user-namespaces") == fixes._CAPABILITY
    refused = typed(NO_CAPABILITIES, tmp_path / "store", "sandbox", "run", "--", "true")
    assert "without CAP_SETFCAP" in refused.text
    assert "user namespaces are refused" not in refused.text


@pytest.mark.parametrize(
    ("release", "status", "said"),
    [
        ("5.10.0-9-amd64", "missing", "at least Linux 5.14 is needed"),
        ("5.15.0-97-generic", "degraded", "not been tried on kernels before 6.1"),
        ("6.1.0-49-amd64", "ok", "6.1.0-49-amd64"),
    ],
)
def test_what_is_said_of_a_kernel(monkeypatch: pytest.MonkeyPatch, release: str, status: str, said: str) -> None:
    monkeypatch.setattr("platform.release", lambda: release)
    finding = environment.kernel()
    assert (finding.status, said in finding.detail) == (status, True)


@pytest.mark.parametrize("feature", ["private-proc", "devices", "private-network"])
def test_what_is_refused_in_user_namespaces_is_not_blamed_on_them(
    monkeypatch: pytest.MonkeyPatch, feature: str
) -> None:
    monkeypatch.setattr(fixes, "in_container", lambda: False)
    assert "CONFIG_USER_NS" not in fixes.fix_for(feature)


@pytest.mark.parametrize("change", [TMPFS_WITHOUT_MAPS, TMPFS_WITHOUT_ATTRIBUTES], ids=["6.2", "6.5"])
def test_with_a_tmpfs_that_cannot_take_writes(tmp_path: Path, change: str) -> None:
    """Sandboxes write to the store's disk, and the doctor says so."""
    bend = other_kernel(tmp_path, change)
    said = typed(bend, tmp_path / "store", "doctor")
    to_disk = os.geteuid() == 0 or change == TMPFS_WITHOUT_ATTRIBUTES  # an ordinary user's need no map
    assert said.status == 0, said.text
    assert ("degraded  upper" in said.text) == to_disk
    assert not to_disk or said.fix("upper") == fixes.fix_for("upper")
    lower = "/etc/alternatives /usr/share/doc" if os.geteuid() == 0 else "/etc/alternatives"  # /usr is read-only then
    work = f"rm -r {lower}; mkdir -p /run/x /dev/shm/y /tmp/z; echo made > /made; ls /made"
    run = typed(bend, tmp_path / "store", "sandbox", "run", "--", "sh", "-c", work)
    assert (run.status, run.text.split()[-1]) == (0, "/made"), run.text
    uppers = tmp_path / "store/uppers"
    assert uppers.is_dir() == to_disk
    assert not to_disk or not list(uppers.iterdir())


@pytest.mark.slow
def test_without_network_namespaces(tmp_path: Path) -> None:
    """What makes sandboxes has such a namespace too; it ended without one, and was made anew 500 times a second."""
    said = typed(NO_NETWORK_NAMESPACES, tmp_path, "doctor")
    assert said.status == HostError.exit_code
    assert said.fix("private-network") == "sudo sysctl -w user.max_net_namespaces=65536"
    refused = typed(NO_NETWORK_NAMESPACES, tmp_path / "store", "sandbox", "run", "--", "true")
    assert refused.status == SandboxCreationError.exit_code, refused.text
    assert "could not make namespaces: unshare" in refused.text
    assert "No space left on device" in refused.text


def test_a_filter_that_refuses_names(tmp_path: Path) -> None:
    """As podman's does without CAP_SYS_ADMIN: a sandbox has the container's host name then, which resolves inside."""
    said = typed(FILTERED_NAMES, tmp_path, "doctor")
    assert said.status == 0, said.text
    run = typed(
        FILTERED_NAMES, tmp_path / "store", "sandbox", "run", "--", "sh", "-c", "uname -n; getent hosts $(uname -n)"
    )
    assert run.status == 0, run.text
    name, address, *names = run.text.split()
    assert (name, address) == (os.uname().nodename, "127.0.0.1")
    assert name in names


@pytest.mark.kernel("sandbox")  # what it lacks is all it lacks
def test_without_a_writable_proc_sys(tmp_path: Path) -> None:
    """As AppArmor's profile of Docker has it: the system-call filter alone refuses nested user namespaces."""
    bend = other_kernel(tmp_path, READ_ONLY_SETTINGS)
    said = typed(bend, tmp_path, "doctor")
    assert said.status == 0, said.text
    assert "degraded  no-nesting" in said.text
    assert "only the system-call filter refuses nested user namespaces" in said.text
    assert said.fix("no-nesting") == fixes.fix_for("no-nesting")
    nest = "cat /proc/sys/user/max_user_namespaces; unshare -U true"
    run = typed(bend, tmp_path / "store", "sandbox", "run", "--", "sh", "-c", nest)
    assert run.text.split()[0] != "0", "the kernel's own limit is not what refuses"
    assert "unshare failed: Operation not permitted" in run.text


@pytest.mark.kernel("sandbox")  # what it lacks is all it lacks
def test_without_newuidmap(tmp_path: Path, path_without_newuidmap: str) -> None:
    said = typed(ORDINARY, tmp_path, "doctor", PATH=path_without_newuidmap)
    assert "there is no newuidmap" in said.text
    assert said.fix("id-ranges").startswith("sudo ")
    assert "uidmap" in said.fix("id-ranges") or "shadow" in said.fix("id-ranges")
    assert said.status == 0, said.text  # there is one id inside, and everything else works
    assert "ordinary user: each sandbox has one id" in said.text


@pytest.mark.skipif(shutil.which("newuidmap") is None, reason="there is no newuidmap here")
def test_without_subordinate_ids(tmp_path: Path) -> None:
    said = typed(ORDINARY + "os.environ['LOGNAME'] = 'somebody'\n", tmp_path, "doctor")
    assert said.fix("id-ranges") == "sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 somebody"


@pytest.mark.kernel("sandbox")  # what it lacks is all it lacks
def test_without_control_groups(tmp_path: Path) -> None:
    said = typed(NO_CGROUPS, tmp_path, "doctor")
    assert "there are no groups for memory and pids at /sys/fs/cgroup" in said.text
    assert said.fix("cgroups") in (environment._MOUNT, environment._CONTAINER)
    assert said.status == 0, said.text
    run = typed(NO_CGROUPS, tmp_path / "store", "sandbox", "run", "--limit", "cpu=0.5", "--", "true")
    assert run.status == HostError.exit_code, run.text
    assert "cpu" in run.text


@pytest.mark.slow
def test_with_an_overlay_that_refuses_user_namespaces(tmp_path: Path) -> None:
    bend = other_kernel(tmp_path, OLD_OVERLAY)
    said = typed(bend, tmp_path, "doctor")
    assert said.status == HostError.exit_code
    assert "fsopen(overlay): Operation not permitted" in said.text
    assert said.fix("overlay-tmpfs") == fixes.fix_for("overlay-tmpfs")
    assert "overlay-tmpfs" in said.text.splitlines()[-1]
    refused = typed(bend, tmp_path / "store", "sandbox", "run", "--", "true")
    assert refused.status == 11, refused.text
    assert "minisandbox doctor" in refused.text


def test_with_an_overlay_that_takes_any_option(tmp_path: Path) -> None:
    bend = other_kernel(tmp_path, CREDULOUS_OVERLAY)
    said = typed(bend, tmp_path, "doctor")
    assert said.status == 0, said.text
    assert said.fix("many-layers") == fixes.fix_for("many-layers")
    run = typed(bend, tmp_path / "store", "sandbox", "run", "--", "sh", "-c", "rm -r /usr/share/doc; echo made > /made")
    assert run.status == 0, run.text


# --- control groups of every kind, on paper --------------------------------------------------------------------------


def group_tree(root: Path, files: dict[str, str]) -> tuple[str, str]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
    return str(root), str(root / "own")


def test_version_2_that_was_not_delegated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixes, "in_container", lambda: False)
    root, own = group_tree(
        tmp_path, {"own": "0::/user.slice/session-1.scope\n", "cgroup.controllers": "cpu memory pids\n"}
    )
    found = environment.control_groups(root, own)
    assert (found.status, found.fix.split()[0]) == ("degraded", "systemd-run")


def test_version_2_of_our_own_with_processes_that_cannot_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr("minisandbox.launch.kernel.syscalls.write_setting", refuse)
    root, own = group_tree(
        tmp_path,
        {"own": "0::/\n", "cgroup.controllers": "cpu memory pids\n", "cgroup.procs": "", "cgroup.subtree_control": ""},
    )
    found = environment.control_groups(root, own)
    assert found.status == "degraded"
    assert f"d={root}; mkdir -p $d/others" in found.fix
    assert "echo +memory +pids +cpu > $d/cgroup.subtree_control" in found.fix


def test_version_1_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixes, "in_container", lambda: False)
    files = {"own": "2:memory:/elsewhere\n1:pids:/elsewhere\n", "memory/cgroup.procs": "", "pids/cgroup.procs": ""}
    found = environment.control_groups(*group_tree(tmp_path, files))
    assert (found.status, "version 1" in found.detail) == ("degraded", True)
    assert "sudo mkdir -p $d" in found.fix
