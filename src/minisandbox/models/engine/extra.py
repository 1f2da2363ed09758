"""Import the packages of the extra ``[local]`` when needed; a missing one gives a helpful error."""

from __future__ import annotations

import importlib
import os

from minisandbox.errors import MissingExtra

_PACKAGES = ("torch", "transformers")


def require(*packages: str) -> None:
    """Import optional packages.

    Args:
        packages: names to import; torch and transformers if none is given.

    Raises:
        MissingExtra: one is not installed.
    """
    # the engine loads nothing from the hub, but transformers would ask it even about local directories
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in packages or _PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise MissingExtra(
                f"the package {name} is not installed",
                reason=str(error),
                hint="pip install torch==2.13.0 (a build for the CPU), then pip install 'swe-minisandbox[local]'",
            ) from error
