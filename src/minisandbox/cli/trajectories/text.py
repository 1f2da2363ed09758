"""Print a rollout as text: messages, commands, patch and tests."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence

from minisandbox.cli.common.output import clean_line, human_seconds, put_styled
from minisandbox.errors import clean
from minisandbox.trajectories import StepRecord, Trajectory, TurnRecord

_BOLD, _DIM, _RED, _GREEN, _YELLOW, _CYAN = "1", "2", "31", "32", "33", "36"
_COLOURS = {"system": _DIM, "user": _CYAN, "tool": _CYAN, "assistant": _YELLOW}


class RolloutPrinter:
    """Prints rollouts to stdout, coloured on a terminal, with control characters replaced.

    Args:
        lines: the maximum number of lines per text, half of them from its start; None for all.
    """

    def __init__(self, lines: int | None) -> None:
        self._lines = lines
        self._colours = sys.stdout.isatty()

    def print(self, trajectory: Trajectory) -> None:
        """Print the record of a rollout."""
        self._head(trajectory)
        if trajectory.messages:
            self._messages(trajectory)
        else:
            for number, step in enumerate(trajectory.steps, start=1):
                self._title(f"step {number}", _step_line(step), _YELLOW)
                self._text(_command(step))
                self._text((step.stdout + step.stderr).decode("utf-8", "replace"), _DIM)
        self._patch(trajectory)
        self._tests(trajectory)

    def _head(self, trajectory: Trajectory) -> None:
        agent = trajectory.agent + (f" with {trajectory.model}" if trajectory.model else "")
        no_reward = (
            "no reward: the pass is unconfirmed" if trajectory.unconfirmed else "no reward: infrastructure error"
        )
        reward = no_reward if trajectory.reward is None else f"reward {trajectory.reward:g}"
        title = f"{trajectory.instance_id} #{trajectory.attempt}: {trajectory.exit_status}, {reward}"
        put_styled(self._in(_BOLD, clean_line(title)))
        put_styled(clean_line(f"{agent}; started {trajectory.started}"))
        timings = trajectory.timings
        phases = [(name, getattr(timings, name)) for name in timings.__slots__ if getattr(timings, name) > 0]
        put_styled("; ".join(f"{name.replace('_', ' ')} {human_seconds(seconds)}" for name, seconds in phases))
        if trajectory.turns:
            usage, cost = trajectory.usage, trajectory.cost
            rows = f", {len(trajectory.rows)} training rows" if trajectory.rows else ", no token ids"
            dollars = f", ${cost:.4f}" if cost else ""
            tokens = f"{usage.prompt} tokens read, {usage.completion} sampled"
            put_styled(f"{len(trajectory.turns)} turns, {tokens}{rows}{dollars}")
        for line in (trajectory.detail, *(f"earlier try: {error.phase}: {error.detail}" for error in trajectory.tries)):
            if line:
                self._text(line, _DIM)
        if (failure := trajectory.failure) is not None:
            self._text(f"infrastructure error in {failure.phase}: {failure.kind}: {failure.detail}", _RED)

    def _messages(self, trajectory: Trajectory) -> None:
        turns = {turn.message: (number, turn) for number, turn in enumerate(trajectory.turns)}
        for index, message in enumerate(trajectory.messages):
            number, turn = turns.get(index, (-1, None))
            details = "" if turn is None else _turn_line(turn)
            title = message.role if turn is None else f"turn {number + 1}"
            self._title(title, details, _COLOURS[message.role])
            if message.reasoning:
                self._text(message.reasoning, _DIM)
            self._text(message.content)
            for call in message.tool_calls:
                self._text(f"{call.name}({call.arguments})")
            for step in (step for step in trajectory.steps if turn is not None and step.turn == number + 1):
                put_styled(self._in(_DIM, f"  ran: {_step_line(step)}"))

    def _patch(self, trajectory: Trajectory) -> None:
        if trajectory.submission is None:
            self._title("patch", "could not be taken", _BOLD)
            return
        text = trajectory.submission.decode("utf-8", "replace")
        self._title("patch", "" if text else "empty", _BOLD)
        for line in self._cut(text):
            colour = {"+": _GREEN, "-": _RED, "@": _CYAN}.get(line[:1], "")
            put_styled(self._in(colour, line))

    def _tests(self, trajectory: Trajectory) -> None:
        grade = trajectory.grade
        if grade is None:
            self._title("tests", "not graded", _BOLD)
            return
        passed_count = sum(outcome == "passed" for _, outcome in grade.outcomes)
        details = f"{grade.verdict}: {grade.detail}; {passed_count} of {len(grade.outcomes)} named tests passed"
        self._title("tests", details, _BOLD)
        for test, outcome in grade.outcomes if self._lines is None else _failed_first(grade.outcomes, self._lines):
            colour = _GREEN if outcome == "passed" else _RED
            put_styled(f"  {self._in(colour, clean_line(f'{outcome:12}'))} {clean_line(test)}")
        for flag in grade.flags:
            put_styled(clean_line(f"  flag: {flag.kind} {flag.path} {flag.detail}"))
        if not grade.resolved and grade.log:
            self._title("log", "the end of the tests' output", _BOLD)
            self._text(grade.log, _DIM)

    def _title(self, name: str, details: str, colour: str) -> None:
        put_styled(f"\n{self._in(colour, f'--- {clean_line(name)}')}{'  ' if details else ''}{clean_line(details)}")

    def _text(self, text: str, colour: str = "") -> None:
        for line in self._cut(text):
            put_styled(self._in(colour, line))

    def _cut(self, text: str) -> Iterator[str]:
        """Yield the lines of a text without control characters; leave out the middle of a long text."""
        lines = clean(text).rstrip("\n").split("\n") if text.strip("\n") else []
        if self._lines is None or len(lines) <= self._lines:
            yield from lines
            return
        half = self._lines // 2
        yield from lines[:half]
        yield f"[... {len(lines) - 2 * half} lines; --full shows them ...]"
        yield from lines[-half:]

    def _in(self, colour: str, text: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if colour and self._colours else text


def _turn_line(turn: TurnRecord) -> str:
    tries = f", {turn.tries} tries" if turn.tries > 1 else ""
    reason = "" if turn.finish_reason in ("stop", "tool_calls") else f", ended by {turn.finish_reason}"
    return (
        f"at {human_seconds(turn.began)}, answered in {human_seconds(turn.seconds)}: {turn.usage.prompt} tokens read, "
        f"{turn.usage.completion} sampled{reason}{tries}"
    )


def _step_line(step: StepRecord) -> str:
    fate = f"exit status {step.exit_code}" if step.exit_code is not None else step.outcome
    dropped_bytes = step.dropped_stdout + step.dropped_stderr
    remark = f", {dropped_bytes} bytes of output dropped" if dropped_bytes else ""
    return f"{human_seconds(step.duration)}, {fate}{remark}"


def _command(step: StepRecord) -> str:
    return step.command if isinstance(step.command, str) else shlex.join(step.command)


def _failed_first(outcomes: Sequence[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """Return at most ``count`` test outcomes, failed tests first."""
    return sorted(outcomes, key=lambda outcome: outcome[1] == "passed")[:count]
