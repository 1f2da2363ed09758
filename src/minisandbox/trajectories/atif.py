"""Write ATIF 1.8, the trajectory format of Harbor (its RFC 0001), and read ATIF 1.0 to 1.8.

Each trial's directory contains ``agent/trajectory.json``, and the verifier's rewards in ``result.json``. A trial with
several steps has one trajectory per step, in ``steps/NAME/agent``.
"""

from __future__ import annotations

import importlib
import json
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from minisandbox.errors import InvalidValue, MissingExtra, TrajectoryError
from minisandbox.grade import Flag
from minisandbox.models import Message, Role, TokenRow, Tokens, ToolCall
from minisandbox.models.graph import TokenGraph, versions_between
from minisandbox.trajectories.codec import from_json, to_json
from minisandbox.trajectories.example import Example
from minisandbox.trajectories.published import as_list, as_object, read_json, without_surrogates
from minisandbox.trajectories.styles import style_of
from minisandbox.trajectories.trajectory import StepRecord, Trajectory, TurnRecord

if TYPE_CHECKING:
    import atif

VERSION = "ATIF-v1.8"
"""The ATIF version to write."""
FILE = "agent/trajectory.json"
"""The path of the trajectory, relative to the directory of a trial or step."""
PATCH = "submission.patch"
"""The file next to the trajectory with the exact bytes of the submission, for which ATIF has no field."""

_OURS = "minisandbox"
_PATTERNS = tuple(f"{levels}{step}{FILE}" for levels in ("", "*/", "*/*/") for step in ("", "steps/*/"))

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class _Facts:
    """The fields of an example that ATIF lacks; stored in the ``extra`` object of the root."""

    instance_id: str
    attempt: int
    exit_status: str | None
    reward: float | None
    flags: tuple[Flag, ...]
    style: str


def _models() -> ModuleType:
    """Import the package ``atif`` on use, because the import takes a quarter of a second.

    Raises:
        MissingExtra: the package is not installed.
    """
    try:
        return importlib.import_module("atif")
    except ImportError as error:
        raise MissingExtra(
            "cannot convert ATIF trajectories: the package 'atif' is not installed",
            hint="pip install 'swe-minisandbox[atif]'",
        ) from error


# --- writing ---------------------------------------------------------------------------------------------------------


def atif_of(trajectory: Trajectory, *, example: Example, tokens: bool = True) -> Json | None:
    """Convert a rollout's record to ATIF.

    Args:
        trajectory: the record.
        example: the same rollout as an example, for its id, style and tools.
        tokens: whether to include token ids and log-probabilities. Each step then contains its whole prompt.

    Returns:
        The JSON object; None if the rollout has no messages and no commands, because ATIF requires a step.

    Raises:
        MissingExtra: the package ``atif`` is not installed.
    """
    steps = _message_steps(trajectory, tokens) if trajectory.messages else list(_command_steps(trajectory))
    if not steps:
        return None
    facts = _Facts(
        example.instance_id, example.attempt, example.exit_status, example.reward, example.flags, example.style
    )
    body: Json = {
        "schema_version": VERSION,
        "session_id": example.traj_id,
        "trajectory_id": example.traj_id,
        "agent": {
            "name": trajectory.agent,
            "version": trajectory.minisandbox,
            "model_name": trajectory.model or None,
            "tool_definitions": [dict(tool) for tool in example.tools] or None,
            "extra": {"configuration": to_json(trajectory.configuration), "sampling": to_json(trajectory.sampling)},
        },
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, start=1)],
        "final_metrics": {
            "total_prompt_tokens": trajectory.usage.prompt,
            "total_completion_tokens": trajectory.usage.completion,
            "total_cached_tokens": trajectory.usage.cached,
            "total_cost_usd": trajectory.cost,
            "total_steps": len(steps),
        },
        "extra": {_OURS: to_json(facts)},
    }
    document: Json = _models().Trajectory.model_validate(without_surrogates(body)).to_json_dict()
    return document


