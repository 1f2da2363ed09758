"""Define examples (rollouts of any agent program, as training data) and their JSON Lines format."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from minisandbox.grade import Flag
from minisandbox.models import Message, TokenRow
from minisandbox.trajectories.codec import from_json, to_json
from minisandbox.trajectories.migration import pop_version, upgrade_rows
from minisandbox.trajectories.trajectory import Trajectory

VERSION = 2
"""Version of the file format. Increase it with any change that an older reader would misread."""

FORMAT = "minisandbox-example"
_SMITH = re.compile(r"(?P<owner>.+?)__(?P<name>.+)\.[0-9a-f]{8}\..+")
_BENCH = re.compile(r"(?P<owner>.+?)__(?P<name>.+)-\d+")


@dataclass(frozen=True, slots=True)
class Example:
    """The part of a rollout that training uses.

    Attributes:
        traj_id: a unique id of the rollout.
        instance_id: the task's id.
        attempt: the index of the rollout among the task's rollouts in the run, from 0.
        messages: the whole conversation.
        style: how responses express actions: ``text``, ``tool``, ``xml`` or ``ticks``; empty if unknown.
        tools: the model's tools, as JSON schemas in OpenAI's format.
        submission: the patch, or None if unknown.
        reward: 1.0 if the submission resolves the task, else 0.0; None if unknown, for instance after an unconfirmed
            pass.
        exit_status: why the agent stopped, in SWE-agent's terms, for instance ``submitted``; None if unknown.
        flags: findings to review before trusting the reward.
        model: the model's name.
        agent: the agent's name.
        tokens: the number of tokens of the longest prompt and its response, counted by the engine; None if unknown.
        rows: the prompt and sampled tokens as training sequences; empty if unknown.
        source: the name of the run or file that contained the example.
    """

    traj_id: str
    instance_id: str
    messages: tuple[Message, ...]
    attempt: int = 0
    style: str = ""
    tools: tuple[Mapping[str, object], ...] = ()
    submission: bytes | None = None
    reward: float | None = None
    exit_status: str | None = None
    flags: tuple[Flag, ...] = ()
    model: str = ""
    agent: str = ""
    tokens: int | None = None
    rows: tuple[TokenRow, ...] = ()
    source: str = ""

    @property
    def turns(self) -> int:
        """The number of the model's responses."""
        return sum(message.role == "assistant" for message in self.messages)

    @property
    def characters(self) -> int:
        """The number of characters in the messages, including tool calls."""
        calls = (call for message in self.messages for call in message.tool_calls)
        characters = sum(len(message.content) + len(message.reasoning) for message in self.messages)
        return characters + sum(len(call.name) + len(call.arguments) for call in calls)

    @property
    def repo(self) -> str:
        """The repository as ``owner/name``, parsed from the instance id; the id itself if it names no repository."""
        match = _SMITH.fullmatch(self.instance_id) or _BENCH.fullmatch(self.instance_id)
        return self.instance_id if match is None else f"{match['owner']}/{match['name']}"

    def to_line(self) -> str:
        """Return the example as one line of JSON in ASCII, with a final newline."""
        body = to_json(self)
        assert isinstance(body, dict)
        return json.dumps({"format": FORMAT, "version": VERSION, **body}, separators=(",", ":"), allow_nan=False) + "\n"

    @classmethod
    def from_row(cls, values: Mapping[str, object], *, location: str) -> Example:
        """Decode the object that :meth:`to_line` wrote.

        Args:
            values: the decoded object.
            location: the row's name in error messages.

        Raises:
            TrajectoryError: the object is not an example, has a newer version, or is damaged.
        """
        body = dict(values)
        version = pop_version(body, VERSION, noun="an example", file_format=FORMAT, location=location)
        if version == 1:
            upgrade_rows(body)
        return from_json(cls, body, location=location)


def example_of(
    trajectory: Trajectory, *, source: str, style: str = "", tools: Iterable[Mapping[str, object]] = ()
) -> Example:
    """Convert a rollout's trajectory to an example.

    Args:
        trajectory: the rollout's record.
        source: the run's name.
        style: the style in which responses express actions.
        tools: the model's tools.
    """
    usages = [turn.usage for turn in trajectory.turns]
    origin = (source, trajectory.started, trajectory.agent, trajectory.model, trajectory.submission, trajectory.timings)
    digest = hashlib.sha256(repr(origin).encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return Example(
        traj_id=f"{trajectory.instance_id}.{trajectory.attempt}.{digest}",
        instance_id=trajectory.instance_id,
        attempt=trajectory.attempt,
        messages=trajectory.messages,
        style=style,
        tools=tuple(tools),
        submission=trajectory.submission,
        reward=trajectory.reward,
        exit_status=trajectory.exit_status,
        flags=() if trajectory.grade is None else trajectory.grade.flags,
        model=trajectory.model,
        agent=trajectory.agent,
        tokens=max((usage.prompt + usage.completion for usage in usages), default=None),
        rows=trajectory.rows,
        source=source,
    )
