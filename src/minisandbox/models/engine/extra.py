"""The packages of the extra ``[local]``: imported where they are needed, and missed with a message that helps."""

from __future__ import annotations

import importlib
import os

from minisandbox.errors import MissingExtra

_PACKAGES = ("torch", "transformers")


def require(*packages: str) -> None:
    """Import what the engine needs.

    Args:
        packages: names to import; what the engine itself needs if none is given.

    Raises:
        MissingExtra: one is not installed.
    """
    # nothing that the engine loads lies on the hub: without this transformers asks it about local directories too
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
