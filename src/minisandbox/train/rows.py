"""Read, check and convert training rows: tokens with a loss mask, the sampler's log-probabilities and a weight."""

from __future__ import annotations

import math
import os
import pickle
import random
import sys
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from minisandbox.errors import InvalidValue, TokenMismatch, TrainingError
from minisandbox.models import TokenRow
from minisandbox.models.graph import oldest_version
from minisandbox.tasks.reading import open_source

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""The label of a token without loss, PyTorch's default ``ignore_index``."""
_EXPORT_AGAIN = "export the rows again: minisandbox trajectories export --to tokens"


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One sequence to train on.

    Attributes:
        rollout: the name of the row's rollout, for error messages.
        ids: the tokens (``array('i')``).
        mask: per token, 1 if it carries loss, else 0.
        logprobs: natural logarithms of the sampling probabilities, 0.0 for context (``array('d')``); None if
            unknown.
        weight: the factor of the tokens' log-probabilities: the advantage, or 1.0 in fine-tuning.
        task: the task's id.
        share: the row's share of the rollout's tokens that carry loss.
        versions: the policy versions of the tokens (:attr:`.TokenRow.versions`); empty if unknown.
        lengths: numbers of tokens of the rows that are packed into this one; empty if none are.
    """

    rollout: str
    ids: array[int]
    mask: bytes
    logprobs: array[float] | None = None
    weight: float = 1.0
    task: str = ""
    share: float = 1.0
    versions: tuple[tuple[int, int], ...] = ()
    lengths: tuple[int, ...] = ()

    @classmethod
    def of(cls, row: TokenRow, *, rollout: str, weight: float = 1.0, task: str = "", share: float = 1.0) -> TrainingRow:
        """Create a training row from captured tokens.

        Args:
            row: the tokens that the engine read and sampled.
            rollout: the name of the row's rollout.
            weight: the rollout's advantage.
            task: the task's id.
            share: the row's share of the rollout's tokens that carry loss.
        """
        return cls(rollout, row.ids, row.mask, row.logprobs, weight, task, share, row.versions)

    @property
    def labels(self) -> list[int]:
        """The token ids, with -100 in place of tokens without loss."""
        return [token if carries else IGNORED for token, carries in zip(self.ids, self.mask, strict=True)]

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version of the tokens that carry loss; None if that of a token is unknown."""
        return oldest_version(self.versions, self.mask)

    @property
    def loss_tokens(self) -> int:
        """The number of tokens that carry loss."""
        return sum(self.mask)

    def check(self) -> None:
        """Check that the row is consistent.

        Raises:
            TrainingError: the row is inconsistent; the message names the rollout and, if known, the position.
        """
        if len(self.ids) != len(self.mask) or (self.logprobs is not None and len(self.logprobs) != len(self.ids)):
            counts = f"{len(self.ids)} tokens, {len(self.mask)} mask bytes"
            if self.logprobs is not None:
                counts += f", {len(self.logprobs)} log-probabilities"
            raise TrainingError(f"{self.rollout}: the lengths differ: {counts}", hint=_EXPORT_AGAIN)
        if not any(self.mask):
            raise TrainingError(
                f"{self.rollout}: none of its {len(self.ids)} tokens carries loss",
                reason="the row has no sampled token",
                hint="leave the row out",
            )
        if self.mask[0]:
            raise TrainingError(f"{self.rollout}: token 0 carries loss, but nothing predicts it", hint=_EXPORT_AGAIN)
        for position, (token, carries) in enumerate(zip(self.ids, self.mask, strict=True)):
            if token < 0 or carries not in (0, 1):
                raise TrainingError(
                    f"{self.rollout}, token {position}: the id {token} with the mask {carries} is invalid",
                    reason="an id is 0 or more, and a mask is 0 or 1",
                    hint=_EXPORT_AGAIN,
                )
            logprob = self.logprobs[position] if self.logprobs is not None and carries else 0.0
            if not (math.isfinite(logprob) and logprob <= 1e-6):  # float32 may round 1.0 up
                raise TrainingError(
                    f"{self.rollout}, token {position}: the log-probability {logprob} is invalid",
                    reason="it must be a finite natural logarithm of at most 0",
                    hint="check that the server returns log-probabilities of sampled tokens, and sample again",
                )


EMPTY = TrainingRow("", array("i", [0, 0]), b"\0\0", array("d", [0.0, 0.0]))
"""A row without loss, with which all processes have the same number of micro-batches."""


