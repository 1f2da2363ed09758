"""Install benchmark packages that conflict with installed ones into a cache directory: swebench 5 next to 4.1."""

from __future__ import annotations

import subprocess
from pathlib import Path

import uv

from minisandbox import wheels
from minisandbox.errors import HarnessError

_PACKAGES = {
    "swebench5": (
        "swebench-5.0.2",
        (
            "swebench==5.0.2 --hash=sha256:b7f0416a1e686eca22c2f749b5f816685a202835032f6683080e2b53545bbb62",
            "unidiff==1.0.1 --hash=sha256:5e2ca461eda8a4c761ad0922e3e8a65742f359dc60301a3a055b70fd7c158680",
        ),
    ),
}
"""The directory and the packages of each parser family, without dependencies that the parsers do not import."""
_SECONDS = 300.0


def installed(family: str) -> Path | None:
    """Install a family's package if necessary; return its directory, or None if this interpreter has the package.

    The directory is in ``$XDG_CACHE_HOME/minisandbox-harness``, by default in ``~/.cache``.

    Args:
        family: the part of a parser's name before the colon.

    Raises:
        HarnessError: the package cannot be installed.
    """
    if family not in _PACKAGES:
        return None
    name, requirements = _PACKAGES[family]
    cache = wheels.cache_directory("harness")
    try:
        return wheels.make_once(
            cache / name, lambda staging: wheels.fetch_wheels(uv.find_uv_bin(), staging, requirements, timeout=_SECONDS)
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(error) if isinstance(error, OSError) else wheels.reason_of(error)
        raise HarnessError(
            f"{' and '.join(line.split()[0] for line in requirements)} cannot be installed",
            reason=reason,
            hint=f"retry with the package index accessible, or copy {cache} from another machine",
        ) from error
