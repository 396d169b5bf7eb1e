"""First sessions of coding agents, as they were recorded, at ASGI level on scripted boards.

tests/data/README.md says how the requests were recorded and what of them is left.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.boards.fake_boards import FakeBoards
from tests.support.http.router_house import House, model, send
from tests.support.paths import TESTS

DATA = TESTS / "data" / "agents"
SESSIONS: dict[str, list[dict[str, Any]]] = {
    file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(DATA.glob("*.json"))
}
REQUESTS = [
    pytest.param(agent, at, id=f"{agent}-{at}")
    for agent, session in SESSIONS.items()
    for at in range(len(session))
]
LAST = {
    "/v1/chat/completions": "data: [DONE]",
    "/v1/responses": "data: [DONE]",
    "/v1/messages": "event: message_stop",
}


def ask(of: House, request: dict[str, Any], **change: Any) -> Any:
    body = {**request["body"], **change}
    return send(of, "POST", request["path"], headers=request["headers"], json=body)


def prompt(of: House) -> str:
    """The prompt of the last request that a board got."""
    tokenizer = model().renderer.tokenizer
    assert tokenizer is not None
    return tokenizer.whole_text(of.boards.opened[-1][1].prompt_ids)


def test_sessions_of_all_agents_are_here() -> None:
    assert list(SESSIONS) == ["aider", "claude-code", "codex", "opencode"]


@pytest.mark.parametrize(("agent", "at"), REQUESTS)
def test_a_request_of_an_agent_is_answered(agent: str, at: int) -> None:
    of, request = House(FakeBoards.answering("a", text="Hel|lo")), SESSIONS[agent][at]
    response = ask(of, request)
    assert response.status_code == 200, response.text
    path = request["path"].partition("?")[0]
    assert LAST[path] in response.text.rstrip().splitlines()[-2:]
    assert "Hel" in response.text
    of.expect_nothing_left()


@pytest.mark.parametrize("agent", ["claude-code", "codex", "opencode"])
def test_the_model_is_shown_the_tools_and_their_results(agent: str) -> None:
    """The last request of each session brings the result of a call."""
    of, request = House(FakeBoards.answering("a")), SESSIONS[agent][-1]
    assert ask(of, request).status_code == 200
    shown = prompt(of)
    known = [one.get("function", one) for one in request["body"]["tools"]]
    offered = [one["name"] for one in known if one.get("type", "custom") in ("custom", "function")]
    assert offered
    assert all(f'"name": "{name}"' in shown for name in offered)
    assert shown.count("<tool_response>") == 1


@pytest.mark.parametrize("agent", ["codex", "opencode"])
def test_a_turn_goes_on_from_the_prompt_before_it(agent: str) -> None:
    """So that a board finds it in its KV cache, up to the line break before the answer.

    Claude Code asks for thoughts, which sim-chat's template writes into the last message only.
    """
    of, session = House(FakeBoards.answering("a")), SESSIONS[agent]
    for request in session[-2:]:
        assert ask(of, request).status_code == 200
    first, second = (request.prompt_ids for _, request in of.boards.opened)
    assert second[: len(first) - 1] == first[:-1]


def test_tools_that_codex_only_offers_are_named_in_a_header() -> None:
    of = House(FakeBoards.answering("a"))
    response = ask(of, SESSIONS["codex"][0])
    assert response.headers["x-rkserve-tools-ignored"] == "namespace, web_search"
    forced = ask(of, SESSIONS["codex"][0], tool_choice={"type": "web_search"})
    assert (forced.status_code, forced.json()["error"]["param"]) == (400, "tool_choice.type")


def test_claude_code_counts_what_it_would_send() -> None:
    of = House(FakeBoards.answering("a"))
    request = SESSIONS["claude-code"][-1]
    unknown = ("max_tokens", "stream", "metadata")
    body = {key: value for key, value in request["body"].items() if key not in unknown}
    counted = send(of, "POST", "/v1/messages/count_tokens?beta=true", json=body).json()
    assert ask(of, request).status_code == 200
    assert counted == {"input_tokens": len(of.boards.opened[-1][1].prompt_ids)}
