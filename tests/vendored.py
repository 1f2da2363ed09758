"""pytest inside a project's own tree: tests are run for real, without a package index."""

from __future__ import annotations

import compileall
import importlib.metadata
import py_compile
from pathlib import Path


def vendor_pytest(target: Path) -> None:
    """Copy pytest and what it needs out of the environment that runs these tests."""
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        for file in importlib.metadata.distribution(name).files or ():
            if file.parts[0] != ".." and file.suffix != ".pyc":
                place = target / str(file)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(Path(str(file.locate())).read_bytes())
    # or each run of each grade would compile it: that takes longer than the tests
    compileall.compile_dir(target, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
