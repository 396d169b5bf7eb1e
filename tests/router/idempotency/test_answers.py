"""Requests with an ``Idempotency-Key`` at one Router, and at two of one node."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from rkserve.config.router import IdempotencyConfig, RouterConfig
from rkserve.core.errors import BoardFailed
from rkserve.core.messages import Delta
from rkserve.router.idempotency.answers import KeyedAnswers, LiveAnswer
from rkserve.router.idempotency.store import name_of
from tests.support.boards.fake_boards import (
    FakeBoards,
    Step,
    accepted,
    answer,
    eventually,
    finished,
    report,
)
from tests.support.boards.own_time import run_loop
from tests.support.http.router_house import CHAT, House, chat

KEY = {"Idempotency-Key": "order-7"}
REPLAYED = "idempotent-replayed"
WHOLE = chat(temperature=0)
STREAM = chat(temperature=0, stream=True)


def house(folder: Path, *steps: Step, **config: Any) -> House:
    """A Router on one board, with answers to keyed requests in a folder of its node."""
    boards = FakeBoards([report("a", queue_limit=9)], {"replica of a": [steps or _hello()]})
    once = IdempotencyConfig.model_validate(config)
    router = RouterConfig(idempotency=once, max_continuations=0)
    return House(boards, router, once=folder / "once")


def _hello() -> list[Step]:
    return answer("a", "Hel", "lo")


def ended(of: House) -> int:
    """The number of generations that the board has begun."""
    return len(of.boards.opened)


def spent(of: House) -> int:
    """The tokens of answers that its callers are charged for."""
    return sum(row.completion_tokens for row in of.service.metrics.usage.rows())


async def closed(*houses: House) -> None:
    for of in houses:
        assert of.service.keyed is not None
        await of.service.keyed.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(CHAT, WHOLE, id="chat"),
        pytest.param(CHAT, STREAM, id="chat, streamed"),
        pytest.param("/v1/completions", {"model": "sim-chat", "prompt": "a"}, id="completion"),
        pytest.param("/v1/responses", {"model": "sim-chat", "input": "a"}, id="response"),
        pytest.param(
            "/v1/responses",
            {"model": "sim-chat", "input": "a", "stream": True},
            id="response, streamed",
        ),
        pytest.param(
            "/v1/messages",
            {
                "model": "sim-chat",
                "max_tokens": 9,
                "messages": [{"role": "user", "content": "a"}],
                "stream": True,
            },
            id="message, streamed",
        ),
        pytest.param(
            "/api/chat",
            {"model": "sim-chat", "messages": [{"role": "user", "content": "a"}]},
            id="Ollama, streamed by default",
        ),
    ],
)
def test_a_repeat_gets_the_answer_of_the_first_request_and_generates_nothing(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    one, two = house(tmp_path), house(tmp_path)

    async def main() -> None:
        first = await one("POST", path, json=body, headers=KEY)
        assert (first.status_code, REPLAYED in first.headers) == (200, False), first.text
        for of in (one, two):  # another Router of the node, too
            again = await of("POST", path, json=body, headers=KEY)
            assert again.content == first.content
            assert again.headers["content-type"] == first.headers["content-type"]
            assert again.headers[REPLAYED] == "true"
        await closed(one, two)

    run_loop(main())
    assert (ended(one), ended(two)) == (1, 0)
    assert (spent(one), spent(two)) == (2, 0)
    one.expect_nothing_left()


def test_requests_without_a_key_and_those_with_another_are_answered_anew(tmp_path: Path) -> None:
    of = house(tmp_path)

    async def main() -> None:
        for headers in ({}, {}, KEY, {"Idempotency-Key": "order-8"}):
            found = await of("POST", CHAT, json=WHOLE, headers=headers)
            assert (found.status_code, REPLAYED in found.headers) == (200, False)
        await closed(of)

    run_loop(main())
    assert ended(of) == 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(CHAT, chat("Another", temperature=0), id="another body"),
        pytest.param(CHAT, STREAM, id="streamed instead"),
        pytest.param("/api/chat", WHOLE, id="another path"),
    ],
)
def test_another_request_with_a_key_is_refused(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    of = house(tmp_path)

    async def main() -> None:
        assert (await of("POST", CHAT, json=WHOLE, headers=KEY)).status_code == 200
        refused = await of("POST", path, json=body, headers=KEY)
        assert refused.status_code == 422
        assert "Idempotency-Key" in refused.text
        await closed(of)

    run_loop(main())
    assert ended(of) == 1


def test_a_key_without_sense_is_refused(tmp_path: Path) -> None:
    of = house(tmp_path)
    refused = run_loop(of("POST", CHAT, json=WHOLE, headers={"Idempotency-Key": "a b"}))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")


def test_callers_with_one_key_get_answers_of_their_own(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice-secret-key\nbob-secret-key\n", encoding="utf-8")
    boards = FakeBoards.answering("a")
    of = House(boards, RouterConfig(api_keys_file=keys), once=tmp_path / "once")

    async def main() -> None:
        ids = []
        for caller in ("alice", "bob", "alice"):
            headers = {**KEY, "Authorization": f"Bearer {caller}-secret-key"}
            found = await of("POST", CHAT, json=WHOLE, headers=headers)
            assert found.status_code == 200, found.text
            ids.append(found.json()["id"])
        assert ids[0] == ids[2] != ids[1]
        assert (await of("POST", CHAT, json=WHOLE, headers=KEY)).status_code == 401
        await closed(of)

    run_loop(main())
    assert ended(of) == 2


def test_a_repeat_joins_the_answer_that_is_being_made(tmp_path: Path) -> None:
    go_on = asyncio.Event()
    steps: list[Step] = [accepted("a"), Delta("Hel", (1,)), go_on, Delta("lo", (2,)), finished(2)]
    one, two = house(tmp_path, *steps), house(tmp_path)

    async def main() -> None:
        first = asyncio.create_task(one("POST", CHAT, json=STREAM, headers=KEY))
        await eventually(lambda: one.boards.running == 1)
        here = asyncio.create_task(one("POST", CHAT, json=STREAM, headers=KEY))
        there = asyncio.create_task(two("POST", CHAT, json=STREAM, headers=KEY))
        await asyncio.sleep(1.0)
        assert not here.done()
        assert not there.done()
        other = await two("POST", CHAT, json=WHOLE, headers=KEY)
        assert other.status_code == 422
        go_on.set()
        whole = (await first).text
        assert "Hel" in whole
        assert whole.endswith("data: [DONE]\n\n")
        assert (await here).text == (await there).text == whole
        await closed(one, two)

    run_loop(main())
    assert (ended(one), ended(two)) == (1, 0)


async def hang_up(of: House, body: dict[str, Any]) -> None:
    """Make a request, and leave once the board works on it."""
    asked = asyncio.create_task(of("POST", CHAT, json=body, headers=KEY))
    before = of.boards.running
    await eventually(lambda: of.boards.running > before)
    asked.cancel()
    await asyncio.wait({asked})


@pytest.mark.parametrize("body", [pytest.param(WHOLE, id="whole"), pytest.param(STREAM, id="sse")])
def test_an_answer_whose_client_is_lost_is_that_of_its_repeat(
    tmp_path: Path, body: dict[str, Any]
) -> None:
    go_on = asyncio.Event()
    of = house(tmp_path, accepted("a"), Delta("Hel", (1,)), go_on, Delta("lo", (2,)), finished(2))

    async def main() -> None:
        await hang_up(of, body)
        await asyncio.sleep(10.0)
        go_on.set()
        again = await of("POST", CHAT, json=body, headers=KEY)
        assert again.headers[REPLAYED] == "true"
        assert "lo" in again.text
        await closed(of)

    run_loop(main())
    assert ended(of) == 1


def test_an_answer_that_nobody_comes_back_for_is_given_up_and_made_anew_later(
    tmp_path: Path,
) -> None:
    of = house(tmp_path)
    endless: list[Step] = [accepted("a"), Delta("Hel", (1,)), asyncio.Event()]
    of.boards.scripts["replica of a"] = [endless, _hello()]

    async def main() -> None:
        await hang_up(of, STREAM)
        await asyncio.sleep(of.config.idempotency.linger_s - 1)
        assert of.boards.running == 1
        await asyncio.sleep(3)
        assert of.boards.running == 0
        again = await of("POST", CHAT, json=STREAM, headers=KEY)
        assert REPLAYED not in again.headers
        assert again.text.endswith("data: [DONE]\n\n")
        await closed(of)

    run_loop(main())
    assert ended(of) == 2


def test_a_repeat_at_another_router_keeps_an_answer_alive(tmp_path: Path) -> None:
    go_on = asyncio.Event()
    one = house(tmp_path, accepted("a"), Delta("Hel", (1,)), go_on, finished(1), linger_s=5.0)
    two = house(tmp_path, linger_s=5.0)

    async def main() -> None:
        await hang_up(one, STREAM)
        there = asyncio.create_task(two("POST", CHAT, json=STREAM, headers=KEY))
        await asyncio.sleep(60.0)
        assert one.boards.running == 1
        go_on.set()
        assert "Hel" in (await there).text
        await closed(one, two)

    # The store compares times of day, which do not go on with the loop's.
    run_loop(main())
    assert (ended(one), ended(two)) == (1, 0)


def test_what_failed_is_not_kept(tmp_path: Path) -> None:
    of = house(tmp_path)
    fails: list[Step] = [accepted("a"), Delta("Hel", (1,)), BoardFailed("a", "its library crashed")]
    of.boards.scripts["replica of a"] = [fails, fails, _hello()]

    async def main() -> list[httpx.Response]:
        invalid = await of("POST", CHAT, json={"model": "unknown"}, headers=KEY)
        assert invalid.status_code in (400, 404)
        found = [await of("POST", CHAT, json=WHOLE, headers=KEY) for _ in range(4)]
        await closed(of)
        return found

    found = run_loop(main())
    statuses = [one.status_code for one in found]
    assert statuses[-2:] == [200, 200]
    assert found[-1].headers[REPLAYED] == "true"
    assert 503 in statuses
    of.expect_nothing_left()


def test_a_long_answer_reaches_its_client_and_is_not_kept(tmp_path: Path) -> None:
    texts = ["word " * 50] * 40
    of = house(tmp_path, *answer("a", *texts), max_answer_bytes=1024)

    async def main() -> None:
        first = await of("POST", CHAT, json=STREAM, headers=KEY)
        assert first.text.count("word") == 2000
        assert first.text.endswith("data: [DONE]\n\n")
        again = await of("POST", CHAT, json=STREAM, headers=KEY)
        assert (again.status_code, again.json()["error"]["code"]) == (422, "answer_not_kept")
        await closed(of)

    run_loop(main())
    assert ended(of) == 1


def test_a_disk_that_fails_is_an_error_before_a_board_begins(tmp_path: Path) -> None:
    (tmp_path / "once").write_text("no folder", encoding="utf-8")
    of = house(tmp_path)

    async def main() -> None:
        refused = await of("POST", CHAT, json=WHOLE, headers=KEY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "idempotency_failed")
        assert (await of("POST", CHAT, json=WHOLE)).status_code == 200
        await closed(of)

    run_loop(main())
    assert ended(of) == 1


def test_a_router_that_ends_waits_for_no_client_to_come_back(tmp_path: Path) -> None:
    endless: list[Step] = [accepted("a"), Delta("Hel", (1,)), asyncio.Event()]
    of = house(tmp_path, *endless)

    async def main() -> float:
        await hang_up(of, STREAM)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await closed(of)
        return loop.time() - began_s

    assert run_loop(main()) < of.config.idempotency.linger_s / 2
    of.expect_nothing_left()


class Slow:
    """Makes answers that have no end the first time, and need a second to be given up."""

    def __init__(self) -> None:
        self.made = self.running = self.most = 0

    async def __call__(self, live: LiveAnswer) -> None:
        self.made += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            live.begin({})
            await live.add(b"answer")
            if self.made == 1:
                await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1.0)
            self.running -= 1


NAME, DIGEST = name_of("owner", "key"), "d" * 64


def test_a_repeat_while_an_answer_is_given_up_is_answered_anew_by_one_maker(tmp_path: Path) -> None:
    config, make = IdempotencyConfig(linger_s=5.0), Slow()

    async def main() -> None:
        keyed = KeyedAnswers(config, tmp_path / "once")
        first, _ = keyed.join(NAME, DIGEST, make)
        await asyncio.sleep(1.0)
        first.leave()
        assert first.task is not None
        await asyncio.sleep(config.linger_s + 0.5)
        assert not first.task.done()
        again, follows = keyed.join(NAME, DIGEST, make)
        assert (again is first, follows) == (False, False)
        assert [part async for part in again.read()] == [b"answer"]
        assert not again.replayed
        again.leave()
        await keyed.close()

    run_loop(main())
    assert (make.made, make.most) == (2, 1)


def test_a_client_that_comes_and_goes_during_the_last_look_renews_the_time(tmp_path: Path) -> None:
    config, make = IdempotencyConfig(linger_s=5.0), Slow()

    async def main() -> None:
        keyed = KeyedAnswers(config, tmp_path / "once")
        live, _ = keyed.join(NAME, DIGEST, make)
        await live.begun
        call = keyed._store.call

        async def visited(ask: Any) -> Any:
            found = await call(ask)
            keyed.join(NAME, DIGEST, make)[0].leave()
            keyed._store.call = call  # type: ignore[method-assign]  # one visit
            return found

        keyed._store.call = visited  # type: ignore[method-assign]  # in the midst of the look
        live.leave()
        await asyncio.sleep(config.linger_s + 4.0)
        assert live.task is not None
        assert make.running == 1
        await asyncio.sleep(config.linger_s)
        assert live.task.done()
        await keyed.close()

    run_loop(main())


def test_a_router_that_takes_a_key_over_makes_the_answer_and_says_so(tmp_path: Path) -> None:
    endless: list[Step] = [accepted("a"), Delta("Hel", (1,)), asyncio.Event()]
    one, two = house(tmp_path, *endless), house(tmp_path)

    async def main() -> None:
        first = asyncio.create_task(one("POST", CHAT, json=WHOLE, headers=KEY))
        await eventually(lambda: one.boards.running == 1)
        there = asyncio.create_task(two("POST", CHAT, json=WHOLE, headers=KEY))
        await asyncio.sleep(1.0)
        await closed(one)
        ended_first, made = await first, await there
        assert (ended_first.status_code, ended_first.headers["retry-after"]) == (503, "1")
        assert ended_first.json()["error"]["code"] == "answer_given_up"
        assert (made.status_code, REPLAYED in made.headers) == (200, False)
        await closed(two)

    run_loop(main())
    assert (ended(one), ended(two)) == (1, 1)


def test_an_error_after_early_headers_is_an_event_of_the_stream(tmp_path: Path) -> None:
    """Also one that no client has caused, and one in the midst of the answer."""
    of = house(tmp_path, accepted("a"), Delta("Hel", (1,)), asyncio.Event())
    late = of.config.headers_after_s + 1.0

    async def broken(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(late)
        raise RuntimeError("a defect")

    async def main() -> None:
        opens = of.service.open
        of.service.open = broken  # type: ignore[method-assign]  # a defect of this server
        found = await of("POST", CHAT, json=STREAM, headers=KEY)
        assert found.status_code == 200
        assert '"error"' in found.text
        assert "a defect" not in found.text

        async def slow(*args: Any, **rest: Any) -> Any:
            await asyncio.sleep(late)
            return await opens(*args, **rest)

        of.service.open = slow  # type: ignore[method-assign]  # as where boards are busy
        cut = asyncio.create_task(of("POST", CHAT, json=STREAM, headers=KEY))
        await asyncio.sleep(late)
        await eventually(lambda: of.boards.running == 1)
        await asyncio.sleep(1.0)
        await closed(of)
        text = (await cut).text
        assert "Hel" in text
        assert "answer_given_up" in text

    run_loop(main())
