"""The authorities that calls to a head trust."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from rkserve.core import tls
from tests.support.http.certificates import ELSEWHERE, https_server, write_certificate


class Head(BaseHTTPRequestHandler):
    """Answers each question with an empty object."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        """Keep stderr clean."""


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return write_certificate(tmp_path, "own")[0]


@pytest.fixture
def url(certificate: Path) -> Iterator[str]:
    with https_server(Head, certificate, certificate.with_suffix(".key")) as where:
        yield where


def get(url: str, context: ssl.SSLContext | None) -> Any:
    with urllib.request.urlopen(url, timeout=30, context=context) as answer:
        return json.load(answer)


def test_a_url_without_tls_needs_no_context() -> None:
    assert tls.context_for("http://head:8000") is None


def test_a_certificate_of_one_s_own_is_trusted_where_it_is_named(
    url: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(urllib.error.URLError) as raised:
        get(url, tls.context_for(url))
    assert tls.hint(raised.value.reason).startswith(" If the certificate is one of your own")
    assert tls.hint(ConnectionRefusedError()) == ""
    assert get(url, tls.context_for(url, certificate)) == {}
    monkeypatch.setenv(tls.CA_FILE, str(certificate))
    assert get(url, tls.context_for(url)) == {}
    other = url.replace("127.0.0.1", "localhost")
    assert get(other, tls.context_for(other)) == {}


def test_the_name_is_compared_but_for_calls_of_the_machine_to_itself(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path, "public", names=ELSEWHERE)
    with https_server(Head, certificate, key) as url:
        with pytest.raises(urllib.error.URLError, match=r"127\.0\.0\.1"):
            get(url, tls.context_for(url, certificate))
        assert get(url, tls.pinned_context(certificate)) == {}
        other = write_certificate(tmp_path, "other")[0]
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            get(url, tls.pinned_context(other))


def test_a_renewed_file_is_read_again(url: str, certificate: Path, tmp_path: Path) -> None:
    named = tmp_path / "named"
    write_certificate(tmp_path, "other")[0].rename(named)
    os.utime(named, (1, 1))
    with pytest.raises(urllib.error.URLError):
        get(url, tls.context_for(url, named))
    named.write_bytes(certificate.read_bytes())
    assert get(url, tls.context_for(url, named)) == {}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param(None, "the CA file .* cannot be read: No such file", id="no file"),
        pytest.param("no certificate", "has no certificate in PEM format", id="another file"),
    ],
)
def test_a_file_without_certificates_is_named(
    content: str | None, sentence: str, tmp_path: Path
) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=sentence):
        tls.context_for("https://x", file)
    with pytest.raises(ValueError, match=sentence):
        tls.pinned_context(file)
