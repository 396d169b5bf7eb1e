"""An upstream behind a Router: answers, faults, health, control; over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rkserve.api.admin.query import ControlRequest
from rkserve.config.board_group import BoardGroupConfig
from rkserve.core.board_report import GenerationInfo, RouterGenerations
from rkserve.core.desired_state import ActivePause, Desired, PauseMode, Scope
from rkserve.core.errors import UpstreamUnable
from rkserve.core.messages import ControlAction
from rkserve.router.features.generations import Generations
from tests.support.boards.fake_boards import FakeBoards, eventually
from tests.support.http.fake_openai import FakeOpenAi, serving
from tests.support.http.router_house import events
from tests.support.upstreams import UpstreamHouse, group, house, settings

pytestmark = pytest.mark.engine  # sockets, in another thread's server


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeOpenAi]:
    with serving() as found:
        yield found


def at(fake: FakeOpenAi, model: str, **changes: Any) -> BoardGroupConfig:
    """The group of an upstream whose server behaves as the model's name says."""
    return group(f"{fake.url}/v1", model=model, **changes)


@asynccontextmanager
async def one(fake: FakeOpenAi, model: str = "ok", **changes: Any) -> AsyncIterator[UpstreamHouse]:
    async with house(at(fake, model, **changes)) as found:
        yield found


def text_of(body: str) -> str:
    """The text of a stream of a chat."""
    choices = [one["choices"] for one in events(body) if isinstance(one, dict)]
    return "".join(c[0]["delta"].get("content", "") for c in choices if c)


async def test_an_answer_has_the_clients_name_and_the_upstreams_usage(fake: FakeOpenAi) -> None:
    async with one(fake) as found:
        answer = await found.chat()
        body = answer.json()
        assert answer.status_code == 200
        assert answer.headers["x-rkserve-board"] == "gpu"
        assert body["model"] == "big"
        assert fake.asked[-1].body["model"] == "ok"
        assert body["choices"][0]["message"]["content"] == "one two three"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["prompt_tokens"] == 20
        assert body["usage"]["completion_tokens"] == 3
        labels = {"upstream": "gpu", "model": "big"}
        assert found.metric("rkserve_upstream_requests_total", outcome="answered", **labels) == 1
        assert found.metric("rkserve_upstream_prompt_tokens_total", **labels) == 20
        assert found.metric("rkserve_upstream_completion_tokens_total", **labels) == 3
        assert found.metric("rkserve_upstream_ttft_seconds_count", **labels) == 1
        assert found.metric("rkserve_ttft_seconds_count", model="big") == 1


async def test_a_stream_has_the_text_as_it_comes_and_the_usage(fake: FakeOpenAi) -> None:
    async with one(fake) as found:
        answer = await found.chat(stream=True, stream_options={"include_usage": True})
        assert text_of(answer.text) == "one two three"
        assert '"total_tokens":23' in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")


async def test_several_answers_are_requests_of_their_own_with_seeds_apart(
    fake: FakeOpenAi,
) -> None:
    async with one(fake) as found:
        before = len(fake.asked)
        answer = await found.chat(n=3, seed=7)
        assert [c["message"]["content"] for c in answer.json()["choices"]] == ["one two three"] * 3
        asked = fake.asked[before:]
        assert sorted(one.body["seed"] for one in asked) == [7, 8, 9]
        assert answer.json()["usage"]["completion_tokens"] == 9
        assert answer.json()["usage"]["prompt_tokens"] == 20


