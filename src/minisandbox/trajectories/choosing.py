"""Choose training examples: collect, filter and balance, with a report of every dropped example."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from minisandbox.errors import InvalidValue, RunError
from minisandbox.trajectories.example import Example
from minisandbox.trajectories.reports import StageReport

Refusal = tuple[str, str]
"""Why an example is dropped: a machine-readable reason, and an explanation."""

SUBMITTED = "submitted"
_HUNK = re.compile(rb"^(@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@).*$", re.MULTILINE)
_NOISE = re.compile(rb"^index [0-9a-f]+\.\.[0-9a-f]+.*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Collect:
    """Rules for collecting rollouts. By default, a rollout must have submitted and resolved its task without flags.

    Attributes:
        min_reward: the lowest accepted reward; None accepts any rollout, even without a reward.
        statuses: the accepted exit statuses; empty accepts any. Examples without an exit status are always accepted.
        any_flags: whether to accept flagged examples too.
        agents: the accepted agent names; empty accepts any.
        models: the accepted model names; empty accepts any.
    """

    min_reward: float | None = 1.0
    statuses: tuple[str, ...] = (SUBMITTED,)
    any_flags: bool = False
    agents: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def refuse(self, example: Example) -> Refusal | None:
        """Return the reason for dropping an example, or None to keep the example."""
        if not example.turns:
            return "no_answers", "the conversation has no answer of a model"
        if self.statuses and example.exit_status is not None and example.exit_status not in self.statuses:
            return "exit_status", example.exit_status
        return self._by_reward(example) or self._by_name(example)

    def _by_reward(self, example: Example) -> Refusal | None:
        if self.min_reward is not None and example.reward is None:
            return "no_reward", "whether it resolves its task is not known"
        if self.min_reward is not None and example.reward is not None and example.reward < self.min_reward:
            return "reward", f"{example.reward:g}"
        return ("flagged", _kinds(example)) if _is_suspicious(example) and not self.any_flags else None

    def _by_name(self, example: Example) -> Refusal | None:
        for name, accepted, value in (("agent", self.agents, example.agent), ("model", self.models, example.model)):
            if accepted and value not in accepted:
                return name, value
        return None


@dataclass(frozen=True, slots=True)
class Filter:
    """Rules for dropping collected examples; None for no limit.

    Attributes:
        max_tokens: maximum number of tokens of the conversation.
        max_chars: maximum number of characters of all messages together.
        min_turns: minimum number of model responses.
        max_turns: maximum number of model responses.
        no_flags: whether to drop flagged examples.
        flags: regular expressions; an example with a flag of a matching kind is dropped.
        unique: whether to keep only the first of several examples of a task with the same submission.
        repo: a regular expression that must match the repository's name.
        not_repo: a regular expression that must not match the repository's name.
    """

    max_tokens: int | None = None
    max_chars: int | None = None
    min_turns: int | None = None
    max_turns: int | None = None
    no_flags: bool = False
    flags: tuple[str, ...] = ()
    unique: bool = False
    repo: str | None = None
    not_repo: str | None = None

    def __post_init__(self) -> None:
        for pattern in (*self.flags, self.repo or "", self.not_repo or ""):
            try:
                re.compile(pattern)
            except re.error as error:
                raise InvalidValue(f"{pattern!r} is not a regular expression", reason=str(error)) from None
        for name in ("max_tokens", "max_chars", "min_turns", "max_turns"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidValue(f"{name} is {value}", hint="give 1 or more")


class Filtering:
    """Apply a filter, and remember submissions to find duplicates.

    Args:
        rules: the rules.
        count: a function that counts an example's tokens; None uses the engine's count.
    """

    def __init__(self, rules: Filter, *, count: Callable[[Example], int] | None = None) -> None:
        self._rules = rules
        self._count = count
        self._seen: dict[tuple[str, bytes], str] = {}

    def refuse(self, example: Example) -> Refusal | None:
        """Return the reason for dropping an example, or None to keep the example.

        Raises:
            InvalidValue: the rules limit the tokens, and the example's number of tokens is unknown.
        """
        return self._by_repo(example) or self._by_flags(example) or self._by_length(example) or self._duplicate(example)

    def _by_repo(self, example: Example) -> Refusal | None:
        rules = self._rules
        if rules.repo is not None and not re.search(rules.repo, example.repo):
            return "repo", example.repo
        if rules.not_repo is not None and re.search(rules.not_repo, example.repo):
            return "repo", example.repo
        return None

    def _by_flags(self, example: Example) -> Refusal | None:
        if self._rules.no_flags and _is_suspicious(example):
            return "flagged", _kinds(example)
        for pattern in self._rules.flags:
            if any(re.search(pattern, flag.kind) for flag in example.flags):
                return "flagged", _kinds(example)
        return None

    def _by_length(self, example: Example) -> Refusal | None:
        rules, turns = self._rules, example.turns
        if rules.min_turns is not None and turns < rules.min_turns:
            return "too_few_turns", f"{turns} of at least {rules.min_turns}"
        if rules.max_turns is not None and turns > rules.max_turns:
            return "too_many_turns", f"{turns} of at most {rules.max_turns}"
        if rules.max_chars is not None and example.characters > rules.max_chars:
            return "too_many_characters", f"{example.characters} of at most {rules.max_chars}"
        if rules.max_tokens is not None and (tokens := self._tokens(example)) > rules.max_tokens:
            return "too_many_tokens", f"{tokens} of at most {rules.max_tokens}"
        return None

    def _tokens(self, example: Example) -> int:
        if self._count is not None:
            return self._count(example)
        if example.rows:
            return max(len(row.ids) for row in example.rows)
        if example.tokens is None:
            raise InvalidValue(
                f"{example.traj_id}: its number of tokens is not known",
                reason="its source does not count them",
                hint="name a tokenizer to count them: --tokenizer DIR; or bound the characters",
            )
        return example.tokens

    def _duplicate(self, example: Example) -> Refusal | None:
        if not self._rules.unique or example.submission is None:
            return None
        key = (example.instance_id, hashlib.sha256(normalised(example.submission)).digest())
        first = self._seen.setdefault(key, example.traj_id)
        return None if first == example.traj_id else ("duplicate", f"the submission of {first}")


def chosen(
    examples: Iterable[Example], refuse: Callable[[Example], Refusal | None], report: StageReport
) -> Iterator[Example]:
    """Yield the examples to keep one by one, and record all examples in the report.

    Args:
        examples: the examples.
        refuse: returns the reason for dropping an example, or None.
        report: records all examples.
    """
    for example in examples:
        refusal = refuse(example)
        if refusal is None:
            report.keep(example)
            yield example
        else:
            report.drop(example, *refusal)


def normalised(patch: bytes) -> bytes:
    """Normalise a patch, so that equal changes have equal patches.

    The result does not depend on blob hashes, the text after a hunk's line numbers, CRLF or LF line ends, or the order
    of files.

    Args:
        patch: a unified diff.
    """
    plain = _HUNK.sub(rb"\1", _NOISE.sub(b"", patch.replace(b"\r\n", b"\n")))
    files = re.split(rb"^(?=diff --git )", plain, flags=re.MULTILINE)
    return b"".join(sorted(file.strip(b"\n") + b"\n" for file in files if file.strip()))


def _is_suspicious(example: Example) -> bool:
    return any(flag.is_suspicious for flag in example.flags)


def _kinds(example: Example) -> str:
    return ", ".join(dict.fromkeys(flag.kind for flag in example.flags))


# --- balance ---------------------------------------------------------------------------------------------------------


def balance(
    names: Sequence[tuple[str, str]], *, max_per_instance: int, seed: int, total: int | None = None
) -> dict[int, Refusal]:
    """Draw at most ``max_per_instance`` examples per task.

    Examples are drawn in the order of a hash of the seed and their ids. The draw of a task therefore depends neither on
    the order of ``names`` nor on other tasks.

    Args:
        names: each example's ``instance_id`` and ``traj_id``.
        max_per_instance: maximum number of examples per task.
        seed: the seed of the draw.
        total: maximum number of examples of all tasks together; None for no limit. The first examples of all tasks
            are drawn before any second example.

    Returns:
        For each dropped example, its index in ``names`` and the reason.

    Raises:
        InvalidValue: a limit is less than 1.
    """
    if max_per_instance < 1 or (total is not None and total < 1):
        raise InvalidValue(f"cannot draw {max_per_instance} per task, {total} in all", hint="give 1 or more")
    ranks: dict[str, int] = {}
    order: list[tuple[int, bytes, int]] = []
    dropped: dict[int, Refusal] = {}
    for lot, index in sorted((_lot(seed, *name), index) for index, name in enumerate(names)):
        instance = names[index][0]
        rank = ranks[instance] = ranks.get(instance, 0) + 1
        if rank <= max_per_instance:
            order.append((rank, lot, index))
        else:
            dropped[index] = ("over_max_per_instance", f"lot {rank} of at most {max_per_instance}")
    for number, (_, _, index) in enumerate(sorted(order), start=1):
        if total is not None and number > total:
            dropped[index] = ("over_total", f"lot {number} of at most {total}")
    return dropped


def _lot(seed: int, instance_id: str, traj_id: str) -> bytes:
    return hashlib.sha256(f"{seed}\0{instance_id}\0{traj_id}".encode("utf-8", "surrogatepass")).digest()


def drawn(
    examples: Iterable[Example], names: Sequence[tuple[str, str]], dropped: Mapping[int, Refusal], report: StageReport
) -> Iterator[Example]:
    """Yield the examples that :func:`balance` kept, and record all examples in the report.

    Args:
        examples: the examples, in the order of ``names``.
        names: the argument of :func:`balance`.
        dropped: the result of :func:`balance`.
        report: records all examples.

    Raises:
        RunError: the examples differ from ``names``.
    """
    error = RunError(
        "the examples changed while they were balanced",
        reason="the run is still in progress, or another program wrote the file meanwhile",
        hint="collect the run into a file first, and balance that file",
    )
    indices = itertools.count()

    def refuse(example: Example) -> Refusal | None:
        index = next(indices)
        if index >= len(names) or names[index] != (example.instance_id, example.traj_id):
            raise error
        return dropped.get(index)

    yield from chosen(examples, refuse, report)
    if next(indices) != len(names):
        raise error


def table_of(rules: Collect | Filter) -> dict[str, object]:
    """Return the rules as a table for the report, without None, False and empty tuples."""
    values = {field.name: getattr(rules, field.name) for field in fields(rules)}
    return {name: value for name, value in values.items() if value is not None and value is not False and value != ()}
