"""Work on long bodies off the event loop: few at once, and the memory given back."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rkserve.core.errors import RateLimited, RequestError
from rkserve.core.run_params import Guide, GuideKind
from rkserve.router.off_loop import KEPT, GrammarChecker, off_loop
from rkserve.sampling.trial import MAX_CHARS
from tests.support.boards.fake_boards import FakeBoards
from tests.support.http.router_house import CHAT, FOLDER, House, chat

pytestmark = pytest.mark.slow


def test_few_long_bodies_are_worked_on_at_once_and_the_loop_is_free() -> None:
    gate, running, most = threading.Event(), 0, 0
    lock, both = threading.Lock(), threading.Event()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 2:
                both.set()
        assert gate.wait(30)
        with lock:
            running -= 1

    async def main() -> None:
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(off_loop(10**6, work)) for _ in range(6)]
        assert await asyncio.to_thread(both.wait, 30)
        # Counting has a thread of its own, and is not behind them.
        assert await asyncio.wait_for(off_loop(10**6, lambda: 5, counts=True), 30) == 5
        left = tasks.pop()
        left.cancel()
        gate.set()
        await asyncio.gather(*tasks)
        assert most == 2

    asyncio.run(main())


MEMORY = """
import asyncio, sys
from pathlib import Path
from rkserve.router.off_loop import off_loop
from rkserve.api.prompting.tokenizer import Tokenizer

def rss_mb():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6

async def main():
    tokenizer = Tokenizer(Path(sys.argv[1]))
    text = "The quick brown fox jumps over it. " * 15_000
    tokenizer.encode(text[:1000], add_special_tokens=False)
    before = rss_mb()
    work = lambda: len(tokenizer.encode(text, add_special_tokens=False))
    await asyncio.gather(*(off_loop(len(text), work) for _ in range(4)))
    print(rss_mb() - before)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and asks glibc")
