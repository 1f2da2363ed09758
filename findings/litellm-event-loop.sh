#!/usr/bin/env bash
# litellm 1.110.2: a blocking completion() leaves a new event loop on the calling thread, which nobody closes.
#
# Expected: a blocking call changes nothing in asyncio, or closes what it has opened.
# Observed: after completion() in a program that has run no event loop, the main thread has one, open, with a selector and
#           two sockets. The program's next asyncio.run() drops it unclosed: a ResourceWarning much later, in other code.
# Why it matters: test suites that turn warnings into errors fail now and then, in a test that has nothing to do with it.
#           Call asyncio.set_event_loop(None) first: then litellm opens a loop of its own and closes it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info >= (3, 14))' || { echo "asyncio before Python 3.14 only" >&2; exit 77; }
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'litellm==1.110.2'

cat >observe.py <<'END'
import asyncio
import gc
import http.server
import json
import sys
import threading
import warnings

import litellm


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "message": {"role": "assistant", "content": "done"}, "finish_reason": "stop"}
        body = json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def loop_of_thread():
    """The loop set on this thread, without making one."""
    return getattr(asyncio.get_event_loop_policy()._local, "_loop", None)


async def nothing():
    pass


if sys.argv[1] == "none":
    asyncio.set_event_loop(None)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
before = loop_of_thread()
litellm.completion(
    model="openai/m",
    messages=[{"role": "user", "content": "Fix the bug"}],
    api_base=f"http://127.0.0.1:{server.server_port}/v1",
    api_key="none",
)
loop = loop_of_thread()
print(f"loop before: {before is not None}, after: {loop is not None}, open: {loop is not None and not loop.is_closed()}")
del loop
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    asyncio.run(nothing())
    gc.collect()
print("warning of an unclosed loop after asyncio.run():", any("unclosed event loop" in str(each.message) for each in caught))
END
export LITELLM_LOCAL_MODEL_COST_MAP=True NO_PROXY=127.0.0.1
for loop in unset none; do
    echo "event loop of the main thread: $loop"
    venv/bin/python observe.py "$loop" 2>log || { cat log >&2; exit 1; }
done >observed
cat observed
diff - observed <<'END' || { echo "litellm handles the event loop in another way" >&2; exit 1; }
event loop of the main thread: unset
loop before: False, after: True, open: True
warning of an unclosed loop after asyncio.run(): True
event loop of the main thread: none
loop before: False, after: False, open: False
warning of an unclosed loop after asyncio.run(): False
END