# --- files -----------------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> Iterator[TrainingRow]:
    """Read rows from JSON Lines, Parquet or a folder of ``datasets``, as ``trajectories export`` writes them.

    The columns are ``input_ids``; ``loss_mask`` or ``labels``; and, if known, ``logprobs``, ``traj_id``, ``row``,
    ``instance_id``, ``versions``. Rows that ``model proxy`` writes are read, too, except for those without loss.

    Raises:
        InvalidValue: there is no such file.
        TaskFileError: the file cannot be read; the message names it and, if known, the line.
        MissingExtra: a required package is not installed.
        TrainingError: a line is not a row of tokens, or cannot be trained on; the message names the file and line.
    """
    if not path.exists():
        raise InvalidValue(f"{path}: no such file", hint="write rows with minisandbox trajectories export")
    for line in open_source(path).rows:
        try:
            values = _of_capture(line.values) if "session" in line.values else line.values
            if values is None:
                continue
            row = _row(values, line.place)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise TrainingError(
                f"{line.place} is not a row of tokens",
                reason=f"{type(error).__name__}: {error}",
                hint="write rows with minisandbox trajectories export --to tokens",
            ) from error
        yield row


def _of_capture(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the columns of a row that the capture proxy wrote; None if none of its tokens carries loss."""
    session, mask = body["session"], body["mask"]
    columns = {"input_ids": body["ids"], "loss_mask": mask, "traj_id": session, "instance_id": session}
    return {**body, **columns} if any(mask) else None


def _row(body: Mapping[str, Any], place: str) -> TrainingRow:
    ids, labels = array("i", body["input_ids"]), body.get("labels")
    marks = body.get("loss_mask")
    if marks is None:
        marks = [label != IGNORED for label in body["labels"]]
    logprobs = None if body.get("logprobs") is None else array("d", body["logprobs"])
    name = f"{body['traj_id']}#{body.get('row', 0)}" if body.get("traj_id") else place
    versions = tuple((int(version), int(count)) for version, count in body.get("versions") or ())
    task = str(body.get("instance_id") or "")
    row = TrainingRow(name, ids, bytes(map(int, marks)), logprobs, 1.0, task, versions=versions)
    row.check()
    if labels is not None and list(labels) != row.labels:
        raise ValueError("its labels must equal its tokens where the mask is 1, and -100 elsewhere, unshifted")
    return row


class StoredRows:
    """Rows in a temporary file; memory has only the index.

    Args:
        file: the file, which may also have other rows.
        index: each row's position in the file, number of tokens, and task, or rollout if the task is unknown.
    """

    def __init__(self, file: BinaryIO, index: Iterable[tuple[int, int, str]] = ()) -> None:
        self._file, self.index = file, list(index)

    def append(self, row: TrainingRow) -> None:
        """Store a row without its log-probabilities."""
        self.index.append((self._file.seek(0, os.SEEK_END), len(row.ids), sys.intern(row.task or row.rollout)))
        pickle.dump(replace(row, logprobs=None), self._file, pickle.HIGHEST_PROTOCOL)

    @property
    def tasks(self) -> list[str]:
        """Each row's task."""
        return [task for _, _, task in self.index]

    def split(self, tasks: Container[str]) -> tuple[StoredRows, StoredRows]:
        """Return the rows of other tasks, and the rows of these tasks."""
        parts = ([entry for entry in self.index if (entry[2] in tasks) is chosen] for chosen in (False, True))
        first, second = (StoredRows(self._file, part) for part in parts)
        return first, second

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __iter__(self) -> Iterator[TrainingRow]:
        """Yield the rows, read one by one."""
        return (self[index] for index in range(len(self)))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.index)

    def __getitem__(self, index: int) -> TrainingRow:
        """Read a row."""
        self._file.seek(self.index[index][0])
        row: TrainingRow = pickle.load(self._file)  # noqa: S301 - this process wrote the file, which has no name
        return row


def held_out(tasks: Iterable[str], share: float, seed: int) -> set[str]:
    """Choose the tasks whose rows are held out.

    Args:
        tasks: the rows' tasks.
        share: the share of tasks to hold out. If it is above 0, at least one task is held out, but never all tasks.
        seed: seed of the choice.
    """
    distinct = sorted(set(tasks))
    count = min(max(1, round(share * len(distinct))), len(distinct) - 1) if share else 0
    return set(random.Random(seed).sample(distinct, count))  # noqa: S311 - not a secret


