#!/usr/bin/env bash
# litellm 1.110.2: computing the cost of a response writes to stdout, even if the cost is found.
#
# Expected: completion_cost returns a number, or raises an exception for a model without a price. Messages go to stderr or
#           to logging.
# Observed: if the response names a model that is not in litellm's price table, "Provider List: ..." goes to stdout, although
#           debugging is off. This happens before the exception, and also if the caller names a model with a price.
# Why it matters: a runner that reads an agent's result from its stdout as JSON works with a provider's model and fails with
#           a self-hosted one. Set litellm.suppress_debug_info = True.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'litellm==1.110.2'
export LITELLM_LOCAL_MODEL_COST_MAP=True

cat >agent.py <<'END'
import json
import sys

import litellm

model, served, litellm.suppress_debug_info = sys.argv[1], sys.argv[2], sys.argv[3:] == ["quiet"]
response = litellm.completion(model=model, messages=[{"role": "user", "content": "hi"}], mock_response="hello")
response.model = served  # the name in the server's response
try:
    cost = litellm.completion_cost(response, model=model)
except Exception:
    cost = None
print(json.dumps({"answer": response.choices[0].message.content, "cost known": cost is not None}))
END
for arguments in 'openai/my-model my-model' 'openai/my-model my-model quiet' 'openai/gpt-4o my-model' 'openai/gpt-4o gpt-4o'; do
    echo "$arguments:"
    venv/bin/python agent.py $arguments 2>log | sed 's/\x1b\[[0-9;]*m//g; /^$/d; s/^/  /'
done >observed
cat observed
diff - observed <<'END' || { echo "what litellm writes to stdout has changed" >&2; exit 1; }
openai/my-model my-model:
  Provider List: https://docs.litellm.ai/docs/providers
  {"answer": "hello", "cost known": false}
openai/my-model my-model quiet:
  {"answer": "hello", "cost known": false}
openai/gpt-4o my-model:
  Provider List: https://docs.litellm.ai/docs/providers
  {"answer": "hello", "cost known": true}
openai/gpt-4o gpt-4o:
  {"answer": "hello", "cost known": true}
END
