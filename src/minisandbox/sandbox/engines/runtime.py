"""Assemble a small Python with the worker's code to mount into every container, because images may lack Python.

It consists of this process's interpreter, its shared libraries, the modules that a worker imports, and the dynamic
linker, so that it does not depend on the C library of the image.
"""

from __future__ import annotations

import compileall
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from minisandbox.errors import HostError
from minisandbox.sandbox import scratch

TARGET = "/.minisandbox"
"""Path of the runtime in containers."""
COMMAND = (
    f"{TARGET}/linker", "--library-path", f"{TARGET}/shared", f"{TARGET}/bin/python", "-I", "-S", "-B", "-c",
    "from minisandbox.launch.container import main; main()",
)  # fmt: skip
"""Command that starts the runtime; the arguments of :func:`minisandbox.launch.container.main` follow it."""
_MODULES = (
    "import json, sys; sys.path.append(sys.argv[1]); import minisandbox.launch.container, encodings.ascii, runpy; "
    "files = (getattr(module, '__file__', None) for module in list(sys.modules.values())); "
    "print(json.dumps([file for file in files if file]))"
)
_LIBRARY = re.compile(r"^\s*(?:\S+ => )?(/\S+) \(0x", re.MULTILINE)


def runtime() -> Path:
    """Return the runtime's directory on this machine, which is removed after this process has exited.

    Raises:
        HostError: this interpreter cannot be copied.
    """
    return _made(os.getpid())


@cache
def _made(_process: int) -> Path:
    root = scratch.new_scratch() / "runtime"
    library = Path(os.__file__).parent
    modules = root / "lib" / library.name
    package = Path(__file__).parents[3]
    python = os.path.realpath(sys.executable)
    module_list = _output(python, "-I", "-S", "-c", _MODULES, str(package))
    binaries = [Path(python)]
    for file in map(Path, json.loads(module_list)):
        parent = package if file.is_relative_to(package) else library
        _copy(file, modules / file.relative_to(parent))
        binaries += [file] if file.suffix == ".so" else []
    (modules / "lib-dynload").mkdir(parents=True, exist_ok=True)
    _copy(Path(python), root / "bin/python")
    for library_path in {Path(path) for binary in binaries for path in _LIBRARY.findall(_output("ldd", str(binary)))}:
        _copy(library_path, root / ("linker" if library_path.name.startswith("ld-") else f"shared/{library_path.name}"))
    compileall.compile_dir(modules, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    return root


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def _output(*command: str) -> str:
    completed = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if completed.returncode != 0:
        message = completed.stderr.strip()[-500:]
        raise HostError(f"this Python cannot be copied into containers: {command[0]} failed", reason=message or None)
    return completed.stdout
