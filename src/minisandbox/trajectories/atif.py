"""ATIF, Harbor's trajectory format (its RFC 0001): written in version 1.7, read in versions 1.0 to 1.8.

Harbor keeps ``agent/trajectory.json`` in each trial's directory, with the verifier's rewards in ``result.json``.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from minisandbox.errors import InvalidValue, TrajectoryError
from minisandbox.grade import Flag
from minisandbox.models import Message, TokenRow, Tokens, ToolCall
from minisandbox.models.graph import TokenGraph
from minisandbox.trajectories.codec import from_json, to_json
from minisandbox.trajectories.example import Example
from minisandbox.trajectories.records import StepRecord, TurnRecord
from minisandbox.trajectories.styles import style_of
from minisandbox.trajectories.trajectory import Trajectory

VERSION = "ATIF-v1.7"
"""The version that is written; 1.8 adds only audio."""
FILE = "agent/trajectory.json"
"""Where a trial's directory has its trajectory."""
PATCH = "submission.patch"
"""Our file next to it: the submission, byte by byte."""

_OURS = "minisandbox"
_PATTERNS = (FILE, f"*/{FILE}", f"*/*/{FILE}")
_ROLES = {"system": "system", "user": "user", "agent": "assistant"}

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class _Facts:
    """What an example has and ATIF has no field for; kept in the root's ``extra``."""

    instance_id: str
    attempt: int
    exit_status: str | None
    reward: float | None
    flags: tuple[Flag, ...]
    style: str


# --- writing ---------------------------------------------------------------------------------------------------------


def atif_of(trajectory: Trajectory, *, example: Example, tokens: bool = True) -> Json | None:
    """Convert a rollout's record to ATIF.

    Args:
        trajectory: the record.
        example: the same rollout as an example, for its id, style and tools.
        tokens: whether to include token ids and log-probabilities. Each step repeats its whole prompt.

    Returns:
        The JSON object; None if the rollout ended before the agent did anything, since ATIF has no empty trajectories.
    """
    steps = list(_message_steps(trajectory, tokens) if trajectory.messages else _command_steps(trajectory))
    if not steps:
        return None
    usages = [turn.usage for turn in trajectory.turns]
    facts = _Facts(
        example.instance_id, example.attempt, example.exit_status, example.reward, example.flags, example.style
    )
    body: Json = {
        "schema_version": VERSION,
        "session_id": example.traj_id,
        "trajectory_id": example.traj_id,
        "agent": _given({
            "name": trajectory.agent,
            "version": trajectory.minisandbox,
            "model_name": trajectory.model,
            "tool_definitions": [dict(tool) for tool in example.tools],
            "extra": {"configuration": to_json(trajectory.configuration), "sampling": to_json(trajectory.sampling)},
        }),
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, start=1)],
        "final_metrics": _given({
            "total_prompt_tokens": sum(one.prompt for one in usages),
            "total_completion_tokens": sum(one.completion for one in usages),
            "total_cached_tokens": sum(one.cached for one in usages),
            "total_cost_usd": sum(turn.cost for turn in trajectory.turns),
            "total_steps": len(steps),
        }),
        "extra": {_OURS: to_json(facts)},
    }  # fmt: skip
    whole = _readable(body)
    assert isinstance(whole, dict)
    return whole


def _message_steps(trajectory: Trajectory, tokens: bool) -> Iterator[Json]:
    """Yield a step per message; results of commands belong to the step of the answer that ran them."""
    turn_of = {turn.message: number for number, turn in enumerate(trajectory.turns)}
    sampled = _sampled(trajectory.rows) if tokens else {}
    acted = {step.turn - 1 for step in trajectory.steps}
    step: Json | None = None
    turn: int | None = None
    for index, message in enumerate(trajectory.messages):
        if (
            step is not None
            and turn is not None
            and (message.role == "tool" or (message.role == "user" and turn in acted))
        ):
            _observe(step, message)
            continue
        if step is not None:
            yield step
        turn = turn_of.get(index, -1) if message.role == "assistant" else None
        step = _step(message)
        if turn is not None and turn >= 0:
            step |= _timing(trajectory, trajectory.turns[turn])
            step["metrics"] = _metrics(trajectory.turns[turn], sampled.get(turn))
    if step is not None:
        yield step


def _step(message: Message) -> Json:
    if message.role != "assistant":
        return {"source": "system" if message.role == "system" else "user", "message": message.content}
    return {
        "source": "agent",
        "message": message.content,
        **_given({
            "reasoning_content": message.reasoning,
            "tool_calls": [_call(call, number) for number, call in enumerate(message.tool_calls)],
        }),
    }  # fmt: skip


