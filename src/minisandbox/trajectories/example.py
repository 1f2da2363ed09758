"""Examples: trajectories as training data, one JSON object a line, from whichever program they came."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from minisandbox.errors import TrajectoryError
from minisandbox.grade import Flag
from minisandbox.models import Message, TokenRow
from minisandbox.trajectories.codec import from_json, to_json
from minisandbox.trajectories.trajectory import Trajectory

VERSION = 1
"""Of the file format. A change that an older reader would misread makes it the next number."""

FORMAT = "minisandbox-example"
_SMITH = re.compile(r"(?P<owner>.+?)__(?P<name>.+)\.[0-9a-f]{8}\..+")
_BENCH = re.compile(r"(?P<owner>.+?)__(?P<name>.+)-\d+")


@dataclass(frozen=True, slots=True)
class Example:
    """What training needs of a rollout.

    Attributes:
        traj_id: a name that no other rollout has.
        instance_id: the task's id.
        attempt: which rollout of the task, from 0, in its run.
        messages: the whole conversation.
        style: how answers say their actions: ``text``, ``tool``, ``xml`` or ``ticks``; empty where that is not known.
        tools: what the model could call, as JSON schemas in OpenAI's layout.
        submission: the patch, or None where it is not known.
        reward: 1.0 if the submission resolves the task, 0.0 if not; None where that is not known,
            as of an unconfirmed pass.
        exit_status: why the agent ended, in the field's words; None where that is not known.
        flags: what people should look at before they trust the reward.
        model: the model's name.
        agent: the agent's name.
        tokens: of the longest prompt with its answer, as the engine counted; None where it did not.
        rows: the tokens that were read and sampled, as sequences to train on; empty where they are not known.
        source: the run or the file that it comes from, by its last name.
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
        """How many answers of the model there are."""
        return sum(message.role == "assistant" for message in self.messages)

    @property
    def characters(self) -> int:
        """How many characters the messages have, calls of tools included."""
        calls = (call for message in self.messages for call in message.tool_calls)
        texts = sum(len(message.content) + len(message.reasoning) for message in self.messages)
        return texts + sum(len(call.name) + len(call.arguments) for call in calls)

    @property
    def repo(self) -> str:
        """The repository as ``owner/name``, by the instance's id; the id itself where that does not say."""
        found = _SMITH.fullmatch(self.instance_id) or _BENCH.fullmatch(self.instance_id)
        return self.instance_id if found is None else f"{found['owner']}/{found['name']}"

    def to_line(self) -> str:
        """Return it as one line of ASCII, with its newline."""
        body = to_json(self)
        assert isinstance(body, dict)
        return json.dumps({"format": FORMAT, "version": VERSION, **body}, separators=(",", ":"), allow_nan=False) + "\n"

    @classmethod
    def from_row(cls, values: Mapping[str, object], *, place: str) -> Example:
        """Read what :meth:`to_line` wrote.

        Args:
            values: the decoded object.
            place: what errors call it.

        Raises:
            TrajectoryError: it is none, of a newer version, or damaged.
        """
        body = dict(values)
        version = body.pop("version", None)
        if body.pop("format", None) != FORMAT or type(version) is not int or version < 1:
            raise TrajectoryError(f"{place} is no example", hint=f'its "format" would be "{FORMAT}"')
        if version > VERSION:
            raise TrajectoryError(
                f"{place} has version {version}; this MiniSandbox reads up to {VERSION}",
                reason="a newer MiniSandbox wrote it",
                hint="update MiniSandbox",
            )
        return from_json(cls, body, place=place)


def example_of(
    trajectory: Trajectory, *, source: str, style: str = "", tools: Iterable[Mapping[str, object]] = ()
) -> Example:
    """Return what training needs of a trajectory of ours.

    Args:
        trajectory: the record.
        source: the run's name.
        style: how its answers say their actions.
        tools: what its model could call.
    """
    usages = [turn.usage for turn in trajectory.turns]
    told = (source, trajectory.started, trajectory.agent, trajectory.model, trajectory.submission, trajectory.timings)
    digest = hashlib.sha256(repr(told).encode("utf-8", "backslashreplace")).hexdigest()[:8]
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
        tokens=max((one.prompt + one.completion for one in usages), default=None),
        rows=trajectory.rows,
        source=source,
    )