def _message_steps(trajectory: Trajectory, tokens: bool) -> list[Json]:
    """Return one step per message, but add the results of commands to the step of the response."""
    turn_of = {turn.message: number for number, turn in enumerate(trajectory.turns)}
    sampled = _sampled(trajectory.rows) if tokens else {}
    acted = {step.turn - 1 for step in trajectory.steps}
    patches = {record.turn - 1: record for record in trajectory.patches}
    steps: list[Json] = []
    turn: int | None = None  # the number of the latest response, -1 if it has no record; None after another message
    for index, message in enumerate(trajectory.messages):
        if turn is not None and (message.role == "tool" or (message.role == "user" and turn in acted)):
            _observe(steps[-1], message)
            continue
        turn = turn_of.get(index, -1) if message.role == "assistant" else None
        step = _step(message)
        if turn is not None and turn >= 0:
            step |= _timing(trajectory, trajectory.turns[turn])
            step["metrics"] = _metrics(trajectory.turns[turn], sampled.get(turn))
            if turn in patches:
                step["extra"] = {_OURS: to_json(patches[turn])}
        steps.append(step)
    return steps


def _step(message: Message) -> Json:
    if message.role != "assistant":
        return {"source": "system" if message.role == "system" else "user", "message": message.content}
    return {
        "source": "agent",
        "message": message.content,
        "reasoning_content": message.reasoning or None,
        "tool_calls": [_call(call, number) for number, call in enumerate(message.tool_calls)] or None,
    }


def _call(call: ToolCall, number: int) -> Json:
    """Convert a tool call; store malformed arguments as text, because ATIF requires a JSON object."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    is_object = isinstance(arguments, dict)
    return {
        "tool_call_id": call.id or f"call_{number}",
        "function_name": call.name,
        "arguments": arguments if is_object else {},
        "extra": None if is_object else {"arguments": call.arguments},
    }


def _observe(step: Json, message: Message) -> None:
    observation = step.setdefault("observation", {"results": []})
    calls = step["tool_calls"] or []
    assert isinstance(observation, dict)
    assert isinstance(calls, list)
    answers_call = message.tool_call_id in [call["tool_call_id"] for call in calls]
    call_id = message.tool_call_id if answers_call else None
    observation["results"].append({"content": message.content, "source_call_id": call_id})


def _timing(trajectory: Trajectory, turn: TurnRecord) -> Json:
    start = datetime.fromisoformat(trajectory.started) + timedelta(seconds=trajectory.timings.sandbox_ready)
    return {"timestamp": (start + timedelta(seconds=turn.began)).isoformat(), "llm_call_count": 1}


def _metrics(turn: TurnRecord, tokens: Tokens | None) -> Json:
    extra: Json = {"seconds": turn.seconds, "tries": turn.tries, "finish_reason": turn.finish_reason}
    if tokens is not None and tokens.versions:
        extra[_OURS] = {"versions": to_json(tokens.versions)}
    body: Json = {
        "prompt_tokens": turn.usage.prompt,
        "completion_tokens": turn.usage.completion,
        "cached_tokens": turn.usage.cached,
        "cost_usd": turn.cost,
        "extra": extra,
    }
    if tokens is not None:
        body |= {
            "prompt_token_ids": tokens.prompt.tolist(),
            "completion_token_ids": tokens.sampled.tolist(),
            "logprobs": tokens.logprobs.tolist(),
        }
    return body


def _sampled(rows: Sequence[TokenRow]) -> dict[int, Tokens]:
    """Return the tokens of each turn, by the turn's number.

    A row's mask has one span per new turn, in order. Turns sampled under a constraint have no span; a row with such
    turns is omitted, because its spans cannot be assigned to its turns.
    """
    tokens: dict[int, Tokens] = {}
    seen: set[int] = set()
    for row in rows:
        turns = [turn for turn in row.turns if turn not in seen]
        seen.update(turns)
        spans = [match.span() for match in re.finditer(rb"\x01+", row.mask)]
        if len(spans) == len(turns):
            for turn, (start, end) in zip(turns, spans, strict=True):
                versions = versions_between(row.versions, start, end)
                tokens[turn] = Tokens(row.ids[:start], row.ids[start:end], row.logprobs[start:end], versions)
    return tokens


def _command_steps(trajectory: Trajectory) -> Iterator[Json]:
    """Yield a step per command, for an agent without a model."""
    for number, step in enumerate(trajectory.steps):
        call = f"call_{number}"
        output = (step.stdout + step.stderr).decode("utf-8", "replace")
        command = step.command if isinstance(step.command, str) else list(step.command)
        yield {
            "source": "agent",
            "message": "",
            "llm_call_count": 0,
            "tool_calls": [{"tool_call_id": call, "function_name": "exec", "arguments": {"command": command}}],
            "observation": {"results": [{"source_call_id": call, "content": output, "extra": _outcome(step)}]},
        }


def _outcome(step: StepRecord) -> Json:
    return {"outcome": step.outcome, "exit_code": step.exit_code, "signal": step.signal, "seconds": step.duration}


# --- reading ---------------------------------------------------------------------------------------------------------


def has_atif(path: Path) -> bool:
    """Return whether a path is an ATIF file, or the directory of a Harbor trial, job, or several jobs."""
    if path.is_dir():
        return any(next(path.glob(pattern), None) for pattern in _PATTERNS)
    if path.suffix != ".json" or not path.is_file():
        return False
    return re.match(rb'\s*\{.*?"schema_version"\s*:\s*"ATIF-v', path.read_bytes(), flags=re.DOTALL) is not None


def read_atif(path: Path, *, style: str = "") -> Iterator[Example]:
    """Read trajectories lazily, one by one. Continuations (``trajectory.cont-N.json``) are ignored.

    Args:
        path: an ATIF file, or the directory of a Harbor trial, job, or several jobs.
        style: the style of the responses; "" to detect it.

    Raises:
        TrajectoryError: a file cannot be read, or is not a trajectory.
        MissingExtra: the package ``atif`` is not installed.
    """
    files = [path] if path.is_file() else sorted({file for pattern in _PATTERNS for file in path.glob(pattern)})
    for file in files:
        trial, step = _trial_of(file)
        patch = file.with_name(PATCH)
        body = as_object(read_json(file))
        example = _example(body, _facts_of(trial, step), location=str(file), name=trial.name, step=step)
        yield replace(
            example,
            submission=patch.read_bytes() if patch.is_file() else None,
            source=path.resolve().name,
            style=style or example.style,
        )


def _trial_of(file: Path) -> tuple[Path, str]:
    """Return the directory of a trajectory's trial, and the step's name, which is "" for a trial without steps."""
    file = file.absolute()
    trial = file.parents[1] if file.match(FILE) else file.parent
    if trial.parent.name == "steps" and not (trial / "result.json").is_file():
        return trial.parents[1], trial.name
    return trial, ""


def _facts_of(trial: Path, step: str) -> _Facts:
    """Return the task and outcome from Harbor's ``result.json``. Rewards without an exception mean ``submitted``."""
    result = as_object(read_json(trial / "result.json")) if (trial / "result.json").is_file() else {}
    outcomes = {str(entry.get("step_name")): entry for entry in map(as_object, as_list(result.get("step_results")))}
    outcome = outcomes.get(step, {}) if step else result
    rewards = as_object(as_object(outcome.get("verifier_result")).get("rewards"))
    exception = as_object(outcome.get("exception_info")).get("exception_type")
    status = str(exception) if exception else "submitted" if rewards else None
    return _Facts(str(result.get("task_name") or trial.name), 0, status, _reward(rewards, outcome), (), "")


