"""Playing traces: who asks when, what is asked, and what becomes of it whatever the server does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator

import pytest

from rkserve.bench.outcome import OutcomeKind, RequestOutcome
from rkserve.bench.player import (
    NO_ANSWER,
    ClientTimeouts,
    PlayedRun,
    Player,
    PlayOptions,
    RunProgress,
)
from rkserve.bench.processes import BenchFailed
from rkserve.bench.target import Target
from rkserve.bench.trace import Trace, TraceSession, TraceShape, Turn, make_trace
from tests.support.boards.board_bench import until
from tests.support.http.fake_openai import ANSWERS, FakeOpenAi, serving
from tests.support.values.bench_load import PATIENT_S, at_once, small_trace

PATIENT = ClientTimeouts(PATIENT_S, PATIENT_S, PATIENT_S)
LONG_S = 3.0  # longer than any process here stands still: only what hangs is to run into it
NO_SOCKET = "127.0.0.1"


@pytest.fixture
def server() -> Iterator[FakeOpenAi]:
    with serving() as fake:
        yield fake


def target_of(server: FakeOpenAi, model: str = "ok", api: str = "chat") -> Target:
    return Target("server", server.url, model, api)


def play(target: Target, trace: Trace, plan: PlayOptions | None = None) -> PlayedRun:
    return asyncio.run(Player(target, trace, plan or PlayOptions(limits=PATIENT)).play())


def play_until(
    target: Target, trace: Trace, plan: PlayOptions, enough: Callable[[], bool]
) -> PlayedRun:
    """Play until something holds, and then stop."""

    async def both() -> PlayedRun:
        player = Player(target, trace, plan)
        playing = asyncio.ensure_future(player.play())
        await until(enough)
        player.stop()
        return await playing

    return asyncio.run(asyncio.wait_for(both(), PATIENT_S))


def only(played: PlayedRun) -> RequestOutcome:
    (outcome,) = played.outcomes
    return outcome


# -- what a server does ---------------------------------------------------------------------------

FINE = {
    "ok": (3, True),
    "no-usage": (3, False),
    "null-details": (3, True),
    "crlf": (3, True),
    "until-closed": (3, True),
    "whole": (1, True),
    "echo": (2, True),
}
BAD: dict[str, tuple[str, int]] = {
    "busy": ("refused 429 queue_full", 0),
    "down": ("refused 502", 0),
    "fails": ("failed lost", 1),
    "fails-oddly": ("failed", 1),
    "truncated": ("truncated in mid-answer", 1),
    "empty": ("empty stop", 0),
    "closes": ("closed before the head", 0),
    "closes-in-mid-answer": ("closed in mid-answer", 1),
    "no-http": ("garbage before the head", 0),
    "bad-length": ("garbage before text", 0),
    "bad-chunk": ("garbage before text", 0),
    "negative-chunk": ("garbage before text", 0),
    "endless-line": ("garbage before text", 0),
    "no-json": ("garbage in mid-answer", 1),
    "no-object": ("garbage in mid-answer", 1),
    "no-event": ("garbage in mid-answer", 1),
    "no-utf8": ("garbage in mid-answer", 1),
    "deep": ("garbage in mid-answer", 1),
    "odd-types": ("empty stop", 0),
}
HANGING = {
    "hangs": ("stalled before the head", 0),
    "hangs-after-head": ("stalled before text", 0),
    "hangs-in-mid-answer": ("stalled in mid-answer", 1),
    "pings": ("stalled before text", 0),
}


@pytest.mark.parametrize("model", FINE)
def test_an_answer_is_read_however_it_is_written(server: FakeOpenAi, model: str) -> None:
    found = only(play(target_of(server, model), at_once(1)))
    assert (found.label, len(found.text_s), found.usage) == ("ok", *FINE[model])
    assert found.completion_tokens == 3
    assert found.end_s is not None
    assert found.end_s >= found.text_s[-1] >= found.asked.sent_s


@pytest.mark.parametrize("model", BAD)
def test_what_is_no_answer_is_classified(server: FakeOpenAi, model: str) -> None:
    found = only(play(target_of(server, model), at_once(1)))
    assert (found.label, len(found.text_s)) == BAD[model]
    assert not found.ok


async def play_all(server: FakeOpenAi, limits: ClientTimeouts) -> list[PlayedRun]:
    players = (
        Player(target_of(server, one), at_once(1), PlayOptions(limits=limits)) for one in HANGING
    )
    return await asyncio.gather(*(player.play() for player in players))


def test_a_silent_server_is_left_after_a_while(server: FakeOpenAi) -> None:
    found = asyncio.run(play_all(server, ClientTimeouts(PATIENT_S, LONG_S, PATIENT_S)))
    assert {
        model: (only(one).label, len(only(one).text_s))
        for model, one in zip(HANGING, found, strict=True)
    } == HANGING


def test_bytes_without_an_end_run_into_the_limit_of_the_whole(server: FakeOpenAi) -> None:
    found = asyncio.run(play_all(server, ClientTimeouts(PATIENT_S, PATIENT_S, LONG_S)))
    labels = [only(one).label for one in found]
    assert labels == [label.replace("stalled", "timeout") for label, _ in HANGING.values()]


def test_every_way_to_answer_is_tried() -> None:
    tried = FINE.keys() | BAD.keys() | HANGING.keys()
    of_upstreams = {"refused", "forbidden", "page", "long-line"}
    assert tried | {"completion", "shouts", "thinks"} | of_upstreams == ANSWERS.keys()


def test_a_refusal_says_when_to_come_again_and_nobody_does(server: FakeOpenAi) -> None:
    found = only(play(target_of(server, "busy"), at_once(1)))
    assert (found.retry_after_s, found.status, found.detail) == (7.0, 429, "no")
    assert len(server.asked) == 1


def test_nobody_there_is_an_outcome_too() -> None:
    with socket.socket() as held:
        held.bind((NO_SOCKET, 0))  # bound and not listening: nobody else can have it
        port = held.getsockname()[1]
        found = only(play(Target("server", f"http://{NO_SOCKET}:{port}", "ok"), at_once(1)))
    assert found.label == "connect ECONNREFUSED"


def test_a_host_without_an_address_is_said_before_anything_is_asked() -> None:
    with pytest.raises(BenchFailed, match="has no address"):
        play(Target("server", "http://nobody.invalid", "ok"), at_once(1))


# -- what is asked --------------------------------------------------------------------------------


def test_a_conversation_carries_what_the_server_said(server: FakeOpenAi) -> None:
    play(target_of(server), at_once(1, turns=3))
    said = [
        {"role": "user", "content": "question 0"},
        {"role": "assistant", "content": "one two three"},
        {"role": "user", "content": "question 1"},
        {"role": "assistant", "content": "one two three"},
        {"role": "user", "content": "question 2"},
    ]
    assert [one.messages for one in server.asked] == [said[:1], said[:3], said]


def test_a_recorded_answer_stands_in_for_the_servers(server: FakeOpenAi) -> None:
    trace = Trace((TraceSession("s", 0.0, (Turn("a", 1, answer="recorded"), Turn("b", 1))),))
    play(target_of(server), trace)
    assert server.asked[1].messages[1]["content"] == "recorded"


def test_a_session_goes_on_after_an_error(server: FakeOpenAi) -> None:
    found = play(target_of(server, "busy"), at_once(1, turns=2))
    assert [one.label for one in found.outcomes] == ["refused 429 queue_full"] * 2
    assert server.asked[1].messages[1]["content"] == NO_ANSWER


def test_requests_say_what_the_target_and_the_plan_want(server: FakeOpenAi) -> None:
    target = Target(
        "server",
        f"{server.url}/api/v2/",
        "ok",
        key="secret",
        headers={"x-tenant": "blue"},
        body={"top_k": 3, "max_tokens": 5},
    )
    trace = Trace((TraceSession("s", 0.0, (Turn("?", 8),), more={"priority": 4}),))
    play(target, trace, PlayOptions(deadline_s=2.5, salt="x", limits=PATIENT))
    (asked,) = server.asked
    assert asked.path == "/api/v2/chat/completions"
    assert asked.headers["authorization"] == "Bearer secret"
    assert (asked.headers["x-tenant"], asked.headers["x-request-timeout"]) == ("blue", "2.5")
    assert asked.messages[0] == {"role": "system", "content": "Run x."}
    del asked.body["messages"]
    assert asked.body == {
        "model": "ok",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "priority": 4,
        "top_k": 3,
        "max_tokens": 5,
    }


def test_completions_get_the_conversation_as_one_text(server: FakeOpenAi) -> None:
    found = only(play(target_of(server, "completion", api="completions"), at_once(1)))
    assert (found.label, found.completion_tokens) == ("ok", 3)
    assert server.asked[0].path == "/v1/completions"
    assert server.asked[0].body["prompt"] == "User: question 0\nAssistant:"


# -- when it is asked -----------------------------------------------------------------------------


def test_in_an_open_loop_nobody_waits_for_the_answers_of_others(server: FakeOpenAi) -> None:
    plan = PlayOptions(limits=PATIENT)
    found = play_until(
        target_of(server, "hangs"), at_once(12), plan, lambda: len(server.asked) == 12
    )
    assert [one.kind for one in found.outcomes] == [OutcomeKind.CUT] * 12
    assert found.interrupted


def test_sessions_are_due_when_the_trace_says_however_late_they_are(server: FakeOpenAi) -> None:
    trace = make_trace(TraceShape(sessions=10, rate=100.0), 1)
    found = play(target_of(server), trace, PlayOptions(time_factor=0.5, limits=PATIENT))
    due = {one.asked.session: one.asked.due_s - found.start_s for one in found.outcomes}
    for session in trace.sessions:
        assert due[session.name] == pytest.approx(0.5 * session.at_s)
    assert all(one.asked.sent_s >= one.asked.due_s for one in found.outcomes)


def test_the_next_turn_is_due_after_the_answer_and_the_thinking(server: FakeOpenAi) -> None:
    trace = Trace((TraceSession("s", 0.0, (Turn("a", 1), Turn("b", 1, think_s=0.05))),))
    first, second = play(target_of(server), trace).outcomes
    assert first.end_s is not None
    assert second.asked.due_s >= first.end_s + 0.05


@pytest.mark.parametrize("clients", [1, 3])
def test_in_a_closed_loop_so_many_ask_at_once_and_no_more(server: FakeOpenAi, clients: int) -> None:
    found = play(
        target_of(server), at_once(9, turns=2), PlayOptions(clients=clients, limits=PATIENT)
    )
    assert len(found.outcomes) == 18
    assert server.most <= clients
    assert {(one.asked.session, one.asked.turn) for one in found.outcomes} == {
        (f"s{session}", turn) for session in range(9) for turn in range(2)
    }


def test_what_is_asked_at_once_is_counted_to_its_last_answer(server: FakeOpenAi) -> None:
    found = play(target_of(server), at_once(2), PlayOptions(clients=2, limits=PATIENT))
    ends = [one.end_s for one in found.outcomes if one.end_s is not None]
    assert len(ends) == 2
    assert found.window_s[1] == max(ends) > max(one.asked.due_s for one in found.outcomes)


def test_connections_are_used_again(server: FakeOpenAi) -> None:
    play(target_of(server), at_once(20), PlayOptions(clients=1, limits=PATIENT))
    assert server.connections < 20  # a standstill of two seconds may cost one of them


def test_after_its_duration_nothing_new_is_asked_and_what_runs_is_answered(
    server: FakeOpenAi,
) -> None:
    trace = Trace((*at_once(3).sessions, TraceSession("late", 1e6, (Turn("?", 1),))))
    found = play(target_of(server), trace, PlayOptions(duration_s=1e5, limits=PATIENT))
    assert [one.label for one in found.outcomes] == ["ok"] * 3
    assert not found.interrupted


def test_a_stopped_run_keeps_what_it_had(server: FakeOpenAi) -> None:
    trace = Trace(
        (*at_once(4).sessions, TraceSession("never", 1e6, (Turn("?", 1),))),
    )
    plan = PlayOptions(limits=PATIENT)
    seen: list[RunProgress] = []

    async def both() -> PlayedRun:
        player = Player(target_of(server), trace, plan)
        playing = asyncio.ensure_future(player.play(seen.append))
        await until(lambda: any(told.done == 4 for told in seen))
        player.stop()
        return await playing

    found = asyncio.run(asyncio.wait_for(both(), PATIENT_S))
    assert (len(found.outcomes), found.interrupted) == (4, True)
    assert seen[-1].running == 0


def test_texts_are_kept_where_that_is_wanted(server: FakeOpenAi) -> None:
    for keep, text in ((True, "one two three"), (False, "")):
        plan = PlayOptions(keep_text=keep, limits=PATIENT)
        assert only(play(target_of(server), at_once(1), plan)).text == text


def test_the_loop_is_watched(server: FakeOpenAi) -> None:
    trace = small_trace(sessions=5, rate=10.0)
    found = play(target_of(server), trace)
    assert found.lag_ms
    assert found.cpu_s > 0
