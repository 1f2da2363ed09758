#!/usr/bin/env bash
# litellm 1.110.2: an aborted or failed generation finishes with "stop".
#
# Expected: the server's finish_reason reaches the caller, or an unknown one is an error.
# Observed: "abort" (vLLM's and SGLang's word for a cancelled request), "error" and a missing reason all become "stop", the
#           reason of a complete answer. Only some of them log a warning. "length" stays.
# Why it matters: rollouts train on truncated answers as if the model had ended its turn. If the difference matters, read
#           the response without litellm.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'litellm==1.110.2'

cat >observe.py <<'END'
import http.server
import json
import threading

import litellm

reason = None


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "message": {"role": "assistant", "content": "I will now"}, "finish_reason": reason}
        body = json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
for reason in ("stop", "length", "abort", "error", None):
    response = litellm.completion(
        model="hosted_vllm/m",
        messages=[{"role": "user", "content": "Fix the bug"}],
        api_base=f"http://127.0.0.1:{server.server_port}/v1",
        api_key="none",
    )
    print(f"server: {reason}, litellm: {response.choices[0].finish_reason}")
END
LITELLM_LOCAL_MODEL_COST_MAP=True NO_PROXY=127.0.0.1 venv/bin/python observe.py 2>log >observed || { cat log >&2; exit 1; }
cat observed
diff - observed <<'END' || { echo "litellm's mapping of finish reasons has changed" >&2; exit 1; }
server: stop, litellm: stop
server: length, litellm: length
server: abort, litellm: stop
server: error, litellm: stop
server: None, litellm: stop
END