def _call(call: ToolCall, number: int) -> Json:
    """Convert a call. Arguments that are not a JSON object, as models write them, are kept as text."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    known = isinstance(arguments, dict)
    body: Json = {
        "tool_call_id": call.id or f"call_{number}",
        "function_name": call.name,
        "arguments": arguments if known else {},
    }
    return body if known else {**body, "extra": {"arguments": call.arguments}}


def _observe(step: Json, message: Message) -> None:
    observation = step.setdefault("observation", {"results": []})
    calls = step.get("tool_calls", [])
    assert isinstance(observation, dict)
    assert isinstance(calls, list)
    named = message.tool_call_id if message.tool_call_id in [call["tool_call_id"] for call in calls] else None
    observation["results"].append({"content": message.content, **_given({"source_call_id": named})})


def _timing(trajectory: Trajectory, turn: TurnRecord) -> Json:
    start = datetime.fromisoformat(trajectory.started) + timedelta(seconds=trajectory.timings.sandbox_ready)
    return {"timestamp": (start + timedelta(seconds=turn.began)).isoformat(), "llm_call_count": 1}


def _metrics(turn: TurnRecord, tokens: Tokens | None) -> Json:
    body: Json = {
        "prompt_tokens": turn.usage.prompt,
        "completion_tokens": turn.usage.completion,
        **_given({"cached_tokens": turn.usage.cached, "cost_usd": turn.cost}),
        "extra": {"seconds": turn.seconds, "tries": turn.tries, "finish_reason": turn.finish_reason},
    }
    if tokens is not None:
        body |= {
            "prompt_token_ids": tokens.prompt.tolist(),
            "completion_token_ids": tokens.sampled.tolist(),
            "logprobs": tokens.logprobs.tolist(),
        }
    return body


def _sampled(rows: Sequence[TokenRow]) -> dict[int, Tokens]:
    """Return the tokens of each turn: a row masks those that its new turns sampled, in their order.

    A row is left out if its spans do not tell its turns apart: constrained turns have none.
    """
    found: dict[int, Tokens] = {}
    seen: set[int] = set()
    for row in rows:
        turns = [turn for turn in row.turns if turn not in seen]
        seen.update(turns)
        spans = [match.span() for match in re.finditer(rb"\x01+", row.mask)]
        if len(spans) == len(turns):
            for turn, (start, end) in zip(turns, spans, strict=True):
                found[turn] = Tokens(row.ids[:start], row.ids[start:end], row.logprobs[start:end])
    return found


def _command_steps(trajectory: Trajectory) -> Iterator[Json]:
    """Yield the commands of an agent without a model."""
    for number, step in enumerate(trajectory.steps):
        call = f"call_{number}"
        output = (step.stdout + step.stderr).decode("utf-8", "replace")
        command = step.command if isinstance(step.command, str) else list(step.command)
        yield {
            "source": "agent",
            "message": "",
            "llm_call_count": 0,
            "tool_calls": [{"tool_call_id": call, "function_name": "exec", "arguments": {"command": command}}],
            "observation": {"results": [{"source_call_id": call, "content": output, "extra": _fate(step)}]},
        }


def _fate(step: StepRecord) -> Json:
    return {"outcome": step.outcome, "exit_code": step.exit_code, "signal": step.signal, "seconds": step.duration}


def _given(body: Json) -> Json:
    """Return an object without empty values: ATIF leaves unknown fields out."""
    return {name: value for name, value in body.items() if value not in (None, "", [], 0)}


def _readable(value: object) -> object:
    """Replace unpaired surrogates, which pydantic does not read."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {name: _readable(item) for name, item in value.items()}
    return [_readable(item) for item in value] if isinstance(value, list) else value


# --- reading ---------------------------------------------------------------------------------------------------------


def has_atif(path: Path) -> bool:
    """Return whether a path is an ATIF file, or the directory of a Harbor trial, job, or several jobs."""
    if path.is_dir():
        return any(next(path.glob(pattern), None) for pattern in _PATTERNS)
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        return re.match(rb'\s*\{.{0,200}?"schema_version"\s*:\s*"ATIF-v', file.read(512), flags=re.DOTALL) is not None


def read_atif(path: Path, *, style: str = "") -> Iterator[Example]:
    """Read trajectories lazily, one by one. Continuations (``trajectory.cont-N.json``) are not read.

    Args:
        path: an ATIF file, or the directory of a Harbor trial, job, or several jobs.
        style: the style of the answers; detected if empty.

    Raises:
        TrajectoryError: a file cannot be read, or is not a trajectory.
    """
    files = [path] if path.is_file() else sorted({file for pattern in _PATTERNS for file in path.glob(pattern)})
    for file in files:
        trial = file.parents[1] if str(file).endswith(FILE) else file.parent
        result = _read(trial / "result.json") if (trial / "result.json").is_file() else {}
        example = _example(_read(file), result, place=str(file), name=trial.name, source=path.resolve().name)
        patch = file.with_name(PATCH)
        submission = patch.read_bytes() if patch.is_file() else None
        yield replace(example, submission=submission, style=style or example.style)


