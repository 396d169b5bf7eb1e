"""Cases (a) to (d): runs of the binding, answers through the cluster, hang-ups and loads.

Nothing is computed here; see ``summary``. Cases (e) to (g), about one board, are in ``oneboard``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.harness.exchange import Exchange, HangUp
from benchmarks.harness.figures import flaws, flaws_of_hang_ups
from benchmarks.harness.processes import ANSWER_S, SLACK_S, BenchCrew, chat_body
from benchmarks.harness.prompts import (
    NEW_TOKENS,
    PROFILE,
    PROMPT_TOKENS,
    cycle_s,
    messages_of_length,
    step_ms,
)
from rkserve.bench.processes import (
    PROC,
    CommandProcess,
    CpuUse,
    ProcessMemory,
    hold,
    memory_of,
    snapshot,
)
from rkserve.bench.results import cores
from rkserve.bench.systems import SimulatedDeployment

PROMPTS = 16
WARM_UPS = 2
CLIENTS_PER_BOARD = 4
LEFT_TOKENS = 2000  # of an answer that its client leaves: two minutes of a board
LEFT_AFTER = (2, 8)  # events, of which the first brings no text
QUEUED_S = 0.2  # how long it has been there when its client is told so
NEXT_TOKENS = 2  # of the answer that waits behind it
SETTLE_S = 2.0  # after a deployment: Ray's start-up work is not the work of idling
# Prompts are alike and come again; each is measured as a new one.
DEPLOYMENT = SimulatedDeployment(PROFILE, prefix_reuse=False)


@dataclass(frozen=True, slots=True)
class Load:
    """One load of cases (c) and (d)."""

    boards: int
    clients: int
    time_scale: float
    new_tokens: int = NEW_TOKENS
    args: Mapping[str, Any] = field(default_factory=dict)  # of the application, besides

    @property
    def name(self) -> str:
        """The name in tables."""
        parts = [
            "1 board" if self.boards == 1 else f"{self.boards} boards",
            "1 client" if self.clients == 1 else f"{self.clients} clients",
        ]
        if self.new_tokens != NEW_TOKENS:
            parts.append(f"{self.new_tokens} tokens")
        if 0 < self.time_scale < 1:
            parts.append(f"{1 / self.time_scale:.0f} times as fast")
        return ", ".join(parts)

    @property
    def deployment(self) -> SimulatedDeployment:
        """The deployment. Boards that are faster than real ones would only measure the disk."""
        park = self.time_scale == 1
        # Rates are told apart by boards, which only headers name that come after the board's word.
        named = {"router": {"headers_after_s": ANSWER_S}, **self.args}
        return replace(
            DEPLOYMENT, boards=self.boards, time_scale=self.time_scale, park=park, args=named
        )

    @property
    def case(self) -> str:
        """The case that it belongs to."""
        return "(c)" if self.time_scale == 1 else "(d)"


@dataclass
class Pair:
    """Cases (a) and (b): the same runs without and through the cluster, in turns."""

    alone: list[Exchange] = field(default_factory=list)
    through: list[Exchange] = field(default_factory=list)
    cpu: CpuUse = field(default_factory=lambda: CpuUse(cores()))


@dataclass
class Loaded:
    """A load of cases (c) and (d). The window is from ``start_s`` to ``end_s``."""

    load: Load
    exchanges: list[Exchange]
    start_s: float
    end_s: float
    load_end_s: float
    cpu: CpuUse
    memories: dict[str, list[ProcessMemory]]
    idle: CpuUse


class Bench:
    """Cases (a) to (d) on a crew."""

    def __init__(self, crew: BenchCrew) -> None:
        self._crew = crew
        renderer = crew.renderer
        self._messages = [
            messages_of_length(renderer, PROMPT_TOKENS, number) for number in range(PROMPTS)
        ]
        self._ids = [renderer.chat(messages).ids for messages in self._messages]
        self._alone: CommandProcess | None = None

    # -- the cases ----------------------------------------------------------------------------

    def pair(self, rounds: int, *, through: bool) -> Pair:
        """Make ``rounds`` runs alone and as many through the cluster, in turns."""
        found = Pair()
        if through:
            self._crew.deploy(DEPLOYMENT)
            for warm_up in range(WARM_UPS):
                self._one_answer(warm_up)
        for warm_up in range(WARM_UPS):
            self._one_run(warm_up)
        for number in range(rounds):
            self._crew.note(f"round {number + 1} of {rounds}")
            # The order changes so that what drifts within a round hits both alike.
            for is_alone in (number % 2 == 0, number % 2 == 1):
                if is_alone:
                    found.alone.append(self._one_run(number))
                elif through:
                    found.through.append(self._metered_answer(number, found.cpu))
        return found

    def hang_ups(self, rounds: int) -> list[HangUp]:
        """Leave ``rounds`` answers of a single board, each at another moment of a decode step."""
        # Headers tell the client that its request is in the queue: it need not wait long for them.
        self._crew.deploy(replace(DEPLOYMENT, args={"router": {"headers_after_s": QUEUED_S}}))
        rng = random.Random(0)
        found = []
        for number in range(rounds):
            self._crew.note(f"hang-up {number + 1} of {rounds}")
            found.append(self._one_hang_up(number, rng))
        hold(flaws_of_hang_ups(found, PROMPT_TOKENS, NEXT_TOKENS))
        return found

    def loaded(self, load: Load, seconds: float, idle_s: float) -> Loaded:
        """Keep boards saturated and measure a window of ``seconds``."""
        self._crew.deploy(load.deployment)
        idle = self._idle(idle_s) if idle_s else CpuUse(cores())
        answer_s = cycle_s(load.new_tokens) * load.time_scale
        warm_s, tail_s = max(2.0, 2.0 * answer_s), max(0.5, 1.5 * answer_s)
        start_s = time.monotonic() + warm_s + 0.5
        end_s = start_s + seconds
        self._send(
            clients=load.clients,
            stagger_s=answer_s,
            until_s=end_s + tail_s,
            new_tokens=load.new_tokens,
        )
        cpu = CpuUse(cores())
        self._crew.sleep_until(start_s, "warming up")
        before = self._crew.read()
        self._crew.sleep_until(end_s, "measuring")
        cpu.add(before, self._crew.read())
        memories = memory_of(PROC, snapshot(PROC, self._crew.pids()))
        exchanges = self._crew.exchanges(tail_s + ANSWER_S)
        _hold_to(exchanges, load.new_tokens)
        return Loaded(load, exchanges, before.at_s, end_s, end_s + tail_s, cpu, memories, idle)

    # -- one answer ---------------------------------------------------------------------------

    def _one_run(self, number: int) -> Exchange:
        if self._alone is None:
            self._alone = self._crew.binding(PROFILE)
        ids = self._ids[number % PROMPTS]
        command = {"do": "run", "ids": ids, "max_tokens": NEW_TOKENS}
        return Exchange.from_json(self._alone.ask(command, ANSWER_S))

    def _one_answer(self, number: int) -> Exchange:
        # As the loads of (c), so that nothing differs but the number of clients.
        self._send(
            clients=1,
            stagger_s=0.0,
            until_s=time.monotonic() + ANSWER_S,
            new_tokens=NEW_TOKENS,
            requests_each=1,
            first=number,
        )
        exchanges = self._crew.exchanges(ANSWER_S + SLACK_S)
        _hold_to(exchanges, NEW_TOKENS)
        return exchanges[0]

    def _one_hang_up(self, number: int, rng: random.Random) -> HangUp:
        leaving, waiting = (self._messages[(number + k) % PROMPTS] for k in range(2))
        model = self._crew.model.id
        return HangUp.from_json(
            self._crew.hang_up(
                leaving=chat_body(model, leaving, LEFT_TOKENS),
                waiting=chat_body(model, waiting, NEXT_TOKENS),
                events=rng.randrange(*LEFT_AFTER),
                pause_s=rng.uniform(0, step_ms() / 1e3),
            )
        )

    def _metered_answer(self, number: int, cpu: CpuUse) -> Exchange:
        before = self._crew.read()
        answer = self._one_answer(number)
        cpu.add(before, self._crew.read())
        return answer

    def _idle(self, seconds: float) -> CpuUse:
        cpu = CpuUse(cores())
        self._crew.sleep_until(time.monotonic() + SETTLE_S, "settling")
        before = self._crew.read()
        self._crew.sleep_until(before.at_s + seconds, "idling")
        cpu.add(before, self._crew.read())
        return cpu

    # -- the crew -----------------------------------------------------------------------------

    def _send(self, *, new_tokens: int, first: int = 0, **command: float) -> None:
        order = [(first + index) % PROMPTS for index in range(PROMPTS)]
        model = self._crew.model.id
        bodies = [chat_body(model, self._messages[index], new_tokens) for index in order]
        self._crew.send(bodies, **command)


def _hold_to(exchanges: Sequence[Exchange], new_tokens: int) -> None:
    """Raise ``BenchFailed`` where an answer was not what is measured here."""
    found = flaws(exchanges, PROMPT_TOKENS, new_tokens)
    hold(found if exchanges else ["no answer at all"])
