#!/usr/bin/env bash
# pydantic 2.14.3, orjson 3.13.0, msgspec 0.22.0: a log-probability of minus infinity does not survive JSON.
#
# Expected: a library reads what it wrote, and refuses what it cannot write.
# Observed: all three write minus infinity as null, without an error. pydantic and msgspec then refuse their own output for a
#           list of floats. Python's json writes -Infinity, which pydantic reads, and orjson and msgspec refuse.
# Why it matters: masked tokens have this log-probability. A trajectory file can be written for hours and turn out to be
#           unreadable by the class that wrote it. Clip log-probabilities before writing them.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'pydantic==2.14.3' 'orjson==3.13.0' 'msgspec==0.22.0'

cat >observe.py <<'END'
import json

import msgspec
import orjson
from pydantic import BaseModel


class Tokens(BaseModel):
    logprobs: list[float]


class Row(msgspec.Struct):
    logprobs: list[float]


logprobs = [-0.5, float("-inf")]
writers = {
    "json": lambda: json.dumps({"logprobs": logprobs}),
    "orjson": lambda: orjson.dumps({"logprobs": logprobs}).decode(),
    "msgspec": lambda: msgspec.json.encode(Row(logprobs)).decode(),
    "pydantic": lambda: Tokens(logprobs=logprobs).model_dump_json(),
}
readers = {
    "json": lambda text: json.loads(text)["logprobs"],
    "orjson": lambda text: orjson.loads(text)["logprobs"],
    "msgspec": lambda text: msgspec.json.decode(text, type=Row).logprobs,
    "pydantic": lambda text: Tokens.model_validate_json(text).logprobs,
}
for writer, write in writers.items():
    text = write()
    print(f"{writer} writes {text.replace(' ', '')}")
    for reader, read in readers.items():
        try:
            print(f"  {reader} reads {read(text)}")
        except ValueError as error:
            print(f"  {reader} raises {type(error).__name__}")
END
venv/bin/python observe.py >observed
cat observed
diff - observed <<'END' || { echo "the treatment of infinity has changed" >&2; exit 1; }
json writes {"logprobs":[-0.5,-Infinity]}
  json reads [-0.5, -inf]
  orjson raises JSONDecodeError
  msgspec raises DecodeError
  pydantic reads [-0.5, -inf]
orjson writes {"logprobs":[-0.5,null]}
  json reads [-0.5, None]
  orjson reads [-0.5, None]
  msgspec raises ValidationError
  pydantic raises ValidationError
msgspec writes {"logprobs":[-0.5,null]}
  json reads [-0.5, None]
  orjson reads [-0.5, None]
  msgspec raises ValidationError
  pydantic raises ValidationError
pydantic writes {"logprobs":[-0.5,null]}
  json reads [-0.5, None]
  orjson reads [-0.5, None]
  msgspec raises ValidationError
  pydantic raises ValidationError
END