async def test_a_raw_completion_goes_to_its_own_path(fake: FakeOpenAi) -> None:
    async with one(fake, "completion") as found:
        body = {"model": "big", "prompt": "Once", "max_tokens": 5}
        answer = await found("POST", "/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == "one two three"
        assert fake.asked[-1].path == "/v1/completions"
        assert fake.asked[-1].body["prompt"] == "Once"
        assert fake.asked[-1].body["max_tokens"] == 5


async def test_reasoning_and_tool_calls_that_the_upstream_parsed(fake: FakeOpenAi) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    async with one(fake, "thinks") as found:
        message = (await found.chat(tools=[tool])).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "well, yes"
        assert message["tool_calls"][0]["id"] == "c"
        assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"a": 1}'}
        assert message["content"] == "```four```"
        assert fake.asked[-1].body["tool_choice"] == "auto"
        streamed = (await found.chat(tools=[tool], stream=True)).text
        assert text_of(streamed) == "```four```"
        assert '"finish_reason":"tool_calls"' in streamed


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        pytest.param(
            "/v1/messages",
            {"max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]},
            '"text":"one two three"',
            id="Anthropic",
        ),
        pytest.param("/v1/responses", {"input": "Hi"}, '"text":"one two three"', id="Responses"),
        pytest.param(
            "/api/chat",
            {"messages": [{"role": "user", "content": "Hi"}], "stream": False},
            '"content":"one two three"',
            id="Ollama",
        ),
    ],
)
async def test_other_dialects_reach_it_as_chats(
    fake: FakeOpenAi, path: str, body: dict[str, Any], words: str
) -> None:
    async with one(fake) as found:
        answer = await found("POST", path, json={"model": "big", **body})
        assert answer.status_code == 200, answer.text
        assert words in answer.text
        assert fake.asked[-1].path == "/v1/chat/completions"
        assert fake.asked[-1].messages == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("model", ["whole", "crlf", "until-closed"])
async def test_unusual_but_right_answers_are_taken(fake: FakeOpenAi, model: str) -> None:
    async with one(fake, model) as found:
        answer = await found.chat()
        if model == "until-closed":  # without a type
            assert answer.status_code == 503
            return
        text = answer.json()["choices"][0]["message"]["content"]
        assert text in ("one two three", "all at once")


@pytest.mark.parametrize(
    ("model", "status", "code", "words"),
    [
        pytest.param("busy", 429, "queue_full", "Try again in 7 s", id="429 with Retry-After"),
        pytest.param("down", 503, "no_board", "it answers 502", id="502 with HTML"),
        pytest.param("closes", 503, "no_board", "the connection broke", id="it hangs up"),
        pytest.param("bad-length", 503, "no_board", "the connection broke", id="no length"),
        pytest.param("bad-chunk", 503, "no_board", "the connection broke", id="no chunk"),
        pytest.param("truncated", 503, "upstream_failed", "has no end", id="no end"),
        pytest.param("no-json", 503, "upstream_failed", "it is not JSON", id="no JSON"),
        pytest.param("no-object", 503, "upstream_failed", "is no object", id="no object"),
        pytest.param("no-utf8", 503, "upstream_failed", "it is not JSON", id="no UTF-8"),
        pytest.param("deep", 503, "upstream_failed", "it is not JSON", id="nested too deeply"),
        pytest.param("odd-types", 503, "no_board", "is no", id="other types"),
        pytest.param("fails", 503, "upstream_failed", "broken off: x", id="an error event"),
        pytest.param(
            "fails-oddly", 503, "upstream_failed", "broken off: a word", id="a bare error"
        ),
        pytest.param("refused", 400, "upstream_refused", "max_tokens is too large", id="400"),
        pytest.param("forbidden", 503, "no_board", "does not take the key", id="401"),
        pytest.param("page", 503, "no_board", "of the type 'text/html'", id="a web page"),
        pytest.param("long-line", 503, "upstream_failed", "more than 1048576 bytes", id="1 MiB"),
    ],
)
async def test_faults_are_the_error_object(
    fake: FakeOpenAi, model: str, status: int, code: str, words: str
) -> None:
    async with one(fake, model) as found:
        answer = await found.chat()
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, code), error
        assert words in error["message"]
        assert "sk-secret" not in answer.text
        if model == "busy":
            assert answer.headers["retry-after"] == "7"


