"""Options of ``rkserve bench``: servers, models, keys, wrong usage."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rkserve.cli.bench_options import LoadOptions, targets
from rkserve.cli.context import Exit
from tests.support.http.fake_openai import FakeOpenAi, serving
from tests.support.http.terminal import QUICK, bench, report


@pytest.fixture
def server() -> Iterator[FakeOpenAi]:
    with serving() as fake:
        yield fake


def test_without_a_url_it_loads_the_server_of_the_environment(server: FakeOpenAi) -> None:
    code, _, err = bench("run", *QUICK, "--model", "ok", RKSERVE_URL=server.url)
    assert code == Exit.DONE, err
    assert server.asked


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(("run",), "either --url (or RKSERVE_URL", id="nothing to load"),
        pytest.param(("run", "--url", "ftp://a"), "not an http://", id="no HTTP"),
        pytest.param(("run", "--url", "http://a", "--boards", "2"), "either", id="both"),
        pytest.param(("run", "--url", "http://a", "--policy", "prefix"), "--policy", id="policy"),
        pytest.param(("run", "--url", "http://a", "--slo", "x=1"), "none of ttft", id="limits"),
        pytest.param(("run", "--url", "http://a", "--header", "x"), "NAME: VALUE", id="header"),
        pytest.param(
            ("run", "--url", "http://a", "--header", "x: a\r\ny: b"),
            "NAME: VALUE",
            id="two headers",
        ),
        pytest.param(("run", "--url", "http://a", "--body", "[]"), "JSON object", id="body"),
        pytest.param(("run", "--url", "http://a", "--body", "{"), "is not JSON", id="no JSON"),
        pytest.param(("run", "--url", "http://a", "--api", "x"), "completions", id="api"),
        pytest.param(("run", "--url", "http://a", "--watch", "x"), "name=pid", id="watch"),
        pytest.param(("run", "--url", "http://a", "--arrivals", "x"), "poisson", id="arrivals"),
        pytest.param(("run", "--boards", "1", "--profile", "rk3588-x"), "no profile", id="profile"),
        pytest.param(
            ("run", "--url", "http://a", "--key-env", "RKSERVE_NO_SUCH"), "RKSERVE_NO", id="key"
        ),
        pytest.param(
            ("run", *("--url", "http://a", "--model", "x") * 2, "--model", "y"),
            "3 models for 2 URLs",
            id="models",
        ),
        pytest.param(
            ("run", *("--url", "a=http://a", "--model", "x") * 2), "same name", id="names"
        ),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_asked(words: tuple[str, ...], said: str) -> None:
    code, _, err = bench(*words)
    assert code == Exit.USAGE
    assert said in err


@pytest.mark.parametrize(
    ("urls", "models", "expected"),
    [
        pytest.param(["http://a"], ["m"], [("server", "m")], id="one"),
        pytest.param(["http://a"], ["m", "n"], [("m", "m"), ("n", "n")], id="models of one"),
        pytest.param(
            ["http://a", "b=http://b"], ["m"], [("server 1", "m"), ("b", "m")], id="one for all"
        ),
        pytest.param(["a=http://a", "b=http://b"], ["m", "n"], [("a", "m"), ("b", "n")], id="each"),
    ],
)
def test_urls_and_models_are_paired(
    urls: list[str], models: list[str], expected: list[tuple[str, str]]
) -> None:
    found = targets(LoadOptions(url=urls, model=models))
    assert [(one.name, one.model) for one in found] == expected


def test_a_url_with_an_equals_sign_is_not_taken_for_a_name() -> None:
    (found,) = targets(LoadOptions(url=["http://a/v1?x=http://b"], model=["m"]))
    assert (found.name, found.address) == ("server", ("a", 80))


def test_a_key_comes_from_a_file_or_the_environment_and_is_printed_nowhere(
    server: FakeOpenAi, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("# mine\nsecret-1\n")
    out = tmp_path / "out"
    first = bench(
        "run", *QUICK, "--url", server.url, "--key-file", str(tmp_path / "key"), "--out", str(out)
    )
    assert {one.headers["authorization"] for one in server.asked} == {"Bearer secret-1"}
    server.asked.clear()
    second = bench("run", *QUICK, "--url", server.url, "--key-env", "SOME_KEY", SOME_KEY="s-2")
    assert {one.headers["authorization"] for one in server.asked} == {"Bearer s-2"}
    written = "".join(one.read_text() for one in out.iterdir())
    assert "secret" not in f"{first}{second}{written}"


def test_processes_that_are_named_are_measured(server: FakeOpenAi) -> None:
    code, found = report("run", *QUICK, "--url", server.url, "--watch", f"itself={os.getpid()}")
    assert code == Exit.DONE
    assert found["runs"][0]["processes"]["itself"]["rss_bytes"] > 0
    code, _, err = bench("run", *QUICK, "--url", server.url, "--watch", "it=no such command here")
    assert code == Exit.FAILED
    assert "no process runs that is it" in err


def test_without_a_key_none_is_sent(server: FakeOpenAi) -> None:
    bench("run", *QUICK, "--url", server.url, OPENAI_API_KEY="for somebody else")
    assert not any("authorization" in one.headers for one in server.asked)


def test_all_models_are_loaded_but_those_that_embed(server: FakeOpenAi) -> None:
    embedding = {"id": "vectors", "rkserve": {"embedding": {"pooling": "last"}}}
    server.models = [{"id": "ok"}, {"id": "echo", "rkserve": {"embedding": None}}, embedding]
    code, found = report("run", *QUICK, "--all-models", "--url", server.url)
    assert code == Exit.DONE
    assert [run["target"] for run in found["runs"]] == ["ok", "echo"]
    assert {asked.body["model"] for asked in server.asked} == {"ok", "echo"}
    code, _, err = bench("run", "--all-models", "--model", "ok", "--url", server.url)
    assert (code, "either --model or --all-models" in err) == (Exit.USAGE, True)
    code, _, err = bench("run", "--all-models", "--boards", "1")
    assert (code, "--all-models is for --url" in err) == (Exit.USAGE, True)
