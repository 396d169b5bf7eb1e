"""The process of ``serve run`` as ``rkserve up`` sees it: its log, its readiness, and the first
answer behind it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rkserve.core import tls

SERVE = (sys.executable, "-m", "rkserve.deployments.preflight", "run")
START_TIMEOUT_S = 600
LONGEST_POLL_S, SHORTEST_POLL_S = 0.5, 0.1
ANSWER_S = 120.0
UNAUTHORIZED = 401
UNNAMED = "its models"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
# The line of a traceback that names an error, as Serve appends it to a deployment's message. A line
# of an error's own text may begin with a word and a colon, too.
ERROR_LINE = re.compile(r"^(?:(?:\w+\.)+\w+|\w*(?:Error|Exception|Exit)): ", re.MULTILINE)
Note = Callable[[str], None]


class PollInterval:
    """The time between two polls of a step of a start, a twentieth of that since the first one:
    short beside a step of seconds, and long enough in one of minutes.
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def sleep(self) -> None:
        """Wait until the next poll is due."""
        waited_s = time.monotonic() - self._began_s
        time.sleep(min(LONGEST_POLL_S, max(SHORTEST_POLL_S, waited_s / 20)))


@dataclass(frozen=True)
class ServeLog:
    """The output of ``serve run``."""

    path: Path

    def text(self) -> str:
        """Return all of it."""
        return self.path.read_text(errors="replace")

    def last_line(self) -> str:
        """Return the last line that is not empty."""
        lines = reversed(self.text().split("\n"))
        return next((line.strip() for line in lines if line.strip()), "without a word")

    def explain_end(self, code: int) -> str:
        """Return the one sentence of a check that failed, or the log's end."""
        if (last := self.last_line()).startswith("rkserve: "):
            return last
        tail = "\n".join(self.text().splitlines()[-15:])
        return f"rkserve: serve ended with exit code {code}:\n{tail}"


def token_file() -> Path:
    """Return the path of the token of Ray's clusters on this machine, as Ray finds it."""
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(named) if named else Path.home() / ".ray" / "auth_token"


def read_token() -> str | None:
    """Return that token, or the one of the environment."""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    try:
        return token_file().read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def interrupt_on_signals() -> None:
    """Have Ctrl-C and SIGTERM raise ``KeyboardInterrupt``.

    A shell without job control starts its background jobs with Ctrl-C ignored, and children would
    inherit that: nothing could stop them in order.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _as_interrupt)


def _as_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def get_json(
    url: str, timeout_s: float = 2.0, key: str | None = None, certificate: Path | None = None
) -> Any:
    """Return the JSON behind ``url``, or None while it is not there.

    With TLS ``certificate`` is the one that this machine's endpoint shows.
    """
    try:
        with _open(_with_key(url, key), timeout_s, certificate) as answer:
            return json.load(answer)
    except (OSError, ValueError):
        return None


def _open(request: urllib.request.Request, timeout_s: float, certificate: Path | None) -> Any:
    context = tls.pinned_context(certificate) if certificate is not None else None
    return urllib.request.urlopen(request, timeout=timeout_s, context=context)


def _with_key(url: str, key: str | None, body: bytes | None = None) -> urllib.request.Request:
    headers = {} if body is None else {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return urllib.request.Request(url, body, headers)


def failing_deployments(dashboard: str, token: str | None) -> dict[str, str]:
    """Return the errors of deployments whose replicas do not start, by the deployments' names.

    Ray's dashboard at ``dashboard`` knows them; nothing is returned while it does not answer.
    """
    found: dict[str, str] = {}
    answer = get_json(f"{dashboard}/api/serve/applications/", key=token) or {}
    for name, application in (answer.get("applications") or {}).items():
        stated = {name: application, **(application.get("deployments") or {})}
        for about, one in stated.items():
            _, error, trace = str(one.get("message") or "").partition("Error:\n")
            starts = [match.end() for match in ERROR_LINE.finditer(trace)]
            if error and starts:
                found[about] = trace[starts[-1] :].strip()
    return found


def ready_models(
    url: str, key: str | None = None, certificate: Path | None = None
) -> list[str] | None:
    """Return the models and adapters once every model has a board; ``UNNAMED`` if a key is
    missing.
    """
    if get_json(f"{url}/ready", certificate=certificate) is None:
        return None
    try:
        with _open(_with_key(f"{url}/v1/models", key), 2.0, certificate) as answer:
            return [str(one["id"]) for one in json.load(answer)["data"]]
    except urllib.error.HTTPError as exc:
        return [UNNAMED] if exc.code == UNAUTHORIZED else None
    except (OSError, ValueError):
        return None


def board_counts(
    url: str, key: str | None = None, certificate: Path | None = None
) -> tuple[int, int]:
    """Return the numbers of boards that are ready, and of all that are known."""
    found = get_json(f"{url}/v1/models", key=key, certificate=certificate) or {"data": []}
    boards: dict[str, bool] = {}
    for one in found["data"]:
        for board in (one.get("rkserve") or {}).get("boards") or ():
            boards[str(board["id"])] = board["state"] == "ready"
    return sum(boards.values()), len(boards)


def first_answer(
    url: str, model: str, key: str | None = None, certificate: Path | None = None
) -> tuple[float, str] | None:
    """Return the seconds of a shortest request to a model, and its path; None where an API key is
    needed.

    Raises:
        OSError: neither a chat nor a prompt nor an embedding was answered.
    """
    started_s, refused = time.monotonic(), b""
    for path in (CHAT, COMPLETIONS, EMBEDDINGS):
        limit = {} if path == EMBEDDINGS else {"max_tokens": 1}
        try:
            _post(f"{url}{path}", {**_body(path, model, "Hi"), **limit}, key, certificate)
        except urllib.error.HTTPError as exc:
            if exc.code == UNAUTHORIZED:
                return None
            refused = exc.read()
        else:
            return time.monotonic() - started_s, path
    raise OSError(f"{model} did not answer: {refused.decode(errors='replace')}")


def example(path: str, model: str) -> str:
    """Return the body of a call that a person may try."""
    texts = {CHAT: "Hello! Who are you?", COMPLETIONS: "Once upon a time", EMBEDDINGS: "Hello!"}
    return json.dumps(_body(path, model, texts[path]))


def _body(path: str, model: str, text: str) -> dict[str, Any]:
    asked: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": text}]},
        COMPLETIONS: {"prompt": text},
        EMBEDDINGS: {"input": text},
    }
    return {"model": model, **asked[path]}


def _post(url: str, body: Mapping[str, Any], key: str | None, certificate: Path | None) -> None:
    request = _with_key(url, key, json.dumps(body).encode())
    with _open(request, ANSWER_S, certificate) as answer:
        answer.read()