def _reward(rewards: Json, outcome: Json) -> float | None:
    """Return the verifier's reward, or None if it is ambiguous or Harbor marks it invalid, as after a rate limit."""
    policy = as_object(as_object(outcome.get("exception_info")).get("policy"))
    if outcome.get("reward_valid") is False or policy.get("has_valid_reward") is False:
        return None
    value = rewards.get("reward", next(iter(rewards.values())) if len(rewards) == 1 else None)
    return float(value) if isinstance(value, int | float) else None


def _example(body: Json, facts: _Facts, *, location: str, name: str, step: str) -> Example:
    version, steps = body.get("schema_version"), body.get("steps")
    if not isinstance(version, str) or not version.startswith("ATIF-v1.") or not isinstance(steps, list) or not steps:
        raise TrajectoryError(f"{location} is not an ATIF trajectory", hint='it needs a "schema_version" and "steps"')
    parsed = _parsed(steps, location)
    try:
        messages = tuple(message for entry in parsed for message in _messages(entry))
        rows = _rows([entry for entry in parsed if _is_sampled(entry)])
    except (InvalidValue, OverflowError) as error:
        raise TrajectoryError(f"{location} is damaged", reason=f"{type(error).__name__}: {error}") from error
    agent = as_object(body.get("agent"))
    ours = as_object(body.get("extra")).get(_OURS)
    facts = facts if ours is None else from_json(_Facts, ours, location=f"{location}: extra.{_OURS}")
    traj_id = str(body.get("trajectory_id") or body.get("session_id") or name)
    return Example(
        traj_id=f"{traj_id}/{step}" if step else traj_id,  # steps of a trial may share a session id
        instance_id=facts.instance_id,
        messages=messages,
        attempt=facts.attempt,
        style=facts.style or style_of(messages),
        tools=tuple(map(as_object, as_list(agent.get("tool_definitions")))),
        reward=facts.reward,
        exit_status=facts.exit_status,
        flags=facts.flags,
        model=str(agent.get("model_name") or ""),
        agent=str(agent.get("name") or ""),
        tokens=max(map(_count, parsed)) or None,
        rows=rows,
    )


