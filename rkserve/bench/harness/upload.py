"""A call of the benchmark's own process to the cluster, a whole body at a time.

It knows http.client, and nothing of what is called.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from urllib.parse import urlencode

from rkserve.bench.harness.child import BenchFailed, Json


def post(
    address: tuple[str, int], path: str, query: Json, content: bytes, timeout_s: float
) -> Json:
    """Send bytes and return the answer's JSON. Raises ``BenchFailed`` where it is not HTTP 200."""
    connection = http.client.HTTPConnection(*address, timeout=timeout_s)
    with contextlib.closing(connection):
        try:
            headers = {"content-type": "application/octet-stream"}
            connection.request("POST", f"{path}?{urlencode(query)}", content, headers)
            answer = connection.getresponse()
            words = answer.read()
        except (OSError, http.client.HTTPException) as exc:
            raise BenchFailed(f"{path}: {exc!r}") from exc
    if answer.status != http.client.OK:
        raise BenchFailed(f"{path} was answered by HTTP {answer.status}: {words.decode()}")
    found: Json = json.loads(words)
    return found
