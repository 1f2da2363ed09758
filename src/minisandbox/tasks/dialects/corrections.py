"""Corrections of the benchmarks' specifications that do not work here, or no longer work, with reasons."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

_BETWEEN = re.compile(r"&&|;")
_APT = re.compile(r"^(?:[A-Z_]+=\S+\s+)*apt(?:-get)?\s+(.*)$")
_ACTIVATION = re.compile(r"^(?:source|\.)\s+\S*activate(?:\s+\S+)?$|^conda\s+(?:activate|deactivate)\b.*$")
_LOCALE = re.compile(r"locale-gen|locale\.gen|^export\s+(?:LANG|LANGUAGE|LC_ALL)=")
_NETWORK_TOOLS = re.compile(r"^(?:wget|curl)\b")

FIRST = ("pip<24.1", "setuptools<70", "wheel")
"""Default pins: projects of the benchmarks' time use distutils and pkg_resources, which later releases lack."""

AFTERWARDS: dict[str, tuple[str, ...]] = {
    # its tests need httpbin.org, which no sandbox can reach; the same program serves on the loopback interface
    "psf/requests": (
        "python -m venv /opt/httpbin",
        "/opt/httpbin/bin/python -m pip install -q 'httpbin==0.10.2' 'gunicorn==23.0.0' 'setuptools<81'",
    ),
    # setuptools brings a release of inflect along, with the code that the tasks' bugs were put into
    "jaraco/inflect": ('rm -rf "$CONDA_PREFIX"/lib/python3.*/site-packages/setuptools/_vendor/inflect*',),
}
"""Commands that follow the installation of a repository."""

_HTTPBIN = """\
(unset PYTHONPATH; cd /opt && exec httpbin/bin/python -m gunicorn -b 127.0.0.1:8055 httpbin:app \
    > /dev/null 2>&1 < /dev/null 8<&- 9>&-) &
for second in $(seq 100); do (: < /dev/tcp/127.0.0.1/8055) 2> /dev/null && break; sleep 0.1; done
export HTTPBIN_URL=http://127.0.0.1:8055/"""

BEFORE_TESTS: dict[str, tuple[str, ...]] = {"psf/requests": (_HTTPBIN,)}
"""Commands that start the services which a repository's tests need."""

BEFORE: dict[str, str] = {
    # its C code uses what Python 3.10 no longer has; conda's build carries a patch
    "backports-zoneinfo": "3.9",
}
"""Distributions of exported environments that only older interpreters than the named one need."""


@dataclass(frozen=True, slots=True)
class Commands:
    """Shell commands of a specification, sorted by their needs.

    Attributes:
        remaining: what is run unchanged.
        system: packages that the dropped ``apt-get`` commands install.
    """

    remaining: tuple[str, ...]
    system: tuple[str, ...] = ()


def sort_commands(commands: Iterable[str]) -> Commands:
    """Remove the commands that are redundant or impossible in an image.

    ``apt-get install`` becomes system packages; every image does what ``conda activate`` does; the locale is C.UTF-8,
    and none is generated (measured: verdicts are the same); downloads fail without a network.

    Args:
        commands: the specification's commands.
    """
    sorted_commands: list[str] = []
    system: list[str] = []
    for command in commands:
        parts = [part.strip() for part in _BETWEEN.split(command) if part.strip()]
        lost = [part for part in parts if _is_dropped(part)]
        system += [package for part in lost if (apt := _APT.match(part)) for package in _packages(apt[1])]
        remaining = [part for part in parts if part not in lost]
        # a command without removed parts stays unchanged: quotes may contain a separator
        sorted_commands += [" && ".join(remaining) if lost else command] if remaining else []
    return Commands(tuple(sorted_commands), tuple(dict.fromkeys(system)))


def _is_dropped(part: str) -> bool:
    return any((_APT.match(part), _ACTIVATION.match(part), _LOCALE.search(part), _NETWORK_TOOLS.match(part)))


def _packages(arguments: str) -> list[str]:
    """Return the packages of an ``apt-get`` command line."""
    verb, *packages = [part for part in shlex.split(arguments) if not part.startswith("-")] or [""]
    return packages if verb == "install" else []
