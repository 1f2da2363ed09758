#!/usr/bin/env bash
# openenv 0.10.0: over HTTP, every request has an environment of its own; only the WebSocket has episodes.
#
# Expected: POST /reset starts an episode, and each POST /step continues it.
# Observed: the server makes a new environment for every HTTP request. A step after a reset sees none of its effects, and
#           two steps do not add up. No response says so. The same messages over /ws form an episode.
# Why it matters: a rollout over HTTP runs to its end with status 200, and trains on first steps only.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'openenv==0.10.0'

cat >observe.py <<'END'
from fastapi.testclient import TestClient
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Add(Action):
    amount: int


class Total(Observation):
    total: int


class Counter(Environment):
    environments = 0

    def __init__(self):
        super().__init__()
        Counter.environments += 1
        self.total = 0

    def reset(self, seed=None, episode_id=None, **options):
        self.total = 100
        return Total(total=self.total)

    def step(self, action, timeout_s=None, **options):
        self.total += action.amount
        return Total(total=self.total)

    @property
    def state(self):
        return State()


client = TestClient(create_fastapi_app(Counter, Add, Total))
Counter.environments = 0
for path, body in (("/reset", {}), ("/step", {"action": {"amount": 1}}), ("/step", {"action": {"amount": 1}})):
    response = client.post(path, json=body)
    print(f"POST {path}: status {response.status_code}, total {response.json()['observation']['total']}")
print("environments:", Counter.environments)
Counter.environments = 0
with client.websocket_connect("/ws") as socket:
    for kind, data in (("reset", {}), ("step", {"amount": 1}), ("step", {"amount": 1})):
        socket.send_json({"type": kind, "data": data})
        print(f"/ws {kind}: total {socket.receive_json()['data']['observation']['total']}")
print("environments:", Counter.environments)
END
venv/bin/python observe.py 2>log >observed || { cat log >&2; exit 1; }
cat observed
diff - observed <<'END' || { echo "openenv's HTTP server has changed" >&2; exit 1; }
POST /reset: status 200, total 100
POST /step: status 200, total 1
POST /step: status 200, total 1
environments: 3
/ws reset: total 100
/ws step: total 101
/ws step: total 102
environments: 1
END
