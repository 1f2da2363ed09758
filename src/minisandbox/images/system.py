"""System packages: a step of its own at the bottom, which the host's distribution's package manager carries out."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from minisandbox.errors import HostError
from minisandbox.images.places import RANKS
from minisandbox.images.recipe import InstallSystem
from minisandbox.images.runner import BuildStep, Command, StepNetwork, Work, mount_points
from minisandbox.images.scripts import script
from minisandbox.sandbox.controller import current_controller
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.keys import JSONValue

_FIRST_PERSON = 1000
# Where packages come from and who is trusted; never auth.conf, which holds passwords.
_SETTINGS = ("sources.list", "sources.list.d", "trusted.gpg", "trusted.gpg.d", "keyrings", "preferences.d")


def system_step(wanted: InstallSystem) -> BuildStep:
    """The step that installs packages of the host's distribution with apt-get.

    Raises:
        HostError: this machine has no apt, or this user's sandboxes cannot write below ``/usr``.
    """
    text = script("system_apt", RANK=str(RANKS.index("system")))
    definition: dict[str, JSONValue] = {
        "kind": "system",
        "packages": list(wanted.packages),
        "scripts": hashlib.sha256(text.encode()).hexdigest(),
    }

    def prepare(staging: Path) -> Work:
        _check_host(wanted.packages)
        with store_faults("copy apt's settings"):
            _copy_settings(staging / "apt")
        mounts = mount_points([(staging / "apt", "apt"), (Path("/var/lib/dpkg"), "dpkg")])
        listed = "".join(f"{package}\n" for package in wanted.packages)
        files = (
            ("packages", listed.encode()),
            ("passwd", _system_entries("passwd")),
            ("group", _system_entries("group")),
        )
        command = Command("system", ("bash", "-c", text))
        return Work((command,), files=files, mounts=mounts, network=StepNetwork.OUTSIDE, facts=("versions",))

    return BuildStep("system", definition, prepare, " ".join(wanted.packages))


def _check_host(packages: tuple[str, ...]) -> None:
    asked = f"system packages ({' '.join(packages)})"
    if shutil.which("apt-get") is None or not Path("/var/lib/dpkg/status").is_file():
        raise HostError(
            f"{asked} cannot be installed here",
            reason="this machine has no apt-get, the only package manager that is supported",
            hint="install them on the machine itself (images show its /usr) and leave them out of the recipe",
        )
    if not current_controller().launcher.writable_usr:
        raise HostError(
            f"{asked} cannot be installed by this user",
            reason="the host's /usr belongs to the host's root, so an ordinary user's sandboxes show it read-only",
            hint="install them on the machine itself (images show its /usr) and leave them out of the recipe, "
            "or build the image as root",
        )


def _system_entries(name: str) -> bytes:
    """The host's system users or groups: packages that are there already gave files to them; no person's account."""
    lines = []
    for line in Path("/etc", name).read_text("utf-8", "replace").splitlines():
        fields = line.split(":")
        if len(fields) > 3 and fields[2].isdecimal() and int(fields[2]) < _FIRST_PERSON:
            lines.append(":".join((fields[0], "x", *fields[2:])) if name == "passwd" else f"{fields[0]}:x:{fields[2]}:")
    return "".join(f"{line}\n" for line in lines).encode()


def _copy_settings(target: Path) -> None:
    target.mkdir()
    for name in _SETTINGS:
        source = Path("/etc/apt", name)
        if source.is_dir():
            shutil.copytree(source, target / name)
        elif source.is_file():
            shutil.copyfile(source, target / name)
