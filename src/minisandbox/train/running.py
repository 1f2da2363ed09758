"""Manage a training run's directory, with configuration, checkpoints and log. A repeated command resumes the run."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Self

from minisandbox import certificates
from minisandbox.errors import DiskFull, InvalidValue, MissingExtra, RunError, TrainingError
from minisandbox.tasks.formats.writing import written_whole
from minisandbox.train.config import Lora
from minisandbox.train.options import differences, load, store

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FULL = ("No space left", "PytorchStreamWriter failed", "inline_container.cc", "iostream error")
"""Parts of the error messages of safetensors and torch if the disk is full."""
_COMPLETE = "complete"
"""The marker file of a complete checkpoint, which is missing if the process was killed while writing it."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3), as in glibc's malloc.h."""


def is_first() -> bool:
    """Return whether this process has rank 0 among the training processes. Only rank 0 writes files."""
    return os.environ.get("RANK", "0") == "0"


def leave_process_group() -> None:
    """Destroy torch's process group, if there is one, because torch may abort a process that exits as a member."""
    from torch import distributed  # noqa: PLC0415 - an optional package

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def step_of(checkpoint: Path | None) -> int:
    """Return the number of optimiser steps before a checkpoint, or 0 if there is no checkpoint."""
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0


class TrainingRun:
    """A training run's directory. Use it in a ``with`` block.

    It contains the resolved configuration (``config.yaml``), the states from which a run resumes (``checkpoints``), one
    line per logged step (``log.jsonl``), and the trained model (``model``).

    Args:
        path: the directory.
        config: the experiment's configuration.
        may_change: keys that may differ from the run's first configuration.

    Raises:
        RunError: another process trains there, or the directory belongs to another experiment.
    """

    def __init__(self, path: Path, config: object, *, may_change: Iterable[str] = ()) -> None:
        self.path = path
        self._lock: int | None = None
        if not is_first():
            return
        path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise RunError(f"{path}: another process trains there", hint="wait for it, or set another out") from None
        try:
            self._compare(config, may_change)
            store(config, path / "config.yaml")
        except BaseException:  # release the lock, after Ctrl-C too
            self.close()
            raise

    def _compare(self, config: object, may_change: Iterable[str]) -> None:
        file = self.path / "config.yaml"
        if not file.is_file():
            return
        stored = load(type(config), str(file))
        if changed := differences(stored, config, but=may_change):
            raise RunError(
                f"{self.path} has a run with another configuration: {', '.join(changed)}",
                reason="a resumed run must match its config.yaml",
                hint="set another out, or the values in its config.yaml",
            )

    @property
    def model(self) -> Path:
        """The directory of the trained model."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints."""
        return self.path / "checkpoints"

    def last_checkpoint(self) -> Path | None:
        """Return the latest complete checkpoint, or None, and remove incomplete ones."""
        complete = self._complete_checkpoints()
        if is_first():
            for incomplete in set(self._all_checkpoints()) - set(complete):
                shutil.rmtree(incomplete)
        return complete[-1] if complete else None

    def checkpoint_written(self, step: int, keep: int) -> None:
        """Mark a checkpoint as complete, and only then remove old checkpoints.

        Args:
            step: the checkpoint's step.
            keep: number of latest checkpoints to keep; 0 keeps all.
        """
        (self.checkpoints / f"checkpoint-{step}" / _COMPLETE).touch()
        for old in self._complete_checkpoints()[:-keep] if keep else ():
            (old / _COMPLETE).unlink()  # first, so that an interrupted removal leaves an incomplete checkpoint
            shutil.rmtree(old)

    def _all_checkpoints(self) -> list[Path]:
        """Return all checkpoints, complete or not, from first to last; ignore directories that a user has renamed."""
        paths = [path for path in self.checkpoints.glob("checkpoint-*") if path.name.partition("-")[2].isdigit()]
        return sorted(paths, key=step_of)

    def _complete_checkpoints(self) -> list[Path]:
        return [path for path in self._all_checkpoints() if (path / _COMPLETE).exists()]

    @contextlib.contextmanager
    def new_model(self, name: str) -> Iterator[Path]:
        """Yield a directory for a model, which replaces an earlier one of this name if the block succeeds."""
        part = self.path / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)  # left by a killed process
        try:
            yield part
        except BaseException:  # free the disk space, after Ctrl-C too
            shutil.rmtree(part, ignore_errors=True)
            raise
        shutil.rmtree(self.path / name, ignore_errors=True)
        part.rename(self.path / name)

    def append(self, line: Mapping[str, object], *, file: str = "log.jsonl") -> None:
        """Append a line to a log."""
        if is_first():
            with (self.path / file).open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")

    def lines(self, file: str = "log.jsonl") -> list[dict[str, object]]:
        """Return the parsed lines of a log; skip truncated lines."""
        lines = []
        with contextlib.suppress(FileNotFoundError), (self.path / file).open(encoding="utf-8") as log:
            for line in log:
                with contextlib.suppress(ValueError):
                    lines.append(json.loads(line))
        return lines

    def forget_after(self, step: int, *, file: str = "log.jsonl") -> None:
        """Remove the lines after a step from a log, because a resumed run repeats the later steps."""
        if not is_first():
            return
        earlier = [line for line in self.lines(file) if isinstance(n := line.get("step"), int) and n <= step]
        with written_whole(self.path / file) as new:
            new.write_text("".join(json.dumps(line) + "\n" for line in earlier), encoding="utf-8")

    def close(self) -> None:
        """Release the lock on the directory; further calls do nothing."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def __enter__(self) -> Self:
        """Enter a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock on the directory."""
        self.close()


def resume_message(out: str | Path) -> str:
    """Return what an interrupted command has kept, for a run's directory."""
    steps = [step_of(path.parent) for path in Path(out, "checkpoints").glob(f"checkpoint-*/{_COMPLETE}")]
    if not steps:
        return "there is no checkpoint yet, so the same command starts over"
    return f"the same command resumes from the checkpoint of step {max(steps)}"


