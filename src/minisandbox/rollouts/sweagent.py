"""Convert trajectories to the format of SWE-agent 1.1 and later (documented in SWE-agent's usage/trajectories)."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence

from minisandbox.models import Message
from minisandbox.trajectories import PatchRecord, StepRecord, Trajectory, TurnRecord

_KINDS = {"system": "system_prompt", "user": "observation", "assistant": "action", "tool": "observation"}
_SUBMIT = "submit"


def prediction(instance_id: str, model: str, patch: bytes | None) -> dict[str, object]:
    """Return a prediction in SWE-bench's format.

    Args:
        instance_id: the task's id.
        model: the name of the model or agent.
        patch: the submission; None if no patch could be taken.
    """
    text = None if patch is None else patch.decode("utf-8", "surrogateescape")
    return {"model_name_or_path": model, "instance_id": instance_id, "model_patch": text}


def report(trajectory: Trajectory) -> dict[str, object]:
    """Return a prediction's entry in the ``report.json`` of SWE-bench's and SWE-smith's evaluations.

    ``reward`` is an addition to these formats. ``reward`` and ``resolved`` are null after an infrastructure error or
    unconfirmed pass.

    Args:
        trajectory: the rollout's record.
    """
    graded = trajectory.grade
    return {
        "patch_exists": bool(trajectory.submission),
        "resolved": None if trajectory.reward is None else trajectory.reward == 1.0,
        "reward": trajectory.reward,
        "verdict": None if graded is None else str(graded.verdict),
    }


def trajectory_file(trajectory: Trajectory) -> dict[str, object]:
    """Return the content of a ``.traj`` file.

    Args:
        trajectory: the rollout's record.
    """
    patch = trajectory.submission
    name = trajectory.model or trajectory.agent
    return {
        "trajectory": _turns(trajectory) or _steps(trajectory),
        "history": _history(trajectory),
        "info": {
            # SWE-agent has no exit status for limits on steps or tokens
            "exit_status": re.sub("exit_(steps|tokens)", "exit_cost", trajectory.exit_status),
            "submission": None if patch is None else patch.decode("utf-8", "surrogateescape"),
            "reward": trajectory.reward,
            "model_stats": {
                "instance_cost": trajectory.cost,
                "tokens_sent": trajectory.usage.prompt,
                "tokens_received": trajectory.usage.completion,
                "api_calls": len(trajectory.turns),
            },
        },
        # a JSON string, because SWE-smith's collection parses it to get the model's name
        "replay_config": json.dumps({"agent": {"type": "default", "model": {"name": name}}}),
        "environment": "minisandbox",
    }


def _turns(trajectory: Trajectory) -> list[dict[str, object]]:
    """Return SWE-agent's steps, each with a response, its commands, and the observation that the model received."""
    history = _history(trajectory)
    turns: list[dict[str, object]] = []
    for number, turn in enumerate(trajectory.turns):
        if turn.message < 0:  # a side request of a command-line agent
            continue
        message = trajectory.messages[turn.message]
        steps = _of_turn(trajectory, number)
        after = _after(trajectory, number)
        observed = [one.content for one in trajectory.messages[turn.message + 1 : after] if one.role != "assistant"]
        turns.append(
            {
                "action": _action(trajectory, number),
                "observation": "\n".join(observed),
                "response": message.content,
                "thought": _thought(message),
                "execution_time": sum(step.duration for step in steps),
                "state": _state(trajectory.patch_after(number + 1)),
                "query": history[: turn.message],
                "extra_info": {"seconds": turn.seconds, "tries": turn.tries},
            }
        )
    return turns


def _state(record: PatchRecord | None) -> dict[str, str]:
    """Return the state after a step, with the patch where SWE-agent's tool ``diff_state`` writes it."""
    if record is None or record.patch is None:
        return {}
    return {"diff": record.patch.decode("utf-8", "surrogateescape")}


def _steps(trajectory: Trajectory) -> list[dict[str, object]]:
    """Return SWE-agent's steps for an agent without a model: one step per command."""
    return [
        {
            "action": _command(step),
            "observation": (step.stdout + step.stderr).decode("utf-8", "replace"),
            "response": "",
            "thought": "",
            "execution_time": step.duration,
            "state": {},
            "query": [],
            "extra_info": {},
        }
        for step in trajectory.steps
    ]


def _history(trajectory: Trajectory) -> list[dict[str, object]]:
    turn_of = {turn.message: number for number, turn in enumerate(trajectory.turns)}
    return [_entry(trajectory, one, turn_of.get(number)) for number, one in enumerate(trajectory.messages)]


def _entry(trajectory: Trajectory, message: Message, turn: int | None) -> dict[str, object]:
    entry: dict[str, object] = {"role": message.role, "agent": "main", "message_type": _KINDS[message.role]}
    if message.role in ("user", "tool"):
        entry["content"] = [{"type": "text", "text": message.content}]
        if message.tool_call_id is not None:
            entry["tool_call_ids"] = [message.tool_call_id]
        return entry
    entry["content"] = message.content
    if message.role == "assistant":
        entry |= {"thought": _thought(message), "action": "" if turn is None else _action(trajectory, turn)}
        calls = message.to_json().get("tool_calls")
        if calls:
            entry["tool_calls"] = calls
    return entry


def _thought(message: Message) -> str:
    """Return the part of a response before its action."""
    return message.content.partition("```")[0].partition("<function=")[0].rstrip()


def _action(trajectory: Trajectory, turn: int) -> str:
    commands = [_command(step) for step in _of_turn(trajectory, turn)]
    last = turn == len(trajectory.turns) - 1
    if last and trajectory.exit_status == "submitted":
        commands.append(_SUBMIT)
    return "\n".join(commands)


def _of_turn(trajectory: Trajectory, turn: int) -> Sequence[StepRecord]:
    return [step for step in trajectory.steps if step.turn == turn + 1]


def _after(trajectory: Trajectory, turn: int) -> int:
    """Return the index of the next response in the messages, or the number of messages if there is none."""
    turns: Sequence[TurnRecord] = trajectory.turns
    later = (entry.message for entry in turns[turn + 1 :] if entry.message >= 0)
    return next(later, len(trajectory.messages))


def _command(step: StepRecord) -> str:
    return step.command if isinstance(step.command, str) else shlex.join(step.command)
