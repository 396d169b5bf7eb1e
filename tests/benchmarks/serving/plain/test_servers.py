"""The paced servers that stand for boards with a server each."""

from __future__ import annotations

import json
import time

from starlette.testclient import TestClient

from benchmarks.serving.plain.pace import MODEL, PREFILL_S, TOKEN_S
from benchmarks.serving.plain.ray_apps import upstream_groups
from benchmarks.serving.plain.upstreams import application
from rkserve.config.board_group import BoardGroupConfig

CHAT = "/v1/chat/completions"


def test_a_stream_has_a_chunk_for_each_token_at_the_pace_then_the_usage() -> None:
    body = {"model": MODEL, "max_tokens": 4, "stream": True}
    begun_s = time.monotonic()
    answer = TestClient(application()).post(
        CHAT, json={**body, "stream_options": {"include_usage": True}}
    )
    assert time.monotonic() - begun_s >= PREFILL_S + 3 * TOKEN_S
    *chunks, done = [one for one in answer.text.split("\n\n") if one]
    assert done == "data: [DONE]"
    parsed = [json.loads(one.removeprefix("data: ")) for one in chunks]
    words = [one["choices"][0]["delta"].get("content") for one in parsed[:-1]]
    assert words == ["", " word0", " word1", " word2", " word3", None]
    assert parsed[-2]["choices"][0]["finish_reason"] == "length"
    assert (parsed[-1]["choices"], parsed[-1]["usage"]["completion_tokens"]) == ([], 4)


def test_a_whole_answer_and_the_model_are_there_for_probes_of_gateways() -> None:
    client = TestClient(application())
    answer = client.post(CHAT, json={"model": MODEL, "max_tokens": 2}).json()
    assert answer["choices"][0]["message"]["content"] == " word0 word1"
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == [MODEL]
    assert client.get("/health").is_success


def test_rkserve_has_a_group_for_each_server() -> None:
    groups = [BoardGroupConfig.model_validate(one) for one in upstream_groups([4001, 4002])]
    assert {str(one.model) for one in groups} == {MODEL}
    urls = [one.upstream.url for one in groups if one.upstream is not None]
    assert urls == ["http://127.0.0.1:4001/v1", "http://127.0.0.1:4002/v1"]