@pytest.mark.parametrize("model", ["hangs", "hangs-after-head", "pings", "no-http"])
async def test_an_upstream_without_a_token_is_given_up(fake: FakeOpenAi, model: str) -> None:
    async with one(fake, model, first_token_timeout_s=0.2, token_timeout_s=0.2) as found:
        answer = await found.chat()
        assert answer.status_code == 503
        assert "nothing came for 0.2 s" in answer.json()["error"]["message"]
    await eventually(lambda: fake.running == 0)


@pytest.mark.parametrize("model", ["hangs-in-mid-answer", "closes-in-mid-answer", "fails"])
async def test_a_stream_that_breaks_ends_with_the_error_object(
    fake: FakeOpenAi, model: str
) -> None:
    async with one(fake, model, token_timeout_s=0.2, retries=3) as found:
        before = len(fake.asked)
        found_events = events((await found.chat(stream=True)).text)
        assert found_events[-1] == "data: [DONE]"
        assert found_events[-2]["error"]["code"] == "upstream_failed"
        assert text_of("\n\n".join(f"data: {json.dumps(e)}" for e in found_events[:-2])) == "one"
        assert len(fake.asked) == before + 1  # nothing is said twice


async def test_a_hang_up_ends_the_answer_at_the_upstream(fake: FakeOpenAi) -> None:
    async with one(fake, "hangs-in-mid-answer") as found:
        task = asyncio.create_task(found.chat())
        await eventually(lambda: fake.running == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await eventually(lambda: fake.running == 0)


async def test_a_request_is_sent_again_before_its_first_token(fake: FakeOpenAi) -> None:
    async with one(fake, "twice-down", retries=2) as found:
        fake.failures = 2
        answer = await found.chat()
        assert answer.json()["choices"][0]["message"]["content"] == "one two three"
        labels = {"upstream": "gpu", "model": "big"}
        assert found.metric("rkserve_upstream_retries_total", **labels) == 2


async def test_the_other_upstream_of_the_model_gets_what_one_cannot_answer(
    fake: FakeOpenAi,
) -> None:
    for model in ("closes", "down", "busy", "refused", "bad-length", "forbidden"):
        broken = at(fake, model)
        good = group(f"{fake.url}/v1", "spare", model="ok")
        async with house(broken, good) as found:
            for _ in range(4):
                answer = await found.chat()
                assert answer.status_code == 200, (model, answer.text)
                assert answer.headers["x-rkserve-board"] == "spare"


async def test_the_breaker_leaves_an_upstream_alone_that_keeps_failing(fake: FakeOpenAi) -> None:
    config = settings(queue_timeout_s=0.2)
    async with house(at(fake, "down"), config=config) as found:
        for _ in range(3):
            assert (await found.chat()).status_code == 503
        before = len(fake.asked)
        boards = (await found("GET", "/v1/boards")).json()["data"]
        assert boards[0]["circuit"]["state"] == "open"
        assert (await found.chat()).json()["error"]["code"] == "queue_timeout"
        assert len(fake.asked) == before


async def test_readiness_and_health(fake: FakeOpenAi) -> None:
    async with one(fake) as found:
        assert (await found("GET", "/ready")).status_code == 200
        entry = (await found("GET", "/v1/models/big")).json()
        assert entry["rkserve"]["state"] == "ready"
        assert entry["rkserve"]["boards"][0]["platform"] == "upstream"
    async with house(group("http://127.0.0.1:9/v1")) as found:
        assert (await found("GET", "/ready")).status_code == 503
        answer = await found.chat()
        assert answer.json()["error"]["code"] == "no_board"
        assert "cannot be reached" in answer.json()["error"]["message"]
        assert found.metric("rkserve_upstream_up", upstream="gpu", model="big") == 0


async def test_an_ill_upstream_comes_back(fake: FakeOpenAi) -> None:
    async with one(fake, health_path="/boards") as found:
        fake.boards = None  # 404
        await found("GET", "/ready")
        assert (await found("GET", "/ready")).status_code == 503
        fake.boards = []
        for _ in range(100):
            if (await found("GET", "/ready")).status_code == 200:
                break
            await asyncio.sleep(0.05)
        assert (await found.chat()).status_code == 200


async def test_its_key_is_sent_and_never_the_clients(fake: FakeOpenAi) -> None:
    keyed = at(fake, "ok", key_env="GPU_KEY")
    async with house(keyed, environ={"GPU_KEY": " sk-secret \n"}) as found:
        await found.chat()
        assert fake.asked[-1].headers["authorization"] == "Bearer sk-secret"
    async with one(fake) as found:
        headers = {"authorization": "Bearer of-a-client", "x-api-key": "another"}
        body = {"model": "big", "messages": [{"role": "user", "content": "Hi"}]}
        await found("POST", "/v1/chat/completions", json=body, headers=headers)
        assert "authorization" not in fake.asked[-1].headers
        assert "x-api-key" not in fake.asked[-1].headers


async def test_no_more_requests_at_once_than_it_may_have(fake: FakeOpenAi) -> None:
    async with one(fake, concurrency=2) as found:
        fake.most = 0
        answers = await asyncio.gather(*(found.chat() for _ in range(8)))
        assert {one.status_code for one in answers} == {200}
        assert fake.most == 2


# -- control ------------------------------------------------------------------------------------


async def generation(found: UpstreamHouse) -> str:
    """Return the id of the one generation, once it has a token."""
    for _ in range(200):
        listed = (await found("GET", "/v1/generations")).json()["data"]
        if listed and listed[0]["tokens"]:
            return str(listed[0]["id"])
        await asyncio.sleep(0.02)
    raise AssertionError("there is none")


async def test_a_generation_is_listed_and_can_be_aborted_but_not_paused(fake: FakeOpenAi) -> None:
    async with one(fake, "hangs-in-mid-answer") as found:
        task = asyncio.create_task(found.chat())
        name = await generation(found)
        paused = await found("POST", f"/v1/generations/{name}/pause")
        assert paused.status_code == 400
        assert paused.json()["error"]["code"] == "upstream_unable"
        assert "gpu is an upstream" in paused.json()["error"]["message"]
        aborted = await found("POST", f"/v1/generations/{name}/abort")
        assert aborted.status_code == 200, aborted.text
        body = (await task).json()
        assert body["choices"][0]["finish_reason"] == "abort"
        assert body["choices"][0]["message"]["content"] == "one"


async def test_other_routers_list_and_abort_its_generations(fake: FakeOpenAi) -> None:
    async with one(fake, "hangs-in-mid-answer") as found:
        task = asyncio.create_task(found.chat())
        name = await generation(found)
        upstreams = found.upstreams
        assert [info.request_id for info in upstreams.infos()] == [f"{name}/0"]
        refused = upstreams.control(name, ControlAction.PAUSE, None)
        assert (len(refused.refused), refused.done, refused.known) == (1, (), True)
        assert not upstreams.control("chatcmpl-other", ControlAction.ABORT, None).known
        assert upstreams.control(name, ControlAction.ABORT, 0).done
        assert (await task).json()["choices"][0]["finish_reason"] == "abort"


class Peers:
    """The Router that has the generation, for another one."""

    def __init__(self, other: UpstreamHouse) -> None:
        self._of = other.upstreams

    async def unassigned(self) -> list[GenerationInfo]:
        return self._of.infos()

    async def control_unassigned(
        self, generation: str, action: ControlAction, choice: int | None
    ) -> RouterGenerations:
        return self._of.control(generation, action, choice)


async def test_a_call_at_another_router_has_the_same_answer(fake: FakeOpenAi) -> None:
    async with one(fake, "hangs-in-mid-answer") as found, one(fake) as other:
        task = asyncio.create_task(found.chat())
        name = await generation(found)
        calls = Generations(other.service, Peers(found))
        assert [entry["id"] for entry in (await calls.listed())["data"]] == [name]
        asked = ControlRequest()
        with pytest.raises(UpstreamUnable, match="gpu is an upstream"):
            await calls.control(name, ControlAction.PAUSE, asked)
        status, _ = await calls.control(name, ControlAction.ABORT, asked)
        assert status == 200
        assert (await task).json()["choices"][0]["finish_reason"] == "abort"


async def test_an_abort_of_everything_ends_what_runs_there(fake: FakeOpenAi) -> None:
    async with one(fake, "hangs-in-mid-answer") as found:
        task = asyncio.create_task(found.chat())
        await generation(found)
        found.service.unassigned.abort(Scope(), None)
        assert (await task).json()["choices"][0]["finish_reason"] == "abort"


async def test_the_answer_to_a_pause_says_what_becomes_of_upstreams(fake: FakeOpenAi) -> None:
    shared = group(f"{fake.url}/v1", "gpu", "sim-chat", model="ok")
    async with house(at(fake, "ok", name="alone"), shared, boards=FakeBoards.answering("a")) as of:
        answer = (await of("POST", "/pause?mode=wait")).json()
        goes_on = "takes no new requests; those that run go on"
        assert answer["upstreams"] == {"alone": goes_on, "gpu": goes_on}
        answer = (await of("POST", "/pause?mode=abort&model=sim-chat")).json()
        assert answer["upstreams"] == {"gpu": "takes no new requests; those that ran are aborted"}
        answer = (await of("POST", "/resume")).json()
        assert answer["upstreams"]["gpu"].startswith("takes requests")
        assert "upstreams" not in (await of("POST", "/pause?boards=a")).json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause?model=big", {}),
        ("/v1/models/unload", {"model": "big"}),
        ("/v1/boards/drain", {"boards": ["gpu"]}),
        ("/v1/boards/gpu/restart", {}),
        ("/v1/boards/gpu/measure", {}),
    ],
)
async def test_changes_of_an_upstream_alone_are_refused(
    fake: FakeOpenAi, path: str, body: dict[str, Any]
) -> None:
    async with one(fake) as found:
        answer = await found("POST", path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "upstream_unable")


