#!/usr/bin/env bash
# datasets 5.2.0: Dataset.from_list and load_dataset("json") make different rows of the same list.
#
# Expected: both keep every key of every row, and add none to the arguments of a tool call.
# Observed: from_list takes the columns from the first row and drops the other keys without a message. It gives the arguments
#           of every tool call the keys of all of them, with None. load_dataset("json") does neither.
# Why it matters: a reward or an error that only later rows have is lost. Chat templates write the added arguments into
#           the training text ("path": null), so the model learns calls that the agent never made.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'datasets==5.2.0'
export HF_HOME=$work/home HF_HUB_OFFLINE=1

cat >observe.py <<'END'
import json

from datasets import Dataset, load_dataset

rows = [
    {"calls": [{"name": "bash", "arguments": {"command": "ls"}}]},
    {"calls": [{"name": "view", "arguments": {"path": "a.py"}}], "reward": 1.0},
]
with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)
for name, dataset in (
    ("from_list", Dataset.from_list(rows)),
    ("load_dataset", load_dataset("json", data_files="rows.jsonl", split="train")),
):
    print(name, dataset.column_names)
    for row in dataset:
        print("  ", row)
END
venv/bin/python observe.py 2>log >observed || { cat log >&2; exit 1; }
cat observed
diff - observed <<'END' || { echo "the columns that datasets makes of a list have changed" >&2; exit 1; }
from_list ['calls']
   {'calls': [{'name': 'bash', 'arguments': {'command': 'ls', 'path': None}}]}
   {'calls': [{'name': 'view', 'arguments': {'command': None, 'path': 'a.py'}}]}
load_dataset ['calls', 'reward']
   {'calls': [{'name': 'bash', 'arguments': {'command': 'ls'}}], 'reward': None}
   {'calls': [{'name': 'view', 'arguments': {'path': 'a.py'}}], 'reward': 1.0}
END
