"""Case (h), the token path: the same loads over every way that tokens can take through a cluster.

Each way has a Ray of its own, one after the other: HAProxy is switched on for a whole Ray. Nothing
is computed here; see ``tokenpath_figures``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.connection import WatchedConnection
from benchmarks.harness.exchange import Exchange
from benchmarks.harness.figures import flaws
from benchmarks.harness.processes import ANSWER_S, SLACK_S, BenchCrew, chat_body
from benchmarks.harness.prompts import NEW_TOKENS, PROMPT_TOKENS, messages_of_length, step_ms
from benchmarks.serving.cases import Bench, Load, Loaded
from rkserve.bench.connection import OK, request_bytes
from rkserve.bench.processes import hold
from rkserve.bench.systems import Note
from rkserve.deployments.haproxy import available

TOKEN_MS = 20.0
STREAMS = 32
STREAM_TOKENS = 128  # a call costs the same on every way, however long the answer is
SHORTEST_S = 16.0  # of a window: on the plain way answers take several times their own time
AGAINST = 8  # streams that long prompts must not hold up
PROMPT_BYTES = (15_000, 220_000)  # the second one fits no context of the runtime
PROMPTS_EACH = 5
REST_S = 0.7  # between long prompts
ALONE_RUNS = 6
TOO_LONG = 400
CEILING = Load(boards=3, clients=12, time_scale=0, new_tokens=512)


@dataclass(frozen=True, slots=True)
class Way:
    """One way of tokens. ``front``: HAProxy before the Routers, instead of Ray's Python proxy."""

    name: str
    front: bool
    channel: bool

    @property
    def args(self) -> dict[str, Any]:
        """The application's arguments."""
        return {"channel": self.channel}


PLAIN = Way("Python proxy, Ray streaming", front=False, channel=False)
FAST = Way("HAProxy, channel", front=True, channel=True)
BETWEEN = (
    Way("Python proxy, channel", front=False, channel=True),
    Way("HAProxy, Ray streaming", front=True, channel=False),
)


def ways(*, all_of_them: bool) -> list[Way]:
    """Return the plain way first and the fast one last, as far as this platform has them."""
    found = [PLAIN, *(BETWEEN if all_of_them else ()), FAST]
    return [way for way in found if available() or not way.front]


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """A long prompt, from its sending to the answer's headers: a board has it, or it is refused."""

    size: int
    sent_s: float
    answered_s: float


@dataclass
class Shown:
    """Long prompts beside streams. In the time of ``calm_s`` none was under way."""

    prompts: list[LongPrompt]
    against: list[Exchange]
    calm_s: tuple[float, float]


@dataclass
class Taken:
    """The measurements of one way. ``lone`` is one stream on a cluster of one board."""

    way: Way
    lone: Loaded
    one: Loaded
    many: Loaded
    shown: Shown
    ceiling: Loaded


@dataclass
class TokenPaths:
    """Everything of case (h). ``alone`` are runs of the binding without a cluster."""

    alone: list[Exchange]
    taken: list[Taken]


class TokenPath:
    """Case (h). ``folder`` takes the files of its Rays."""

    def __init__(self, folder: Path, note: Note) -> None:
        self._folder, self._say = folder, note

    def measure(
        self, found: Sequence[Way], seconds: float, done: Callable[[Taken], None]
    ) -> TokenPaths:
        """Measure each of these ways; ``done`` hears of each."""
        alone: list[Exchange] = []
        taken = []
        for number, way in enumerate(found):
            folder = self._folder / f"w{number}"
            folder.mkdir()
            crew = BenchCrew(folder, self._say, front=way.front)
            try:
                alone = alone or self._alone(crew)
                taken.append(self._take(crew, way, seconds))
            finally:
                crew.close()
            done(taken[-1])
        return TokenPaths(alone, taken)

    def _alone(self, crew: BenchCrew) -> list[Exchange]:
        self._say("the binding alone")
        child = crew.binding(Load(1, 1, 1.0).deployment.profile)
        messages = messages_of_length(crew.renderer, PROMPT_TOKENS, 0)
        ids = crew.renderer.chat(messages).ids
        command = {"do": "run", "ids": list(ids), "max_tokens": 2}
        return [Exchange.from_json(child.ask(command, ANSWER_S)) for _ in range(ALONE_RUNS)]

    def _take(self, crew: BenchCrew, way: Way, seconds: float) -> Taken:
        bench = Bench(crew)
        pace = TOKEN_MS / step_ms()
        many = Load(STREAMS, STREAMS, pace, STREAM_TOKENS, args=way.args)
        one = Load(STREAMS, 1, pace, args=way.args)
        lone = Load(1, 1, pace, args=way.args)
        ceiling = Load(CEILING.boards, CEILING.clients, 0, CEILING.new_tokens, args=way.args)
        alone = bench.loaded(lone, seconds / 2, 0.0)
        # A board's first answers are its slowest: all of them are warm before one is asked alone.
        together = bench.loaded(many, max(seconds, SHORTEST_S), 0.0)
        return Taken(
            way,
            lone=alone,
            one=bench.loaded(one, seconds / 2, seconds / 4),
            many=together,
            shown=self._long_prompts(crew),
            ceiling=bench.loaded(ceiling, seconds / 2, 0.0),
        )

    def _long_prompts(self, crew: BenchCrew) -> Shown:
        """Send long prompts while some streams go on, which are watched."""
        renderer, model = crew.renderer, crew.model.id
        asked = (messages_of_length(renderer, PROMPT_TOKENS, n) for n in range(AGAINST))
        bodies = [chat_body(model, messages, NEW_TOKENS) for messages in asked]
        lasts_s = len(PROMPT_BYTES) * PROMPTS_EACH * (REST_S + 1.0)
        start_s = time.monotonic() + 2.0
        until_s = start_s + 2 * lasts_s
        crew.send(bodies, clients=AGAINST, stagger_s=1.0, until_s=until_s)
        crew.sleep_until(start_s + lasts_s, "nothing but streams")
        prompts: list[LongPrompt] = []
        for number in range(PROMPTS_EACH):
            for size in PROMPT_BYTES:
                self._say(f"long prompts, {len(prompts)} so far")
                prompts.append(asyncio.run(_answered(crew, size, number)))
                time.sleep(REST_S)
        against = crew.exchanges(until_s - time.monotonic() + ANSWER_S + SLACK_S)
        hold(flaws(against, PROMPT_TOKENS, NEW_TOKENS))
        return Shown(prompts, against, (start_s, start_s + lasts_s))


async def _answered(crew: BenchCrew, size: int, number: int) -> LongPrompt:
    """Send a prompt and leave once it has been read: a board has it, or it was too long."""
    host, port = crew.address
    body = chat_body(crew.model.id, [{"role": "user", "content": _text(size, number)}], NEW_TOKENS)
    connection = await WatchedConnection.open(host, port)
    try:
        connection.send(request_bytes(host, port, body))
        await connection.reach(lambda answer: answer.status != 0, time.monotonic() + ANSWER_S)
        answered_s = time.monotonic()
        status = connection.so_far.status
        hold(
            []
            if status in (OK, TOO_LONG)
            else [f"a prompt of {size} bytes was answered by HTTP {status}"]
        )
        return LongPrompt(size, connection.leave().sent_s, answered_s)
    finally:
        connection.close()


def _text(size: int, number: int) -> str:
    """Words that no other prompt begins with."""
    words = f"Story number {number} of {size}: " + "the board and the model, one of many. " * size
    return words[:size]
