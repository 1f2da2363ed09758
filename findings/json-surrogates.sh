#!/usr/bin/env bash
# pydantic 2.14.4, orjson 3.13.0, msgspec 0.22.0: half of an emoji in a command's output.
#
# Expected: one rule for an unpaired surrogate, the JSON escape \ud83d: all readers and writers accept it, or all refuse it.
# Observed: Python's json reads and writes it. pydantic takes it in Python and in model_dump(mode="json"), cannot write it with
#           model_dump_json, and calls the same escape invalid in model_validate_json. orjson and msgspec refuse to read or
#           write it.
# Why it matters: JavaScript agents cut a command's output between the two halves of an emoji. The request is valid JSON, the
#           model answers, and the trajectory cannot be written, or cannot be read back. Replace such halves on arrival.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'pydantic==2.14.4' 'orjson==3.13.0' 'msgspec==0.22.0'

cat >observe.py <<'END'
import json

import msgspec
import orjson
from pydantic import BaseModel


class Message(BaseModel):
    content: str


class Record(msgspec.Struct):
    content: str


half = "ok \ud83d"
escaped = json.dumps({"content": half})
trials = {
    "json reads": lambda: json.loads(escaped)["content"] == half,
    "json writes": lambda: json.dumps(half) == '"ok \\ud83d"',
    "pydantic model_validate": lambda: Message.model_validate({"content": half}).content == half,
    "pydantic model_dump(mode='json')": lambda: Message(content=half).model_dump(mode="json")["content"] == half,
    "pydantic model_dump_json": lambda: Message(content=half).model_dump_json(),
    "pydantic model_validate_json": lambda: Message.model_validate_json(escaped),
    "orjson reads": lambda: orjson.loads(escaped),
    "orjson writes": lambda: orjson.dumps(half),
    "msgspec reads": lambda: msgspec.json.decode(escaped, type=Record),
    "msgspec writes": lambda: msgspec.json.encode(Record(half)),
}
for name, trial in trials.items():
    try:
        print(f"{name}: {trial()}")
    except Exception as error:
        print(f"{name}: {type(error).__name__}")
END
venv/bin/python observe.py >observed
cat observed
diff - observed <<'END' || { echo "the treatment of unpaired surrogates has changed" >&2; exit 1; }
json reads: True
json writes: True
pydantic model_validate: True
pydantic model_dump(mode='json'): True
pydantic model_dump_json: PydanticSerializationError
pydantic model_validate_json: ValidationError
orjson reads: JSONDecodeError
orjson writes: TypeError
msgspec reads: DecodeError
msgspec writes: UnicodeEncodeError
END
