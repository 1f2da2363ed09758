"""A training run on disk: its configuration, its checkpoints, its log. The same command goes on where it was."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Self

from minisandbox.errors import DiskFull, InvalidValue, MissingExtra, RunError, TrainingError
from minisandbox.tasks.writing import written_whole
from minisandbox.train.options import differences, load, store

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainerState

_FULL = ("No space left", "PytorchStreamWriter failed", "inline_container.cc", "iostream error")
"""What safetensors and torch say where there is no room for what they write."""
_COMPLETE = "complete"
"""The file that a checkpoint has once all of it is written: who is killed while writing leaves one without."""


def is_first() -> bool:
    """Whether this is the first of the processes that train together: the one that writes."""
    return os.environ.get("RANK", "0") == "0"


def step_of(checkpoint: Path | None) -> int:
    """Return the optimiser steps that a checkpoint has; 0 for none."""
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0


class TrainingRun:
    """A training run's directory. Use it in a ``with`` block.

    ``config.yaml`` is the resolved configuration, ``checkpoints`` what it goes on from, ``log.jsonl`` a line for each
    step that was logged, ``model`` the result.

    Args:
        path: the directory.
        config: the experiment's configuration.
        may_change: keys that may differ from those that the run was begun with.

    Raises:
        RunError: another process trains there, or another experiment was begun there.
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
            raise RunError(f"{path}: another process trains there", hint="wait for it, or give another out") from None
        try:
            self._compare(config, may_change)
            store(config, path / "config.yaml")
        except BaseException:  # a Ctrl-C too: the lock is let go
            self.close()
            raise

    def _compare(self, config: object, may_change: Iterable[str]) -> None:
        file = self.path / "config.yaml"
        if not file.is_file():
            return
        before = load(type(config), str(file))
        if other := differences(before, config, but=may_change):
            raise RunError(
                f"{self.path} has a run of another configuration: {', '.join(other)}",
                reason="going on with it would make an experiment that no file describes",
                hint="give another out, or the values that config.yaml there has",
            )

    @property
    def model(self) -> Path:
        """Where the result goes."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go."""
        return self.path / "checkpoints"

    def last_checkpoint(self) -> Path | None:
        """Return the latest checkpoint that is whole, or None; what was cut off while it was written is removed."""
        whole = self._whole()
        if is_first():
            for one in set(self._begun()) - set(whole):
                shutil.rmtree(one)
        return whole[-1] if whole else None

    def checkpoint_written(self, step: int, keep: int) -> None:
        """Mark a checkpoint as whole, and only then remove those that it takes the place of.

        Args:
            step: its own.
            keep: how many of the latest stay; 0: all.
        """
        (self.checkpoints / f"checkpoint-{step}" / _COMPLETE).touch()
        for one in self._whole()[:-keep] if keep else ():
            (one / _COMPLETE).unlink()  # the first to go: one that is half removed is not whole
            shutil.rmtree(one)

    def _begun(self) -> list[Path]:
        """The checkpoints that there are, the latest last; what people have given other names is theirs."""
        found = [one for one in self.checkpoints.glob("checkpoint-*") if one.name.removeprefix("checkpoint-").isdigit()]
        return sorted(found, key=step_of)

    def _whole(self) -> list[Path]:
        return [one for one in self._begun() if (one / _COMPLETE).exists()]

    @contextlib.contextmanager
    def new_model(self) -> Iterator[Path]:
        """A directory for the result; it takes the place of an earlier one where the block ends well."""
        part = self.path / "model.part"
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        try:
            yield part
        except BaseException:  # a Ctrl-C too: where the disk is full it takes no more room
            shutil.rmtree(part, ignore_errors=True)
            raise
        shutil.rmtree(self.model, ignore_errors=True)
        part.rename(self.model)

    def append(self, line: Mapping[str, object], *, file: str = "log.jsonl") -> None:
        """Append a line to a log."""
        if is_first():
            with (self.path / file).open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")

    def lines(self, file: str = "log.jsonl") -> list[dict[str, object]]:
        """Return a log's lines; one that was cut off is left out."""
        found = []
        with contextlib.suppress(FileNotFoundError), (self.path / file).open(encoding="utf-8") as log:
            for line in log:
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def forget_after(self, step: int, *, file: str = "log.jsonl") -> None:
        """Take out of a log what is done again: the lines of later steps."""
        if not is_first():
            return
        kept = [line for line in self.lines(file) if isinstance(n := line.get("step"), int) and n <= step]
        with written_whole(self.path / file) as new:
            new.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def close(self) -> None:
        """Let others train there; calling it again does nothing."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def __enter__(self) -> Self:
        """Use it in a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let others train there."""
        self.close()


def missing_vllm() -> MissingExtra:
    """Return the error that says that vLLM cannot be imported, and how to install it."""
    return MissingExtra(
        "engine=vllm needs the package vllm, which is not installed in the trainer's environment",
        reason="TRL imports it in the trainer's process, also where a server draws the answers",
        hint="pip install 'trl[vllm]': it takes a vLLM that TRL supports",
    )


def require_training(*, curve: bool = False, vllm: bool = False) -> None:
    """Check that what training needs is installed.

    Args:
        curve: also what draws learning curves.
        vllm: also vLLM, which is in no extra.

    Raises:
        MissingExtra: a package is not installed; the message says which, and how to install it.
    """
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func may change: the tests watch it
    try:
        import datasets  # noqa: PLC0415 - extras
        import peft  # noqa: F401, PLC0415 - the same
        import trl  # noqa: F401, PLC0415 - the same

        if curve:
            import matplotlib as _  # noqa: F401, ICN001, PLC0415 - the same; hours later is too late to miss it
    except ImportError as error:
        raise MissingExtra(
            f"the package {error.name} is not installed", reason=str(error), hint="pip install 'swe-minisandbox[train]'"
        ) from error
    if vllm and find_spec("vllm") is None:
        raise missing_vllm()
    from transformers.utils import logging  # noqa: PLC0415 - the same

    logging.disable_progress_bar()
    datasets.disable_progress_bars()


def open_policy(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open a model to train, in float32, and its tokenizer.

    Args:
        name: a directory, ``local`` for the embedded model, or a name on the Hugging Face hub.

    Raises:
        InvalidValue: there is none of that name.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - an extra

    place: Path | str = Path(name) if Path(name).is_dir() else name
    if name.partition(":")[0] == "local":
        from minisandbox.models.engine import find_model  # noqa: PLC0415 - the same

        place = find_model(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place)
        model = AutoModelForCausalLM.from_pretrained(place, dtype="float32")
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidValue(
            f"the model {name} cannot be opened",
            reason=reason,
            hint="give a directory that save_pretrained has written",
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def quiet(trainer: Trainer) -> None:
    """Keep a trainer from printing: stdout is its caller's, and what goes on is told in other ways."""
    from transformers import PrinterCallback  # noqa: PLC0415 - an extra

    trainer.remove_callback(PrinterCallback)


