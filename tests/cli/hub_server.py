"""A small server with the Hub's endpoints, on a free port of this machine, with faults."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FakeHub:
    """One model and the faults of its server; each fault is used up by a request."""

    files: dict[str, bytes]
    id: str = "org/tiny"
    commit: str = "c" * 40
    statuses: list[int] = field(default_factory=list)
    """Statuses of the next answers."""
    retry_after: str | None = None
    cuts: list[int] = field(default_factory=list)
    """Bytes after which the next answers with weights are cut off."""
    wrong: list[bytes] = field(default_factory=list)
    """Contents that the next answers with weights have instead."""
    ranges: bool = True
    slow_s: float = 0.0
    """Seconds between pieces of 64 KiB."""
    list_piece: int = 65536
    """Bytes of a piece of the list of files."""
    redirect: str = ""
    """Server to which requests for files are redirected."""
    given: list[str | None] = field(default_factory=list)
    """Header ``Authorization`` of all requests."""
    token: str | None = None
    """Token that requests must have."""
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """Paths and ranges."""
    url: str = ""

    def listed(self) -> bytes:
        files = []
        for name, data in self.files.items():
            one = {"rfilename": name, "size": len(data)}
            if name.endswith(".safetensors"):
                sha = hashlib.sha256(data).hexdigest()
                one |= {"lfs": {"sha256": sha, "size": len(data)}, "blobId": "0" * 40}
            else:
                head = b"blob %d\0" % len(data)
                one["blobId"] = hashlib.sha1(head + data).hexdigest()
            files.append(one)
        return json.dumps({"sha": self.commit, "siblings": files}).encode()

    def ranges_of(self, name: str) -> list[str | None]:
        return [given for path, given in self.requests if path.endswith("/" + name)]


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        path, given = self.path.partition("?")[0], self.headers.get("Range")
        name = path.removeprefix(f"/{self.hub.id}/resolve/{self.hub.commit}/")
        self.hub.requests.append((path, given))
        self.hub.given.append(self.headers.get("Authorization"))
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.answer(401, b"", {"X-Error-Message": "Access to org/tiny is restricted"})
        elif self.hub.statuses and (status := self.hub.statuses.pop(0)) != 200:
            wait = {"Retry-After": self.hub.retry_after} if self.hub.retry_after else {}
            self.answer(status, b"", wait)
        elif path.startswith(f"/api/models/{self.hub.id}/revision/"):
            self.answer(200, self.hub.listed(), piece=self.hub.list_piece)
        elif name in self.hub.files and self.hub.redirect:
            self.answer(302, b"", {"Location": self.hub.redirect + path})
        elif name in self.hub.files:
            self.send_file(name, given)
        else:
            self.answer(404, b"")

    def send_file(self, name: str, given: str | None) -> None:
        data, begin, whole = self.hub.files[name], 0, name.endswith(".safetensors")
        outline = given is not None and not given.endswith("-")
        if whole and not outline and self.hub.wrong:
            data = self.hub.wrong.pop(0)
        if given is not None and self.hub.ranges:
            first, _, last = given.removeprefix("bytes=").partition("-")
            begin, end = int(first), int(last) + 1 if last else len(data)
            end = min(end, len(data))
            head = {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
            status, body = 206, data[begin:end]
        else:
            status, head, body = 200, {}, data
        cut = self.hub.cuts.pop(0) if self.hub.cuts and whole and not outline else None
        self.answer(status, body, head, cut)

    def answer(self, status, body, head=None, cut=None, piece=65536) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **(head or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(body[:cut]), piece):
                self.wfile.write(body[:cut][at : at + piece])
                if self.hub.slow_s:
                    time.sleep(self.hub.slow_s)
        if cut is not None:
            self.close_connection = True


@contextlib.contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OfHub", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
