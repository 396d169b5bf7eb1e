"""Requests of the client: the URL, the admin key and files to upload."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from rkserve.client import (
    AsyncClient,
    Client,
    SourceFailed,
)
from rkserve.client.requests import Upload
from tests.support.cluster.control_clients import (
    CONTENT,
    PAUSE,
)
from tests.support.cluster.fake_control import FakeControl, envelope, ok


def test_the_key_is_shown_nowhere(client: Client) -> None:
    assert "secret" not in f"{client!r} {vars(client)}"


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        pytest.param("secret\n", b"Bearer secret", id="a line of a file"),
        pytest.param("geh\u00ebim", "Bearer geh\u00ebim".encode(), id="as a Router reads it"),
        pytest.param(" \n", None, id="an empty variable"),
    ],
)
def test_a_key_is_sent_without_what_stands_around_it(
    server: FakeControl, given: str, sent: bytes | None
) -> None:
    server.on(PAUSE, ok(envelope()))
    transport = httpx.MockTransport(server.handle)
    with Client("http://head:8000", admin_key=given, transport=transport) as client:
        client.pause()
    raw = {name.lower(): value for name, value in server.asked[0].headers.raw}
    assert raw.get(b"authorization") == sent


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("key", ["se\ncret", "se\0cret", "se\udc80cret"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(
    kind: type[Client] | type[AsyncClient], key: str
) -> None:
    with pytest.raises(ValueError, match="admin key") as caught:
        kind("http://head:8000", admin_key=key)
    assert "cret" not in f"{caught.value!r}"


@pytest.mark.parametrize("url", ["head:8000", "ftp://head", "http://", "http://[::1"])
def test_what_is_no_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|http"):
        Client(url)


def test_a_file_that_is_not_there_is_said_before_anything_is_sent(
    server: FakeControl, client: Client, tmp_path: Path
) -> None:
    with pytest.raises(SourceFailed, match="cannot be read: No such file"):
        client.push_adapter(tmp_path / "none", "tone")
    assert server.asked == []


def test_a_file_that_shrinks_on_the_way_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "adapter.rkllm"
    file.write_bytes(CONTENT)
    source = Upload.of(file, lambda _: None)
    file.write_bytes(b"short")
    with pytest.raises(SourceFailed, match="became shorter"):
        list(source.pieces())
