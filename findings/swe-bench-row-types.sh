#!/usr/bin/env bash
# pandas 3.1.1, datasets 5.2.0: a row of SWE-bench's form loses its version or its time zone in a JSON reader.
#
# Expected: JSON has strings and numbers, so the string "3.10" stays a string, and so does a timestamp.
# Observed: pandas.read_json reads the version "3.10" as the number 3.1, and created_at as a timestamp, which to_json writes
#           as a number. load_dataset("json") keeps the version, and makes created_at a datetime without a time zone.
# Why it matters: SWE-bench chooses the environment of a task by its version. 3.1 and 3.10 are different environments, and
#           a file that has been through pandas cannot tell them apart. Pass dtype=False, convert_dates=False.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'datasets==5.2.0' 'pandas==3.1.1'
export HF_HOME=$work/home HF_HUB_OFFLINE=1

cat >observe.py <<'END'
import pandas
from datasets import load_dataset

with open("rows.jsonl", "w") as file:
    file.write('{"instance_id": "a__a-1", "version": "3.10", "created_at": "2026-10-01T12:00:00Z"}\n')


def show(name, row):
    print(name, *(f"{key}={row[key]!r}" for key in ("version", "created_at")))


frame = pandas.read_json("rows.jsonl", lines=True)
show("pandas:", frame.to_dict("records")[0])
print("pandas, written again:", frame.to_json(orient="records", lines=True).strip())
plain = pandas.read_json("rows.jsonl", lines=True, dtype=False, convert_dates=False)
show("pandas, no conversion:", plain.to_dict("records")[0])
show("datasets:", load_dataset("json", data_files="rows.jsonl", split="train")[0])
END
venv/bin/python -W ignore observe.py 2>log >observed || { cat log >&2; exit 1; }
cat observed
diff - observed <<'END' || { echo "the types that JSON readers guess have changed" >&2; exit 1; }
pandas: version=3.1 created_at=Timestamp('2026-10-01 12:00:00+0000', tz='UTC')
pandas, written again: {"instance_id":"a__a-1","version":3.1,"created_at":1790856000000}
pandas, no conversion: version='3.10' created_at='2026-10-01T12:00:00Z'
datasets: version='3.10' created_at=datetime.datetime(2026, 10, 1, 12, 0)
END