async def test_lists_of_boards_calls_tell_that_it_cannot(fake: FakeOpenAi) -> None:
    async with one(fake) as found:
        answer = (await found("GET", "/v1/cache/kv/size")).json()
        assert answer["failed"][0]["board"] == "gpu"
        assert "tell what its KV cache holds" in answer["failed"][0]["message"]


def paused(mode: PauseMode) -> Desired:
    return Desired(epoch=5, pauses=(ActivePause("p", Scope(), mode),))


@pytest.mark.parametrize("mode", [PauseMode.WAIT, PauseMode.ABORT])
async def test_a_paused_cluster_sends_it_nothing(fake: FakeOpenAi, mode: PauseMode) -> None:
    async with one(fake) as found:
        found.head.desired = paused(mode)
        before = len(fake.asked)
        answer = await found.chat()
        assert answer.json()["error"]["code"] == "engine_paused"
        assert len(fake.asked) == before


async def test_requests_wait_for_the_end_of_a_pause_that_keeps(fake: FakeOpenAi) -> None:
    async with one(fake) as found:
        found.head.desired = paused(PauseMode.KEEP)
        before = len(fake.asked)
        task = asyncio.create_task(found.chat())
        await asyncio.sleep(0.2)
        assert len(fake.asked) == before
        assert not task.done()
        found.head.desired = Desired(epoch=6)
        await found("GET", "/ready")
        assert (await task).status_code == 200


