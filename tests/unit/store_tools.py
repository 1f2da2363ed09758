"""Layers and images for tests of the store, made without any sandbox."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

from minisandbox.store import ImageRecord, Lease, Made, Store, step_key

MOMENT = 946684800
FILES = {"lib/a.py": "a = 1\n" * 500, "lib/b.py": "b = 2\n" * 500, "lib/empty.py": "", "bin/run": "#!/bin/sh\n"}


def key_of(name: str) -> str:
    """The key of a layer that :func:`add_layer` makes."""
    return step_key(None, {"name": name})


def frozen_keys(store: Store) -> list[str]:
    """The keys of all frozen layers, in order."""
    return [key for key in store.layer_keys() if store.is_frozen(key)]


def add_layer(
    store: Store,
    name: str,
    files: Mapping[str, str] = FILES,
    *,
    parent: str | None = None,
    hold: Lease | None = None,
) -> str:
    """Publish a layer of files, and a link; return its key."""

    def make(work: Path) -> Made:
        tree = work / "tree"
        tree.mkdir()
        for path, text in files.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
            (tree / path).chmod(0o755 if path.startswith("bin/") else 0o644)
            os.utime(tree / path, (MOMENT, MOMENT))
        (tree / "link").symlink_to("lib/a.py")
        return Made(tree, {"name": name})

    store.ensure_layer(key_of(name), parent=parent, step={"kind": "test", "name": name}, make=make, hold=hold)
    return key_of(name)


def add_image(store: Store, name: str, *layers: str) -> ImageRecord:
    """Record an image of layers."""
    key = step_key(layers[-1], {"kind": "image"})
    record = ImageRecord(name, key, layers, (("PATH", "/bin"),), "/testbed", None, "", time.time(), {"python": "3.11"})
    store.put_image(record)
    return record


def two_images(store: Store) -> tuple[str, str, str]:
    """Images ``one`` and ``two`` over one base layer; each of their own layers has files of its own and common ones."""
    base = add_layer(store, "base", {"etc/passwd": "root\n" * 2000})
    one = add_layer(store, "one", {**FILES, "lib/one.py": "one\n" * 3000}, parent=base)
    two = add_layer(store, "two", {**FILES, "lib/two.py": "two\n" * 3000}, parent=base)
    add_image(store, "one", base, one)
    add_image(store, "two", base, two)
    return base, one, two


def own_modules() -> dict[str, str]:
    """What lets another process import the modules of the tests."""
    places = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, places))}


def python(
    script: str, *arguments: object, environment: Mapping[str, str] | None = None, killed_at: str = ""
) -> subprocess.Popen[str]:
    """Start a script in a process of its own; it finds the modules of the tests.

    Args:
        script: the program.
        arguments: its arguments.
        environment: additions to this process's environment.
        killed_at: a point of :mod:`tests.faults` at which the process is killed.
    """
    fault = f"from tests.faults import kill_at\nkill_at({killed_at!r})\n" if killed_at else ""
    command = [sys.executable, "-c", fault + textwrap.dedent(script), *map(str, arguments)]
    settings = {**os.environ, **own_modules(), **(environment or {})}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=settings)


def end_of(process: subprocess.Popen[str]) -> int:
    """How a process ended, after at most a minute; what it said is shown where a test fails."""
    print(*process.communicate(timeout=60))
    return process.returncode


def names_below(path: Path) -> list[str]:
    """Every file below a directory, locks and gates left out."""
    found = (child for child in path.rglob("*") if not child.is_dir() or child.is_symlink())
    return sorted(str(child.relative_to(path)) for child in found if child.name not in (".gate", ".lock"))


def on_disk(path: Path) -> int:
    """Bytes that everything below a directory takes, every inode once, directories left out."""
    inodes = {(info.st_dev, info.st_ino): info.st_blocks * 512 for info in map(os.lstat, _everything(path))}
    return sum(inodes.values())


def _everything(path: Path) -> list[Path]:
    return [child for child in path.rglob("*") if child.is_symlink() or not child.is_dir()]