def _parsed(steps: list[object], location: str) -> list[atif.Step]:
    """Parse steps. Ignore unknown fields, and renumber the steps because some programs count from 0."""
    model = _models().Step
    try:
        return [
            model.model_validate({**as_object(step), "step_id": n}, extra="ignore") for n, step in enumerate(steps, 1)
        ]
    except ValueError as error:  # includes pydantic's ValidationError
        raise TrajectoryError(f"{location} is damaged", reason=" ".join(str(error).split())) from error


def _messages(step: atif.Step) -> Iterator[Message]:
    """Yield a step's messages. An agent's step without a model call becomes a user message."""
    if step.is_copied_context:  # an earlier trajectory contains this step
        return
    results = step.observation.results if step.observation else []
    text = _text(step.message)
    if step.source == "agent" and step.llm_call_count == 0:
        contents = [text, *(_text(result.content) for result in results)]
        yield Message("user", "\n".join(filter(None, contents)))
        return
    calls = tuple(
        ToolCall(call.tool_call_id, call.function_name, _arguments(call.arguments, call.extra))
        for call in step.tool_calls or ()
    )
    role: Role = "assistant" if step.source == "agent" else step.source
    yield Message(role, text, calls, reasoning=step.reasoning_content or "")
    for result in results:
        call_id = result.source_call_id or (calls[0].id if len(calls) == 1 else None)
        yield Message("tool" if call_id else "user", _text(result.content), tool_call_id=call_id)


def _arguments(arguments: Json, extra: Json | None) -> str:
    text = (extra or {}).get("arguments")
    return text if isinstance(text, str) and not arguments else json.dumps(arguments)


def _is_sampled(step: atif.Step) -> bool:
    return step.source == "agent" and step.llm_call_count != 0 and not step.is_copied_context


def _rows(steps: Sequence[atif.Step]) -> tuple[TokenRow, ...]:
    """Return the training rows of a trajectory, or no rows if any response lacks token ids.

    A response whose numbers of log-probabilities and tokens differ carries no loss.
    """
    graph = TokenGraph()
    trainable = False
    for step in steps:
        metrics = step.metrics
        if metrics is None or metrics.prompt_token_ids is None or metrics.completion_token_ids is None:
            return ()
        prompt, sampled = array("i", metrics.prompt_token_ids), array("i", metrics.completion_token_ids)
        is_complete = len(metrics.logprobs or ()) == len(sampled)
        logprobs = array("d", metrics.logprobs or () if is_complete else bytes(8 * len(sampled)))
        versions = as_object((metrics.extra or {}).get(_OURS)).get("versions", [])
        runs = from_json(tuple[tuple[int, int], ...], versions, location=f"step {step.step_id}: extra.{_OURS}.versions")
        graph.add(Tokens(prompt, sampled, logprobs, runs), trained=is_complete)
        trainable |= is_complete
    return graph.rows() if trainable else ()


def _text(content: str | list[atif.ContentPart] | None) -> str:
    """Return a message's text; join the parts of a list, and replace images and audio by their paths."""
    if not isinstance(content, list):
        return content or ""
    lines = (part.text if part.source is None else f"[{part.type}: {part.source.path}]" for part in content)
    return "\n".join(text or "" for text in lines)


def _count(step: atif.Step) -> int:
    metrics = step.metrics
    return 0 if metrics is None else (metrics.prompt_tokens or 0) + (metrics.completion_tokens or 0)
