"""The bash agent: a model with a shell and an edit tool. Its history only grows; the session records its steps."""

from __future__ import annotations

from minisandbox.agents.actions import Action, Bash, FormatError, Submit
from minisandbox.agents.formats import FORMATS
from minisandbox.agents.observation import of_command, shortened, warning
from minisandbox.agents.options import AgentOptions
from minisandbox.agents.prompts import Prompts
from minisandbox.agents.protocol import EXIT_FORMAT, Ending
from minisandbox.agents.session import Session
from minisandbox.models import Completion, Message
from minisandbox.tasks import Task

_STATE = {
    "stateless": "Every command runs in a new shell in {workdir}: neither cd nor variables last until the next one.",
    "stateful": "Commands run one after the other in the same shell, which starts in {workdir}: cd and variables last.",
}


class BashAgent:
    """Repeats: get an action from the model, perform it, report the result; until a submission or a limit.

    Args:
        options: its options; the defaults if None.

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
            LimitReached: a limit of the rollout ended it.
            ModelError: the model gave no usable response.
        """
        session.say(*self._opening(task, session))
        errors = 0
        try:
            while errors < self._options.format_errors:
                completion = await session.ask(self._format.tools)
                try:
                    actions = self._read(completion)
                except FormatError as error:
                    errors += 1
                    session.say(*self._format.correct(completion.message, self._correction(error, session)))
                    continue
                errors = 0
                for number, action in enumerate(actions):
                    if isinstance(action, Submit):
                        return Ending()
                    observation = _with_warning(await self._do(action, session), session)
                    session.say(self._format.observe(completion.message, number, observation))
        finally:
            await session.close()
        return Ending(EXIT_FORMAT, f"{errors} responses in a row had no valid action")

    def _opening(self, task: Task, session: Session) -> list[Message]:
        workdir = str(session.box.image.workdir)
        system, first = self._prompts.render(
            {
                "problem_statement": task.problem_statement,
                "workdir": workdir,
                "shell": _STATE[self._options.shell].replace("{workdir}", workdir),
                "command_timeout": f"{self._options.command_timeout:g}",
            }
        )
        return [Message("system", system)] * bool(system) + [Message("user", first)]

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
    line = warning(session.left(), session.limits)
    return f"{text}\n{line}" if line else text
