"""Read runs as training data, and convert the bash agent's style and prompts.

This module holds the conversions that need a run's database or the agents' action formats. All other conversions are in
:mod:`minisandbox.trajectories`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from minisandbox.agents import FORMATS
from minisandbox.agents.actions import FormatError, action_of, arguments_of, name_of
from minisandbox.agents.formats import beside_action
from minisandbox.agents.prompts import Prompts
from minisandbox.models import Message
from minisandbox.rollouts.rundir import RunReader, is_run
from minisandbox.trajectories import Trajectory
from minisandbox.trajectories.example import Example, example_of
from minisandbox.trajectories.sources import Reading, read_examples
from minisandbox.trajectories.styles import STYLES, CannotSay, DecodedCall, ParsedAnswer, Style, style_of


class TextStyle:
    """The bash agent's text format, with fenced blocks, as a style of training data."""

    name = "text"
    answers_calls = False

    def read(self, message: Message) -> ParsedAnswer:
        """Parse the action in the response's block.

        Raises:
            CannotSay: there is no block, or the block is malformed.
        """
        try:
            actions = FORMATS["text"].parse(message)
        except FormatError as error:
            raise CannotSay(error.what) from None
        calls = tuple(DecodedCall(name_of(one), arguments_of(one)) for one in actions)
        return ParsedAnswer(beside_action(message.content), calls)

    def write(self, answer: ParsedAnswer) -> Message:
        """Return a response with the thought, followed by the block.

        Raises:
            CannotSay: the tool is unknown, or there are several actions.
        """
        try:
            actions = [action_of(call.name, call.arguments) for call in answer.calls]
            block = FORMATS["text"].render(*actions).content
        except FormatError as error:
            raise CannotSay(error.what) from None
        return Message("assistant", f"{answer.thought}\n\n{block}".strip())


ALL_STYLES: Mapping[str, Style] = {"text": TextStyle(), **STYLES}
"""SWE-smith's three styles and the bash agent's text style, by name."""


def open_examples(path: Path, reading: Reading | None = None) -> Iterator[Example]:
    """Read examples lazily, one by one, from a run's database or any source of :func:`.read_examples`.

    Args:
        path: a run's directory, or another file or directory.
        reading: how to interpret files of other programs.

    Raises:
        TrajectoryError: a row or a file is not a trajectory.
        TaskFileError: the file cannot be read.
        RunError: the run's database cannot be read.
        MissingExtra: a required package is not installed.
    """
    return _of_run(path) if is_run(path) else read_examples(path, reading)


def _of_run(path: Path) -> Iterator[Example]:
    with RunReader(path) as run:
        for trajectory in run.trajectories():
            yield example_in(trajectory, path.resolve().name)


def example_in(trajectory: Trajectory, source: str) -> Example:
    """Convert a trajectory of a run to an example, and determine its style and tools.

    Args:
        trajectory: the record.
        source: the run's name.
    """
    style = _style(trajectory)
    tools = FORMATS[style].tools if style in FORMATS else ()
    return example_of(trajectory, source=source, style=style, tools=tools)


def _style(trajectory: Trajectory) -> str:
    """Return the action format of the bash agent; for other agents, detect the style from the messages."""
    action_format = trajectory.configuration.get("action_format")
    if trajectory.agent == "bash" and isinstance(action_format, str) and action_format in FORMATS:
        return action_format
    return style_of(trajectory.messages)


def rewritten_prompt(text: str, source: str, target: str) -> str:
    """Rewrite a prompt of the bash agent, so that it describes another action format.

    Args:
        text: the prompt.
        source: the format that the prompt describes.
        target: the format to describe instead.

    Returns:
        The prompt; unchanged if it does not contain the package's description of the source format.
    """
    if source not in FORMATS or target not in FORMATS:
        return text
    old, new = (Prompts.load(name).actions.text.rstrip("\n") for name in (source, target))
    return text.replace(old, new)
