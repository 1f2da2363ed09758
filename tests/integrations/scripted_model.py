"""A model behind OpenAI's HTTP dialect that gives a list of shell commands, one after the other."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ScriptedModel(ThreadingHTTPServer):
    """Answers a conversation's n-th question with the n-th command; afterwards with the last one.

    It counts by what the conversation holds, so that several may go on at once.
    """

    daemon_threads = True

    def __init__(self, commands: Sequence[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commands = tuple(commands)
        self.seen: list[list[dict[str, object]]] = []

    @property
    def url(self) -> str:
        """What clients call the API base."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def message(self, request: dict[str, object]) -> dict[str, object]:
        """The answer: a call of the tool where tools are offered, else a block of shell."""
        messages = request["messages"]
        assert isinstance(messages, list)
        self.seen.append(messages)
        number = sum(message["role"] == "assistant" for message in messages)
        command = self.commands[min(number, len(self.commands) - 1)]
        if not request.get("tools"):
            return {"role": "assistant", "content": f"Step {number}.\n\n```bash\n{command}\n```"}
        function = {"name": "bash", "arguments": json.dumps({"command": command})}
        calls = [{"id": f"call_{number}", "type": "function", "function": function}]
        return {"role": "assistant", "content": f"Step {number}.", "tool_calls": calls}


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedModel

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = self.server.message(request)
        choice = {"index": 0, "finish_reason": "tool_calls" if "tool_calls" in message else "stop", "message": message}
        answer = {
            "id": "scripted", "object": "chat.completion", "created": 0, "model": request["model"],
            "choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }  # fmt: skip
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name it has there
        """Nobody reads it."""


@contextmanager
def scripted_model(commands: Sequence[str]) -> Iterator[ScriptedModel]:
    """A model that is served for as long as the block lasts."""
    with ScriptedModel(commands) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