def _example(body: Json, result: Json, *, place: str, name: str, source: str) -> Example:
    version, steps = body.get("schema_version"), body.get("steps")
    if not isinstance(version, str) or not version.startswith("ATIF-v1.") or not isinstance(steps, list) or not steps:
        raise TrajectoryError(f"{place} is not an ATIF trajectory", hint='it needs a "schema_version" and "steps"')
    try:
        messages = tuple(message for step in steps for message in _messages(_object(step)))
        rows = _rows([step for step in map(_object, steps) if _is_sampled(step)])
    except (KeyError, TypeError, ValueError, InvalidValue) as error:
        raise TrajectoryError(f"{place} is damaged", reason=f"{type(error).__name__}: {error}") from error
    agent = _object(body.get("agent"))
    ours = _object(body.get("extra")).get(_OURS)
    facts = _facts_of(result, name) if ours is None else from_json(_Facts, ours, place=f"{place}: extra.{_OURS}")
    tools = agent.get("tool_definitions")
    return Example(
        traj_id=str(body.get("trajectory_id") or body.get("session_id") or name),
        instance_id=facts.instance_id,
        messages=messages,
        attempt=facts.attempt,
        style=facts.style or style_of(messages),
        tools=tuple(map(_object, tools)) if isinstance(tools, list) else (),
        reward=facts.reward,
        exit_status=facts.exit_status,
        flags=facts.flags,
        model=str(agent.get("model_name") or ""),
        agent=str(agent.get("name") or ""),
        tokens=max((_count(_object(step).get("metrics")) for step in steps), default=0) or None,
        rows=rows,
        source=source,
    )


def _facts_of(result: Json, name: str) -> _Facts:
    """Return what Harbor's ``result.json`` says: ``submitted`` for an agent that ended without an exception."""
    rewards = _object(_object(result.get("verifier_result")).get("rewards"))
    value = rewards.get("reward", next(iter(rewards.values())) if len(rewards) == 1 else None)
    failed = _object(result.get("exception_info")).get("exception_type")
    status = str(failed) if failed else "submitted" if rewards else None
    task = str(result.get("task_name") or name)
    return _Facts(task, 0, status, float(value) if isinstance(value, int | float) else None, (), "")


def _messages(step: Json) -> Iterator[Message]:
    """Yield a step's messages. A dispatch without a model is the environment's, not an answer to learn from."""
    if step.get("is_copied_context"):  # it is in an earlier trajectory
        return
    results = [_object(one) for one in _list(_object(step.get("observation")).get("results"))]
    if step["source"] == "agent" and step.get("llm_call_count") == 0:
        texts = [_text(step.get("message")), *(_text(one.get("content")) for one in results)]
        yield Message("user", "\n".join(filter(None, texts)))
        return
    calls = [_object(one) for one in _list(step.get("tool_calls"))]
    yield Message.from_json({
        "role": _ROLES[str(step["source"])],
        "content": _text(step.get("message")),
        "reasoning_content": step.get("reasoning_content"),
        "tool_calls": [{"id": one["tool_call_id"], "function": _function(one)} for one in calls],
    })  # fmt: skip
    for one in results:
        answered = one.get("source_call_id") or (calls[0]["tool_call_id"] if len(calls) == 1 else None)
        named = {"role": "tool", "tool_call_id": answered} if answered else {"role": "user"}
        yield Message.from_json({**named, "content": _text(one.get("content"))})


def _function(call: Json) -> Json:
    kept = _object(call.get("extra")).get("arguments")
    arguments = kept if isinstance(kept, str) and not call["arguments"] else json.dumps(call["arguments"])
    return {"name": call["function_name"], "arguments": arguments}


def _is_sampled(step: Json) -> bool:
    return step.get("source") == "agent" and step.get("llm_call_count") != 0 and not step.get("is_copied_context")


def _rows(steps: Sequence[Json]) -> tuple[TokenRow, ...]:
    """Return the rows of a trajectory whose every answer has its tokens; else none."""
    graph = TokenGraph()
    for step in steps:
        metrics = _object(step.get("metrics"))
        prompt, sampled, logprobs = (
            metrics.get(name) for name in ("prompt_token_ids", "completion_token_ids", "logprobs")
        )
        if not isinstance(prompt, list) or not isinstance(sampled, list) or not isinstance(logprobs, list):
            return ()
        graph.add(Tokens(array("i", prompt), array("i", sampled), array("d", logprobs)))
    return graph.rows()


def _text(content: object) -> str:
    """Return a message's text; of parts, the texts, and where media lie."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = map(_object, content)
    return "\n".join(
        str(one.get("text") or f"[{one['type']}: {_object(one.get('source')).get('path')}]") for one in parts
    )


def _count(metrics: object) -> int:
    found = [_object(metrics).get(name) for name in ("prompt_tokens", "completion_tokens")]
    return sum(one for one in found if isinstance(one, int))


def _object(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _read(file: Path) -> Json:
    try:
        return _object(json.loads(file.read_bytes().decode("utf-8", "replace")))
    except OSError as error:
        raise TrajectoryError(f"{file} cannot be read", reason=error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise TrajectoryError(f"{file} is not JSON", reason=f"it may be damaged: {error}") from error
