"""LoRA adapters over HTTP: what a model name means, who is refused, and what a conversation keeps.

One board in strict mode, where misuse of the C API ends the engine; it holds two adapters at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from rkserve.native.sim import models
from tests.support.cluster.local_cluster import App
from tests.support.cluster.varied import ADAPT, TITLES, adapter_file, of
from tests.support.cluster.varied import ADAPTED as BASE
from tests.support.http.talk import CHAT, act, streaming

pytestmark = pytest.mark.ray
pytest_plugins = ["tests.support.cluster.varied_fixtures"]

WHO = "Who are you?"


@pytest.fixture(scope="module")
def app(varied: App) -> App:
    """A board whose model folder has adapters, two of them broken."""
    return of(varied, ADAPT)


@pytest.fixture
def http(app: App) -> Iterator[httpx.Client]:
    """A client of the board, which fails nothing that is not refused."""
    with app.http_sync() as client:
        yield client


def ask(http: httpx.Client, model: str, messages: list[dict[str, str]]) -> httpx.Response:
    return http.post(CHAT, json={"model": model, "messages": messages, "temperature": 0})


def answer(http: httpx.Client, model: str, *messages: dict[str, str]) -> dict[str, Any]:
    response = ask(http, model, list(messages))
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def text_of(found: dict[str, Any]) -> str:
    text: str = found["choices"][0]["message"]["content"]
    return text


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def loaded(app: App) -> list[str]:
    """The names of the adapters that the board holds."""
    (report,) = app.reports()
    return sorted(key.partition("-")[0] for key in report.adapters)


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "title"),
    [
        pytest.param("poet", "Sappho", id="an adapter"),
        pytest.param(f"{BASE}:poet", "Sappho", id="a base and an adapter"),
        pytest.param("pirate", "Captain Kidd", id="the newest version"),
        pytest.param("pirate@v1", "Captain Hook", id="an older version"),
        pytest.param(f"{BASE}:pirate@v10", "Captain Kidd", id="all of it"),
        pytest.param(BASE, None, id="the base model"),
    ],
)
def test_the_model_name_chooses_the_adapter(
    http: httpx.Client, model: str, title: str | None
) -> None:
    found = answer(http, model, user(WHO))
    assert found["model"] == model
    if title is None:
        assert not any(other in text_of(found) for other in TITLES.values())
    else:
        assert f"speaking through {title}" in text_of(found)


def test_the_openai_client_streams_an_adapter_s_answer(app: App) -> None:
    with openai.OpenAI(
        base_url=f"{app.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        chunks = list(
            client.chat.completions.create(
                model="poet", messages=[{"role": "user", "content": WHO}], stream=True
            )
        )
    assert {chunk.model for chunk in chunks} == {"poet"}
    assert "Sappho" in "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_what_is_exact_stays_exact_and_answers_differ_by_adapter(http: httpx.Client) -> None:
    models = (BASE, "poet", "pirate")
    exact = [text_of(answer(http, model, user("Count to 7"))) for model in models]
    assert exact == ["1, 2, 3, 4, 5, 6, 7."] * 3
    free = {text_of(answer(http, model, user("Tell me about the sea"))) for model in models}
    assert len(free) == 3
    seals = {answer(http, model, user("Hello"))["system_fingerprint"] for model in models}
    assert len(seals) == 3


def test_adapters_are_listed_as_models(app: App, http: httpx.Client) -> None:
    everything = http.get("/v1/models").json()["data"]
    listed = {one["id"]: one for one in everything if one["id"].partition(":")[0] == BASE}
    names = ("cook", "damaged", "pirate", "poet", "swapped")
    assert sorted(listed) == [BASE, *(f"{BASE}:{name}" for name in names)]
    pirate = listed[f"{BASE}:pirate"]
    assert (pirate["object"], pirate["parent"]) == ("model", BASE)
    told = pirate["rkserve"]
    assert (told["adapter"], told["version"], len(told["digest"])) == ("pirate", "v10", 64)
    assert [one["version"] for one in told["versions"]] == ["v1", "v10"]
    assert "sha256" in listed[f"{BASE}:swapped"]["rkserve"]["broken"]
    one = http.get(f"/v1/models/{BASE}:pirate@v1").json()
    assert (one["id"], one["rkserve"]["version"]) == (f"{BASE}:pirate@v1", "v1")
    with openai.OpenAI(
        base_url=f"{app.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        assert listed.keys() <= {one.id for one in client.models.list().data}


def test_an_adapter_that_was_just_copied_there_is_served(app: App, http: httpx.Client) -> None:
    model = app.cluster.folder / "models" / BASE
    assert ask(http, "newcomer", [user(WHO)]).status_code == 404
    models.write_adapter(adapter_file(model, "newcomer", "v1"), "Columbus", seed=99)
    while (response := ask(http, "newcomer", [user(WHO)])).status_code == 404:
        pass  # the Router looks again once a second
    assert "Columbus" in text_of(response.json())
    (model / "adapters" / "newcomer" / "v1" / "adapter.rkllm").unlink()
    (model / "adapters" / "newcomer" / "v1").rmdir()
    (model / "adapters" / "newcomer").rmdir()


# -- who is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    ["nobody", f"{BASE}:nobody", "poet@v9", "nobase:poet", f"{BASE}:", "poet@", "../poet", ":poet"],
)
def test_an_adapter_that_nobody_has_is_a_404(http: httpx.Client, model: str) -> None:
    response = ask(http, model, [user(WHO)])
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        pytest.param("damaged", "damaged@v1", id="refused by the runtime"),
        pytest.param("swapped", "swapped@v1", id="another file than the manifest says"),
    ],
)
def test_a_broken_adapter_is_refused_by_name_and_the_board_goes_on(
    app: App, http: httpx.Client, model: str, words: str
) -> None:
    (before,) = app.reports()
    for _ in range(2):
        response = ask(http, model, [user(WHO)])
        assert response.status_code == 400, response.text
        assert response.json()["error"]["code"] == "adapter_broken"
        assert words in response.json()["error"]["message"]
        assert text_of(answer(http, BASE, user("Repeat after me: well"))) == "well"
    assert "Sappho" in text_of(answer(http, "poet", user(WHO)))
    (after,) = app.reports()
    assert (after.pid, after.failed - before.failed <= 2) == (before.pid, True)


# -- room -----------------------------------------------------------------------------------------


def test_one_adapter_too_many_renews_the_handle_and_conversations_go_on(
    app: App, http: httpx.Client
) -> None:
    for model in ("poet", "pirate", "poet", "pirate"):  # whatever was loaded before
        answer(http, model, user(WHO))
    talk = [user("Repeat after me: " + "the sea the sea " * 100)]
    first = answer(http, "poet", *talk)
    held = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 1
    answer(http, "pirate", user(WHO))
    (before,) = app.reports()
    assert loaded(app) == ["pirate@v10", "poet@v1"]
    assert "Escoffier" in text_of(answer(http, "cook", user(WHO)))
    (after,) = app.reports()
    assert after.pid == before.pid, "the replica stays"
    assert after.engine_starts == before.engine_starts + 1
    assert "cook@v1" in loaded(app)
    assert len(loaded(app)) <= 2

    talk += [{"role": "assistant", "content": text_of(first)}, user("What did I say first?")]
    back = answer(http, "poet", *talk)
    assert "the sea" in text_of(back)
    assert back["usage"]["prompt_tokens_details"]["cached_tokens"] == held, "it was parked"
    assert "Sappho" in text_of(answer(http, "poet", user(WHO)))


def test_the_context_of_one_adapter_is_never_used_for_another(http: httpx.Client) -> None:
    """Under strict mode that would end the engine: keys and values are the adapter's own."""
    question = user("Tell me a long story about " + "the sea and " * 80)
    alone = {model: text_of(answer(http, model, question)) for model in (BASE, "poet", "pirate")}
    for model in (BASE, "poet", "pirate", "poet", BASE, "pirate"):
        found = answer(http, model, question)
        assert text_of(found) == alone[model], model


