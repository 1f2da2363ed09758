#!/usr/bin/env bash
# datasets 5.2.0: in a column of mixed types, a string that is JSON comes back as another type.
#
# Expected: the values that went in: "42" is a string, and so are "null" and the text of a JSON object.
# Observed: a column whose values mix types gets the type Json. In it, "42" becomes a number, "null" becomes None, and a
#           string that holds an object becomes the object. load_dataset("json") chooses this type without being asked.
# Why it matters: message contents are sometimes strings and sometimes lists of parts, so they get this type. The output
#           of a tool such as `cat package.json` then is no longer a string.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'datasets==5.2.0'
export HF_HOME=$work/home HF_HUB_OFFLINE=1

cat >observe.py <<'END'
import json

from datasets import load_dataset

contents = ["42", "null", '{"name": "demo"}', "plain text", [{"type": "text", "text": "a part"}]]
with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps({"content": content}) + "\n" for content in contents)
dataset = load_dataset("json", data_files="rows.jsonl", split="train")
print(dataset.features)
for content, row in zip(contents, dataset):
    print(f"{content!r} -> {row['content']!r}")
END
venv/bin/python observe.py 2>log >observed || { cat log >&2; exit 1; }
cat observed
diff - observed <<'END' || { echo "the type Json of datasets has changed" >&2; exit 1; }
{'content': Json(decode=True)}
'42' -> 42
'null' -> None
'{"name": "demo"}' -> {'name': 'demo'}
'plain text' -> 'plain text'
[{'type': 'text', 'text': 'a part'}] -> [{'type': 'text', 'text': 'a part'}]
END
