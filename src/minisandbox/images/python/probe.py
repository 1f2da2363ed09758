"""One interpreter, asked what it is."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

PROBE_TIMEOUT = 10.0

# Runs on Python 2.7 to 3.14; prints one line of JSON.
_QUESTION = """
import sys
try:
    import sysconfig
    config = sysconfig.get_config_var
except ImportError:
    config = lambda name: None
import json, platform
sys.stdout.write(json.dumps({
    "version": platform.python_version(),
    "implementation": platform.python_implementation(),
    "prefix": getattr(sys, "base_prefix", getattr(sys, "real_prefix", sys.prefix)),
    "abi": config("SOABI") or config("EXT_SUFFIX") or "",
    "build": sys.version,
    "debug": hasattr(sys, "gettotalrefcount"),
}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter on this machine.

    Attributes:
        executable: its path, links resolved.
        version: such as ``"3.11.7"``.
        prefix: the installation's directory (of a virtual environment: its base's).
        abi: its ABI tag, such as ``"cpython-311-x86_64-linux-gnu"``.
        build: its ``sys.version``.
        stamp: size and mtime of its executable, which change when it is installed again.
    """

    executable: Path
    version: str
    prefix: Path
    abi: str
    build: str
    stamp: str

    @property
    def minor(self) -> str:
        """Its minor version, such as ``"3.11"``."""
        return ".".join(self.version.split(".")[:2])

    @property
    def release(self) -> Version:
        """Its version for comparisons: builds from CPython's repository end in a "+" that PEP 440 does not know."""
        return Version(self.version.rstrip("+"))

    @property
    def own_prefix(self) -> bool:
        """Whether its prefix holds nothing but it: pyenv, uv, conda; not the system's /usr."""
        return Path("/usr") not in (self.prefix, *self.prefix.parents) and self.prefix != Path("/")


def probe(executable: Path) -> Interpreter | None:
    """Ask an interpreter what it is.

    Args:
        executable: its path, links resolved.

    Returns:
        The interpreter; None where it does not run, does not answer in ten seconds, or is not CPython's release build.
    """
    try:
        info = executable.stat()
        answer = subprocess.run(
            [executable, "-E", "-s", "-S", "-c", _QUESTION],  # -I is newer than Python 2
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
            timeout=PROBE_TIMEOUT,
            check=True,
        ).stdout
        values = json.loads(answer)
        if values["implementation"] != "CPython" or values["debug"]:
            return None
        prefix, stamp = Path(values["prefix"]).resolve(), f"{info.st_size}:{info.st_mtime_ns}"
        return Interpreter(executable, values["version"], prefix, values["abi"], values["build"], stamp)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None
