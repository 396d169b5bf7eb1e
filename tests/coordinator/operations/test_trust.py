"""The check of a signed manifest: against the declaration, the boards and the pinned keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rkserve.config.serve_config import SecurityConfig, SignatureRule
from rkserve.control.calls import AcceptedManifest, ArtifactMetadata, DeclaredArtifact
from rkserve.coordinator.operations.trust import ArtifactTrust, TrustRules, checked
from rkserve.coordinator.state.ledger import Ledger
from rkserve.coordinator.state.signed_versions import SignedVersions
from rkserve.core.board_report import BoardReport, BoardState, Hardware
from rkserve.core.errors import (
    ConfigError,
    ManifestExpired,
    ManifestMismatch,
    SignatureInvalid,
    SignatureRequired,
)
from rkserve.models.signing import public_line, signed_envelope, trusted_keys
from tests.models.test_signing import DIGEST, manifest

SECRET = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
LINE = public_line(SECRET, "release")
KEYS = trusted_keys([LINE], "test")
RULES = TrustRules(KEYS, SignatureRule.ADAPTERS)
CLAIM = DeclaredArtifact("tone", None, "qwen")


def claim(**changed: Any) -> DeclaredArtifact:
    return replace(CLAIM, manifest=signed_envelope(manifest(**changed), SECRET))


def board(**known: Any) -> BoardReport:
    return BoardReport("rock-1", "qwen", BoardState.READY, **known)


def test_what_the_manifest_states_becomes_the_declaration() -> None:
    base = {"model": "qwen", "sha256": "cd" * 32}
    found = checked(claim(base=base), RULES, (), 0.0)
    assert (found.version, found.size_bytes, found.sha256) == ("v7", 10, DIGEST)
    assert found.base_digest == "cd" * 32
    assert found.accepted == AcceptedManifest(
        "qwen", "tone", 7, "adapter", KEYS[0].key_id, "release"
    )


def test_a_sender_cannot_declare_itself_accepted() -> None:
    forged = replace(CLAIM, accepted=AcceptedManifest("qwen", "tone", 9))
    assert checked(forged, TrustRules(), (), 0.0).accepted is None
    with pytest.raises(SignatureRequired):
        checked(forged, RULES, (), 0.0)


def test_a_wrong_signature_is_refused_also_where_none_is_required() -> None:
    other = trusted_keys([public_line(Ed25519PrivateKey.generate(), "other")], "test")
    with pytest.raises(SignatureInvalid):
        checked(claim(), TrustRules(other), (), 0.0)


@pytest.mark.parametrize(
    ("rule", "kind", "adapters", "needed"),
    [
        (SignatureRule.NONE, {}, False, False),
        (SignatureRule.ADAPTERS, {}, False, True),
        (SignatureRule.ADAPTERS, {"base": True}, False, False),
        (SignatureRule.ADAPTERS, {"base": True, "folder": True}, False, False),
        (SignatureRule.ADAPTERS, {"base": True, "folder": True}, True, True),
        (SignatureRule.ALL, {}, False, True),
        (SignatureRule.ALL, {"base": True}, False, True),
        (SignatureRule.ALL, {"base": True, "folder": True}, False, True),
    ],
)
def test_the_rule_decides_which_files_need_a_signature(
    rule: SignatureRule, kind: dict[str, Any], adapters: bool, needed: bool
) -> None:
    try:
        checked(replace(CLAIM, **kind), TrustRules(KEYS, rule), (), 0.0, adapters=adapters)
    except SignatureRequired:
        assert needed
    else:
        assert not needed


@pytest.mark.parametrize(
    ("now_s", "good"), [pytest.param(99.9, True, id="before"), pytest.param(100.0, False, id="at")]
)
def test_a_manifest_is_good_until_it_expires(now_s: float, good: bool) -> None:
    one = claim(expires=100)
    if good:
        assert checked(one, RULES, (), now_s).accepted
        return
    with pytest.raises(ManifestExpired, match="expired 0 s ago"):
        checked(one, RULES, (), now_s)


@pytest.mark.parametrize(
    ("stated", "known", "words"),
    [
        pytest.param({"soc": ["rk3588"]}, {"platform": "RK3588"}, "", id="the SoC"),
        pytest.param({"soc": ["rk3588"]}, {"platform": "any"}, "", id="any SoC"),
        pytest.param({"soc": ["rk3588"]}, {}, "", id="a SoC that is not known"),
        pytest.param(
            {"soc": ["rk3588"]}, {"hardware": Hardware(soc="RK3588S")}, "", id="a revision"
        ),
        pytest.param({"soc": ["rk3588"]}, {"platform": "rk3576"}, "is a rk3576", id="another SoC"),
        pytest.param({"soc": ["rk3588", "rk3576"]}, {"platform": "rk3576"}, "", id="two SoCs"),
        pytest.param({"runtime": {"min": "1.3.0"}}, {"release": "1.3.0"}, "", id="the oldest"),
        pytest.param(
            {"runtime": {"min": "1.3.0"}}, {"release": "1.2.3"}, "runtime 1.2.3", id="too old"
        ),
        pytest.param({"runtime": {"max": "1.2.3"}}, {"release": "1.10.0"}, "up to", id="too new"),
        pytest.param({"runtime": {"max": "1.2.3"}}, {"release": "1.2.3"}, "", id="the newest"),
        pytest.param({"toolkit": "1.3.0"}, {"release": "1.2.3"}, "of toolkit 1.3.0", id="toolkit"),
        pytest.param({"toolkit": "1.2.3"}, {"release": "1.3.1"}, "", id="an older toolkit"),
        pytest.param({"toolkit": "1.3.0"}, {"release": "unknown"}, "", id="no known release"),
        pytest.param(
            {"soc": ["rk3588"]},
            {"platform": "rk3576", "state": BoardState.LOST},
            "",
            id="a board that is gone",
        ),
    ],
)
def test_a_file_for_other_boards_is_refused(
    stated: dict[str, Any], known: dict[str, Any], words: str
) -> None:
    boards = [board(), replace(board(), **known)]
    if not words:
        assert checked(claim(**stated), RULES, boards, 0.0).accepted
        return
    with pytest.raises(ManifestMismatch, match=words):
        checked(claim(**stated), RULES, boards, 0.0)


def test_a_stored_file_counts_by_its_name_and_by_a_key_that_is_pinned_now(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path)
    trust = ArtifactTrust(RULES, SignedVersions(ledger), lambda: 0.0, lambda _: (), lambda: 0)
    good = AcceptedManifest("qwen", "tone", 7, "adapter", KEYS[0].key_id, "release")
    trust.require(ArtifactMetadata(manifests=(good,)), "qwen", "tone")
    for other in (
        replace(good, key_id="SHA256:gone"),
        replace(good, key_id=None),
        replace(good, name="calm"),
        replace(good, model="llama"),
        replace(good, kind="model"),
    ):
        with pytest.raises(SignatureRequired):
            trust.require(ArtifactMetadata(manifests=(other,)), "qwen", "tone")
    trust.require(ArtifactMetadata(), "qwen", "qwen", "model")
    ledger.close()


def test_keys_come_from_the_configuration_and_its_file(tmp_path: Path) -> None:
    other = public_line(Ed25519PrivateKey.generate(), "other")
    file = tmp_path / "keys"
    file.write_text(f"{LINE}\n{other}\n", encoding="utf-8")
    config = SecurityConfig(trusted_keys=(LINE,), trusted_keys_file=file)
    assert [one.name for one in TrustRules.of(config).keys] == ["release", "other"]
    file.write_text("# none yet\n", encoding="utf-8")
    strict = SecurityConfig(trusted_keys_file=file, require_signatures=SignatureRule.ALL)
    with pytest.raises(ConfigError, match=r"'all', and .*keys has no key"):
        TrustRules.of(strict)
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        TrustRules.of(config)
