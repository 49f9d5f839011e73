"""A server between Codex and the daemon that forces the model's first answer.

Codex always sends ``tool_choice`` ``auto``, and the embedded model has not learned to write
patches. So the first request requires a call of ``apply_patch``, with a narrower grammar, and later
ones no call. All else passes unchanged in both directions.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx


class Forcing:
    """What passed, and where the server listens."""

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        """Codex's requests, as it sent them."""
        self.answers: list[str] = []

    def changed(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the request that the daemon gets."""
        if len(self.bodies) > 1:
            return body | {"tool_choice": "none"}
        tools = [
            {**tool, "format": {**tool["format"], "definition": self.grammar}}
            for tool in body["tools"]
            if tool.get("name") == "apply_patch"
        ]
        choice = {"type": "custom", "name": "apply_patch"}
        return body | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}


@contextlib.contextmanager
def forcing(daemon: str, grammar: str) -> Iterator[Forcing]:
    """Serve `Forcing` in front of the daemon at this address."""
    passed = Forcing(grammar)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = httpx.get(daemon + self.path, timeout=30)
            self.send_response(answer.status_code)
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            passed.bodies.append(body)
            text = b""
            with httpx.stream(
                "POST", daemon + self.path, json=passed.changed(body), timeout=120
            ) as answer:
                self.send_response(answer.status_code)
                self.send_header("content-type", answer.headers["content-type"])
                self.send_header("connection", "close")
                self.end_headers()
                for piece in answer.iter_bytes():
                    text += piece
                    self.wfile.write(piece)
                    self.wfile.flush()
            passed.answers.append(text.decode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    passed.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield passed
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
