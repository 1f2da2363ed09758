#!/usr/bin/env bash
# litellm 1.110.2: thoughts are cut out of the content if they come with both tags, and stay if the prompt opened them.
#
# Expected: the content of a response without reasoning_content is the server's text.
# Observed: "<think>plan</think>answer" becomes content "answer" and reasoning_content "plan". "plan</think>answer", which
#           the same model generates if its chat template ends the prompt with "<think>", stays in the content.
# Why it matters: recorded trajectories no longer hold what the model generated, and whether thoughts are content depends
#           on the chat template. Do not compute token ids or rewards from litellm's content.
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

content = ""


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
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
for content in ("<think>plan</think>\n\nanswer", "plan</think>\n\nanswer", "answer <think>plan</think>"):
    response = litellm.completion(
        model="hosted_vllm/m",
        messages=[{"role": "user", "content": "Fix the bug"}],
        api_base=f"http://127.0.0.1:{server.server_port}/v1",
        api_key="none",
    )
    message = response.choices[0].message
    print(f"server: {content!r}")
    print(f"  content: {message.content!r}, reasoning_content: {getattr(message, 'reasoning_content', None)!r}")
END
LITELLM_LOCAL_MODEL_COST_MAP=True NO_PROXY=127.0.0.1 venv/bin/python observe.py 2>log >observed || { cat log >&2; exit 1; }
cat observed
diff - observed <<'END' || { echo "litellm's treatment of <think> has changed" >&2; exit 1; }
server: '<think>plan</think>\n\nanswer'
  content: '\n\nanswer', reasoning_content: 'plan'
server: 'plan</think>\n\nanswer'
  content: 'plan</think>\n\nanswer', reasoning_content: None
server: 'answer <think>plan</think>'
  content: 'answer <think>plan</think>', reasoning_content: None
END