def test_the_memory_of_long_texts_is_given_back() -> None:
    # Without that the process keeps more than 100 MB.
    command = [sys.executable, "-c", MEMORY, str(FOLDER / "tokenizer.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 50


# -- grammars are tried in a process of their own: what takes too long or too much is a 400 --


def schema(value: Any) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(value))


GOOD = schema({"type": "integer"})
BAD = schema({"not": {}})
# An intersection whose parts llguidance multiplies out.
HOSTILE = schema({"allOf": [{"type": "string", "pattern": f"a{n}"} for n in range(200)]})


@asynccontextmanager
async def guiding(**rules: Any) -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(**rules)
    try:
        yield made
    finally:
        await made.close()


async def test_each_grammar_gets_its_own_answer() -> None:
    async with guiding(waiting_per_key=KEPT + 10) as made:

        async def ask(guide: Guide) -> bool:
            try:
                await made.check(guide, "x")
            except RequestError as exc:
                return exc.param != "x"
            return True

        asked = [GOOD, BAD, GOOD, *(schema({"const": n}) for n in range(KEPT + 3)), BAD]
        found = await asyncio.gather(*map(ask, asked))
        assert found == [guide != BAD for guide in asked]


async def test_what_takes_too_long_is_refused_and_the_next_one_is_not() -> None:
    async with guiding() as made:
        with pytest.raises(RequestError, match=r"longer than 2 s|memory") as caught:
            await made.check(HOSTILE, "response_format")
        assert caught.value.param == "response_format"
        await made.check(GOOD, "response_format")
        with pytest.raises(RequestError, match=r"longer than 2 s|memory"):
            await made.check(HOSTILE, "response_format")  # remembered


async def test_who_leaves_while_a_grammar_is_tried_leaves_no_answer_to_the_next() -> None:
    async with guiding() as made:
        leaves = asyncio.create_task(made.check(HOSTILE, "x"))
        await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.wait({leaves})
        assert leaves.cancelled()
        with pytest.raises(RequestError, match="Unimplemented"):
            await made.check(BAD, "x")
        await made.check(GOOD, "x")


class Gated(GrammarChecker):
    """Trials that end when the test says so."""

    def __init__(self, **rules: Any) -> None:
        super().__init__(**rules)
        self.begun: list[Guide] = []
        self.ended: list[Guide] = []
        self.gates: dict[Guide, asyncio.Event] = {}

    async def _tried(self, guide: Guide) -> str | None:
        self.begun.append(guide)
        try:
            await self.gates.setdefault(guide, asyncio.Event()).wait()
        finally:
            self.ended.append(guide)
        return None


def guides(letter: str, count: int) -> list[Guide]:
    return [schema({"const": f"{letter}{n}"}) for n in range(count)]


def checks(of: GrammarChecker, flow: str, some: list[Guide]) -> list[asyncio.Task[None]]:
    loop = asyncio.get_running_loop()
    return [loop.create_task(of.check(guide, "x", flow)) for guide in some]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_known_grammar_waits_for_no_trial() -> None:
    made = Gated(keys=True)
    (known,) = checks(made, "b", [GOOD])
    await settle()
    made.gates[GOOD].set()
    await known
    hostile = checks(made, "a", guides("a", 10))
    await settle()
    assert made.begun != [GOOD]
    # It ends without one turn of the loop.
    with pytest.raises(StopIteration):
        made.check(GOOD, "x", "b").send(None)
    await made.close()
    await asyncio.wait(hostile)


async def test_one_key_never_has_all_processes_and_keys_take_turns() -> None:
    made = Gated(keys=True, processes=2)
    a, b, c = guides("a", 5), guides("b", 2), guides("c", 2)
    tasks = checks(made, "a", a)
    await settle()
    assert made.begun == a[:1]
    tasks += checks(made, "b", b)
    await settle()
    assert made.begun == [a[0], b[0]]
    tasks += checks(made, "c", c)
    await settle()
    made.gates[a[0]].set()
    await settle()
    assert made.begun == [a[0], b[0], c[0]]  # and not a[1], which came earlier
    for guide in (*a, *b, *c):
        made.gates.setdefault(guide, asyncio.Event()).set()
    await asyncio.gather(*tasks)
    assert sorted(made.begun, key=str) == sorted([*a, *b, *c], key=str)


async def test_without_keys_all_processes_are_used() -> None:
    made = Gated(processes=2)
    tasks = checks(made, "", guides("a", 5))
    await settle()
    assert len(made.begun) == 2
    await made.close()
    await asyncio.wait(tasks)


async def test_so_many_of_one_key_may_wait_and_another_key_may_still_come() -> None:
    made = Gated(keys=True, waiting_per_key=3)
    tasks = checks(made, "a", guides("a", 5))
    await settle()
    (refused,) = [task for task in tasks if task.done()]
    error = refused.exception()
    assert isinstance(error, RateLimited)
    assert error.http_status == 429
    assert error.retry_after_s
    (other,) = checks(made, "b", [GOOD])
    await settle()
    made.gates[GOOD].set()
    await other
    await made.close()
    await asyncio.wait(tasks)


async def test_a_trial_ends_with_the_last_request_that_waits_for_it() -> None:
    made = Gated(keys=True)
    first, second = checks(made, "a", [GOOD, GOOD])
    (queued,) = checks(made, "a", [BAD])
    await settle()
    assert made.begun == [GOOD]
    first.cancel()
    queued.cancel()
    await settle()
    assert made.ended == []
    second.cancel()
    await settle()
    assert made.ended == [GOOD]
    assert made.begun == [GOOD]  # the one in the queue has left it
    (again,) = checks(made, "a", [BAD])
    await settle()
    made.gates[BAD].set()
    await again


async def test_a_key_with_many_grammars_displaces_its_own_results_only() -> None:
    made = Gated(keys=True)
    for flow, some in (("b", [GOOD]), ("a", guides("a", KEPT + 10))):
        for guide in some:
            made.gates[guide] = asyncio.Event()
            made.gates[guide].set()
            await made.check(guide, "x", flow)
    begun = len(made.begun)
    await made.check(GOOD, "x", "b")
    assert len(made.begun) == begun


async def test_the_grammar_of_another_key_is_tried_as_if_it_were_new() -> None:
    made = Gated(keys=True)
    made.gates[GOOD] = asyncio.Event()
    made.gates[GOOD].set()
    for flow in ("b", "c"):
        await made.check(GOOD, "x", flow)
    assert made.begun == [GOOD, GOOD]


async def test_too_many_new_grammars_are_a_429_that_is_counted() -> None:
    house = House(FakeBoards.answering("a"))
    made = Gated(waiting_per_key=1, processes=1)
    house.service.guiding = made
    waiting = checks(made, "", guides("a", 2))
    await settle()
    asks = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 5}}}
    refused = await house("POST", CHAT, json=chat(response_format=asks))
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(refused.headers["retry-after"]) > 0
    assert house.metric("rkserve_rate_limited_total") == 1
    await made.close()
    await asyncio.wait(waiting)
    house.expect_nothing_left()


async def test_a_hang_up_ends_the_process_that_tries_its_grammar() -> None:
    async with guiding(processes=1) as made:
        await made.check(GOOD, "x")
        tasks = checks(made, "a", [HOSTILE])
        await settle()
        tasks[0].cancel()
        await asyncio.wait(tasks)
        await made.check(schema({"const": 1}), "x")  # by a process that works on nothing else


async def test_a_grammar_that_is_too_long_is_not_even_tried() -> None:
    async with guiding() as made:
        with pytest.raises(RequestError, match="characters"):
            await made.check(Guide(GuideKind.REGEX, "a" * (MAX_CHARS + 1)), "x")
