"""TLS for clients, as far as no HAProxy is needed: an operator's files, and what is wrong there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rkserve.core.errors import ConfigError
from rkserve.deployments.haproxy_tls import (
    CERT,
    KEY,
    TlsFiles,
    check_program,
    current_pem,
    renewal_script,
)
from tests.support.http.certificates import write_certificate

as_user = pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    """A certificate and its key."""
    return TlsFiles(*write_certificate(tmp_path, "a"))


def test_without_a_certificate_there_is_no_tls() -> None:
    assert TlsFiles.of({}) is None
    assert TlsFiles.of({CERT: "", KEY: ""}) is None


def test_one_file_may_hold_both(files: TlsFiles, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(files.pem())
    found = TlsFiles.of({CERT: str(both)})
    assert found == TlsFiles(both, both)
    assert found.pem() == files.pem()
    assert TlsFiles.of(found.environ()) == found


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        pytest.param({KEY: "/k"}, f"{KEY} is set, and {CERT} is not", id="a key alone"),
        pytest.param({CERT: "a.crt"}, f"{CERT}: a.crt is no absolute path", id="a relative path"),
        pytest.param({CERT: "/a", KEY: "k"}, f"{KEY}: k is no absolute path", id="of the key"),
    ],
)
def test_an_environment_with_half_of_it_is_refused(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        TlsFiles.of(given)


SPOILT: list[object] = [
    pytest.param(lambda one: one.key.unlink(), "a.key cannot be read by account", id="no key"),
    pytest.param(
        lambda one: one.certificate.unlink(), "a.crt cannot be read by account", id="no certificate"
    ),
    pytest.param(
        lambda one: one.key.chmod(0), "Permission denied", id="not readable", marks=as_user
    ),
    pytest.param(
        lambda one: write_certificate(one.key.parent, "b")[1].replace(one.key),
        "the key in .*a.key is not that of the certificate in .*a.crt",
        id="another's key",
    ),
    pytest.param(
        lambda one: write_certificate(one.key.parent, "a", b"secret"),
        "the key is encrypted with a password",
        id="a password",
    ),
    pytest.param(
        lambda one: one.certificate.write_bytes(b"\x30\x82"),
        "a.crt has no certificate in PEM format",
        id="another format",
    ),
    pytest.param(
        lambda one: one.key.write_bytes(one.certificate.read_bytes()),
        "a.key has no private key in PEM format",
        id="the certificate twice",
    ),
]


@pytest.mark.parametrize(("spoil", "sentence"), SPOILT)
def test_files_that_cannot_be_used_are_named_in_one_sentence(
    spoil: Callable[[TlsFiles], object], sentence: str, files: TlsFiles
) -> None:
    spoil(files)
    with pytest.raises(ConfigError, match=sentence) as raised:
        files.pem()
    assert "\n" not in str(raised.value)


def test_the_last_certificate_stays_where_the_files_are_in_the_middle_of_a_renewal(
    files: TlsFiles, tmp_path: Path
) -> None:
    last = tmp_path / "tls.pem"
    whole = files.pem()
    last.write_bytes(whole)
    write_certificate(tmp_path, "b")[0].replace(files.certificate)
    text, warning = current_pem(files, last)
    assert text == whole
    assert "is not that of the certificate" in warning
    assert "The last certificate stays in force" in warning
    last.unlink()
    with pytest.raises(ConfigError, match="is not that of the certificate"):
        current_pem(files, last)


def test_paths_are_no_words_of_the_script() -> None:
    odd = Path('/x/"]] os.execute("true") --\n\\é')
    script = renewal_script(TlsFiles(odd, odd), Path("/p"))
    assert "os.execute" not in script
    assert "\\047\\120\\047" in script  # /x/


def test_a_haproxy_without_the_means_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "haproxy"
    for listed, lacks in (("-OPENSSL +LUA ", "OPENSSL"), ("+OPENSSL -LUA ", "LUA")):
        program.write_text(f"#!/bin/sh\necho 'Feature list : {listed}'\n")
        program.chmod(0o700)
        with pytest.raises(ConfigError, match=f"needs a HAProxy with {lacks}"):
            check_program(str(program))
    program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(ConfigError, match="cannot be run") as raised:
        check_program(str(program))
    assert isinstance(raised.value.__cause__, subprocess.CalledProcessError)