def pack(rows: Sequence[TrainingRow]) -> TrainingRow:
    """Return rows as one, in which :func:`collate` isolates them from each other."""
    if len(rows) == 1:
        return rows[0]
    ids, lengths = array("i"), tuple(len(row.ids) for row in rows)
    for row in rows:
        ids.extend(row.ids)
    return TrainingRow(rows[0].rollout, ids, b"".join(row.mask for row in rows), lengths=lengths)


# --- tensors ---------------------------------------------------------------------------------------------------------


def collate(rows: Sequence[TrainingRow], *, pad: int) -> dict[str, torch.Tensor]:
    """Return rows as tensors, padded on the right.

    Args:
        rows: at least one row.
        pad: the id of the padding token, which attention and loss ignore.

    Returns:
        ``input_ids``, ``attention_mask``, ``mask`` (1.0 for tokens with loss) and ``logprobs`` [rows, longest];
        ``weights`` and ``shares`` [rows, 1]. If rows are packed, ``positions`` instead of ``attention_mask``.
    """
    import torch  # noqa: PLC0415 - an optional package
    from torch.nn.utils.rnn import pad_sequence  # noqa: PLC0415 - an optional package

    def padded(values: Iterable[Sequence[float]], dtype: torch.dtype, padding: int = 0) -> torch.Tensor:
        return pad_sequence([torch.tensor(list(row_values), dtype=dtype) for row_values in values], True, padding)

    if any(row.lengths for row in rows):  # padding has the positions 0, and so attends to itself
        numbers = ([n for length in row.lengths or [len(row.ids)] for n in range(length)] for row in rows)
        context = {"positions": padded(numbers, torch.long)}
    else:
        context = {"attention_mask": padded(([1] * len(row.ids) for row in rows), torch.long)}
    return context | {
        "input_ids": padded((row.ids for row in rows), torch.long, pad),
        "mask": padded((row.mask for row in rows), torch.float32),
        "logprobs": padded((row.logprobs or [0.0] * len(row.ids) for row in rows), torch.float32),
        "weights": torch.tensor([[row.weight] for row in rows], dtype=torch.float32),
        "shares": torch.tensor([[row.share] for row in rows], dtype=torch.float32),
    }


# --- checks ----------------------------------------------------------------------------------------------------------


_FEW = 32
"""Statistics fill a row up to this number of tokens with differences of 0: one token's rounding must not fail a row."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest allowed differences between a trainer's and the sampler's log-probabilities (docs/design/tokens.md).

    Attributes:
        token: largest difference of a single token.
        mean: largest mean difference of a step's tokens.
        p99: largest 99th percentile of the differences of a step's tokens.
        row_kl: largest KL divergence of a row from the trainer's policy to the sampler's, estimated per token.
    """

    token: float = math.inf
    mean: float = math.inf
    p99: float = math.inf
    row_kl: float = math.inf


FLOAT32 = Tolerance(token=1e-4)
"""The tolerance if both sides compute in float32: each token is compared."""
BFLOAT16 = Tolerance(mean=0.1, p99=0.5, row_kl=0.05)
"""The tolerance if one side uses bfloat16: statistics are compared, because tokens differ by more than half a nat."""


