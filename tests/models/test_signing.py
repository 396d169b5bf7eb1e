"""Signed manifests: the one form that is signed, who signed it, and the files of keys."""

from __future__ import annotations

import base64
import json
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rkserve.core.errors import ConfigError, ManifestInvalid, SignatureInvalid
from rkserve.core.files import MANIFEST_MAX_CHARS
from rkserve.models.signing import (
    PAYLOAD_TYPE,
    ArtifactManifest,
    TrustedKey,
    check_envelope,
    make_key,
    make_manifest,
    pre_authentication,
    public_line,
    read_key,
    read_manifest_payload,
    read_trusted_keys,
    signed_envelope,
    trusted_keys,
)

SEED = bytes(range(32))
SECRET = Ed25519PrivateKey.from_private_bytes(SEED)
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
DIGEST = "ab" * 32


def key_of(secret: Ed25519PrivateKey, name: str) -> TrustedKey:
    (key,) = trusted_keys([public_line(secret, name)], "test")
    return key


RELEASE = key_of(SECRET, "release")


def manifest(**changed: Any) -> ArtifactManifest:
    stated: dict[str, Any] = {
        "kind": "adapter",
        "name": "tone",
        "version": 7,
        "sha256": DIGEST,
        "size": 10,
        "base": {"model": "qwen"},
    }
    return make_manifest(**{**stated, **changed})


def envelope(signed: bytes, **changed: Any) -> str:
    """An envelope around any payload, with a signature that is right for it."""
    signature = SECRET.sign(pre_authentication(PAYLOAD_TYPE, signed))
    whole = {
        "payload": base64.b64encode(signed).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"keyid": "", "sig": base64.b64encode(signature).decode()}],
    }
    return json.dumps({**whole, **changed})


# -- manifests ------------------------------------------------------------------------------------


def test_a_signed_manifest_is_read_back_with_the_key_that_signed_it() -> None:
    text = signed_envelope(manifest(), SECRET)
    found = check_envelope(text, (key_of(OTHER, "other"), RELEASE))
    assert (found.manifest, found.key, found.signatures) == (manifest(), RELEASE, 1)


def test_the_signed_bytes_are_those_of_dsse_and_of_canonical_json() -> None:
    whole = json.loads(signed_envelope(manifest(), SECRET))
    payload = base64.b64decode(whole["payload"])
    assert payload == (
        b'{"base":{"model":"qwen"},"kind":"adapter","name":"tone","sha256":"'
        + DIGEST.encode()
        + b'"'
        b',"size":10,"soc":[],"version":7}'
    )
    signed = b"DSSEv1 %d %s %d %s" % (
        len(PAYLOAD_TYPE),
        PAYLOAD_TYPE.encode(),
        len(payload),
        payload,
    )
    SECRET.public_key().verify(base64.b64decode(whole["signatures"][0]["sig"]), signed)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda p: p.replace(b'"size":10', b'"size":10,"size":10'), id="a key twice"),
        pytest.param(lambda p: p.replace(b'"size":10', b'"size":11,"size":10'), id="two values"),
        pytest.param(lambda p: p.replace(b":", b": "), id="white space"),
        pytest.param(lambda p: p + b"\n", id="a new line"),
        pytest.param(lambda p: p.replace(b"tone", b"t\\u006fne"), id="an escape"),
        pytest.param(lambda p: p.replace(b'"size"', b'"expires":null,"size"'), id="a null"),
        pytest.param(lambda p: p.replace(b'"size":10', b'"size":10.0'), id="a float"),
        pytest.param(lambda p: p.replace(b'"size":10', b'"size":1e1'), id="an exponent"),
        pytest.param(lambda p: p.replace(b'"size":10', b'"size":true'), id="true for 1"),
        pytest.param(lambda p: p.replace(b'"size":10', b'"size":"10"'), id="a number as text"),
        pytest.param(lambda p: p.replace(b'"size":10', b'"siz":10,"size":10'), id="another key"),
        pytest.param(lambda p: b"\xef\xbb\xbf" + p, id="a byte order mark"),
        pytest.param(lambda p: p.decode().encode("utf-16"), id="UTF-16"),
        pytest.param(lambda p: p.replace(b"tone", b"t\xffne"), id="no UTF-8"),
        pytest.param(lambda _: b"[" * 4000, id="nested deeply"),
        pytest.param(lambda _: b"9" * 4000, id="a long number"),
        pytest.param(lambda p: p.replace(b":7", b":" + b"7" * 3000), id="a version of 3000 digits"),
        pytest.param(lambda p: p.replace(b":7", b":9223372036854775808"), id="version 2^63"),
        pytest.param(lambda p: p.replace(b":7", b":2147483648"), id="version 2^31"),
        pytest.param(lambda p: p.replace(b":7", b":0"), id="version 0"),
        pytest.param(lambda p: p.replace(b":7", b":-1"), id="version -1"),
        pytest.param(lambda p: p.replace(b":10", b":1099511627777"), id="more than a terabyte"),
        pytest.param(lambda _: b"", id="nothing"),
        pytest.param(lambda p: p + b" " * 4096, id="too long"),
        pytest.param(lambda p: p.replace(b'"base":{"model":"qwen"},', b""), id="without a base"),
        pytest.param(lambda p: p.replace(b'"adapter"', b'"model"'), id="a model with a base"),
    ],
)
def test_a_manifest_in_any_other_form_is_refused_also_where_it_is_signed(
    change: Callable[[bytes], bytes],
) -> None:
    payload = change(manifest().canonical())
    with pytest.raises(ManifestInvalid):
        check_envelope(envelope(payload), (RELEASE,))
    with pytest.raises(ManifestInvalid):
        read_manifest_payload(payload)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/x",
        "a/b",
        ".",
        "..",
        "",
        "x" * 65,
        "a\0b",
        "-x",
        "t\N{GREEK SMALL LETTER OMICRON}ne",
        "a b",
        "tone\n",
        "~x",
    ],
)
def test_a_name_that_could_be_a_path_is_refused(name: str) -> None:
    with pytest.raises(ManifestInvalid, match="name"):
        manifest(name=name)