# -- overflow -----------------------------------------------------------------------------------


async def test_boards_go_first_and_the_upstream_takes_the_overflow(fake: FakeOpenAi) -> None:
    hold = asyncio.Event()
    boards = FakeBoards.answering("a")
    script = boards.scripts["replica of a"][0]
    boards.scripts["replica of a"] = [[script[0], hold, *script[1:]]]
    shared = group(f"{fake.url}/v1", "gpu", "sim-chat", model="ok")
    async with house(shared, boards=boards) as found:
        first = asyncio.create_task(found.chat(model="sim-chat"))
        await eventually(lambda: boards.running == 1)
        second = await found.chat(model="sim-chat")
        assert second.headers["x-rkserve-board"] == "gpu"
        assert second.json()["choices"][0]["message"]["content"] == "one two three"
        assert second.json()["model"] == "sim-chat"
        # Token ids are the boards' own: such a request waits for one.
        third = asyncio.create_task(found.chat(model="sim-chat", logprobs=True))
        await asyncio.sleep(0.1)
        assert not third.done()
        hold.set()
        assert (await first).headers["x-rkserve-board"] == "a"
        assert (await third).headers["x-rkserve-board"] == "a"


async def test_the_upstream_serves_where_no_board_does(fake: FakeOpenAi) -> None:
    boards = FakeBoards([])
    shared = group(f"{fake.url}/v1", "gpu", "sim-chat", model="ok")
    async with house(shared, boards=boards) as found:
        answer = await found.chat(model="sim-chat")
        assert answer.headers["x-rkserve-board"] == "gpu"


