"""A simulated rollout: the real ``control.rollout`` over boards that die and join."""

from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import dataclass
from random import Random

from rkserve.control import state_changes
from rkserve.control.calls import Strategy
from rkserve.control.rollout import (
    BoardAnswered,
    BoardJoined,
    BoardLeft,
    Event,
    FinishRollout,
    Step,
    advance,
    start,
)
from rkserve.control.rollout_plan import AdapterRolloutPlan, Move, MoveRequest
from rkserve.core.desired_state import AdapterVersion, Desired
from rkserve.core.messages import AdapterRef

MODEL, NAME = "paper", "law"


@dataclass(frozen=True, slots=True)
class Course:
    """The seconds that boards take for each move, and how often they fail.

    An adapter of ``adapter_mb`` goes from the head to the boards at ``uplink_mb_s`` in all.
    """

    load_s: float = 2.0
    hold_s: float = 0.1
    switch_s: float = 0.05
    adapter_mb: float = 40.0
    uplink_mb_s: float = 110.0
    dies: float = 0.01
    returns_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Converged:
    """A rollout's end in simulated seconds, with the CPU time of its decisions."""

    boards: int
    strategy: str
    state: str
    took_s: float
    staged_s: float
    lagging: int
    events: int
    decide_ms: float
    decide_p99_us: float
    died: int


class Rolling:
    """One rollout."""

    def __init__(
        self, boards: int, strategy: Strategy, seed: int, course: Course | None = None
    ) -> None:
        self._course = course or Course()
        self._rng = Random(f"{seed} {boards} {strategy.value}")
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = itertools.count()
        self._names = tuple(f"b{number:04}" for number in range(boards))
        self._strategy = strategy
        self._gone: set[str] = set()
        self._died = 0
        self._staged_s = 0.0
        self._spent_us: list[float] = []
        old, new = (_version(name) for name in ("v1", "v2"))
        self._desired = state_changes.commit(
            state_changes.begin(Desired(), MODEL, old), MODEL, NAME
        )
        self._plan = AdapterRolloutPlan(
            operation="op",
            model=MODEL,
            name=NAME,
            version=new,
            boards=self._names,
            strategy=strategy,
            max_unavailable=max(1, boards // 10),
        )

    def run(self) -> Converged:
        """Play it to its end."""
        now_s = 0.0
        began = time.thread_time()
        rollout, steps = start(self._plan, now_s)
        self._spent_us.append((time.thread_time() - began) * 1e6)
        finish = self._perform(steps, now_s)
        while finish is None:
            now_s, _, event = heapq.heappop(self._events)
            if not self._happens(event, now_s):
                continue
            began = time.thread_time()
            rollout, steps = advance(rollout, event, now_s)
            self._spent_us.append((time.thread_time() - began) * 1e6)
            if isinstance(event, BoardJoined) and event.board_id in rollout.boards:
                self._answer(Move(rollout.at), (event.board_id,), now_s)
            finish = self._perform(steps, now_s)
        ordered = sorted(self._spent_us)
        return Converged(
            boards=len(self._names),
            strategy=self._strategy.value,
            state=finish.state.value,
            took_s=now_s,
            staged_s=self._staged_s,
            lagging=len(finish.lagging),
            events=len(self._spent_us),
            decide_ms=sum(self._spent_us) / 1e3,
            decide_p99_us=ordered[int(0.99 * (len(ordered) - 1))],
            died=self._died,
        )

    def serving(self) -> set[str]:
        """Return the versions that boards give to requests now."""
        line = self._desired.line(MODEL, NAME)
        assert line is not None
        refs = [line.serves(board, "session") for board in self._names]
        return {ref.version for ref in refs if ref is not None}

    def _happens(self, event: Event, now_s: float) -> bool:
        """Return whether it happens: a board that has died sends nothing more."""
        if isinstance(event, BoardLeft):
            self._gone.add(event.board_id)
            self._died += 1
            back_s = now_s + self._course.returns_s
            heapq.heappush(self._events, (back_s, next(self._numbers), BoardJoined(event.board_id)))
            return True
        if isinstance(event, BoardJoined):
            self._gone.discard(event.board_id)
            return True
        if isinstance(event, BoardAnswered):
            if event.move is Move.STAGE:
                self._staged_s = now_s
            return event.board_id not in self._gone
        return True

    def _perform(self, steps: tuple[Step, ...], now_s: float) -> FinishRollout | None:
        for step in steps:
            if isinstance(step, FinishRollout):
                return step
            if isinstance(step, MoveRequest):
                self._desired = self._plan.apply(step, self._desired, now_s)
                self._answer(step.move, step.boards, now_s)
        return None

    def _answer(self, move: Move, boards: tuple[str, ...], now_s: float) -> None:
        course = self._course
        each_s = {Move.LOAD: course.load_s, Move.HOLD: course.hold_s, Move.SWITCH: course.switch_s}
        for number, board in enumerate(boards):
            took_s = each_s.get(move, 0.01) * (0.75 + self._rng.random() / 2)
            if move is Move.STAGE:  # the head's uplink is shared
                took_s = (number + 1) * course.adapter_mb / course.uplink_mb_s
            event: Event = BoardAnswered(move, board)
            if self._rng.random() < course.dies / 4:
                event = BoardLeft(board)
            heapq.heappush(self._events, (now_s + took_s, next(self._numbers), event))


def _version(name: str) -> AdapterVersion:
    digest = (name * 64)[:64]
    return AdapterVersion(AdapterRef(NAME, name, digest), 40_000_000)
