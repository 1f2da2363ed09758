"""Find the command that enables a missing feature on this machine."""

from __future__ import annotations

import getpass
import os
import platform
import re
import shutil
import stat
import sys
from pathlib import Path

from minisandbox.launch.kernel import syscalls

_SYSCTLS = (
    # name, value that forbids user namespaces, value that permits them; first Debian and Arch, then RHEL 7
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("user.max_user_namespaces", "0", "65536"),
)
_APPARMOR = "kernel.apparmor_restrict_unprivileged_userns"  # Ubuntu from 23.10 on
_PROFILE = (
    "printf 'abi <abi/4.0>,\\nprofile minisandbox {program} flags=(unconfined) {{ userns, }}\\n' | "
    "sudo tee /etc/apparmor.d/minisandbox && sudo apparmor_parser -r /etc/apparmor.d/minisandbox"
    "  # or for every program, until the next restart: sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
)
_SETFCAP = 1 << 31
_CAPABILITY = (
    "start the container with --cap-add SETFCAP (Kubernetes: capabilities: {add: [SETFCAP]}), or as an ordinary user"
)
_NETWORK = ("user.max_net_namespaces", "0", "65536")
_SECCOMP = (
    "start the container with: docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined ... "
    "(Kubernetes: seccompProfile and appArmorProfile of type Unconfined)"
)
_UNMASKED = (
    "start the container with: docker run --security-opt systempaths=unconfined ... "
    "(podman: --security-opt unmask=ALL; Kubernetes: procMount: Unmasked)"
)
_KERNEL = "boot a kernel >= {version} (see: uname -r)"
_LOOK = "look for what the kernel refused: sudo dmesg | tail  # or a policy: SELinux, AppArmor, seccomp"
_IDMAPPED_LAYERS = (5, 19)
"""First kernel whose overlayfs supports idmapped layers (fs/overlayfs/super.c), which root's sandboxes use."""


_DEVICES = {"null": "1 3", "zero": "1 5", "full": "1 7", "random": "1 8", "urandom": "1 9", "tty": "5 0"}
"""Major and minor numbers of the devices in sandboxes (the kernel's devices.txt)."""


def kernel_version() -> tuple[int, int]:
    """Return the kernel's version, or (0, 0) if its release string is malformed."""
    numbers = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def fix_for(name: str) -> str:  # noqa: PLR0911 - one return for each cause
    """Return how to enable the feature of a failed trial.

    Args:
        name: name of the trial, mostly one of :data:`minisandbox.host.probes.PROBES`.

    Returns:
        A command line, or an instruction if no single command is enough.
    """
    if name in ("user-namespaces", "namespaces"):
        return _user_namespaces()
    if name == "no-nesting" or (name == "private-proc" and in_container()):
        return _UNMASKED
    if name == "private-network" and read_sysctl(_NETWORK[0]) == _NETWORK[1]:
        return f"sudo sysctl -w {_NETWORK[0]}={_NETWORK[2]}"
    if name == "devices" and (line := _devices()):
        return line
    if name in ("devices", "real-sandbox") and in_container():
        return _SECCOMP
    if name == "id-ranges":
        return _id_ranges()
    if name in ("overlay-tmpfs", "overlay-store") and os.geteuid() == 0 and kernel_version() < _IDMAPPED_LAYERS:
        return "run MiniSandbox as an ordinary user, or " + _KERNEL.format(version="5.19")
    return _FIXED.get(name, _SECCOMP if in_container() else _user_namespaces())


_FIXED = {
    "new-mount-api": _KERNEL.format(version="5.12"),
    "many-layers": _KERNEL.format(version="6.7"),
    "idmap-tmpfs": _KERNEL.format(version="6.3"),
    "tmpfs-xattrs": _KERNEL.format(version="6.6") + ", built with CONFIG_TMPFS_XATTR",
    "upper": _KERNEL.format(version="6.6") + "; until then sandboxes write to disk",
    "overlay-tmpfs": "sudo modprobe overlay",
    "overlay-store": "export MINISANDBOX_STORE=DIRECTORY  # on ext4, xfs or btrfs; not on overlay, NFS or FUSE",
    "idmap-store": "export MINISANDBOX_STORE=DIRECTORY  # on ext4, xfs or btrfs, with a kernel >= 5.19",
    "idmap-usr": "run MiniSandbox outside a container, or on a host whose /usr is on ext4, xfs or btrfs",
    "seccomp": "boot a kernel built with CONFIG_SECCOMP_FILTER",
    "private-proc": _LOOK,
    "devices": _LOOK,
    "private-network": "boot a kernel built with CONFIG_NET_NS",
    "real-sandbox": _LOOK,
    "pidfd": _KERNEL.format(version="5.9"),
}


def _user_namespaces() -> str:
    settings = [f"{name}={permitting}" for name, forbidding, permitting in _SYSCTLS if read_sysctl(name) == forbidding]
    lines = [f"sudo sysctl -w {' '.join(settings)}"] if settings else []
    if read_sysctl(_APPARMOR) == "1":  # allow only this interpreter, because the sysctl affects every program
        lines.append(_PROFILE.format(program=Path(sys.executable).resolve()))
    if lines:
        return " && ".join(lines)
    if os.geteuid() == 0 and not syscalls.capget()[0] & _SETFCAP:
        return _CAPABILITY
    if in_container():
        return _SECCOMP
    return "boot a kernel built with CONFIG_USER_NS, or ask what forbids it: sudo dmesg | tail"


def _devices() -> str:
    """Return a command that lets every user open the needed devices, or "" if every user can."""
    lines = []
    for name, numbers in _DEVICES.items():
        mode = os.stat(f"/dev/{name}").st_mode if os.path.exists(f"/dev/{name}") else 0
        if not stat.S_ISCHR(mode):
            lines.append(f"sudo rm -f /dev/{name} && sudo mknod -m 666 /dev/{name} c {numbers}")
        elif mode & 0o666 != 0o666:
            lines.append(f"sudo chmod 666 /dev/{name}")
    return " && ".join(lines)


def _id_ranges() -> str:
    if shutil.which("newuidmap") is None:
        return f"sudo {_install('uidmap', 'shadow-utils', 'shadow')}"
    return f"sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user_name()}"


def install(program: str) -> str:
    """Return the command line that installs a program."""
    return f"sudo {_install(program, program, program)}"


def _install(debian: str, fedora: str, arch: str) -> str:
    for manager, command, package in (
        ("apt-get", "apt-get install", debian),
        ("dnf", "dnf install", fedora),
        ("yum", "yum install", fedora),
        ("pacman", "pacman -S", arch),
        ("zypper", "zypper install", fedora),
        ("apk", "apk add", arch),
    ):
        if shutil.which(manager):
            return f"{command} {package}"
    return f"apt-get install {debian}  # or what your system's package manager calls it"


def user_name() -> str:
    """Return this user's name, or the uid if it has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


def read_sysctl(name: str) -> str | None:
    """Return the value of a kernel parameter, or None if it cannot be read."""
    try:
        return Path("/proc/sys", *name.split(".")).read_text(encoding="ascii").strip()
    except OSError:
        return None


def in_container() -> bool:
    """Return whether this process probably runs in a container, judging by an engine's files or a seccomp filter."""
    if (
        any(Path(path).exists() for path in ("/.dockerenv", "/run/.containerenv"))
        or "KUBERNETES_SERVICE_HOST" in os.environ
    ):
        return True
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return any(line.split() == ["Seccomp:", "2"] for line in status.splitlines())