@dataclass(slots=True)
class Gaps:
    """The differences between a trainer's and the sampler's log-probabilities.

    Attributes:
        tolerance: the largest allowed differences.
        sizes: absolute differences of all tokens compared so far.
    """

    tolerance: Tolerance
    sizes: array[float] = field(default_factory=lambda: array("d"))

    def add(self, row: TrainingRow, logprobs: Sequence[float]) -> float:
        """Compare sampler's and trainer's log-probabilities of a row's loss tokens; return the largest difference.

        Args:
            row: a row with the sampler's log-probabilities.
            logprobs: the trainer's log-probabilities, one per token.

        Raises:
            TokenMismatch: a token differs by more than ``token`` or is NaN, or the row by more than ``row_kl``.
        """
        assert row.logprobs is not None
        pairs = zip(row.logprobs, logprobs, row.mask, strict=True)
        changes = [b - a if carries else 0.0 for a, b, carries in pairs]
        worst = max(range(len(changes)), key=lambda position: _size(changes[position]))
        sizes = array("d", (_size(change) for change, carries in zip(changes, row.mask, strict=True) if carries))
        kl = sum(map(_divergence, changes)) / max(len(sizes), _FEW)
        over = max(_size(changes[worst]) / self.tolerance.token, kl / self.tolerance.row_kl)
        if not over <= 1.0:
            where = f"{row.rollout}, token {worst} (id {row.ids[worst]})"
            found = f"{row.logprobs[worst]:.6f} and {logprobs[worst]:.6f}; {_statistics(sizes)}, row KL {kl:.2g}"
            raise self._mismatch(where, found, row.rollout, worst, over)
        self.sizes.extend(sizes)
        return _size(changes[worst])

    @property
    def mean(self) -> float:
        """The mean difference of all tokens compared so far."""
        return _mean(self.sizes)

    def check(self) -> None:
        """Check the differences of all tokens compared so far.

        Raises:
            TokenMismatch: the mean or the 99th percentile of the differences is too large.
        """
        over = max(self.mean / self.tolerance.mean, _p99(self.sizes) / self.tolerance.p99)
        if not over <= 1.0:
            raise self._mismatch("this step's rows", _statistics(self.sizes), "", -1, over)

    def _mismatch(self, where: str, found: str, rollout: str, position: int, over: float) -> TokenMismatch:
        limits = self.tolerance
        options = "bfloat16 needs agreement.by=statistics" if limits.token < math.inf else "set by agreement.*"
        return TokenMismatch(
            f"{where}: the log-probabilities of sampler and trainer differ: {found}",
            rollout=rollout,
            position=position,
            excess=over,
            reason="the trainer's weights, chat template, temperature, precision or context differ from the sampler's",
            hint=f"the limits are {_shown_limits(limits)} ({options}); top_p and top_k must be off",
        )


def _size(change: float) -> float:
    return math.inf if math.isnan(change) else abs(change)


def _divergence(change: float) -> float:
    """Return a token's part of the KL divergence: the estimator k3 (>= 0) of http://joschu.net/blog/kl-approx.html."""
    return math.expm1(change) - change if _size(change) < 700 else math.inf


def _mean(sizes: Sequence[float]) -> float:
    return sum(sizes) / max(len(sizes), _FEW)


def _p99(sizes: Sequence[float]) -> float:
    padded = sorted([*sizes, *[0.0] * (_FEW - len(sizes))])
    return padded[int(0.99 * (len(padded) - 1))]


def _statistics(sizes: Sequence[float]) -> str:
    mean, p99, largest = _mean(sizes), _p99(sizes), max(sizes, default=0.0)
    return f"the differences of {len(sizes)} tokens have mean {mean:.2g}, p99 {p99:.2g}, max {largest:.2g}"


def _shown_limits(limits: Tolerance) -> str:
    labels = {"token": "a token's", "mean": "mean", "p99": "p99", "row_kl": "row KL"}
    shown = {label: getattr(limits, name) for name, label in labels.items()}
    return ", ".join(f"{label} {limit:g}" for label, limit in shown.items() if limit < math.inf)


class Rounding:
    """The rows of a step that are left out because trainer and sampler differ by rounding alone.

    If the policy sampled a very unlikely token, the order of summation can change the next token's log-probability by
    more than the tolerance: by 1.6e-4 in float32 in one of 38,400 rollouts of an experiment. Rounding affects few
    rows, and by little. Wrong weights, contexts or temperatures affect most rows, or by much.

    Args:
        rows: number of rows in the step, of which one in fifty may be left out.

    Attributes:
        rollouts: names of the rollouts whose rows are left out.
    """

    LARGEST = 10.0
    """The largest excess over the tolerance, as a factor, that counts as rounding."""

    def __init__(self, rows: int) -> None:
        self._allowed = rows // 50
        self.rollouts: list[str] = []

    def take(self, error: TokenMismatch) -> None:
        """Leave out a mismatched row; raise the error if rounding cannot explain it, or too many rows are left out."""
        if not (error.rollout and error.excess <= self.LARGEST) or len(self.rollouts) >= self._allowed:
            raise error
        self.rollouts.append(error.rollout)


def shown_mask(row: TrainingRow, decode: Callable[[int], str] | None = None) -> Iterator[str]:
    """Format a row's mask for display, as spans of tokens with and without loss.

    Args:
        row: the row.
        decode: returns a token's text; None to show token ids.

    Yields:
        One line per span.
    """
    start = 0
    for carries, group in groupby(row.mask):
        end = start + len(list(group))
        texts = map(decode or str, row.ids[start:end])
        yield f"{'LOSS   ' if carries else 'context'} {start:5} to {end - 1:5}: {' '.join(texts)}"
        start = end