@pytest.mark.parametrize(
    "digest",
    ["sha256:../../x", DIGEST.upper(), DIGEST[:-1], DIGEST + "a", f"sha512:{DIGEST}", "", "é" * 64],
)
def test_a_digest_is_64_lower_case_digits(digest: str) -> None:
    with pytest.raises(ManifestInvalid, match="sha256"):
        manifest(sha256=digest)


def test_a_key_that_is_not_pinned_signs_nothing() -> None:
    with pytest.raises(SignatureInvalid, match="release"):
        check_envelope(signed_envelope(manifest(), OTHER), (RELEASE,))


def test_the_signature_of_another_manifest_is_none() -> None:
    one, two = (json.loads(signed_envelope(manifest(version=n), SECRET)) for n in (7, 8))
    with pytest.raises(SignatureInvalid):
        check_envelope(json.dumps({**one, "signatures": two["signatures"]}), (RELEASE,))


def test_a_signature_of_the_bare_payload_is_none() -> None:
    signature = base64.b64encode(SECRET.sign(manifest().canonical())).decode()
    text = envelope(manifest().canonical(), signatures=[{"sig": signature}])
    with pytest.raises(SignatureInvalid):
        check_envelope(text, (RELEASE,))


def test_a_key_id_is_a_hint_and_one_good_signature_is_enough() -> None:
    whole = json.loads(signed_envelope(manifest(), SECRET))
    bad = {"keyid": RELEASE.key_id, "sig": base64.b64encode(bytes(64)).decode()}
    good = {**whole["signatures"][0], "keyid": "SHA256:another"}
    text = json.dumps({**whole, "signatures": [bad, good]})
    assert check_envelope(text, (RELEASE,)).key == RELEASE


