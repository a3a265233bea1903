"""An HTTP server that answers like an OpenAI-compatible one, and misbehaves as it is told to. Real sockets, standard library only.

What it says is a function of the request: of a prompt ``p`` it makes ``<p>!``, with the characters as token ids.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Body = dict[str, Any]
Misdeed = Callable[["Handler", Body, int], bool]
"""(handler, request, how many times this prompt was asked before) -> whether it has dealt with the request."""

END = 3


def prompt_of(body: Body) -> str:
    return body["prompt"] if "prompt" in body else "|".join(str(message["content"]) for message in body["messages"])


def answer_to(body: Body, *, ids: str | None = None, text: str | None = None, reason: str = "stop", **changes: Any) -> Body:
    """A well-formed answer; ``ids``: vllm, sglang, or None for none."""
    prompt = prompt_of(body)
    said = f"<{prompt}>!" if text is None else text
    prompt_ids, output_ids = [ord(c) for c in prompt], [*(ord(c) for c in said), *([END] if reason == "stop" else [])]
    chat = "messages" in body
    choice: Body = {"index": 0, "finish_reason": reason}
    choice |= {"message": {"role": "assistant", "content": said}} if chat else {"text": said}
    answer: Body = {"choices": [choice], "usage": {"completion_tokens": len(output_ids), "prompt_tokens": len(prompt_ids)}}
    if ids == "vllm":
        choice["token_ids"] = output_ids
        (answer if chat else choice)["prompt_token_ids"] = prompt_ids
    elif ids == "sglang":
        choice["prompt_token_ids"] = prompt_ids
        choice["meta_info"] = {"output_token_logprobs": [[-0.5, token, None] for token in output_ids]}
    return {**answer, **changes}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WaywardServer

    def do_GET(self) -> None:
        self.send({"object": "list", "data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            before = self.server.asked[prompt_of(body)]
            self.server.asked[prompt_of(body)] += 1
            self.server.bodies.append(body)
            self.server.pages.append(self.path)
            self.server.keys.append(self.headers.get("Authorization"))
            self.server.now += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.now)
        try:
            if not self.server.misdeed(self, body, before):
                self.send(answer_to(body))
        finally:
            with self.server.lock:
                self.server.now -= 1

    def send(self, content: Any, status: int = 200, **headers: str) -> bool:
        """Send JSON, or bytes as they are."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)
        return True

    def cut(self, promised: int = 1000) -> bool:
        """Begin an answer and close the connection in the middle of it."""
        self.send_response(200)
        self.send_header("Content-Length", str(promised))
        self.end_headers()
        self.wfile.write(b'{"choices": [{"text": "beg')
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True
        return True

    def log_message(self, format: str, *args: Any) -> None:
        pass


class WaywardServer(ThreadingHTTPServer, AbstractContextManager["WaywardServer"]):
    """Serves inside its ``with`` block; says what it was asked."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, misdeed: Misdeed = lambda handler, body, before: False, models: tuple[str, ...] = ("m",)) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.misdeed = misdeed
        self.models = models
        self.lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        self.bodies: list[Body] = []
        self.pages: list[str] = []
        self.keys: list[str | None] = []
        self.now = self.most_at_once = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def __enter__(self) -> WaywardServer:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients go away in the middle, that is what they are here for


def slow(seconds: float) -> Misdeed:
    """Every answer takes its time."""

    def wait(handler: Handler, body: Body, before: int) -> bool:
        time.sleep(seconds)
        return False

    return wait