def run_callback(run: TrainingRun, tell: Callable[[str], object], *, keep: int) -> TrainerCallback:
    """Return what writes a run's log, tells it, and marks its checkpoints as whole.

    Args:
        run: its directory.
        tell: is told each line of the log.
        keep: how many of the latest checkpoints stay; 0: all.
    """
    from transformers import TrainerCallback  # noqa: PLC0415 - an extra

    class Keeper(TrainerCallback):  # type: ignore[misc] # transformers is not looked at for types
        def on_log(
            self, _args: object, state: TrainerState, _control: object, logs: object = None, **__: object
        ) -> None:
            if isinstance(logs, dict) and is_first():
                run.append({"step": state.global_step, **logs})
                shown = [f"{key} {logs[key]:.4g}" for key in ("loss", "reward", "eval_loss", "entropy") if key in logs]
                tell(f"step {state.global_step} of {state.max_steps}: {', '.join(shown)}" if shown else "done")

        def on_save(self, _args: object, state: TrainerState, _control: object, **__: object) -> None:
            if is_first():
                run.checkpoint_written(state.global_step, keep)

    return Keeper()


@contextlib.contextmanager
def told_in_our_words(run: TrainingRun) -> Iterator[None]:
    """Turn what trainers raise where a disk is full into our own error.

    Raises:
        DiskFull: the disk is full.
    """
    try:
        yield
    except Exception as error:  # safetensors and torch have exceptions of their own for it, of which the text tells
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not (full or any(text in str(error) for text in _FULL)):
            raise
        last = run.last_checkpoint()
        raise DiskFull(
            f"{run.path}: a checkpoint cannot be written",
            reason="the disk is full",
            hint=f"make room; the same command goes on from {last.name if last else 'the beginning'}",
        ) from error


def check_vocabulary(model: PreTrainedModel, largest: int, what: str) -> None:
    """Check that a model knows a token.

    Raises:
        TrainingError: it does not.
    """
    size = model.get_input_embeddings().weight.shape[0]
    if largest >= size:
        raise TrainingError(
            f"{what} has the token {largest}, and the model's vocabulary has {size}",
            reason="these rows were made with another tokenizer",
            hint="export them again with the tokenizer of the model that is trained",
        )
