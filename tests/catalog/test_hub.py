"""Downloads from a hub on a local port: resumption, checksums, refusals."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rkserve.catalog.hub import ATTEMPTS, Hub, HubAddress, open_hub, parse_address
from rkserve.core.errors import ConfigError
from tests.support.http.fake_hub import FakeHub, serving

WEIGHTS = random.Random(1).randbytes(3_000_000)
REPOSITORY = "someone/Qwen-rk3588"
ADDRESS = HubAddress(REPOSITORY)


@pytest.fixture
def server() -> Iterator[FakeHub]:
    files = {"model.rkllm": WEIGHTS, "tokenizer_config.json": b"{}", "empty.txt": b""}
    with serving(FakeHub({REPOSITORY: files})) as hub:
        yield hub


@pytest.fixture
def hub(server: FakeHub) -> Hub:
    return replace(open_hub({"HF_ENDPOINT": f"{server.url}/"}), sleep=lambda _: None)


def test_a_file_is_fetched_and_verified(hub: Hub, tmp_path: Path) -> None:
    repository = hub.repository(ADDRESS)
    for name in ("model.rkllm", "tokenizer_config.json", "empty.txt"):
        hub.fetch(repository, repository.files[name], tmp_path / name)
    assert (tmp_path / "model.rkllm").read_bytes() == WEIGHTS
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(repository.files)


def test_a_cut_download_resumes_where_it_was_cut(server: FakeHub, hub: Hub, tmp_path: Path) -> None:
    server.cut_after, server.cuts = 1_000_000, 2
    repository = hub.repository(ADDRESS)
    hub.fetch(repository, repository.files["model.rkllm"], tmp_path / "model.rkllm")
    assert (tmp_path / "model.rkllm").read_bytes() == WEIGHTS
    begins = [given for path, given in server.requests if path.endswith("model.rkllm")]
    assert begins == [None, "bytes=1000000-", "bytes=2000000-"]


def test_a_server_without_ranges_sends_it_anew(server: FakeHub, hub: Hub, tmp_path: Path) -> None:
    server.cut_after, server.cuts, server.ranges = 1_000_000, 1, False
    repository = hub.repository(ADDRESS)
    hub.fetch(repository, repository.files["model.rkllm"], tmp_path / "model.rkllm")
    assert (tmp_path / "model.rkllm").read_bytes() == WEIGHTS


def test_another_process_resumes_what_one_has_kept(
    server: FakeHub, hub: Hub, tmp_path: Path
) -> None:
    repository, target = hub.repository(ADDRESS), tmp_path / "model.rkllm"
    server.cut_after, server.cuts = 1_000_000, 1
    file = repository.files["model.rkllm"]

    def refuse(_: float) -> None:
        server.status = 503

    with pytest.raises(ConfigError, match=r"1000000 of 3000000 bytes are kept.*resumes"):
        replace(hub, sleep=refuse).fetch(repository, file, target)
    assert not target.exists()
    server.status = 0
    hub.fetch(repository, file, target)
    assert target.read_bytes() == WEIGHTS
    assert server.requests[-1][1] == "bytes=1000000-"


def test_attempts_without_progress_are_limited(server: FakeHub, hub: Hub, tmp_path: Path) -> None:
    repository = hub.repository(ADDRESS)
    server.status = 500
    with pytest.raises(ConfigError, match="HTTP 500"):
        hub.fetch(repository, repository.files["model.rkllm"], tmp_path / "model.rkllm")
    assert len([path for path, _ in server.requests if "resolve" in path]) == ATTEMPTS


@pytest.mark.parametrize(
    ("name", "forged"),
    [
        pytest.param("model.rkllm", "a" * 64, id="sha256"),
        pytest.param("tokenizer_config.json", "b" * 40, id="Git blob"),
    ],
)
def test_a_wrong_checksum_removes_the_download(
    server: FakeHub, hub: Hub, tmp_path: Path, name: str, forged: str
) -> None:
    server.forged[name] = forged
    repository = hub.repository(ADDRESS)
    with pytest.raises(
        ConfigError, match=f"checksum mismatch: the (sha256|Git blob) is .*{forged}"
    ):
        hub.fetch(repository, repository.files[name], tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_more_bytes_than_stated_are_not_kept(server: FakeHub, hub: Hub, tmp_path: Path) -> None:
    repository = hub.repository(ADDRESS)
    file = replace(repository.files["model.rkllm"], size_bytes=1000)
    with pytest.raises(ConfigError, match="more than its 1000 bytes"):
        hub.fetch(repository, file, tmp_path / "model.rkllm")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        pytest.param(401, "HF_TOKEN", id="gated"),
        pytest.param(404, "HTTP 404", id="missing"),
        pytest.param(503, "cannot be reached: HTTP 503", id="overloaded"),
    ],
)
def test_refusals_have_a_sentence(server: FakeHub, hub: Hub, status: int, words: str) -> None:
    server.status = status
    with pytest.raises(ConfigError, match=words):
        hub.repository(ADDRESS)


def test_no_network_has_a_sentence(server: FakeHub) -> None:
    url = server.url
    server.repositories.clear()
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1 cannot be reached"):
        open_hub({"HF_ENDPOINT": "http://127.0.0.1:1"}).repository(ADDRESS)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        open_hub({"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "1"}).repository(ADDRESS)
    with pytest.raises(ConfigError, match="must begin with https"):
        open_hub({"HF_ENDPOINT": "ftp://hub"})


def test_the_token_is_sent(server: FakeHub) -> None:
    open_hub({"HF_ENDPOINT": server.url, "HF_TOKEN": "secret"}).repository(ADDRESS)
    assert server.tokens == ["Bearer secret"]


def test_files_that_lead_out_of_the_repository_are_not_listed(server: FakeHub, hub: Hub) -> None:
    server.repositories[REPOSITORY] = {"../../etc/passwd": b"x", "/etc/x": b"x", "a/b.json": b"x"}
    assert list(hub.repository(ADDRESS).files) == ["a/b.json"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param("hf:a/b", HubAddress("a/b"), id="repository"),
        pytest.param("hf:a/b@v1", HubAddress("a/b", "v1"), id="revision"),
        pytest.param("hf:a/b:x/y.rkllm", HubAddress("a/b", "main", "x/y.rkllm"), id="file"),
    ],
)
def test_addresses_are_parsed(text: str, found: HubAddress) -> None:
    assert parse_address(text) == found


@pytest.mark.parametrize(
    "text", ["hf:", "hf:a", "hf:../b", "hf:a/b:../c", "hf:a/b:/c", "hf:a/b@../x", "hf:a/b/c"]
)
def test_unfit_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(text)
