"""Who starts, who waits, who is turned away; time is an argument."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.board.rules.admission import Admission, Expire, Release, Start
from rkserve.core.errors import QueueFull


def test_requests_start_one_at_a_time_in_the_order_they_came() -> None:
    admission = Admission(queue_limit=5, queue_timeout_s=60)
    assert [admission.offer(ticket, 0.0) for ticket in (1, 2, 3)] == [0, 1, 2]
    assert admission.decide(ready=True, now_s=0.0) == [Start((1,))]
    assert admission.decide(ready=True, now_s=0.0) == []
    admission.finished(1.0)
    assert admission.decide(ready=True, now_s=1.0) == [Start((2,))]
    assert (admission.running, admission.queued, admission.ahead) == ((2,), 1, 2)


def test_nothing_starts_while_the_board_is_not_ready() -> None:
    admission = Admission(queue_limit=5, queue_timeout_s=60)
    admission.offer(1, 0.0)
    assert admission.decide(ready=False, now_s=0.0) == []
    assert admission.decide(ready=True, now_s=0.0) == [Start((1,))]


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_the_queue_takes_its_limit_beside_the_running_one(limit: int) -> None:
    admission = Admission(queue_limit=limit, queue_timeout_s=60)
    for ticket in range(limit + 1):
        admission.offer(ticket, 0.0)
        admission.decide(ready=True, now_s=0.0)
    with pytest.raises(QueueFull) as refused:
        admission.offer(99, 0.0)
    assert refused.value.queued == limit
    assert admission.withdraw(99) is False


@pytest.mark.parametrize(
    ("took_s", "retry_after_s"),
    [
        pytest.param([], 10, id="a first guess"),
        pytest.param([0.0] * 40, 1, id="quick generations, yet at least a second"),
        pytest.param([30.0] * 40, 30, id="slow ones"),
    ],
)
def test_the_time_to_retry_follows_what_generations_take(
    took_s: list[float], retry_after_s: int
) -> None:
    admission = Admission(queue_limit=1, queue_timeout_s=60)
    for took in took_s:
        admission.finished(took)
    assert admission.retry_after_s() == retry_after_s


def test_those_who_waited_too_long_expire_before_the_next_starts() -> None:
    admission = Admission(queue_limit=5, queue_timeout_s=10)
    for ticket, since_s in ((1, 0.0), (2, 4.0), (3, 5.0)):
        admission.offer(ticket, since_s)
    assert admission.next_event_s() == 10.0
    assert admission.decide(ready=True, now_s=14.0) == [
        Expire(1, 14.0),
        Expire(2, 10.0),
        Start((3,)),
    ]
    assert admission.next_event_s() is None


def test_the_running_one_does_not_expire_and_cannot_be_withdrawn() -> None:
    admission = Admission(queue_limit=5, queue_timeout_s=10)
    admission.offer(1, 0.0)
    admission.decide(ready=True, now_s=0.0)
    assert not admission.withdraw(1)
    assert admission.decide(ready=True, now_s=99.0) == []


def test_a_withdrawn_request_frees_its_place() -> None:
    admission = Admission(queue_limit=1, queue_timeout_s=10)
    admission.offer(1, 0.0)
    admission.offer(2, 0.0)
    assert admission.withdraw(1)
    assert admission.offer(3, 0.0) == 1
    assert admission.decide(ready=True, now_s=0.0) == [Start((2,))]


# -- coming back ----------------------------------------------------------------------------------


def test_one_that_had_the_board_goes_before_those_that_wait_whatever_the_limit() -> None:
    admission = Admission(queue_limit=1, queue_timeout_s=60)
    for ticket in (1, 2):
        admission.offer(ticket, 0.0)
        admission.decide(ready=True, now_s=0.0)
    admission.readmit(7, 1.0)
    admission.readmit(8, 2.0)
    assert admission.queued == 3
    order = []
    for _ in range(3):
        admission.finished(1.0)
        order += admission.decide(ready=True, now_s=3.0)
    assert order == [Start((7,)), Start((8,)), Start((2,))]


def test_one_that_came_back_waits_its_full_time_and_hides_nobody_behind_it() -> None:
    admission = Admission(queue_limit=5, queue_timeout_s=10)
    admission.offer(1, 0.0)
    admission.readmit(2, 6.0)
    assert admission.next_event_s() == 10.0
    assert admission.decide(ready=False, now_s=10.0) == [Expire(1, 10.0)]
    assert admission.next_event_s() == 16.0
    assert admission.decide(ready=False, now_s=16.0) == [Expire(2, 10.0)]


def test_one_that_came_back_can_be_withdrawn() -> None:
    admission = Admission(queue_limit=5, queue_timeout_s=10)
    admission.readmit(1, 0.0)
    assert admission.withdraw(1)
    assert admission.decide(ready=True, now_s=0.0) == []


# -- batches --------------------------------------------------------------------------------------


def batching(batch: int = 4, window_s: float = 0.5, queue_limit: int = 8) -> Admission:
    return Admission(queue_limit, 60, batch=batch, window_s=window_s)


def test_a_full_batch_starts_at_once_in_the_order_they_came() -> None:
    admission = batching(batch=3)
    for ticket in (1, 2, 3, 4):
        admission.offer(ticket, 0.0)
    assert admission.decide(ready=True, now_s=0.0) == [Start((1, 2, 3))]
    assert (admission.running, admission.queued, admission.ahead) == ((1, 2, 3), 1, 4)


def test_a_batch_that_is_not_full_waits_for_its_window() -> None:
    admission = batching()
    admission.offer(1, 10.0)
    assert admission.decide(ready=True, now_s=10.0) == []
    assert admission.next_event_s() == 10.5
    admission.offer(2, 10.25)
    assert admission.decide(ready=True, now_s=10.25) == []
    assert admission.decide(ready=True, now_s=10.5) == [Start((1, 2))]


def test_on_a_board_that_was_free_a_window_begins_with_its_first_request() -> None:
    admission = batching()
    assert admission.decide(ready=True, now_s=0.0) == []
    admission.offer(1, 10.0)
    assert admission.decide(ready=True, now_s=10.0) == []
    assert admission.next_event_s() == 10.5


def test_the_last_one_to_arrive_starts_a_batch_within_its_window() -> None:
    admission = batching(batch=2)
    admission.offer(1, 10.0)
    admission.decide(ready=True, now_s=10.0)
    admission.offer(2, 10.25)
    assert admission.decide(ready=True, now_s=10.25) == [Start((1, 2))]


def test_a_window_begins_when_the_board_is_free_for_those_that_waited_before() -> None:
    admission = batching(batch=2)
    admission.offer(1, 0.0)
    admission.offer(2, 0.0)
    assert admission.decide(ready=True, now_s=0.0) == [Start((1, 2))]
    admission.offer(3, 1.0)
    assert admission.next_event_s() == 61.0
    admission.finished(5.0)
    assert admission.decide(ready=True, now_s=5.0) == []
    assert admission.next_event_s() == 5.5
    assert admission.decide(ready=True, now_s=5.5) == [Start((3,))]


def test_a_board_that_fails_within_a_window_begins_a_new_one() -> None:
    admission = batching()
    admission.offer(1, 0.0)
    assert admission.decide(ready=True, now_s=0.0) == []
    assert admission.decide(ready=False, now_s=0.25) == []
    assert admission.next_event_s() == 60.0
    assert admission.decide(ready=True, now_s=3.0) == []
    assert admission.next_event_s() == 3.5


def test_only_those_of_one_key_share_a_run_and_the_others_keep_their_order() -> None:
    admission = batching(batch=2)
    for ticket, key in ((1, "a"), (2, "b"), (3, "b"), (4, "a"), (5, "a")):
        admission.offer(ticket, 0.0, key)
    starts = []
    for now_s in (0.0, 1.0, 2.0, 2.5):
        starts += admission.decide(ready=True, now_s=now_s)
        if admission.running:
            admission.finished(1.0)
    assert starts == [Start((1, 4)), Start((2, 3)), Start((5,))]


def test_the_first_in_the_queue_is_not_overtaken_by_a_full_batch_of_others() -> None:
    admission = batching(batch=2)
    for ticket, key in ((1, "a"), (2, "b"), (3, "b")):
        admission.offer(ticket, 0.0, key)
    assert admission.decide(ready=True, now_s=0.0) == []
    assert admission.decide(ready=True, now_s=0.5) == [Start((1,))]


def test_one_that_comes_back_shares_a_run() -> None:
    admission = batching(batch=2)
    admission.offer(1, 0.0, "a")
    admission.readmit(2, 0.0, "a")
    assert admission.decide(ready=True, now_s=0.0) == [Start((2, 1))]


@pytest.mark.parametrize("limit", [0, 2])
def test_a_free_board_takes_a_whole_batch_besides_the_queue(limit: int) -> None:
    admission = batching(batch=3, queue_limit=limit)
    for ticket in range(3 + limit):
        admission.offer(ticket, 0.0)
    with pytest.raises(QueueFull):
        admission.offer(98, 0.0)
    admission.decide(ready=True, now_s=0.0)
    assert admission.queued == limit
    with pytest.raises(QueueFull):
        admission.offer(99, 0.0)


# -- a board that is only held --------------------------------------------------------------------


def holding(hold_s: float | None = 30.0) -> Admission:
    admission = Admission(queue_limit=5, queue_timeout_s=300, hold_s=hold_s)
    admission.offer(1, 0.0)
    admission.decide(ready=True, now_s=0.0)
    admission.hold(5.0)
    return admission


def test_a_held_board_starts_nothing_and_is_not_claimed_while_nobody_waits() -> None:
    admission = holding()
    assert admission.next_event_s() is None
    assert admission.decide(ready=True, now_s=1000.0) == []
    assert admission.running == (1,)


@pytest.mark.parametrize(
    ("arrived_s", "released_s"),
    [
        pytest.param(1.0, 35.0, id="from the pause, for one that waited before"),
        pytest.param(9.0, 39.0, id="from its arrival, for one that came later"),
    ],
)
def test_others_wait_only_so_long_for_a_held_board(arrived_s: float, released_s: float) -> None:
    admission = holding()
    admission.offer(2, arrived_s)
    assert admission.next_event_s() == released_s
    assert admission.decide(ready=True, now_s=released_s - 0.5) == []
    assert admission.decide(ready=True, now_s=released_s) == [Release((1,))]
    assert admission.decide(ready=True, now_s=released_s + 1) == [], "it is said once"
    admission.finished(40.0)
    assert admission.decide(ready=True, now_s=released_s + 2) == [Start((2,))]


@pytest.mark.parametrize("ends", ["unhold", "withdraw", "never"])
def test_a_board_that_goes_on_or_that_nobody_waits_for_is_not_released(ends: str) -> None:
    admission = holding(None if ends == "never" else 30.0)
    admission.offer(2, 6.0)
    if ends == "unhold":
        admission.unhold(7.0)
    elif ends == "withdraw":
        admission.withdraw(2)
    assert admission.decide(ready=True, now_s=100.0) == []


def test_what_one_lets_others_wait_for_is_counted_over_all_of_its_pauses() -> None:
    admission = holding()
    admission.offer(2, 0.0)
    assert admission.holdable(29.9)
    spent_s = admission.unhold(25.0)
    assert spent_s == 20.0
    admission.hold(100.0, spent_s)
    assert admission.next_event_s() == 110.0
    assert admission.decide(ready=True, now_s=110.0) == [Release((1,))]
    spent_s += admission.unhold(111.0)
    assert spent_s == 31.0
    assert not admission.holdable(spent_s)
    admission.hold(120.0, spent_s)
    assert admission.decide(ready=True, now_s=120.0) == [Release((1,))], "there is nothing left"
    admission.withdraw(2)
    assert admission.holdable(spent_s), "nobody waits"


def test_a_hold_that_nobody_waits_for_costs_nothing() -> None:
    admission = holding()
    assert admission.unhold(1000.0) == 0.0
    assert admission.unhold(2000.0) == 0.0, "it is over"


def test_one_that_yields_comes_behind_the_first_that_never_had_the_board() -> None:
    admission = holding()
    admission.offer(2, 6.0)
    admission.offer(3, 6.0)
    admission.readmit(1, 7.0, yields=True)
    admission.readmit(4, 7.0)
    started = []
    for _ in range(4):
        admission.finished(1.0)
        started += admission.decide(ready=True, now_s=8.0)
    assert started == [Start((4,)), Start((2,)), Start((1,)), Start((3,))]


# -- whatever happens -----------------------------------------------------------------------------


class Story:
    """An admission to which things happen, and what became of every ticket."""

    def __init__(self, limit: int, batch: int, keys: int) -> None:
        self.admission = Admission(limit, queue_timeout_s=3, batch=batch, window_s=0.5)
        self.batch, self.keys = batch, keys
        self.now_s = 0.0
        self.offered: list[int] = []
        self.answered: list[int] = []  # started, expired or withdrawn

    def offer(self) -> None:
        ticket = len(self.offered)
        try:
            self.admission.offer(ticket, self.now_s, ticket % self.keys)
        except QueueFull:
            assert self.admission.queued >= self.admission.queue_limit
        else:
            self.offered.append(ticket)

    def come_back(self) -> None:
        ticket = len(self.offered)
        self.admission.readmit(ticket, self.now_s, ticket % self.keys)
        self.offered.append(ticket)

    def withdraw(self) -> None:
        if self.offered and self.admission.withdraw(self.offered[-1]):
            self.answered.append(self.offered[-1])

    def finish(self) -> None:
        if self.admission.running:
            self.admission.finished(1.0)

    def wait(self) -> None:
        self.now_s += 0.25

    def decide(self) -> None:
        for decision in self.admission.decide(ready=True, now_s=self.now_s):
            if isinstance(decision, Start):
                assert 1 <= len(decision.tickets) <= self.batch
                assert len({ticket % self.keys for ticket in decision.tickets}) == 1
                self.answered.extend(decision.tickets)
            else:
                assert isinstance(decision, Expire)
                self.answered.append(decision.ticket)
        event_s = self.admission.next_event_s()
        assert event_s is None or event_s > self.now_s, "it was due, and was not done"


HAPPENINGS = st.sampled_from(
    [Story.offer, Story.come_back, Story.withdraw, Story.finish, Story.wait]
)


@given(
    happenings=st.lists(HAPPENINGS, max_size=60),
    limit=st.integers(0, 3),
    batch=st.integers(1, 3),
    keys=st.integers(1, 2),
)
def test_every_ticket_gets_exactly_one_answer(
    happenings: list[Callable[[Story], None]], limit: int, batch: int, keys: int
) -> None:
    story = Story(limit, batch, keys)
    end = [Story.finish, *[Story.wait] * 3] * len(happenings)
    for happens in [*happenings, *end]:
        happens(story)
        story.decide()
    assert sorted(story.answered) == story.offered


@given(keys=st.lists(st.integers(0, 2), min_size=1, max_size=30), batch=st.integers(1, 4))
def test_those_of_one_key_start_in_the_order_they_came_and_none_is_starved(
    keys: list[int], batch: int
) -> None:
    admission = Admission(len(keys), queue_timeout_s=1000, batch=batch)
    for ticket, key in enumerate(keys):
        admission.offer(ticket, 0.0, key)
    waiting = list(range(len(keys)))
    while waiting:
        (start,) = admission.decide(ready=True, now_s=1.0)
        assert isinstance(start, Start)
        assert start.tickets[0] == waiting[0], "the oldest is always among the next"
        mates = [ticket for ticket in waiting if keys[ticket] == keys[waiting[0]]]
        assert list(start.tickets) == mates[:batch]
        waiting = [ticket for ticket in waiting if ticket not in start.tickets]
        admission.finished(1.0)


# -- runs of their own ----------------------------------------------------------------------------


def joining(batch: int = 3, queue_limit: int = 2) -> Admission:
    admission = Admission(queue_limit, 60, batch=batch, window_s=1.0)
    admission.joins = True
    return admission


def started(admission: Admission) -> list[int]:
    decisions = admission.decide(ready=True, now_s=0.0)
    assert all(isinstance(one, Start) and len(one.tickets) == 1 for one in decisions)
    return [one.tickets[0] for one in decisions if isinstance(one, Start)]


def test_each_starts_at_once_beside_those_that_run_and_leaves_by_itself() -> None:
    admission = joining()
    assert [admission.offer(ticket, 0.0) for ticket in (1, 2)] == [0, 0]
    assert started(admission) == [1, 2]
    assert [admission.offer(ticket, 0.0) for ticket in (3, 4)] == [0, 1]
    assert started(admission) == [3]
    assert (admission.running, admission.queued, admission.next_event_s()) == ((1, 2, 3), 1, 60.0)
    admission.finished(1.0, 2)
    assert started(admission) == [4]
    assert admission.running == (1, 3, 4)


def test_a_full_board_with_a_full_queue_refuses_what_has_no_place() -> None:
    admission = joining()
    for ticket in range(5):
        admission.offer(ticket, 0.0)
    with pytest.raises(QueueFull):
        admission.offer(5, 0.0)
    assert started(admission) == [0, 1, 2]
    with pytest.raises(QueueFull):
        admission.offer(5, 0.0)
    admission.finished(1.0, 0)
    assert started(admission) == [3]
    admission.offer(5, 0.0)


def test_one_of_another_key_waits_for_all_and_none_overtakes_it() -> None:
    admission = joining(queue_limit=9)
    for ticket, key in enumerate("aabab"):
        admission.offer(ticket, 0.0, key)
    assert started(admission) == [0, 1, 3]  # together, as they would share a run
    admission.offer(5, 0.0, "a")
    admission.finished(1.0, 0)
    assert started(admission) == []
    admission.finished(1.0, 1)
    admission.finished(1.0, 3)
    assert started(admission) == [2, 4]
    admission.finished(1.0, 2)
    assert started(admission) == []
    admission.finished(1.0, 4)
    assert started(admission) == [5]


def test_one_that_left_a_run_that_goes_on_waits_for_its_end() -> None:
    admission = joining()
    admission.offer(1, 0.0)
    assert started(admission) == [1]
    admission.readmit(1, 0.0)
    assert started(admission) == []
    admission.finished(1.0, 1)
    assert started(admission) == [1]