def test_an_adapter_s_generation_that_is_paused_survives_the_others(app: App) -> None:
    """Two others want to be loaded meanwhile, which renews the handle under it."""

    async def talk() -> None:
        async with app.http() as http:
            body = {"model": "poet", "temperature": 0, "native_pause": False}
            question = "Tell me about the sea"
            async with streaming(http, question, **body, pause_on=["Sappho"]) as reply:
                await reply.read_until(lambda r: bool(r.pauses))
                for other, title in (("pirate", "Kidd"), ("cook", "Escoffier"), (BASE, "")):
                    async with streaming(http, WHO, model=other) as between:
                        assert title in (await between.read()).text
                await act(http, reply.id, "resume")
                await reply.read()
            async with streaming(http, question, **body) as plain:
                assert (await plain.read()).text == reply.text
            assert reply.finish_reason == "stop"

    asyncio.run(asyncio.wait_for(talk(), 60))


def test_a_prompt_cache_belongs_to_its_adapter(http: httpx.Client) -> None:
    rules = "You are a guest in this house. " * 40
    body = {"cache_name": "house", "messages": [{"role": "system", "content": rules}]}
    built = http.post("/v1/cache/poet", json=body)
    assert built.status_code == 200, built.text
    (entry,) = (e for e in http.get("/v1/cache/poet").json()["data"] if e["cache_name"] == "house")
    assert entry["adapter"].startswith("poet@v1")
    names = [e["cache_name"] for e in http.get("/v1/cache/pirate").json()["data"]]
    assert "house" not in names

    talk = [{"role": "system", "content": rules}, user("Hello there")]
    answer(http, "poet", user("Hello"))
    ask_cached = {"model": "poet", "messages": talk, "use_cache": "house", "temperature": 0}
    warm = http.post(CHAT, json=ask_cached).json()
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == built.json()["tokens"]
    foreign = http.post(CHAT, json={**ask_cached, "model": "pirate"})
    assert foreign.status_code == 400, foreign.text
    assert "house" in foreign.json()["error"]["message"]
    assert http.delete("/v1/cache/poet/house").status_code == 200
