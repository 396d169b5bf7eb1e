"""The Router's queue without boards: deadlines, bounds, what is told, and what overload does."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from rkserve.core.errors import DeadlineUnreachable, QueueFull, QueueTimeout
from rkserve.router.queue.admission import AdmissionQueue, Capacity, QueueEntry, QueueTerms
from rkserve.router.queue.reservation import (
    AnswerTiming,
    RequestSize,
    ServiceTime,
    ServiceTimeModel,
)

SECOND = ServiceTime(1000.0, 1000.0)


def supply(places: int = 1, free: int = 0, limit: int = 100, **rest: float) -> Capacity:
    """Boards that are busy, with room in the queue."""
    return Capacity(places, free, limit, **rest)  # type: ignore[arg-type]


def until(deadline_s: float, timeout_s: float | None = None) -> QueueTerms:
    """A request that came at 0 and is of no use later."""
    return QueueTerms(deadline_s=deadline_s, timeout_s=timeout_s or deadline_s)


def offered(
    of: AdmissionQueue[str], what: str = "x", claim: QueueTerms | None = None, now_s: float = 0.0
) -> QueueEntry[str]:
    """Queue one that takes a second."""
    return of.offer(what, claim or QueueTerms(), SECOND, supply(), now_s)[0]


def names(of: AdmissionQueue[str]) -> list[str]:
    return [ticket.what for ticket in of.order()]


# -- deadlines ------------------------------------------------------------------------------------


def test_what_cannot_be_ready_in_time_is_refused_at_once_and_told_when_to_come_back() -> None:
    of: AdmissionQueue[str] = AdmissionQueue(300.0)
    for _ in range(5):
        offered(of)
    with pytest.raises(DeadlineUnreachable) as caught:
        offered(of, "late", until(3.0))
    error = caught.value
    assert error.needs_s == pytest.approx(6.0)
    assert error.retry_after_s == 3, "then three of the five are done"
    assert len(of) == 5
    offered(of, "in time", until(6.5))


def test_more_places_make_a_shorter_wait() -> None:
    of: AdmissionQueue[str] = AdmissionQueue(300.0)
    for _ in range(5):
        offered(of)
    of.offer("x", until(3.0), SECOND, supply(places=4), 0.0)


def test_what_would_be_late_on_an_idle_cluster_is_not_asked_to_come_back() -> None:
    of: AdmissionQueue[str] = AdmissionQueue(300.0)
    with pytest.raises(DeadlineUnreachable) as caught:
        of.offer("x", until(0.5), SECOND, supply(free=1), 0.0)
    assert caught.value.retry_after_s is None
    assert "0.5 s" in caught.value.message


def test_before_anything_is_known_nothing_is_refused_for_its_deadline() -> None:
    of: AdmissionQueue[str] = AdmissionQueue(300.0)
    ticket, _ = of.offer("x", until(0.001), None, supply(free=1), 0.0)
    assert names(of) == ["x"]
    assert ticket.start_by_s == pytest.approx(0.001)


def test_work_that_has_become_late_in_the_queue_is_never_started() -> None:
    of: AdmissionQueue[str] = AdmissionQueue(300.0)
    offered(of, "late", until(3.0))
    patient = offered(of, "patient")
    assert of.next_event_s() == pytest.approx(2.0), "a second before the deadline"
    assert of.expire(1.99) == []
    ((ticket, error),) = of.expire(2.0)
    assert (ticket.what, type(error)) == ("late", DeadlineUnreachable)
    assert names(of) == ["patient"]
    assert of.next_event_s() == patient.since_s + 300.0


def test_a_wait_that_is_too_long_ends() -> None:
    of: AdmissionQueue[str] = AdmissionQueue(5.0)
    offered(of)
    assert of.next_event_s() == 5.0
    ((_, error),) = of.expire(5.0)
    assert isinstance(error, QueueTimeout)
    assert of.next_event_s() is None


def test_who_left_is_not_said_to_have_waited_too_long() -> None:
    of: AdmissionQueue[str] = AdmissionQueue(5.0)
    gone = offered(of)
    of.withdraw(gone)
    of.withdraw(gone)
    assert of.expire(10.0) == []
    assert of.next_event_s() is None


def test_what_was_let_in_before_is_ahead_and_has_no_deadline_any_more() -> None:
    of: AdmissionQueue[str] = AdmissionQueue(300.0)
    offered(of, "first", QueueTerms(priority=-5))
    of.readmit("back", until(0.1), SECOND, 0.0, ahead=True)
    assert names(of) == ["back", "first"]
    assert of.expire(1.0) == []


def test_what_has_to_look_again_keeps_its_deadline_and_the_time_that_it_waited() -> None:
    of: AdmissionQueue[str] = AdmissionQueue(5.0)
    of.readmit("late", until(3.0), SECOND, 1.0)
    of.readmit("patient", QueueTerms(), SECOND, 1.0)
    offered(of, "urgent", QueueTerms(priority=-5))
    assert names(of) == ["urgent", "late", "patient"]
    assert [ticket.what for ticket, _ in of.expire(2.0)] == ["late"]
    assert [ticket.what for ticket, _ in of.expire(6.0)] == ["urgent", "patient"]


# -- bounds ---------------------------------------------------------------------------------------


def test_a_full_queue_turns_away_by_the_time_that_it_takes_to_drain() -> None:
    of: AdmissionQueue[str] = AdmissionQueue(300.0)
    bounds = supply(places=2, limit=4)
    for _ in range(4):
        of.offer("x", QueueTerms(), SECOND, bounds, 0.0)
    with pytest.raises(QueueFull) as caught:
        of.offer("x", QueueTerms(), SECOND, bounds, 0.0)
    assert (caught.value.queued, caught.value.retry_after_s) == (4, 2)


def test_what_waits_at_the_boards_counts_too() -> None:
    of: AdmissionQueue[str] = AdmissionQueue(300.0)
    with pytest.raises(QueueFull) as caught:
        of.offer("x", QueueTerms(), None, supply(limit=3, elsewhere=3, typical_ms=2000.0), 0.0)
    assert (caught.value.queued, caught.value.retry_after_s) == (3, 6)


def test_a_queue_without_room_still_lets_one_in_that_starts_at_once() -> None:
    of: AdmissionQueue[str] = AdmissionQueue(300.0)
    of.offer("x", QueueTerms(), SECOND, supply(free=1, limit=0), 0.0)
    with pytest.raises(QueueFull):
        of.offer("x", QueueTerms(), SECOND, supply(free=0, limit=0), 0.0)


def test_a_more_urgent_one_pushes_the_least_urgent_out() -> None:
    of: AdmissionQueue[str] = AdmissionQueue(300.0)
    bounds = supply(limit=2)
    of.offer("later", QueueTerms(priority=5), SECOND, bounds, 0.0)
    of.offer("normal", QueueTerms(), SECOND, bounds, 0.0)
    _, left = of.offer("urgent", QueueTerms(priority=-5), SECOND, bounds, 0.0)
    assert left is not None
    assert left.what == "later"
    assert names(of) == ["urgent", "normal"]
    assert of.by_priority() == {-5: 1, 0: 1}


def test_what_runs_counts_as_wait_by_what_is_left_of_it() -> None:
    of: AdmissionQueue[str] = AdmissionQueue(300.0)
    running = offered(of)
    of.start(running, 0.0)
    ticket = offered(of, "next", until(2.5), 0.4)
    assert ticket.start_by_s == 1.5
    of.withdraw(ticket)
    with pytest.raises(DeadlineUnreachable):
        offered(of, "too late", until(1.9), 0.4)  # 0.6 s of the other one are left
    of.ended(running, 500.0)
    offered(of, "now", until(1.9), 0.5)


# -- what is expected -----------------------------------------------------------------------------


def took(asked: RequestSize, tokens: int, *, slow: float = 1.0) -> AnswerTiming:
    """A millisecond for a token of the prompt, ten for one of the answer."""
    prefill_ms, decode_ms = 1.0 * asked.prompt_tokens, 10.0 * tokens
    held_ms = (prefill_ms + decode_ms) * slow
    return AnswerTiming(asked.prompt_tokens, prefill_ms, tokens, decode_ms, tokens, held_ms)


def test_nothing_is_expected_before_some_answers_have_ended() -> None:
    of, asked = ServiceTimeModel(), RequestSize(100, 50)
    assert of.of(asked) is None
    assert of.typical_ms is None
    for _ in range(3):
        of.observe(asked, took(asked, 50))
    assert of.of(asked) is None


def test_what_is_expected_follows_prompt_and_limit() -> None:
    of, asked = ServiceTimeModel(), RequestSize(100, 50)
    for _ in range(20):
        of.observe(asked, took(asked, 50))
    found = of.of(RequestSize(200, 60))
    assert found is not None
    assert found.likely_ms == pytest.approx(200 + 500, rel=0.05), "such limits give 50 tokens"
    assert found.safe_ms >= found.likely_ms
    longer = of.of(RequestSize(100, 1000))
    assert longer is not None
    assert longer.likely_ms == pytest.approx(100 + 10_000, rel=0.05), "of such nothing is known"


def test_answers_that_end_early_and_prompts_that_are_cached_are_learned() -> None:
    of, asked = ServiceTimeModel(), RequestSize(1000, 500)
    cached = AnswerTiming(100, 100.0, 20, 200.0, 20, 300.0)
    for _ in range(60):
        of.observe(asked, cached)
    found = of.of(asked)
    assert found is not None
    assert found.likely_ms == pytest.approx(300.0, rel=0.05)


def test_the_more_it_varies_the_more_time_is_safe() -> None:
    def spread(*slow: float) -> float:
        of, asked = ServiceTimeModel(), RequestSize(100, 50)
        for _ in range(30):
            for factor in slow:
                of.observe(asked, took(asked, 50, slow=factor))
        found = of.of(asked)
        assert found is not None
        return found.safe_ms - found.likely_ms

    assert spread(1.0, 1.0) < 100.0
    assert spread(1.0, 3.0) > 400.0


# -- overload, in a time of its own ---------------------------------------------------------------


@dataclass
class Shop:
    """Boards that serve from the queue, and clients that come at random and do not wait for others.

    A request takes between half and one and a half times ``mean_ms``, which nobody knows before.
    """

    boards: int = 4
    limit: int = 64
    mean_ms: float = 1000.0
    seed: int = 7
    done: Counter[str] = field(default_factory=Counter)
    in_time: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    late: int = 0
    waits_s: list[float] = field(default_factory=list)

    def run(
        self,
        load: float,
        seconds: float,
        timeout_s: float,
        owners: dict[str, tuple[float, QueueTerms]],
    ) -> Shop:
        """``load`` is in capacities; owners have shares of it."""
        rng = random.Random(self.seed)
        queue: AdmissionQueue[str] = AdmissionQueue(300.0)
        expectation, asked = ServiceTimeModel(), RequestSize(1, 100)
        busy: list[tuple[float, int, QueueEntry[str], float]] = []
        per_s = load * self.boards / (self.mean_ms / 1e3)
        arrivals = _arrivals(rng, per_s, seconds, [(n, s) for n, (s, _) in owners.items()])
        number = 0
        while arrivals or busy:
            comes = bool(arrivals) and (not busy or arrivals[0][0] < busy[0][0])
            now_s = arrivals[0][0] if comes else busy[0][0]
            if comes:
                base = owners[owner := arrivals.pop(0)[1]][1]
                claim = QueueTerms(owner, base.weight, base.priority, now_s + timeout_s, timeout_s)
                bounds = supply(self.boards, self.boards - len(busy), self.limit)
                self._offer(queue, claim, expectation.of(asked), bounds, now_s)
            else:
                _, _, ticket, ms = heapq.heappop(busy)
                queue.ended(ticket, ms)
                expectation.observe(asked, AnswerTiming(0, 0.0, 100, ms, 100, ms))
                self._count(ticket, now_s)
            for ticket, _ in queue.expire(now_s):
                self.refused[ticket.what] += 1
            while len(busy) < self.boards and len(queue):
                ticket = next(queue.order())
                queue.start(ticket, now_s)
                self.waits_s.append(now_s - ticket.since_s)
                ms = self.mean_ms * rng.uniform(0.5, 1.5)
                number += 1
                heapq.heappush(busy, (now_s + ms / 1e3, number, ticket, ms))
        return self

    def _offer(
        self,
        queue: AdmissionQueue[str],
        claim: QueueTerms,
        expected: ServiceTime | None,
        bounds: Capacity,
        now_s: float,
    ) -> None:
        try:
            _, left = queue.offer(claim.flow, claim, expected, bounds, now_s)
        except (QueueFull, DeadlineUnreachable):
            self.refused[claim.flow] += 1
        else:
            if left is not None:
                self.refused[left.what] += 1

    def _count(self, ticket: QueueEntry[str], now_s: float) -> None:
        self.done[ticket.what] += 1
        assert ticket.terms.deadline_s is not None
        if now_s <= ticket.terms.deadline_s:
            self.in_time[ticket.what] += 1
        else:
            self.late += 1


def _arrivals(
    rng: random.Random, per_s: float, seconds: float, owners: list[tuple[str, float]]
) -> list[tuple[float, str]]:
    found, now_s = [], 0.0
    while now_s < seconds:
        now_s += rng.expovariate(per_s)
        (owner,) = rng.choices([name for name, _ in owners], [share for _, share in owners])
        found.append((now_s, owner))
    return found


ALONE = {"": (1.0, QueueTerms())}


@pytest.mark.parametrize("timeout_s", [2.5, 6.0, 30.0])
def test_goodput_at_three_times_the_capacity_is_no_less_than_at_capacity(timeout_s: float) -> None:
    once = Shop().run(1.0, 600.0, timeout_s, ALONE)
    thrice = Shop().run(3.0, 600.0, timeout_s, ALONE)
    assert sum(thrice.in_time.values()) >= sum(once.in_time.values())
    # Work is hardly done in vain, and everybody is told so soon.
    assert thrice.late <= 0.02 * sum(thrice.done.values())
    assert sum(thrice.refused.values()) >= sum(thrice.done.values())


def test_without_any_deadlines_the_bound_keeps_waits_short_under_overload() -> None:
    shop = Shop(limit=16).run(3.0, 600.0, 1e6, ALONE)
    assert sum(shop.done.values()) >= 0.97 * 4 * 600
    assert max(shop.waits_s) <= 16 * 1.5 / 4 + 1.5


def test_under_overload_the_urgent_are_served_and_the_others_shed() -> None:
    urgent = {"urgent": (0.25, QueueTerms(priority=-1)), "later": (0.75, QueueTerms(priority=1))}
    shop = Shop().run(3.0, 600.0, 6.0, urgent)
    assert shop.refused["urgent"] <= 0.02 * shop.done["urgent"]
    assert shop.refused["later"] > shop.done["later"] > 0


def test_an_owner_who_floods_the_queue_takes_nothing_from_the_others() -> None:
    owners = {"flood": (0.94, QueueTerms()), "small": (0.06, QueueTerms())}
    shop = Shop().run(5.0, 600.0, 6.0, owners)
    asked = shop.done["small"] + shop.refused["small"]
    assert shop.done["small"] >= 0.97 * asked, "it wants less than its half of the capacity"


def test_two_owners_who_both_want_too_much_share_by_weight() -> None:
    owners = {"heavy": (0.5, QueueTerms(weight=3.0)), "light": (0.5, QueueTerms(weight=1.0))}
    shop = Shop().run(8.0, 600.0, 8.0, owners)
    assert shop.done["heavy"] / shop.done["light"] == pytest.approx(3.0, rel=0.1)
