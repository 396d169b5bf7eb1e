"""Send odd requests to a Router, and check every answer against its OpenAPI document.

The Router is the real one on scripted boards, as in the tests, and listens on this machine only. It
fetches no images, and the run ends by itself. Schemathesis makes the requests; it has a virtual
environment of its own, because it would change packages that are pinned in the other one. One
``--seed`` makes the same requests again.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.http.reference_house import (  # noqa: E402 - not installed
    CHAT,
    EMBED,
    ReferenceHouse,
    described_api,
)

HOST = "127.0.0.1"
CHECKS = (
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "unsupported_method",
    "allow_header_conformance",
)
# Of calls that are asked by query and body alike, those that are tried with both.
BY_QUERY = ("/pause", "/sleep", "/v1/lora_adapters", "/receive_weight_update")
END_S = 30
STREAM_S = 5.0  # of an answer that has begun


class Served:
    """A Router behind a port of this machine, and how often it answered with which status."""

    def __init__(self, folder: Path) -> None:
        self.answered: Counter[int] = Counter()
        self._house = ReferenceHouse(folder)
        self._house.remember()
        # Connections that come before the server is ready wait in the socket's queue.
        self._socket = socket.create_server((HOST, 0))
        config = uvicorn.Config(self._app, interface="asgi3", log_level="warning", lifespan="on")
        self._server = uvicorn.Server(config)
        run = partial(self._server.run, sockets=[self._socket])
        self._thread = threading.Thread(target=run, daemon=True)

    def __enter__(self) -> str:
        """Start it, and return its address."""
        self._thread.start()
        return f"http://{HOST}:{self._socket.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(END_S)
        self._house.responses.close()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._house.serve(scope, receive, send)
            return

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.answered[message["status"]] += 1
                # Events and logs that are followed end with their client, which reads to the end.
                asyncio.get_running_loop().call_later(STREAM_S, answer.cancel)
            await send(message)

        answer = asyncio.ensure_future(self._house.serve(scope, receive, counted))
        try:
            await answer
        except asyncio.CancelledError:
            await send({"type": "http.response.body", "body": b""})


def to_try() -> dict[str, Any]:
    """Return the document from which requests are made.

    It is without the status that only a hook of the operator's may cause, and names what there is
    here: requests for models and generations of random names would all end the same.
    """
    made = copy.deepcopy(described_api().document())
    for name, path in made["paths"].items():
        for operation in path.values():
            operation["responses"].pop("500", None)
            for answer in operation["responses"].values():
                # It describes a whole stream, but would be compared with single events.
                answer.get("content", {}).get("text/event-stream", {}).pop("schema", None)
            given = operation.setdefault("parameters", [])
            if "requestBody" in operation and name not in BY_QUERY:
                # A parameter in both places is refused.
                given[:] = [one for one in given if one["in"] != "query"]
            for one in given:
                if one["in"] == "path":
                    one["schema"] = {"anyOf": [{"const": one["example"]}, one["schema"]]}
    for schema in made["components"]["schemas"].values():
        asked = schema.get("properties", {})
        if "additionalProperties" in schema and "model" in asked:
            asked["model"] = {"anyOf": [{"enum": [CHAT, EMBED]}, asked["model"]]}
    return made


def main() -> int:
    """Run it. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemathesis", default=str(ROOT / ".venv-fuzz" / "bin" / "schemathesis"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--examples", type=int, default=20, help="random requests per call")
    parser.add_argument("--max-time", type=int, help="seconds after which it ends")
    given, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        file = folder / "openapi.json"
        file.write_text(json.dumps(to_try()), encoding="utf-8")
        served = Served(folder / "kept")
        with served as url:
            command = [given.schemathesis, "run", str(file), "--url", url]
            command += ["--checks", ",".join(CHECKS), "--seed", str(given.seed)]
            command += ["--max-examples", str(given.examples), "--phases"]
            command += ["examples,coverage,fuzzing", "--request-timeout", "30"]
            command += ["--continue-on-failure", "--warnings", "off"]
            command += ["--generation-database", "none", "--no-shrink"]
            if given.max_time is not None:
                command += ["--max-time", str(given.max_time)]
            code = subprocess.run([*command, *more], cwd=folder, check=False).returncode
    told = ", ".join(f"{count} x {status}" for status, count in sorted(served.answered.items()))
    print(f"{served.answered.total()} answers with the seed {given.seed}: {told}")
    return code or (1 if served.answered[500] else 0)


if __name__ == "__main__":
    sys.exit(main())
