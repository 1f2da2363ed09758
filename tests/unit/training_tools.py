"""What tests of training data share."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from minisandbox.grade import Flag, Grade, Reason, Verdict
from minisandbox.models import Message, TokenRow, TokenUsage
from minisandbox.models.protocol import Request
from minisandbox.models.scripted import encode_message, encode_prompt
from minisandbox.trajectories import Timings, Trajectory, TurnRecord
from minisandbox.trajectories.example import Example

DATA = Path(__file__).parents[1] / "data" / "trajectories"
PATCH = b"diff --git a/x b/x\nindex 1..2 100644\n--- a/x\n+++ b/x\n@@ -1 +1 @@ def f\n-a\n+b\n"
MESSAGES = (
    Message("system", "You are"),
    Message("user", "Solve this"),
    Message("assistant", "I look.\n\n```bash\nls\n```"),
    Message("user", "[exited 0]"),
    Message("assistant", "Done.\n\n```submit\n```"),
)


def example(name: str = "a__b-1", number: int = 0, **more: object) -> Example:
    """An example of a task; what is given takes the place of what it has."""
    values: dict[str, object] = {
        "traj_id": f"{name}.{number}", "instance_id": name, "attempt": number, "messages": MESSAGES, "style": "text",
        "submission": PATCH, "reward": 1.0, "exit_status": "submitted", "model": "m-1", "agent": "bash", "tokens": 30,
    }  # fmt: skip
    return Example(**(values | more))  # type: ignore[arg-type] # each of its field's type


def byte_row(messages: tuple[Message, ...] = MESSAGES) -> TokenRow:
    """The row that an engine with a token for each byte reports of a conversation."""
    ids, logprobs, mask = array("i"), array("d"), bytearray()
    for number, message in enumerate(messages):
        if message.role != "assistant":
            continue
        prompt, answer = encode_prompt(Request(messages[:number])), encode_message(message)
        context = prompt[len(ids) :]
        ids += context + answer
        logprobs += array("d", [0.0] * len(context) + [-0.5] * len(answer))
        mask += bytes(len(context)) + b"\x01" * len(answer)
    return TokenRow(ids, logprobs, bytes(mask), (0, 1))


def trajectory(name: str = "a__b-1", attempt: int = 0, reward: float = 1.0, **more: object) -> Trajectory:
    """A rollout of the bash agent; what is given takes the place of what it has."""
    reason = Reason.RESOLVED if reward else Reason.TESTS_NOT_PASSED
    flags = more.pop("flags", ())
    values: dict[str, object] = {
        "instance_id": name, "attempt": attempt, "agent": "bash", "image": name, "image_key": "00",
        "started": "2025-01-01T00:00:00+00:00", "minisandbox": "0.1.0", "exit_status": "submitted", "detail": "",
        "steps": (), "submission": PATCH, "failure": None, "timings": Timings(0.1, 1.0, 0.2, 3.0, 4.4), "model": "m-1",
        "grade": Grade(name, Verdict(reason.verdict), reason, flags=flags),  # type: ignore[arg-type] # flags, by name
        "configuration": {"action_format": "text"}, "messages": MESSAGES, "rows": (byte_row(),),
        "turns": tuple(TurnRecord(at, 0.0, 1.0, 1, TokenUsage(10 * at, 5), "stop", 0.0) for at in (2, 4)),
    }  # fmt: skip
    return Trajectory(**(values | more))  # type: ignore[arg-type] # each of its field's type


FLAG = Flag("suspicious: frame_walking", "x.py", "sys._getframe()")
CHATML = (
    "{%- if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}{{ '<call>' + call.function.name }}"
    "{{ call.function.arguments | tojson }}</call>{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def saved_tokenizer(path: Path, template: str | None = CHATML) -> str:
    """Save a byte-level BPE tokenizer of transformers, trained on what the tests say; returns its directory."""
    transformers: Any = pytest.importorskip("transformers", reason="the package transformers is not installed")
    tokenizers: Any = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    marks = ["<|im_start|>", "<|im_end|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=marks, initial_alphabet=alphabet)
    trained.train_from_iterator([message.content for message in MESSAGES] * 5 + ["assistant\n", "user\n"], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=marks[1], pad_token=marks[1])
    tokenizer.add_special_tokens({"additional_special_tokens": marks[:1]})
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(str(path))
    return str(path)