def missing_vllm() -> MissingExtra:
    """Return the error for a missing vLLM, with a hint how to install vLLM."""
    return MissingExtra(
        "engine=vllm needs the packages vllm and trl in the trainer's environment",
        reason="TRL imports vLLM in the trainer's process, even if a server samples",
        hint="pip install 'trl[vllm]', which installs a version that TRL supports",
    )


def require_training(*, curve: bool = False, vllm: bool = False) -> None:
    """Check that the packages for training are installed.

    Args:
        curve: also check for the plotting package.
        vllm: also check for vLLM, which no extra includes.

    Raises:
        MissingExtra: a package is not installed; the message names it and the extra.
    """
    certificates.export()
    if not sys.warnoptions:  # warnings of other packages tell users nothing that they can change
        for package in ("accelerate", "peft", "torch", "transformers"):
            warnings.filterwarnings("ignore", module=rf"{package}\b")
    # Set before torch is imported; models.renderer.require explains the value.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        import accelerate  # noqa: F401, PLC0415 - an optional package
        import peft  # noqa: F401, PLC0415 - an optional package
        import transformers  # noqa: F401, PLC0415 - an optional package

        if curve:
            import matplotlib as _  # noqa: F401, ICN001, PLC0415 - fail now, not after hours of training
    except ImportError as error:
        raise MissingExtra(
            f"the package {error.name} is not installed", reason=str(error), hint="pip install 'swe-minisandbox[train]'"
        ) from error
    if vllm and not (find_spec("vllm") and find_spec("trl")):
        raise missing_vllm()
    from transformers.utils import logging  # noqa: PLC0415 - an optional package

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def set_threads(*, single: bool) -> None:
    """Let torch use one thread per idle CPU, unless ``OMP_NUM_THREADS`` is set.

    A thread that waits for a busy CPU holds up all others: on two busy CPUs, a step with two threads takes several
    times as long as with one (docs/design/decisions.md).

    Args:
        single: use one thread, because results depend on the number of threads.
    """
    import torch  # noqa: PLC0415 - an optional package

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1 if single else max(1, idle_processors()))


