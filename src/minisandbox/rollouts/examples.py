"""Runs as training data: their rollouts as examples, and the bash agent's own style and prompts.

What training data is and how it is chosen is in :mod:`minisandbox.trajectories`; here is what takes a run's
database, or the agents' action formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from minisandbox.agents import FORMATS
from minisandbox.agents.actions import FormatError, action_of, arguments_of, name_of
from minisandbox.agents.prompts import Prompts
from minisandbox.agents.text_format import beside_action
from minisandbox.models import Message
from minisandbox.rollouts.rundir import RunReader, is_run
from minisandbox.trajectories import Trajectory
from minisandbox.trajectories.converting import STYLES
from minisandbox.trajectories.example import Example, example_of
from minisandbox.trajectories.sources import Reading, read_examples
from minisandbox.trajectories.styles import Call, CannotSay, ParsedAnswer, Style, style_of


class TextStyle:
    """The bash agent's fenced blocks, as a style of training data."""

    name = "text"
    answers_calls = False

    def read(self, message: Message) -> ParsedAnswer:
        """Return the block's action.

        Raises:
            CannotSay: there is none, or it cannot be understood.
        """
        try:
            actions = FORMATS["text"].parse(message)
        except FormatError as error:
            raise CannotSay(error.what) from None
        calls = tuple(Call(name_of(one), arguments_of(one)) for one in actions)
        return ParsedAnswer(beside_action(message.content), calls)

    def write(self, answer: ParsedAnswer) -> Message:
        """Return the thought, and the block below it.

        Raises:
            CannotSay: the action has another tool, or there are several.
        """
        try:
            actions = [action_of(call.name, call.arguments) for call in answer.calls]
            block = FORMATS["text"].render(*actions).content
        except FormatError as error:
            raise CannotSay(error.what) from None
        return Message("assistant", f"{answer.thought}\n\n{block}".strip())


ALL_STYLES: Mapping[str, Style] = {"text": TextStyle(), **STYLES}
"""SWE-smith's three, and the bash agent's own."""


def open_examples(path: Path, reading: Reading | None = None) -> Iterator[Example]:
    """Read examples, one by one as they are asked for: of a run of ours, or of whatever :func:`.read_examples` reads.

    Args:
        path: the directory of a run, or a file or directory of others.
        reading: how files of others are understood.

    Raises:
        TrajectoryError: a row or a file is no trajectory.
        TaskFileError: the file cannot be read.
        RunError: the run's database cannot be read.
        MissingExtra: a package that it takes is not installed.
    """
    return _of_run(path) if is_run(path) else read_examples(path, reading)


def _of_run(path: Path) -> Iterator[Example]:
    with RunReader(path) as run:
        for one in run.summaries():
            trajectory = run.trajectory(one.instance_id, one.attempt)
            if trajectory is not None:
                style = _style(trajectory)
                tools = FORMATS[style].tools if style in FORMATS else ()
                yield example_of(trajectory, source=path.resolve().name, style=style, tools=tools)


def _style(trajectory: Trajectory) -> str:
    """The bash agent's action format; of other agents, what their answers look like."""
    told = trajectory.configuration.get("action_format")
    if trajectory.agent == "bash" and isinstance(told, str) and told in FORMATS:
        return told
    return style_of(trajectory.messages)


def rewritten_prompt(text: str, source: str, target: str) -> str:
    """Return a prompt of the bash agent that tells how actions are written in another of its formats.

    Args:
        text: the prompt.
        source: the format that it tells of.
        target: the other one.

    Returns:
        The prompt; unchanged where it does not hold the package's own text on the format, or there is none.
    """
    if source not in FORMATS or target not in FORMATS:
        return text
    old, new = (Prompts.load(name).actions.text.rstrip("\n") for name in (source, target))
    return text.replace(old, new)
