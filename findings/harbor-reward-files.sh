#!/usr/bin/env bash
# harbor 0.26.0: which contents of reward.json and reward.txt are a reward.
#
# Expected: both files accept a bare number; what is no number is an error; a valid result has a reward.
# Observed: a bare 1 is a reward in reward.txt and an error in reward.json. {"reward": true} is 1.0. {"tests": 1, "style": 0}
#           and {} are valid results without a primary reward. A single entry of any name is the primary reward.
# Why it matters: a converted task can be valid in every trial and never have a primary reward. Write one entry, "reward".
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 12))' ||
    { echo "skipped: harbor needs Python 3.12; set PYTHON= to its path"; exit 77; }
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'harbor==0.26.0'

cat >observe.py <<'END'
from pathlib import Path
from types import SimpleNamespace

from harbor.cli.jobs import _primary_reward
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.verifier import Verifier

path = Path("reward")
verifier = SimpleNamespace(trial_paths=SimpleNamespace(reward_json_path=path, reward_text_path=path))


def show(name, parse, text):
    path.write_text(text)
    try:
        result = VerifierResult(rewards=parse(verifier))
    except Exception as error:  # harbor's own classes and pydantic's
        print(f"{name} {text}: {type(error).__name__}")
    else:
        reward = _primary_reward(SimpleNamespace(reward_valid=True, verifier_result=result))
        print(f"{name} {text}: primary reward {reward}")


for text in ("1", "1e0", "true", '{"reward": 1}'):
    show("reward.txt", Verifier._parse_reward_text, text)
for text in ("1", '{"reward": true}', '{"reward": "1"}', '{"solved": 1}', '{"tests": 1, "style": 0}', "{}"):
    show("reward.json", Verifier._parse_reward_json, text)
END
venv/bin/python observe.py 2>log >observed || { cat log >&2; exit 1; }
cat observed
diff - observed <<'END' || { echo "harbor's reading of reward files has changed" >&2; exit 1; }
reward.txt 1: primary reward 1.0
reward.txt 1e0: primary reward 1.0
reward.txt true: VerifierOutputParseError
reward.txt {"reward": 1}: VerifierOutputParseError
reward.json 1: ValidationError
reward.json {"reward": true}: primary reward 1.0
reward.json {"reward": "1"}: VerifierOutputParseError
reward.json {"solved": 1}: primary reward 1.0
reward.json {"tests": 1, "style": 0}: primary reward None
reward.json {}: primary reward None
END
