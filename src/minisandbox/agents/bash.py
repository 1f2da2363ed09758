"""The bash agent: a model with a shell and an edit tool, and a history that only grows."""

from __future__ import annotations

from collections.abc import Mapping

from minisandbox.agents.actions import Action, Bash, FormatError, Submit
from minisandbox.agents.formats import FORMATS
from minisandbox.agents.options import AgentOptions
from minisandbox.agents.prompts import Prompts
from minisandbox.agents.session import EXIT_FORMAT, AgentLimits, Ending, LimitName, Session
from minisandbox.models import Completion, Message
from minisandbox.tasks import Task
from minisandbox.types import ExecResult, Outcome, ShellResult

_STATE = {
    "stateless": "Every command runs in a new shell in {workdir}: neither cd nor variables last until the next one.",
    "stateful": "Commands run one after the other in the same shell, which starts in {workdir}: cd and variables last.",
}


class BashAgent:
    """Ask the model for an action, perform it and report the result, until the model submits or a limit is reached.

    Args:
        options: the agent's options; None for the defaults.

    Raises:
        InvalidValue: a prompt is unreadable or malformed.
    """

    name = "bash"
    needs_model = True

    def __init__(self, options: AgentOptions | None = None) -> None:
        self._options = options or AgentOptions()
        self._format = FORMATS[self._options.action_format]
        self._prompts = Prompts.load(self._options.action_format, self._options.prompt)

    async def run(self, task: Task, session: Session) -> Ending:
        """Work on a task; the model sees only its problem statement.

        Raises:
            SandboxGone: the sandbox has ended.
            LimitReached: a limit of the rollout was reached.
            ModelError: the model gave no usable response.
        """
        session.say(*self._opening(task, session))
        error_count = 0
        try:
            while error_count < self._options.format_errors:
                completion = await session.ask(self._format.tools)
                try:
                    actions = self._read(completion)
                except FormatError as error:
                    error_count += 1
                    session.say(*self._format.correct(completion.message, self._correction(error, session)))
                    continue
                error_count = 0
                for index, action in enumerate(actions):
                    if isinstance(action, Submit):
                        return Ending()
                    observation = _with_warning(await self._do(action, session), session)
                    session.say(self._format.observe(completion.message, index, observation))
        finally:
            await session.close()
        return Ending(EXIT_FORMAT, f"{error_count} responses in a row had no valid action")

    def _opening(self, task: Task, session: Session) -> list[Message]:
        workdir = str(session.box.image.workdir)
        system_prompt, task_prompt = self._prompts.render(
            {
                "problem_statement": task.problem_statement,
                "workdir": workdir,
                "shell": _STATE[self._options.shell].replace("{workdir}", workdir),
                "command_timeout": f"{self._options.command_timeout:g}",
            }
        )
        return [Message("system", system_prompt)] * bool(system_prompt) + [Message("user", task_prompt)]

    def _read(self, completion: Completion) -> tuple[Action, ...]:
        if completion.finish_reason == "length":  # even an action that looks complete may be truncated
            raise FormatError("Your answer was too long and was cut off. Think and write less at once.")
        return self._format.parse(completion.message)

    def _correction(self, error: FormatError, session: Session) -> str:
        return _with_warning(f"[nothing was done] {error.what} {self._format.reminder}", session)

    async def _do(self, action: Action, session: Session) -> str:
        limit, timeout = self._options.observation_chars, self._options.command_timeout
        if isinstance(action, Bash):
            stateful = self._options.shell == "stateful"
            result = await session.perform(action.command, timeout=timeout, stateful=stateful)
            return of_command(result, limit=limit, timeout=timeout)
        assert not isinstance(action, Submit)
        result = await session.edit(action)
        return shortened(result.stdout if result.ok else f"[not done] {result.stderr}", limit)


def _with_warning(text: str, session: Session) -> str:
    warning_line = warning(session.left(), session.limits)
    return f"{text}\n{warning_line}" if warning_line else text


_UNITS: Mapping[LimitName, str] = {
    "steps": "{:.0f} steps",
    "tokens": "{:.0f} tokens",
    "context": "{:.0f} tokens of context",
    "cost": "{:.2f} dollars",
}
_LAST_STEPS = 3
_LOW_SHARE = 0.1  # warn the model when less than this share of a limit remains


def of_command(result: ExecResult, *, limit: int, timeout: float) -> str:
    """Format a command's result as the report to the model.

    Args:
        result: the result.
        limit: maximum characters of output; longer output keeps its head and tail.
        timeout: the command's time limit in seconds.
    """
    streams = [(name, text) for name, text in (("stdout", result.stdout), ("stderr", result.stderr)) if text]
    fate = f"no answer within {timeout:g} s: killed" if result.outcome is Outcome.TIMEOUT else result.fate
    notes = [fate if streams else f"{fate}, no output"]
    dropped_bytes = result.dropped_stdout + result.dropped_stderr
    if dropped_bytes:
        notes.append(f"{dropped_bytes} bytes of output were too many to be kept")
    notes += [f"the sandbox's limit on {name} was reached" for name in result.limits_hit if name != "output"]
    if result.left_running:
        notes.append(f"background processes left running: {result.left_running}")
    if isinstance(result, ShellResult) and result.restarted:
        notes.append(f"the shell was restarted in {result.cwd}; its variables, functions and options are lost")
    sections = [f"[{'; '.join(notes)}]"]
    for (name, text), size in zip(streams, _stream_limits([len(text) for _, text in streams], limit), strict=True):
        sections.append(f"<{name}>\n{shortened(text, size).rstrip(chr(10))}\n</{name}>")
    return "\n".join(sections)


def _stream_limits(lengths: list[int], limit: int) -> list[int]:
    """Divide ``limit`` characters between the streams; a short stream leaves its unused share to the long stream."""
    equal_share = limit // len(lengths) if lengths else 0
    unused = sum(max(0, equal_share - length) for length in lengths)
    return [equal_share + unused if length > equal_share else equal_share for length in lengths]


def shortened(text: str, limit: int) -> str:
    """Shorten a text to ``limit`` characters, with a line in its middle that counts the characters left out."""
    text = text.replace("\0", "\ufffd")  # engines written in C truncate text at NUL
    if len(text) <= limit:
        return text
    head_length, tail_start = limit - limit // 2, len(text) - limit // 2
    omitted = text[head_length:tail_start]
    marker = f"[... {len(omitted)} characters left out, {omitted.count(chr(10))} line ends among them ...]"
    return f"{text[:head_length]}\n{marker}\n{text[tail_start:]}"


def warning(remaining: Mapping[LimitName, float], limits: AgentLimits) -> str:
    """Return a warning that names the limits that are nearly reached, or "" if there are none.

    The warning leaves out time: otherwise the policy would observe the machine's load, and rollouts would not be
    reproducible.
    """
    amounts = [_UNITS[name].format(amount) for name, amount in remaining.items() if _is_little(name, amount, limits)]
    amounts = ["1 step" if amount == "1 steps" else amount for amount in amounts]
    return f"[only {', '.join(amounts)} left: submit before that]" if amounts else ""


def _is_little(name: LimitName, amount: float, limits: AgentLimits) -> bool:
    limit = getattr(limits, name)
    return (
        name in _UNITS
        and limit is not None
        and amount <= max(_LOW_SHARE * limit, _LAST_STEPS if name == "steps" else 0)
    )
