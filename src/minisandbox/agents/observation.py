"""Observations: the reports of results to a model."""

from __future__ import annotations

from collections.abc import Mapping

from minisandbox.agents.session import AgentLimits, LimitName
from minisandbox.types import ExecResult, Outcome, ShellResult

_UNITS: Mapping[LimitName, str] = {
    "steps": "{:.0f} steps",
    "tokens": "{:.0f} tokens",
    "context": "{:.0f} tokens of context",
    "cost": "{:.2f} dollars",
}
_LAST_STEPS = 3
_SHARE = 0.1


def of_command(result: ExecResult, *, limit: int, timeout: float) -> str:
    """Return the report of a command's result.

    Args:
        result: the result.
        limit: maximum characters of output; the head and tail of longer output are kept.
        timeout: the command's time limit in seconds.
    """
    streams = [(name, text) for name, text in (("stdout", result.stdout), ("stderr", result.stderr)) if text]
    head = f"no answer within {timeout:g} s: killed" if result.outcome is Outcome.TIMEOUT else result.fate
    notes = [head if streams else f"{head}, no output"]
    dropped = result.dropped_stdout + result.dropped_stderr
    if dropped:
        notes.append(f"{dropped} bytes of output were too many to be kept")
    notes += [f"the sandbox's limit on {name} was reached" for name in result.limits_hit if name != "output"]
    if result.left_running:
        notes.append(f"background processes left running: {result.left_running}")
    if isinstance(result, ShellResult) and result.restarted:
        notes.append(f"the shell was restarted in {result.cwd}; its variables, functions and options are lost")
    parts = [f"[{'; '.join(notes)}]"]
    for (name, text), share in zip(streams, _shares([len(text) for _, text in streams], limit), strict=True):
        parts.append(f"<{name}>\n{shortened(text, share).rstrip(chr(10))}\n</{name}>")
    return "\n".join(parts)


def _shares(lengths: list[int], limit: int) -> list[int]:
    """Divide a number of characters among texts; short texts leave their rest to long ones."""
    half = limit // len(lengths) if lengths else 0
    spare = sum(max(0, half - length) for length in lengths)
    return [half + spare if length > half else half for length in lengths]


def shortened(text: str, limit: int) -> str:
    """Return a text of at most ``limit`` characters, plus a line that counts the characters missing in its middle."""
    text = text.replace("\0", "\ufffd")  # engines written in C truncate text there
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    missing = text[head : len(text) - tail]
    line = f"[... {len(missing)} characters left out, {missing.count(chr(10))} line ends among them ...]"
    return f"{text[:head]}\n{line}\n{text[len(text) - tail :]}"


def warning(remaining: Mapping[LimitName, float], limits: AgentLimits) -> str:
    """Return a line that names the limits that are nearly reached, or "" without one.

    Time is not reported: a policy would observe the load of this machine, and rollouts would not be reproducible.
    """
    low = [_UNITS[name].format(amount) for name, amount in remaining.items() if _is_little(name, amount, limits)]
    low = ["1 step" if one == "1 steps" else one for one in low]
    return f"[only {', '.join(low)} left: submit before that]" if low else ""


def _is_little(name: LimitName, amount: float, limits: AgentLimits) -> bool:
    limit = getattr(limits, name)
    return name in _UNITS and limit is not None and amount <= max(_SHARE * limit, _LAST_STEPS if name == "steps" else 0)
