"""Callers: their limits and usage, and the salt of their KV caches."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from rkserve.config.router import RouterConfig
from rkserve.core.api_keys import UNLIMITED, CallerLimits, SpentLimits
from rkserve.core.block_hashes import salted
from rkserve.core.errors import RateLimited
from rkserve.core.metrics import RouterMetrics
from rkserve.router.auth.callers import REPORT_AGE_S, Caller, Callers
from rkserve.router.auth.key_ring import ClientKey, Keys, open_keys


def test_callers_with_keys_share_no_kv_cache() -> None:
    anybody, one, two = (Caller(name, CallerLimits()) for name in ("", "one", "two"))
    salts = ["", salted("tenant")]
    assert [anybody.salt(salt) for salt in salts] == salts, "as without any keys"
    made = [caller.salt(salt) for caller in (one, two) for salt in salts]
    assert len({*made, *salts}) == 6
    assert one.salt("") == Caller("one", CallerLimits()).salt(""), "at every Router"


# -- limits of a key ------------------------------------------------------------------------------


def test_requests_per_minute_come_back_evenly() -> None:
    now_s = [0.0]
    caller = Caller("key", CallerLimits(requests_per_minute=60), lambda: now_s[0])
    for _ in range(60):
        caller.enter()
    with pytest.raises(RateLimited, match="60 requests per minute") as caught:
        caller.enter()
    assert caught.value.retry_after_s == 1
    now_s[0] = 1.0
    caller.enter()
    with pytest.raises(RateLimited):
        caller.enter()
    now_s[0] = 1000.0
    for _ in range(60):
        caller.enter()
    with pytest.raises(RateLimited):
        caller.enter()  # no more than a minute's worth is saved up


def test_tokens_may_get_into_debt_which_is_waited_out() -> None:
    now_s = [0.0]
    caller = Caller("key", CallerLimits(tokens_per_minute=600), lambda: now_s[0])
    caller.enter()
    caller.spend(900)
    with pytest.raises(RateLimited, match="600 tokens per minute") as caught:
        caller.enter()
    assert caught.value.retry_after_s == 31, "the debt, and the first token beyond it"
    now_s[0] = 31.0
    caller.enter()


def test_only_so_many_calls_go_on_at_once_and_one_that_is_refused_costs_nothing() -> None:
    caller = Caller("key", CallerLimits(concurrent=2, requests_per_minute=3), lambda: 0.0)
    caller.enter()
    caller.enter()
    for _ in range(5):
        with pytest.raises(RateLimited, match="2 calls at once"):
            caller.enter()
    caller.leave()
    caller.enter()
    caller.leave()
    with pytest.raises(RateLimited, match="3 requests per minute"):
        caller.enter()


def two_routers(limits: CallerLimits, now_s: list[float]) -> tuple[Caller, Caller]:
    one, other = (Caller("key", limits, lambda: now_s[0]) for _ in range(2))
    return one, other


def tell(caller: Caller, other: Caller) -> None:
    report = caller.report()
    assert report is not None
    other.spent_elsewhere("1", report)


def test_what_one_router_admits_counts_at_the_other_one() -> None:
    now_s = [0.0]
    one, other = two_routers(CallerLimits(requests_per_minute=60), now_s)
    for _ in range(60):
        one.enter()
        one.leave()
    tell(one, other)
    with pytest.raises(RateLimited, match="60 requests per minute"):
        other.enter()
    assert one.report() is None, "nothing since"
    now_s[0] = 2.0
    other.enter()


@pytest.mark.parametrize(
    ("limits", "unit"),
    [
        pytest.param(CallerLimits(tokens_per_minute=600), "tokens", id="tokens"),
        pytest.param(CallerLimits(board_seconds_per_minute=600), "board time", id="board time"),
    ],
)
def test_tokens_and_board_time_are_those_of_all_routers(limits: CallerLimits, unit: str) -> None:
    one, other = two_routers(limits, [0.0])
    for caller in (one, other):
        caller.enter()
        caller.spend(200, 150)
        caller.use_board(350)
        caller.enter()
    tell(one, other)
    tell(other, one)
    for caller in (one, other):
        with pytest.raises(RateLimited, match=unit):
            caller.enter()


def test_calls_at_once_are_those_of_all_routers_and_of_one_that_ended_no_more() -> None:
    now_s = [0.0]
    one, other = two_routers(CallerLimits(concurrent=2), now_s)
    one.enter()
    tell(one, other)
    other.enter()
    with pytest.raises(RateLimited, match="2 calls at once"):
        other.enter()
    one.leave()
    tell(one, other)  # also that none runs any more
    assert one.report() is None
    other.enter()
    one.enter()
    tell(one, other)
    other.leave()
    with pytest.raises(RateLimited):
        other.enter()
    now_s[0] = REPORT_AGE_S + 0.1
    other.enter()


def test_reports_count_for_keys_that_a_router_sees_for_the_first_time() -> None:
    callers = Callers(Keys(), RouterMetrics(CollectorRegistry()), counted_keys=10)
    key = ClientKey(b"", "team", CallerLimits(requests_per_minute=3), id="key_1")
    for _ in range(3):
        callers.spent_elsewhere("1", {"key_1": SpentLimits(calls=1, running=1)})
    with pytest.raises(RateLimited, match="3 requests per minute"):
        callers.of(key).enter()
    assert callers.report() == {}
    callers.spent_elsewhere("1", {"key_2": SpentLimits(calls=1)})
    callers.keep(["key_1"])
    assert not callers._unseen


def test_a_key_without_limits_is_never_refused() -> None:
    caller = Caller("key", CallerLimits())
    for _ in range(1000):
        caller.enter()
        caller.spend(10_000)


# -- usage ----------------------------------------------------------------------------------------


def test_the_first_keys_are_counted_by_name_and_the_others_together(tmp_path: Path) -> None:
    file = tmp_path / "clients"
    file.write_text("tiger name=team-a\nlion\npuma name=team-c\nlynx name=team-d\n")
    keys = open_keys(RouterConfig(api_keys_file=file))
    metrics = RouterMetrics(CollectorRegistry())
    callers = Callers(keys, metrics, counted_keys=2)
    for key in keys.clients or ():
        caller = callers.of(key)
        caller.enter()
        caller.spend(10)
        caller.spend(completion=3)
        caller.leave()
    callers.anybody.enter()
    found = {
        (sample.name.removeprefix("rkserve_key_"), sample.labels["key"]): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name.startswith("rkserve_key_")
    }
    names = {"team-a", "key-2", "(other)", "(none)"}
    assert {name for _, name in found} == names
    assert found["requests_total", "team-a"] == found["requests_total", "(none)"] == 1
    assert found["requests_total", "(other)"] == 2
    assert found["prompt_tokens_total", "key-2"] == 10
    assert found["prompt_tokens_total", "(other)"] == 20
    assert found["completion_tokens_total", "(other)"] == 6
    stored = {one.key: one.requests for one in metrics.usage.rows()}
    assert stored == dict.fromkeys(("team-a", "key-2", "team-c", "team-d", "(none)"), 1)
    text = generate_latest(metrics.registry).decode()
    assert not any(secret in text for secret in ("tiger", "lion", "puma", "lynx"))


def test_board_time_is_usage_of_the_key_without_a_limit_too() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    caller = Caller("team", CallerLimits(), usage=metrics.key_usage("team"))
    caller.use_board(2.5)
    caller.use_board(1.0)
    (found,) = metrics.usage.rows()
    assert (found.key, found.board_s, found.requests) == ("team", 3.5, 0)


def test_a_call_that_is_refused_is_no_usage() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    usage = metrics.key_usage("team")
    caller = Caller("team", CallerLimits(concurrent=1), usage=usage)
    caller.enter()
    with pytest.raises(RateLimited):
        caller.enter()
    assert metrics.registry.get_sample_value("rkserve_key_requests_total", {"key": "team"}) == 1


def test_the_owner_of_a_cluster_s_key_is_its_id_and_a_revoked_one_is_forgotten() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    callers = Callers(Keys(), metrics, counted_keys=1)
    keys = [ClientKey(b"", name, UNLIMITED, id=f"key_{name}") for name in ("one", "two")]
    one, two = (callers.of(key) for key in keys)
    assert callers.of(keys[0]) is one
    assert (one.owner, one.name, callers.name_of(one.owner)) == ("key_one", "one", "one")
    two.enter()
    assert metrics.registry.get_sample_value("rkserve_key_requests_total", {"key": "(other)"}) == 1
    callers.keep({"key_two"})
    assert callers.of(keys[0]) is not one
    assert callers.of(keys[1]) is two
    again = ClientKey(b"", "one", UNLIMITED, id="key_other")
    assert callers.of(again).salt("") != one.salt(""), "another key of its name has other caches"


def test_the_label_of_a_key_that_is_gone_is_that_of_the_next_one() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    callers = Callers(Keys(), metrics, counted_keys=1)
    one, two = (ClientKey(b"", name, UNLIMITED, id=f"key_{name}") for name in ("one", "two"))

    def requests(label: str) -> float | None:
        return metrics.registry.get_sample_value("rkserve_key_requests_total", {"key": label})

    revoked = callers.of(one)
    revoked.enter()
    callers.keep({"key_two"})
    revoked.spend(completion=5)  # of a call that goes on to its end
    callers.of(two).enter()
    assert [requests(label) for label in ("one", "two", "(other)")] == [None, 1, None]
    stored = {row.key: row.completion_tokens for row in metrics.usage.rows()}
    assert stored == {"one": 5, "two": 0}
