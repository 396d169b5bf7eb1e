"""KV caches and prompt caches over HTTP: what is held, cleared, built, used, parked; and telemetry.

One board in strict mode, where misuse of the C API ends the engine, and no admin key.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.cluster.local_cluster import App, LocalCluster, wait_for
from tests.support.cluster.varied import CACHE, of
from tests.support.http.talk import CHAT, chat_body

pytestmark = pytest.mark.ray
pytest_plugins = ["tests.support.cluster.varied_fixtures"]

BOARD = f"{CACHE}-0"
# A system prompt that is worth a file.
RULES = "You are Ferris, and these are the rules of the house. " + " ".join(
    f"Rule {n}: whoever says {n} twice has to say it once more." for n in range(1, 30)
)
STORY = "Repeat after me: " + " ".join(
    f"it was {n} o'clock and nothing happened," for n in range(60)
)
numbers = itertools.count(1)


@pytest.fixture(scope="module")
def app(varied: App) -> App:
    """One board whose position of the KV cache takes 28672 bytes."""
    return of(varied, CACHE)


@pytest.fixture
def http(app: App) -> Iterator[httpx.Client]:
    """A client of the board, which is the same engine afterwards."""
    (before,) = app.reports()
    with app.http_sync() as client:
        yield client
    (after,) = app.reports()
    assert after.engine_pid == before.engine_pid, after.last_recovery


def say(http: httpx.Client, messages: list[dict[str, str]], **extra: Any) -> dict[str, Any]:
    """Return the answer to a conversation."""
    body = {"model": "cached", "messages": messages, "temperature": 0, **extra}
    response = http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def said(answer: dict[str, Any]) -> dict[str, str]:
    return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def cached_tokens(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def files(cluster: LocalCluster) -> set[str]:
    """Every file that the application may have written."""
    return {str(path) for path in cluster.folder.rglob("*") if "ray" not in path.parts}


# -- named caches ---------------------------------------------------------------------------------


def build_rules(http: httpx.Client) -> int:
    """Build a cache of the rules of the house; return how many tokens it holds."""
    body = {"cache_name": "rules", "messages": [{"role": "system", "content": RULES}]}
    response = http.post("/v1/cache/cached", json=body)
    assert response.status_code == 200, response.text
    built = response.json()
    (board,) = built["boards"]
    assert (built["cache_name"], built["model"], board["board"]) == ("rules", "cached", BOARD)
    assert board["tokens"] == built["tokens"] > 300
    assert board["bytes"] > built["tokens"] * 28_672
    tokens: int = built["tokens"]
    return tokens


@pytest.fixture
def rules(http: httpx.Client) -> Iterator[int]:
    """The same for one test."""
    yield build_rules(http)
    http.delete("/v1/cache/cached/rules")


def test_a_named_cache_is_listed_used_and_deleted(http: httpx.Client) -> None:
    talk = [{"role": "system", "content": RULES}, user("Who are you?")]
    cold = say(http, talk)
    rules = build_rules(http)
    listed = http.get("/v1/cache/cached").json()
    (entry,) = (one for one in listed["data"] if one["cache_name"] == "rules")
    assert (entry["tokens"], entry["parked"], entry["board"]) == (rules, False, BOARD)
    assert listed["failed"] == []

    say(http, [user("Hello")])  # nothing of the rules is in the KV cache any more
    other = [{"role": "system", "content": RULES}, user("Repeat after me: other")]
    warm = say(http, other, use_cache="rules")
    assert cached_tokens(cold) < 20
    assert rules <= cached_tokens(warm) < rules + 10  # what was parked begins alike
    prefilled = warm["timings"]["prefill_tokens"]
    assert prefilled == warm["usage"]["prompt_tokens"] - cached_tokens(warm)
    assert said(warm)["content"] == "other"
    again = say(http, talk, use_cache="rules")
    assert said(again) == said(cold)
    assert "Ferris" in said(again)["content"]

    gone = http.delete("/v1/cache/cached/rules")
    assert gone.status_code == 200
    assert (gone.json()["deleted"], gone.json()["boards"]) == (True, [BOARD])
    assert http.delete("/v1/cache/cached/rules").status_code == 404
    body = {"model": "cached", "messages": talk, "use_cache": "rules"}
    refused = http.post(CHAT, json=body)
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "cache_not_found"


def test_a_cache_that_begins_otherwise_changes_no_answer(http: httpx.Client, rules: int) -> None:
    plain = say(http, [user("Repeat after me: as ever")])
    other = say(http, [user("Repeat after me: as ever")], use_cache="rules")
    assert said(other) == said(plain)
    assert cached_tokens(other) < rules


def test_a_cache_of_a_prompt_serves_completions(http: httpx.Client) -> None:
    prompt = "Repeat after me: " + "tea and " * 100
    body = {"cache_name": "tea", "prompt": prompt.strip()}
    built = http.post("/v1/cache/cached", json=body).json()
    say(http, [user("Hello")])
    ask = {"model": "cached", "prompt": prompt.strip() + " toast", "use_cache": "tea"}
    answer = http.post("/v1/completions", json={**ask, "max_tokens": 5}).json()
    assert cached_tokens(answer) >= built["tokens"] - 1  # the last one may join the next word
    assert http.delete("/v1/cache/cached/tea").status_code == 200


def test_a_cache_that_is_built_anew_takes_the_place_of_the_old_one(
    http: httpx.Client, rules: int
) -> None:
    body = {"cache_name": "rules", "prompt": "You are somebody else now. " * 5}
    anew = http.post("/v1/cache/cached", json=body).json()
    (entry,) = (
        e for e in http.get("/v1/cache/cached").json()["data"] if e["cache_name"] == "rules"
    )
    assert entry["tokens"] == anew["tokens"] != rules


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("../x", id="up"),
        pytest.param("a/b", id="a folder"),
        pytest.param("/etc/passwd", id="an absolute path"),
        pytest.param("..", id="dots"),
        pytest.param(".hidden", id="hidden"),
        pytest.param("", id="empty"),
        pytest.param("x" * 65, id="too long"),
        pytest.param("a\x00b", id="NUL"),
        pytest.param("a\nb", id="a line's end"),
        pytest.param("ключ", id="other letters"),
        pytest.param("a b", id="a space"),
        pytest.param("-rf", id="like an option"),
    ],
)
def test_a_name_that_leads_elsewhere_is_refused_and_writes_nothing(
    app: App, http: httpx.Client, name: str
) -> None:
    before = files(app.cluster)
    built = http.post("/v1/cache/cached", json={"cache_name": name, "prompt": "tea"})
    used = http.post(CHAT, json={**chat_body("tea"), "model": "cached", "use_cache": name})
    for response in (built, used):
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert files(app.cluster) == before


@pytest.mark.parametrize(
    "path",
    ["%2e%2e%2fx", "a%2fb", "..%2f..%2fetc%2fpasswd", "%2e%2e", "a%00b", ".hidden", "x" * 65],
)
def test_deleting_a_name_that_leads_elsewhere_deletes_nothing(
    app: App, http: httpx.Client, path: str
) -> None:
    before = files(app.cluster)
    response = http.delete(httpx.URL(f"{app.url}/v1/cache/cached/{path}"))
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert files(app.cluster) == before


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({"cache_name": "x"}, "prompt", id="nothing to cache"),
        pytest.param({"prompt": "x"}, "cache_name", id="no name"),
        pytest.param({"cache_name": 5, "prompt": "x"}, "cache_name", id="a number"),
        pytest.param({"cache_name": "x", "prompt": ""}, "prompt", id="an empty prompt"),
        pytest.param(
            {"cache_name": "x", "prompt": "x", "messages": [user("x")]}, "messages", id="both"
        ),
        pytest.param({"cache_name": "x", "prompt": "tea " * 5000}, "prompt", id="too long"),
        pytest.param({"cache_name": "x", "prompt": "x", "naem": "y"}, "naem", id="a mistyped key"),
    ],
)
def test_a_cache_that_cannot_be_built_is_refused(
    http: httpx.Client, body: dict[str, Any], param: str
) -> None:
    response = http.post("/v1/cache/cached", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_cache_of_a_model_that_nobody_serves_is_a_404(http: httpx.Client) -> None:
    body = {"cache_name": "x", "prompt": "x"}
    assert http.post("/v1/cache/gpt-4", json=body).status_code == 404
    assert http.get("/v1/cache/gpt-4").status_code == 404
    assert http.delete("/v1/cache/gpt-4/x").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/cache/cached", {"cache_name": "x", "prompt": "x"}),
        ("DELETE", "/v1/cache/cached/x", None),
        ("POST", "/v1/cache/kv/clear", {}),
        ("GET", "/v1/generations", None),
    ],
)
def test_without_a_key_the_operator_s_calls_are_taken_from_this_machine_only(
    http: httpx.Client, method: str, path: str, body: Any
) -> None:
    """A proxy in front of the Router is on this machine, and its clients are not."""
    headers = {"x-forwarded-for": "203.0.113.7"}
    response = http.request(method, path, json=body, headers=headers)
    assert response.status_code == 403
    assert "RKSERVE_ADMIN_KEY" in response.json()["error"]["message"]


# -- parked conversations -------------------------------------------------------------------------


def first_turn() -> list[dict[str, str]]:
    """A long first turn. No two have the same length, so `wait_for_parked` can tell them apart."""
    number = next(numbers)
    return [user(f"{STORY} number{' and one' * number}")]


def wait_for_parked(http: httpx.Client, tokens: int) -> None:
    """Wait until a conversation of so many tokens is on disk, where it goes behind the answers."""

    def there() -> bool:
        found = http.get("/v1/cache/cached").json()["data"]
        return any(one["parked"] and one["tokens"] == tokens for one in found)

    wait_for(f"{tokens} tokens to be parked", there)


def test_a_conversation_that_comes_back_prefills_only_what_is_new(
    app: App, http: httpx.Client
) -> None:
    (before,) = app.reports()
    first = first_turn()
    answer = say(http, first)
    held = answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"] - 1
    assert held > 600
    other = say(http, [user("Repeat after me: my turn")])
    assert said(other)["content"] == "my turn"
    wait_for_parked(http, held)

    talk = [*first, said(answer), user("Repeat after me: and I am back")]
    back = say(http, talk)
    assert said(back)["content"] == "and I am back"
    assert cached_tokens(back) == held
    assert back["timings"]["prefill_tokens"] == back["usage"]["prompt_tokens"] - held < 40
    (after,) = app.reports()
    assert after.parked > before.parked
    assert after.restored == before.restored + 1

    # And once more, longer than before.
    say(http, [user("Repeat after me: my turn again")])
    again = say(http, [*talk, said(back), user("What did I say first?")])
    longer = back["usage"]["prompt_tokens"] + back["usage"]["completion_tokens"] - 1
    assert cached_tokens(again) == longer > held
    assert "o'clock" in said(again)["content"]


def test_two_conversations_that_take_turns_never_mix(http: httpx.Client) -> None:
    talks: dict[str, list[dict[str, str]]] = {
        name: [user(f"{STORY} for {name} alone, number {next(numbers)}")] for name in ("Ann", "Bob")
    }
    for turn in range(3):
        for name, talk in talks.items():
            answer = say(http, talk)
            if turn:
                assert said(answer)["content"] == f"{name} {turn}"
                assert cached_tokens(answer) > 600
            talk += [said(answer), user(f"Repeat after me: {name} {turn + 1}")]


def told_apart(hits: list[float], misses: list[float]) -> float:
    """Return the AUC: the probability that a hit takes less time than a miss."""
    less = sum((hit < miss) + (hit == miss) / 2 for hit in hits for miss in misses)
    return less / len(hits) / len(misses)


@pytest.mark.long
def test_the_time_to_the_first_token_does_not_tell_that_another_salt_has_sent_the_prompt(
    app: App, http: httpx.Client, figures: Callable[[str], None]
) -> None:
    app.cluster.control(BOARD, "time_scale=0.05")  # 3 s of prefill take 150 ms
    order = random.Random(29)

    def probe(salt: str, *, sent: bool) -> float:
        """Return the time of a probe of a prompt that salt "a" has sent just before, or has not."""
        secret, other = (f"number {next(numbers)} {STORY}" for _ in range(2))
        say(http, [user(secret)], cache_salt="a", max_tokens=1)
        begun_s = time.perf_counter()
        answer = say(http, [user(secret if sent else other)], cache_salt=salt, max_tokens=1)
        taken_s = time.perf_counter() - begun_s
        assert (cached_tokens(answer) > 600) == (sent and salt == "a")
        return taken_s

    def auc(salt: str, samples: int) -> float:
        drawn = [order.random() < 0.5 for _ in range(samples)]
        taken = [(sent, probe(salt, sent=sent)) for sent in drawn]
        return told_apart([s for sent, s in taken if sent], [s for sent, s in taken if not sent])

    own, foreign = auc("a", 100), auc("b", 1000)
    app.cluster.control(BOARD)
    figures(f"a probe with the same salt: AUC {own:.3f}, with another one: {foreign:.3f}")
    assert own > 0.9, "the probe would not see a hit"
    assert abs(foreign - 0.5) <= 0.05


def test_a_short_conversation_is_not_parked(http: httpx.Client) -> None:
    texts = ("a word", "another word of mine", "one more word")
    usage = [say(http, [user(f"Repeat after me: {text}")])["usage"] for text in texts]
    longest = max(one["prompt_tokens"] + one["completion_tokens"] for one in usage)
    # What replaces them is parked by the same job, so theirs has been decided by then.
    story = say(http, first_turn())["usage"]
    say(http, [user("Repeat after me: my turn")])
    wait_for_parked(http, story["prompt_tokens"] + story["completion_tokens"] - 1)
    found = http.get("/v1/cache/cached").json()["data"]
    assert not [one for one in found if one["parked"] and one["tokens"] <= longest]


def test_parked_conversations_survive_the_engine_that_parked_them(app: App) -> None:
    with app.http_sync() as http:
        talk = first_turn()
        answer = say(http, talk)
        held = answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"] - 1
        say(http, [user("Repeat after me: my turn")])
        wait_for_parked(http, held)
        os.kill(app.settled()[0].engine_pid, signal.SIGKILL)
        app.settled()
        back = say(http, [*talk, said(answer), user("Repeat after me: still there")])
        assert said(back)["content"] == "still there"
        assert cached_tokens(back) == held


def test_a_parked_file_that_was_damaged_is_a_miss_and_never_a_wrong_answer(
    app: App, http: httpx.Client
) -> None:
    talk = first_turn()
    answer = say(http, talk)
    held = answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"] - 1
    say(http, [user("Repeat after me: my turn")])
    wait_for_parked(http, held)
    for file in _cache_files(app.cluster):
        with file.open("r+b") as opened:
            opened.seek(file.stat().st_size // 2)
            opened.write(b"\xff" * 64)
    back = say(http, [*talk, said(answer), user("Repeat after me: not fooled")])
    assert said(back)["content"] == "not fooled"
    assert cached_tokens(back) < 100


def _cache_files(cluster: LocalCluster) -> list[Path]:
    """Complete files of prompts' caches. A seal's `.json.tmp` may be renamed at any moment."""
    found = list((cluster.folder / "state" / "cache" / BOARD).rglob("*.kv"))
    large = [path for path in found if path.stat().st_size > 1_000_000]
    assert large, found
    return large


# -- the KV cache ---------------------------------------------------------------------------------


@pytest.mark.promise("KV cache", "Sizes are exact and per board")
def test_the_size_of_the_kv_cache_is_told_by_board_and_together(http: httpx.Client) -> None:
    answer = say(http, [user("Repeat after me: " + "one two three " * 20)])
    held = answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"] - 1
    told = http.get("/v1/cache/kv/size", params={"board": BOARD}).json()
    assert told == {
        "object": "list",
        "data": [
            {
                "board": BOARD,
                "model": "cached",
                "positions": held,
                "entries": [held],
                "capacity": 4096,
                "bytes": held * 28_672,
                "status": "ok",
                "applied": "at_once",
                "positions_at_resume": None,
            }
        ],
        "total": {"positions": held, "capacity": 4096, "bytes": held * 28_672},
        "failed": [],
    }
    assert http.get("/v1/cache/kv/size", params={"model": "cached"}).json() == told
    everywhere = http.get("/v1/cache/kv/size").json()["data"]
    assert [one for one in everywhere if one["model"] == "cached"] == told["data"]


@pytest.mark.promise("KV cache", "A clear empties the cache, with the result of every board")
def test_a_cleared_kv_cache_is_empty_and_the_conversation_is_computed_anew(
    http: httpx.Client,
) -> None:
    talk = [user(f"Repeat after me: short {next(numbers)}")]
    answer = say(http, talk)
    whole = {"boards": [BOARD], "keep_system_prompt": False}
    cleared = http.post("/v1/cache/kv/clear", json=whole)
    assert cleared.status_code == 200, cleared.text
    (entry,) = cleared.json()["data"]
    assert (entry["positions"], entry["status"]) == (0, "cleared")
    assert cleared.json()["results"][BOARD]["status"] == "cleared"
    back = say(http, [*talk, said(answer), user("Repeat after me: anew")])
    assert (cached_tokens(back), said(back)["content"]) == (0, "anew")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/cache/kv/size?board=nobody", 404),
        ("/v1/cache/kv/size?model=gpt-4", 404),
        ("/v1/boards/nobody", 404),
    ],
)
def test_a_board_or_model_that_is_not_there_is_a_404(
    http: httpx.Client, path: str, status: int
) -> None:
    response = http.get(path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param({"boards": ["nobody"]}, 404, id="no such board"),
        pytest.param({"model": "gpt-4"}, 404, id="no such model"),
        pytest.param({"ranges": [[0, 1]]}, 400, id="ranges of nothing"),
        pytest.param({"keep_system_prompt": "yes"}, 400, id="no boolean"),
        pytest.param({}, 400, id="nothing named"),
        pytest.param({"generation": "nobody", "ranges": [[0, 1]]}, 404, id="no such generation"),
    ],
)
def test_a_clear_that_means_nothing_is_refused(
    http: httpx.Client, body: dict[str, Any], status: int
) -> None:
    response = http.post("/v1/cache/kv/clear", json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


# -- telemetry ------------------------------------------------------------------------------------


def test_the_boards_are_listed_with_what_their_hardware_says(app: App, http: httpx.Client) -> None:
    say(http, [user("Hello")])
    app.settled()
    (board,) = (one for one in http.get("/v1/boards").json()["data"] if one["id"] == BOARD)
    assert (board["object"], board["state"]) == ("board", "ready")
    assert board["n_batch"] == 1
    assert board["kv_positions"] > 0
    hardware = board["hardware"]
    assert hardware["soc"] == "RK3588"
    assert len(hardware["npu_load"]) == 3
    assert hardware["npu_hz"] == 1_000_000_000
    assert hardware["driver_version"].startswith("0.9.")
    assert hardware["ddr_governor"]
    assert 0 < hardware["temperature_c"] < 120
    assert 0 < hardware["memory_available_bytes"] < hardware["memory_total_bytes"]
    one = http.get(f"/v1/boards/{BOARD}").json()
    assert one["id"] == BOARD
    assert one.keys() == board.keys()


FAMILIES = [
    "rkserve_npu_load_ratio",
    "rkserve_npu_frequency_hertz",
    "rkserve_npu_max_frequency_hertz",
    "rkserve_ddr_frequency_hertz",
    "rkserve_ddr_load_ratio",
    "rkserve_temperature_celsius",
    "rkserve_memory_total_bytes",
    "rkserve_memory_available_bytes",
    "rkserve_board_info",
    "rkserve_kv_positions",
    "rkserve_kv_capacity",
    "rkserve_engine_memory_bytes",
    "rkserve_board_paused",
    "rkserve_pauses",
    "rkserve_parked",
    "rkserve_restored",
    "rkserve_batch_runs",
    "rkserve_request_prefill_seconds",
    "rkserve_request_prefill_tokens_per_second",
    "rkserve_request_decode_tokens_per_second",
]


def test_metrics_have_the_hardware_and_the_runtime_s_own_figures(
    app: App, http: httpx.Client
) -> None:
    # What takes no time is no sample of a rate.
    app.cluster.control(BOARD, "time_scale=0.05")
    say(http, [user("Write 20 tokens")])
    app.cluster.control(BOARD)
    app.settled()
    families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
    assert [name for name in FAMILIES if name not in families] == []
    for name in FAMILIES:
        assert families[name].samples, f"{name} has no sample"
    (count,) = (
        s.value
        for s in families["rkserve_request_decode_tokens_per_second"].samples
        if s.name.endswith("_count") and s.labels["model"] == "cached"
    )
    assert count >= 1


def test_timings_of_an_answer_are_the_runtime_s_own(app: App) -> None:
    app.cluster.control(BOARD, "time_scale=0.1")
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="cached", messages=[{"role": "user", "content": "Write 30 tokens"}]
        )
    app.cluster.control(BOARD)
    timings: Any = (answer.model_extra or {})["timings"]
    # A published row: 16.69 tokens/s, ten times as fast here; a busy machine is slower.
    assert 1 < timings["tokens_per_s"] < 200
    assert timings["decode_tokens"] >= 29
    assert timings["prefill_ms"] > 0  # the runtime may have the template's words in RAM
    json.dumps(timings)