async def test_a_board_answers_what_the_upstream_refused(fake: FakeOpenAi) -> None:
    hold = asyncio.Event()
    boards = FakeBoards.answering("a")
    script = boards.scripts["replica of a"][0]
    boards.scripts["replica of a"] = [[script[0], hold, *script[1:]], script]
    for model in ("refused", "busy", "closes", "forbidden"):
        hold.clear()
        boards.scripts["replica of a"] = [[script[0], hold, *script[1:]], script]
        shared = group(f"{fake.url}/v1", "gpu", "sim-chat", model=model)
        async with house(shared, boards=boards) as found:
            first = asyncio.create_task(found.chat(model="sim-chat"))
            await eventually(lambda: boards.running == 1)
            second = asyncio.create_task(found.chat(model="sim-chat"))
            await asyncio.sleep(0.1)
            hold.set()
            assert (await first).status_code == 200
            assert (await second).headers["x-rkserve-board"] == "a", model


# -- what it cannot do --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        pytest.param({"logprobs": True}, "logprobs", id="logprobs"),
        pytest.param({"pause_on": ["x"]}, "pause_on", id="pauses"),
        pytest.param({"use_cache": "a"}, "use_cache", id="prompt caches"),
        pytest.param({"return_token_ids": True}, "return_token_ids", id="token ids"),
        pytest.param({"top_k": 3}, "top_k", id="a key that is none of OpenAI's"),
        pytest.param({"guided_regex": "a+"}, "guided_regex", id="regular expressions"),
        pytest.param({"enable_thinking": False}, "chat_template_kwargs", id="thinking"),
    ],
)
async def test_parameters_that_it_cannot_honour_are_refused_by_name(
    fake: FakeOpenAi, extra: dict[str, Any], param: str
) -> None:
    async with one(fake) as found:
        before = len(fake.asked)
        answer = await found.chat(**extra)
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert (error["code"], error["param"]) == ("unsupported_parameter", param)
        assert "the upstream gpu" in error["message"]
        assert len(fake.asked) == before
        assert len(found.upstreams.calls) == 0


async def test_calls_about_tokens_and_vectors_are_refused(fake: FakeOpenAi) -> None:
    async with one(fake) as found:
        for path, body in (
            ("/v1/embeddings", {"input": "x"}),
            ("/tokenize", {"prompt": "x"}),
            ("/v1/rerank", {"query": "x", "documents": ["y"]}),
        ):
            answer = await found("POST", path, json={"model": "big", **body})
            assert answer.status_code == 400, (path, answer.text)