def test_without_pinned_keys_or_signatures_a_manifest_counts_as_unsigned() -> None:
    assert check_envelope(signed_envelope(manifest(), SECRET), ()).key is None
    text = envelope(manifest().canonical(), signatures=[])
    assert check_envelope(text, (RELEASE,)).key is None


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("{}", id="an empty object"),
        pytest.param("[]", id="a list"),
        pytest.param("null", id="null"),
        pytest.param("[" * 5000, id="nested deeply"),
        pytest.param(envelope(b"x", payloadType="text/plain"), id="another type"),
        pytest.param(envelope(b"x", payload="@@@@"), id="no base64"),
        pytest.param(envelope(b"x", payload="ä"), id="not ASCII"),
        pytest.param(envelope(b"x", signatures=[{"sig": "x" * 129}]), id="a long signature"),
        pytest.param(envelope(b"x", signatures=[{"sig": ""}] * 9), id="nine signatures"),
        pytest.param(envelope(b"x", signatures={"sig": ""}), id="no list"),
        pytest.param(envelope(b"x", pad="x" * MANIFEST_MAX_CHARS), id="too long"),
        pytest.param(envelope(b"\0" * 5000), id="a long payload"),
        pytest.param('"\\ud800"', id="half a character"),
    ],
)
def test_what_is_no_envelope_is_refused(text: str) -> None:
    with pytest.raises(ManifestInvalid):
        check_envelope(text, (RELEASE,))


# -- keys -----------------------------------------------------------------------------------------


def test_a_key_is_made_for_its_owner_alone_and_none_is_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "release"
    line = make_key(file, "release")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (tmp_path / "release.pub").read_text(encoding="utf-8") == f"{line}\n"
    (pinned,) = read_trusted_keys(tmp_path / "release.pub")
    assert check_envelope(signed_envelope(manifest(), read_key(file)), (pinned,)).key == pinned
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="exists"):
        make_key(file, "release")
    assert file.read_bytes() == before


def test_where_the_public_key_cannot_be_written_no_private_one_is_left(tmp_path: Path) -> None:
    (tmp_path / "release.pub").touch()
    with pytest.raises(ConfigError, match=r"release\.pub"):
        make_key(tmp_path / "release", "release")
    assert not (tmp_path / "release").exists()


@pytest.mark.parametrize("name", ["", "a b", "a\nssh-ed25519", "x" * 65, "-x"])
def test_the_name_of_a_key_is_one_word(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is no name of a key"):
        make_key(tmp_path / "k", name)
    assert list(tmp_path.iterdir()) == []


def test_a_private_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "release"
    make_key(file, "release")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"mode 0640.*chmod 600"):
        read_key(file)


@pytest.mark.parametrize("content", [b"", b"ssh-ed25519 AAAA x", b"-----BEGIN PRIVATE KEY-----\n"])
def test_a_file_that_is_no_private_key_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "release"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="is no private key"):
        read_key(file)


def test_keys_of_ssh_keygen_are_taken_and_their_fingerprints_are_its_own(tmp_path: Path) -> None:
    file = tmp_path / "id"
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-C", "ops@head", "-f", str(file)]
    try:
        subprocess.run([*command, "-N", ""], check=True)
    except FileNotFoundError:
        pytest.skip("there is no ssh-keygen")
    (pinned,) = read_trusted_keys(tmp_path / "id.pub")
    shown = subprocess.run(["ssh-keygen", "-l", "-f", file], capture_output=True, check=True)
    assert shown.stdout.decode().split()[1:3] == [pinned.key_id, "ops@head"]
    assert check_envelope(signed_envelope(manifest(), read_key(file)), (pinned,)).key == pinned
    file.unlink()
    subprocess.run([*command, "-N", "secret"], check=True, input=b"y\n")
    with pytest.raises(ConfigError, match="passphrase"):
        read_key(file)


LINE = public_line(SECRET, "release")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        pytest.param([LINE.replace("ssh-ed25519", "ssh-rsa")], "not a key", id="RSA"),
        pytest.param([LINE.rpartition(" ")[0]], "not a key", id="without a name"),
        pytest.param([f"{LINE} more"], "not a key", id="a name of two words"),
        pytest.param([LINE[:-12]], "not a key", id="cut"),
        pytest.param([LINE, public_line(OTHER, "release")], "release is there twice", id="a name"),
        pytest.param([LINE, public_line(SECRET, "again")], r"SHA256.* is there twice", id="a key"),
    ],
)
def test_a_line_that_is_no_key_is_named(lines: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trusted_keys(lines, "security.trusted_keys")


def test_comments_and_empty_lines_are_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\n{LINE}\n", encoding="utf-8")
    assert [one.name for one in read_trusted_keys(file)] == ["release"]


@pytest.mark.parametrize("content", [None, b"\xff", b"#" * 70_000])
def test_a_file_of_keys_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="keys"):
        read_trusted_keys(file)