def keep_freed_memory() -> None:
    """Let malloc keep 256 MiB of freed memory for the next batch; mapping it anew takes a tenth of a step on a CPU.

    Does nothing if there is a GPU, or if the C library has no mallopt(3).
    """
    import torch  # noqa: PLC0415 - an optional package

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and not torch.cuda.is_available():
        mallopt(_TRIM_THRESHOLD, 256 << 20)
        mallopt(_MMAP_THRESHOLD, 32 << 20)


def idle_processors(seconds: float = 0.3) -> int:
    """Return how many of the CPUs that this process may use are idle, from /proc/stat.

    The load average would still count a training run that has just ended.

    Args:
        seconds: how long to watch them.
    """
    began, before = time.monotonic(), _idle_seconds()
    time.sleep(seconds)
    return round((_idle_seconds() - before) / (time.monotonic() - began))


def _idle_seconds() -> float:
    """Return the idle time of this process's CPUs since the machine started; waiting for disks is idle time."""
    names, ticks = {f"cpu{number}" for number in os.sched_getaffinity(0)}, 0
    for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
        name, *fields = line.split()
        if name in names:
            ticks += int(fields[3]) + int(fields[4])  # proc_stat(5): idle, iowait
    return ticks / os.sysconf("SC_CLK_TCK")


def model_path(name: str) -> Path | str:
    """Return where transformers finds a model: its directory, the embedded model's for ``local``, or its hub name.

    Args:
        name: a directory, ``local`` for the embedded model, or a name on the Hugging Face hub.
    """
    if name.partition(":")[0] == "local":
        from minisandbox.models.engine import find_model  # noqa: PLC0415 - only the embedded model needs it

        return find_model(name)
    return Path(name) if Path(name).is_dir() else name


def open_policy(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open a model to train, in float32, and its tokenizer.

    Args:
        name: a directory, ``local`` for the embedded model, or a name on the Hugging Face hub.

    Raises:
        InvalidValue: the model cannot be opened.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - an optional package

    path = model_path(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidValue(
            f"cannot open the model {name}",
            reason=reason,
            hint="give a directory written by save_pretrained, or a name on the Hugging Face hub",
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def lora_of(lora: Lora) -> LoraConfig | None:
    """Return peft's configuration, or None if all weights are trained."""
    if not lora.rank:
        return None
    from peft import LoraConfig  # noqa: PLC0415 - an optional package

    modules = lora.modules if lora.modules == "all-linear" else lora.modules.split(",")
    return LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=modules, task_type="CAUSAL_LM"
    )


@contextlib.contextmanager
def translate_disk_full(path: Path) -> Iterator[None]:
    """Convert the errors of a full disk to DiskFull.

    Args:
        path: the run's directory.

    Raises:
        DiskFull: the disk is full.
    """
    try:
        yield
    except Exception as error:  # safetensors and torch raise their own exceptions, recognised by the message
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not (full or any(text in str(error) for text in _FULL)):
            raise
        raise DiskFull(
            f"cannot write to {path}", reason="the disk is full", hint=f"free some space; {resume_message(path)}"
        ) from error


def check_vocabulary(model: PreTrainedModel, largest: int, what: str) -> None:
    """Check that a token is in a model's vocabulary.

    Raises:
        TrainingError: the vocabulary does not have the token.
    """
    size = model.get_input_embeddings().weight.shape[0]
    if largest >= size:
        raise TrainingError(
            f"{what} has the token {largest}, but the model's vocabulary has only {size}",
            reason="these rows were made with another tokenizer",
            hint="collect the examples with --no-tokens, and export them with the trained model's --tokenizer",
        )
