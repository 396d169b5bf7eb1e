"""A model hub on a local port: repositories of bytes, with cut connections and wrong digests."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 100_000  # stored in LFS, with a sha256


@dataclass
class FakeHub:
    """``cut_after`` ends each transfer after so many bytes, ``cuts`` times; ``forged`` digests are
    stated in place of the right ones.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)
    cut_after: int | None = None
    cuts: int = 0
    ranges: bool = True
    forged: dict[str, str] = field(default_factory=dict)
    status: int = 0
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    url: str = ""

    def info(self, name: str) -> dict[str, Any]:
        return {
            "sha": COMMIT,
            "cardData": self.cards.get(name),
            "siblings": [self._sibling(*one) for one in self.repositories[name].items()],
        }

    def _sibling(self, path: str, data: bytes) -> dict[str, Any]:
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        found: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": blob}
        if len(data) >= LARGE:
            digest = self.forged.get(path, hashlib.sha256(data).hexdigest())
            found["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
        elif path in self.forged:
            found["blobId"] = self.forged[path]
        return found


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve ``hub`` on a free port; its ``url`` is the HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Print nothing."""

        def do_GET(self) -> None:
            given = self.headers.get("Range")
            hub.requests.append((self.path, given))
            hub.tokens.append(self.headers.get("Authorization"))
            if hub.status:
                self._send(hub.status, b"")
                return
            info = re.fullmatch(r"/api/models/(\w+/[\w.-]+)/revision/main\?blobs=true", self.path)
            file = re.fullmatch(rf"/(\w+/[\w.-]+)/resolve/{COMMIT}/(.+)", self.path)
            if info is not None and info[1] in hub.repositories:
                self._send(200, json.dumps(hub.info(info[1])).encode())
            elif file is not None and file[2] in hub.repositories.get(file[1], {}):
                self._file(hub.repositories[file[1]][file[2]], given)
            else:
                self._send(404, b"")

        def _file(self, data: bytes, given: str | None) -> None:
            begin = int(given[6:-1]) if given and hub.ranges else 0
            headers = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"}
            self._send(206 if begin else 200, data[begin:], headers if begin else {})

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            if hub.cut_after is not None and hub.cuts and len(body) > hub.cut_after:
                hub.cuts -= 1
                body = body[: hub.cut_after]
                self.close_connection = True
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
