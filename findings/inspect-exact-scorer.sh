#!/usr/bin/env bash
# inspect-ai 0.3.285: the scorer exact() accepts "C++" for "C" and "-5" for "5", and rejects "A" for "A".
#
# Expected: exact() compares the answer with the target, apart from case and white space.
# Observed: both are normalised first: punctuation and the words a, an, the are removed. Signs and operators vanish. A target
#           "A", as in multiple choice, becomes empty and then matches nothing, itself included; f1() gives it 0.
# Why it matters: one of four multiple-choice answers can never be right, and a wrong sign is right. Compare in a scorer of
#           your own.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'inspect-ai==0.3.285'

cat >observe.py <<'END'
import asyncio

from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Target, exact, f1
from inspect_ai.solver import TaskState


async def main():
    for answer, target in (("A", "A"), ("B", "B"), ("C++", "C"), ("-5", "5")):
        state = TaskState(model="mockllm/model", sample_id=1, epoch=1, input="", messages=[])
        state.output = ModelOutput.from_content("mockllm/model", answer)
        scores = [f"{scorer.__name__} {(await scorer()(state, Target(target))).value}" for scorer in (exact, f1)]
        print(f"answer {answer}, target {target}:", ", ".join(scores))


asyncio.run(main())
END
venv/bin/python observe.py >observed
cat observed
diff - observed <<'END' || { echo "inspect-ai's scorers have changed" >&2; exit 1; }
answer A, target A: exact I, f1 0.0
answer B, target B: exact C, f1 1.0
answer C++, target C: exact C, f1 1.0
answer -5, target 5: exact C, f1 1.0
END
