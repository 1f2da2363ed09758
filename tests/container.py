"""A container image made of this machine's programs: a shell, git and a Python of its own prefix, and a repository."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.unit.oci_tools import MadeImage
from tests.vendored import vendor_pytest

PROGRAMS = (
    "bash", "sh", "git", "cat", "cp", "cut", "dirname", "find", "grep", "head", "id", "kill", "ls", "mkdir", "mkfifo",
    "mv", "readlink", "rm", "sed", "sort", "tr", "true", "wc", "xargs",
)  # fmt: skip
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
ENVIRONMENT = {"PATH": "/opt/own/bin:/bin", "PYTHONPATH": "/opt/packages"}
SETTINGS = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "protocol.file.allow=always", "-c", "gc.auto=0")


def git(folder: Path, *words: str) -> str:
    """Run git as the author of a data set does."""
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", *SETTINGS, "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()


def commit(folder: Path, message: str) -> str:
    """Commit everything; return the commit."""
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "-m", message)
    return git(folder, "rev-parse", "HEAD")


def write_root(root: Path) -> None:
    """Write a root filesystem in which Python, pytest, a shell and git run, at /opt/own, /opt/packages and /bin."""
    (root / "bin").mkdir(parents=True)
    for name in PROGRAMS:
        place = shutil.which(name)
        if place is None:
            pytest.skip(f"this machine has no {name}")
        shutil.copy(Path(place).resolve(), root / "bin" / name)
    library = Path(sysconfig.get_path("stdlib"))
    leave = shutil.ignore_patterns(
        "test", "tests", "site-packages", "dist-packages", "idlelib", "ensurepip", "config-*", "lib2to3", "tkinter",
        "pydoc_data", "turtledemo", "_test*.so", "*.opt-?.pyc",
    )  # fmt: skip
    shutil.copytree(library, root / "opt/own/lib" / PYTHON, ignore=leave, symlinks=True)
    (root / "opt/own/bin").mkdir()
    shutil.copy(Path(sys.executable).resolve(), root / "opt/own/bin" / PYTHON)
    for name in ("python", "python3"):
        (root / "opt/own/bin" / name).symlink_to(PYTHON)
    modules = (root / "opt/own/lib").rglob("*.so")
    _copy_libraries([*(root / "bin").iterdir(), Path(sys.executable).resolve(), *modules], root)
    vendor_pytest(root / "opt/packages")
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\napp:x:1000:1000::/app:/bin/bash\n")
    (root / "root").mkdir(exist_ok=True)


def _copy_libraries(programs: Iterable[Path], root: Path) -> None:
    """Copy what programs and modules are linked with."""
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    for path in set(re.findall(r"(?:=> )?(/\S+) \(0x", listed)):
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(path).resolve(), target)


def tar_of(root: Path, *, owner: int = 0) -> bytes:
    """Return a root filesystem as a layer.

    Args:
        root: the filesystem.
        owner: whose everything below /app is.
    """

    def plain(one: tarfile.TarInfo) -> tarfile.TarInfo:
        one.uid = one.gid = owner if one.name.split("/")[0] == "app" else 0
        one.mtime = 1_700_000_000
        return one

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(root.rglob("*")):
            tar.add(path, str(path.relative_to(root)), recursive=False, filter=plain)
    return buffer.getvalue()


def write_layout(place: Path, *roots: Path, environment: dict[str, str] | None = None, owner: int = 0) -> str:
    """Write filesystems as the layers of a container image with the workdir /app; return its reference.

    Args:
        place: where.
        roots: the filesystems.
        environment: the image's variables.
        owner: as whom it runs, and whose everything below /app is.
    """
    config: dict[str, object] = {"WorkingDir": "/app", "Entrypoint": ["/bin/false"], "User": str(owner)}
    if environment:
        config["Env"] = [f"{name}={value}" for name, value in environment.items()]
    made = MadeImage([tar_of(root, owner=owner) for root in roots], config)
    return f"oci:{made.write_layout(place)}"
