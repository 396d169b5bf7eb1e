"""Who starts, who waits, who is turned away; time is an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.board.admission import Admission, Expire, Start
from rkserve.errors import QueueFull


def test_requests_start_one_at_a_time_in_the_order_they_came() -> None:
    admission = Admission(queue_limit=5, queue_timeout_s=60)
    assert [admission.offer(ticket, 0.0) for ticket in (1, 2, 3)] == [0, 1, 2]
    assert admission.decide(ready=True, now_s=0.0) == [Start(1)]
    assert admission.decide(ready=True, now_s=0.0) == []
    admission.finished(1.0)
    assert admission.decide(ready=True, now_s=1.0) == [Start(2)]
    assert (admission.running, admission.queued, admission.ahead) == (2, 1, 2)


def test_nothing_starts_while_the_board_is_not_ready() -> None:
    admission = Admission(queue_limit=5, queue_timeout_s=60)
    admission.offer(1, 0.0)
    assert admission.decide(ready=False, now_s=0.0) == []
    assert admission.decide(ready=True, now_s=0.0) == [Start(1)]


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
    assert admission.next_expiry_s() == 10.0
    assert admission.decide(ready=True, now_s=14.0) == [Expire(1, 14.0), Expire(2, 10.0), Start(3)]
    assert admission.next_expiry_s() is None


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
    assert admission.decide(ready=True, now_s=0.0) == [Start(2)]


OPERATION = st.sampled_from(["offer", "withdraw", "finish", "wait"])


@given(operations=st.lists(OPERATION, max_size=40), limit=st.integers(0, 3))
def test_every_ticket_gets_exactly_one_answer(operations: list[str], limit: int) -> None:
    admission, now_s = Admission(queue_limit=limit, queue_timeout_s=3), 0.0
    offered: list[int] = []
    started: list[int] = []
    expired: list[int] = []
    withdrawn: list[int] = []
    for operation in [*operations, *["finish"] * (limit + 2)]:
        if operation == "offer" and admission.ahead <= limit:
            offered.append(len(offered))
            admission.offer(offered[-1], now_s)
        elif operation == "withdraw" and offered and admission.withdraw(offered[-1]):
            withdrawn.append(offered[-1])
        elif operation == "finish" and admission.running is not None:
            admission.finished(1.0)
        elif operation == "wait":
            now_s += 1.0
        for decision in admission.decide(ready=True, now_s=now_s):
            (started if isinstance(decision, Start) else expired).append(decision.ticket)
    assert sorted(started + expired + withdrawn) == offered
    assert started == sorted(started)
