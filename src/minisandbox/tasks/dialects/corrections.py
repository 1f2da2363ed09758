"""Correct build specifications of the benchmarks that fail in a sandbox or no longer work."""

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
"""Default pins: the benchmarks' projects use distutils and pkg_resources, which later releases removed."""

AFTERWARDS: dict[str, tuple[str, ...]] = {
    # the tests need httpbin.org, which sandboxes cannot reach, so its server program runs on the loopback interface
    "psf/requests": (
        "python -m venv /opt/httpbin",
        "/opt/httpbin/bin/python -m pip install -q 'httpbin==0.10.2' 'gunicorn==23.0.0' 'setuptools<81'",
    ),
    # setuptools bundles a release of inflect, whose code solves the tasks
    "jaraco/inflect": ('rm -rf "$CONDA_PREFIX"/lib/python3.*/site-packages/setuptools/_vendor/inflect*',),
}
"""Commands that run after the installation of a repository."""

_HTTPBIN = """\
(unset PYTHONPATH; cd /opt && exec httpbin/bin/python -m gunicorn -b 127.0.0.1:8055 httpbin:app \
    > /dev/null 2>&1 < /dev/null 8<&- 9>&-) &
for second in $(seq 100); do (: < /dev/tcp/127.0.0.1/8055) 2> /dev/null && break; sleep 0.1; done
export HTTPBIN_URL=http://127.0.0.1:8055/"""

BEFORE_TESTS: dict[str, tuple[str, ...]] = {"psf/requests": (_HTTPBIN,)}
"""Commands that start the services which a repository's tests need."""

BEFORE: dict[str, str] = {
    # Python 3.9 contains zoneinfo, and without conda's patch the C code needs an API that Python 3.10 removed
    "backports-zoneinfo": "3.9",
}
"""Distributions in exported environments that are dropped from this Python version on."""


@dataclass(frozen=True, slots=True)
class Commands:
    """The shell commands of a specification that still have to run, and the system packages of the others.

    Attributes:
        remaining: the commands that still run.
        system: the system packages that the dropped ``apt-get`` commands would install.
    """

    remaining: tuple[str, ...]
    system: tuple[str, ...] = ()


def sort_commands(commands: Iterable[str]) -> Commands:
    """Remove the commands that are redundant or impossible while an image is built.

    ``apt-get install`` becomes a list of system packages. ``conda activate`` is redundant, because every image
    activates its environment. Commands that generate a locale are removed, because images use C.UTF-8 (measured: the
    verdicts are the same). Downloads are removed, because they fail without a network.

    Args:
        commands: the specification's commands.
    """
    sorted_commands: list[str] = []
    system: list[str] = []
    for command in commands:
        steps = [step.strip() for step in _BETWEEN.split(command) if step.strip()]
        dropped = [step for step in steps if _is_dropped(step)]
        system += [package for step in dropped if (apt := _APT.match(step)) for package in _packages(apt[1])]
        remaining = [step for step in steps if step not in dropped]
        # keep the original text if nothing was removed: quotes may contain a separator
        sorted_commands += [" && ".join(remaining) if dropped else command] if remaining else []
    return Commands(tuple(sorted_commands), tuple(dict.fromkeys(system)))


def _is_dropped(step: str) -> bool:
    return any((_APT.match(step), _ACTIVATION.match(step), _LOCALE.search(step), _NETWORK_TOOLS.match(step)))


def _packages(arguments: str) -> list[str]:
    """Return the packages that an ``apt-get`` command line installs."""
    verb, *packages = [word for word in shlex.split(arguments) if not word.startswith("-")] or [""]
    return packages if verb == "install" else []
