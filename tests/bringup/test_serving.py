"""The log of ``serve run``, the token, and the questions to a Router."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rkserve.bringup import serving
from rkserve.bringup.serving import ServeLog


class Router(http.server.BaseHTTPRequestHandler):
    """Answers by path; what is not there is a 404."""

    answers: ClassVar[dict[str, tuple[int, Any]]] = {}

    def do_GET(self) -> None:
        status, body = self.answers.get(self.path, (404, {}))
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        """Keep stderr clean."""


@pytest.fixture
def url() -> Iterator[str]:
    Router.answers = {}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Router) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_models_are_ready_once_every_one_has_a_board(url: str) -> None:
    Router.answers["/v1/models"] = (200, {"data": [{"id": "a"}, {"id": "b"}]})
    assert serving.ready_models(url) is None
    Router.answers["/ready"] = (200, {"status": "ready"})
    assert serving.ready_models(url) == ["a", "b"]


TRACE = """Deployment 'Coordinator' failed to start 2 times in a row. See logs. Error:
ray::ServeReplica:rkserve:Coordinator.initialize_and_get_metadata() (pid=17)
  File "ledger.py", line 415, in _connect
sqlite3.DatabaseError: file is not a database

The above exception was the direct cause of the following exception:

  File "coordinator.py", line 9, in __init__
rkserve.core.errors.boards.LedgerFailed: The ledger is damaged.
Restore: its newest intact backup was made yesterday."""


def test_deployments_that_do_not_start_are_named_with_the_last_error(url: str) -> None:
    assert serving.failing_deployments(url, None) == {}
    slow = "Deployment 'Router' has 2 replicas that have taken more than 30s to be scheduled."
    deployments = {
        "Coordinator": {"message": TRACE},
        "Router": {"message": slow},
        "Board": {"message": ""},
    }
    application = {"message": "", "deployments": deployments}
    answer = {"applications": {"rkserve": application}}
    Router.answers["/api/serve/applications/"] = (200, answer)
    words = "The ledger is damaged.\nRestore: its newest intact backup was made yesterday."
    assert serving.failing_deployments(url, "token") == {"Coordinator": words}
    application["message"] = "Failed to build. Error:\nModuleNotFoundError: No module named 'x'"
    found = serving.failing_deployments(url, "token")
    assert found == {"rkserve": "No module named 'x'", "Coordinator": words}


def test_boards_are_counted_once_in_all_models(url: str) -> None:
    assert serving.board_counts(url) == (0, 0)
    boards = [{"id": "x@1", "state": "ready"}, {"id": "x@2", "state": "loading"}]
    one = {"id": "a", "rkserve": {"boards": boards}}
    Router.answers["/v1/models"] = (200, {"data": [one, {**one, "id": "a:adapter"}]})
    assert serving.board_counts(url) == (1, 2)


@pytest.mark.parametrize(
    ("chat", "prompt", "embedding", "path"),
    [
        pytest.param(200, 200, 404, serving.CHAT, id="a chat model"),
        pytest.param(400, 200, 404, serving.COMPLETIONS, id="a model without a template"),
        pytest.param(400, 400, 200, serving.EMBEDDINGS, id="an embedding model"),
        pytest.param(401, 401, 401, None, id="keys are needed"),
    ],
)
def test_a_first_answer_fits_the_model(
    url: str, chat: int, prompt: int, embedding: int, path: str | None
) -> None:
    Router.answers["/v1/chat/completions"] = (chat, {})
    Router.answers["/v1/completions"] = (prompt, {})
    Router.answers["/v1/embeddings"] = (embedding, {})
    found = serving.first_answer(url, "a")
    assert (found and found[1]) == path
    if path is not None:
        given = {serving.CHAT: "messages", serving.COMPLETIONS: "prompt"}.get(path, "input")
        assert {*json.loads(serving.example(path, "a"))} == {"model", given}


def test_a_model_that_does_not_answer_is_an_error_with_its_reason(url: str) -> None:
    Router.answers["/v1/chat/completions"] = (503, {})
    Router.answers["/v1/embeddings"] = (400, {"error": "makes no embeddings"})
    with pytest.raises(OSError, match=r"a did not answer: .*makes no embeddings"):
        serving.first_answer(url, "a")


def test_a_log_is_explained_by_the_check_that_failed_or_by_its_end(tmp_path: Path) -> None:
    log = ServeLog(tmp_path / "serve.log")
    log.path.write_text("a\nb\n\n")
    assert log.last_line() == "b"
    assert log.explain_end(7) == "rkserve: serve ended with exit code 7:\na\nb\n"
    log.path.write_text("a\nrkserve: port 8000 is in use.\n")
    assert log.explain_end(1) == "rkserve: port 8000 is in use."


def test_the_token_is_found_as_ray_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert serving.read_token() is None
    (tmp_path / "token").write_text("abc\n")
    assert serving.read_token() == "abc"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "def")
    assert serving.read_token() == "def"


def test_polls_are_close_to_each_other_at_first_and_rare_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, slept = iter((100.0, 100.0, 101.0, 106.0, 700.0)), list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(time, "sleep", slept.append)
    interval = serving.PollInterval()
    for _ in range(4):
        interval.sleep()
    assert slept == pytest.approx([0.1, 0.1, 0.3, 0.5])
