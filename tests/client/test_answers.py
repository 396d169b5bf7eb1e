"""Answers as the client's values."""

from __future__ import annotations

import pickle

import httpx
import pytest

from rkserve.client import (
    Client,
    PartlyDone,
    UnexpectedAnswer,
)
from tests.support.cluster.control_clients import (
    PAUSE,
    RESUME,
)
from tests.support.cluster.fake_control import PARTLY, FakeControl, envelope, ok, stored


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(httpx.Response(200, text="<html>"), id="no JSON"),
        pytest.param(ok([1]), id="no object"),
        pytest.param(ok({"status": "paused"}), id="another server's pause"),
        pytest.param(httpx.Response(404, text="nothing here"), id="an error in other words"),
    ],
)
def test_answers_of_something_else_are_named_so(
    server: FakeControl, client: Client, answer: httpx.Response
) -> None:
    server.on(PAUSE, answer)
    with pytest.raises(UnexpectedAnswer):
        client.pause()


def test_a_partial_result_is_an_error_that_has_the_results(
    server: FakeControl, client: Client
) -> None:
    server.on(RESUME, ok(envelope("partial", **PARTLY), 207))
    with pytest.raises(PartlyDone, match=r"1 of 2 boards; sim-1: It does not answer") as caught:
        client.resume()
    exc = pickle.loads(pickle.dumps(caught.value))
    assert [failure.board for failure in exc.failed] == ["sim-1"]
    assert list(exc.results) == ["sim-0"]


def test_what_there_is_can_be_asked_for(server: FakeControl, client: Client) -> None:
    rows = ok({"object": "list", "data": [{"id": "a"}]})
    for path in ("boards", "models", "lora_adapters", "audit"):
        server.on(f"GET /v1/{path}", rows)
    server.on("GET /v1/operations", ok({"data": [stored("partial", **PARTLY)]}))
    server.on("GET /v1/cluster", ok({"epoch": 7}))
    server.on("GET /weight_info", ok({"weight_version": "step-9"}))
    server.on("POST /update_weight_version", ok(envelope(kind="label")))
    server.on("POST /reset_prefix_cache", ok(envelope(kind="cache_reset")))
    server.on(
        "GET /is_paused",
        ok(
            {
                "is_paused": True,
                "all": False,
                "epoch": 7,
                "boards": {"a": {"paused": True, "mode": "keep"}, "b": {"paused": False}},
            }
        ),
    )
    assert (
        client.boards() == client.models() == client.adapters() == client.audit() == [{"id": "a"}]
    )
    assert [one.state for one in client.operations(limit=5)] == ["partial"]
    assert server.asked[-1].url.params["limit"] == "5"
    assert client.cluster() == {"epoch": 7}
    assert client.weight_version("sim-chat") == "step-9"
    assert client.set_weight_version("step-10").kind == "label"
    assert server.json() == {"new_version": "step-10"}
    assert client.reset_cache(boards="a").kind == "cache_reset"
    paused = client.is_paused()
    assert (bool(paused), paused.all, dict(paused.boards)) == (
        True,
        False,
        {"a": "keep", "b": None},
    )
