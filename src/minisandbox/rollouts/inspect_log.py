"""Export a run as a log of Inspect (``inspect view``), with one sample per rollout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisandbox.errors import MissingExtra
from minisandbox.models import Message
from minisandbox.rollouts.rundir import RunReader
from minisandbox.trajectories import Trajectory

if TYPE_CHECKING:
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ChatMessage

SCORER = "hidden tests"


def export_inspect(run: Path, out: Path) -> Iterator[str]:
    """Write a run as an Inspect log. All rollouts are in memory until the file is written.

    Args:
        run: the run's directory.
        out: the log, ``.eval`` or ``.json``. Pass its directory to ``inspect view``.

    Yields:
        The id of each rollout's task.

    Raises:
        MissingExtra: the extra ``inspect`` is not installed.
        RunError: the database cannot be read.
        TrajectoryError: a trajectory cannot be read.
        OSError: the file cannot be written.
    """
    try:
        from inspect_ai.log import (  # noqa: PLC0415 - an optional package
            EvalConfig,
            EvalDataset,
            EvalLog,
            EvalSpec,
            EvalStats,
            write_eval_log,
        )
    except ImportError as error:
        raise MissingExtra(
            f"inspect-ai is not installed: {error}", hint="pip install 'swe-minisandbox[inspect]'"
        ) from error
    samples, agents, models, ends = [], set[str](), set[str](), list[str]()
    with RunReader(run) as reader:
        for trajectory in reader.trajectories():
            samples.append(_sample(trajectory))
            agents.add(trajectory.agent)
            models.add(trajectory.model)
            ends.append(str(samples[-1].completed_at))
            yield trajectory.instance_id
    ids = sorted({str(sample.id) for sample in samples})
    started = min((str(sample.started_at) for sample in samples), default=datetime.now().astimezone().isoformat())
    model = ", ".join(sorted(filter(None, models))) or "none"
    spec = EvalSpec(
        created=started, task=run.resolve().name, solver=", ".join(sorted(agents)), model=model,
        dataset=EvalDataset(name=run.resolve().name, samples=len(ids), sample_ids=list(ids)),
        config=EvalConfig(epochs=max((sample.epoch for sample in samples), default=1)),
    )  # fmt: skip
    log = EvalLog(
        eval=spec, status="success", samples=samples, results=_results(samples),
        stats=EvalStats(started_at=started, completed_at=max(ends, default=started)),
    )  # fmt: skip
    write_eval_log(log, out)


def _sample(trajectory: Trajectory) -> EvalSample:
    """Return a rollout as a sample; its epoch is the attempt, from 1."""
    from inspect_ai.log import EvalError, EvalSample  # noqa: PLC0415 - an optional package
    from inspect_ai.model import ModelOutput, ModelUsage  # noqa: PLC0415 - the same
    from inspect_ai.scorer import Score  # noqa: PLC0415 - the same

    messages = [_message(message) for message in trajectory.messages]
    started = datetime.fromisoformat(trajectory.started)
    usage, failure, grade = trajectory.usage, trajectory.failure, trajectory.grade
    answer = next((message for message in reversed(trajectory.messages) if message.role == "assistant"), None)
    details = {"attempt": trajectory.attempt, "exit_status": trajectory.exit_status, "detail": trajectory.detail}
    submission = (trajectory.submission or b"").decode("utf-8", "replace")
    score = Score(
        value=float("nan") if trajectory.reward is None else trajectory.reward, answer=submission,
        explanation="" if grade is None else f"{grade.verdict}: {grade.detail}",
    )  # fmt: skip
    error = None if failure is None else f"{failure.phase}: {failure.kind}: {failure.detail}"
    return EvalSample(
        id=trajectory.instance_id, epoch=trajectory.attempt + 1, target="",
        input=next((message.text for message in messages if message.role == "user"), trajectory.instance_id),
        messages=messages, scores={SCORER: score}, metadata=details,
        output=ModelOutput.from_content(trajectory.model or "none", "" if answer is None else answer.content),
        model_usage={
            trajectory.model or "none": ModelUsage(
                input_tokens=usage.prompt, output_tokens=usage.completion, total_tokens=usage.prompt + usage.completion,
                input_tokens_cache_read=usage.cached,
            )
        },
        error=None if error is None else EvalError(message=error, traceback=error, traceback_ansi=error),
        started_at=started.isoformat(),
        completed_at=(started + timedelta(seconds=trajectory.timings.total)).isoformat(),
        total_time=trajectory.timings.total, working_time=trajectory.timings.agent,
    )  # fmt: skip


def _message(message: Message) -> ChatMessage:
    """Return a message in Inspect's terms; malformed arguments of calls are kept as text."""
    from inspect_ai.model import (  # noqa: PLC0415 - an optional package
        ChatMessageAssistant,
        ChatMessageSystem,
        ChatMessageTool,
        ChatMessageUser,
        ContentReasoning,
        ContentText,
    )
    from inspect_ai.tool import ToolCall  # noqa: PLC0415 - the same

    if message.role == "system":
        return ChatMessageSystem(content=message.content)
    if message.role == "user":
        return ChatMessageUser(content=message.content)
    if message.role == "tool":
        return ChatMessageTool(content=message.content, tool_call_id=message.tool_call_id)
    calls = [
        ToolCall(id=call.id, function=call.name, arguments=_arguments(call.arguments)) for call in message.tool_calls
    ]
    thought = [ContentReasoning(reasoning=message.reasoning)] if message.reasoning else []
    content = [*thought, ContentText(text=message.content)] if thought else message.content
    return ChatMessageAssistant(content=content, tool_calls=calls or None)


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": text}


def _results(samples: list[EvalSample]) -> Any:
    """Return the mean reward of the rollouts with a reward."""
    from inspect_ai.log import EvalMetric, EvalResults, EvalScore  # noqa: PLC0415 - an optional package

    rewards = [float(str(sample.scores[SCORER].value)) for sample in samples if sample.scores]
    scored = [reward for reward in rewards if reward == reward]  # noqa: PLR0124 - without NaN
    mean = sum(scored) / len(scored) if scored else float("nan")
    metrics = {"mean": EvalMetric(name="mean", value=mean)}
    score = EvalScore(
        name=SCORER,
        scorer=SCORER,
        scored_samples=len(scored),
        unscored_samples=len(samples) - len(scored),
        metrics=metrics,
    )
    return EvalResults(total_samples=len(samples), completed_samples=len(samples), scores=[score])
