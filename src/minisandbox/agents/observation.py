"""Observations: what a model is told of what it did."""

from __future__ import annotations

from collections.abc import Mapping

from minisandbox.agents.session import AgentLimits, LimitName
from minisandbox.types import ExecResult, Outcome

_UNITS: Mapping[LimitName, str] = {
    "steps": "{:.0f} steps",
    "tokens": "{:.0f} tokens",
    "context": "{:.0f} tokens of context",
    "cost": "{:.2f} dollars",
}
_LAST_STEPS = 3
_SHARE = 0.1


def of_command(result: ExecResult, *, limit: int, timeout: float) -> str:
    """Return what is said of a command.

    Args:
        result: its fate.
        limit: most characters of its output; of more, the beginning and the end are kept.
        timeout: seconds that it had.
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
    parts = [f"[{'; '.join(notes)}]"]
    for (name, text), share in zip(streams, _shares([len(text) for _, text in streams], limit), strict=True):
        parts.append(f"<{name}>\n{shortened(text, share).rstrip(chr(10))}\n</{name}>")
    return "\n".join(parts)


def _shares(lengths: list[int], limit: int) -> list[int]:
    """Divide a number of characters among texts: what a short one leaves goes to the long one."""
    half = limit // len(lengths) if lengths else 0
    spare = sum(max(0, half - length) for length in lengths)
    return [half + spare if length > half else half for length in lengths]


def shortened(text: str, limit: int) -> str:
    """Return a text of so many characters at most, and a line that counts what is missing in its middle."""
    text = text.replace("\0", "\ufffd")  # engines written in C end a text there
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    missing = text[head : len(text) - tail]
    line = f"[... {len(missing)} characters left out, {missing.count(chr(10))} line ends among them ...]"
    return f"{text[:head]}\n{line}\n{text[len(text) - tail :]}"


def warning(left: Mapping[LimitName, float], limits: AgentLimits) -> str:
    """Return a line that names the limits that are nearly reached, or "" if there are none.

    Seconds are not told: a policy would read the load of this machine, and no rollout could be repeated.
    """
    told = [_UNITS[name].format(amount) for name, amount in left.items() if _is_little(name, amount, limits)]
    told = ["1 step" if one == "1 steps" else one for one in told]
    return f"[only {', '.join(told)} left: submit before that]" if told else ""


def _is_little(name: LimitName, amount: float, limits: AgentLimits) -> bool:
    whole = getattr(limits, name)
    return name in _UNITS and whole is not None and amount <= max(_SHARE * whole, _LAST_STEPS if name == "steps" else 0)
