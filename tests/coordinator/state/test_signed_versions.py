"""The highest signed versions in the ledger: monotonic, by name and key, also after a restart and
in a backup.
"""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from rkserve.control.calls import AcceptedManifest, DeclaredArtifact
from rkserve.coordinator.state.ledger import MIGRATIONS, AuditEntry, Ledger
from rkserve.coordinator.state.ledger_files import copy_ledger
from rkserve.coordinator.state.signed_versions import SignedVersions, audit_line
from rkserve.core.errors import (
    ArtifactRefused,
    LedgerFailed,
    SignedVersionOlder,
    SignedVersionTaken,
)

TONE = AcceptedManifest("qwen", "tone", 7, "adapter", "SHA256:a", "release")
LINE = AuditEntry(1.0, "ann", "adapter_upload")


def claim(manifest: AcceptedManifest, *, allow_older: bool = False) -> DeclaredArtifact:
    return DeclaredArtifact(
        manifest.name, None, manifest.model, accepted=manifest, allow_older=allow_older
    )


def digest_of(version: int) -> str:
    return f"{version:064x}"


def accept(
    versions: SignedVersions, manifest: AcceptedManifest, *, allow_older: bool = False
) -> None:
    versions.accept(claim(manifest, allow_older=allow_older), digest_of(manifest.version), LINE)


def test_the_highest_version_never_falls_whatever_comes(tmp_path: Path) -> None:
    rng, highest = random.Random(5), 0
    for _ in range(4):  # four Coordinators, one after the other
        with closing(Ledger.open(tmp_path)) as ledger:
            ledger._database.execute("PRAGMA synchronous = OFF")
            versions = SignedVersions(ledger)
            for _ in range(60):
                number = rng.randrange(1, 90)
                older = rng.random() < 0.2
                try:
                    accept(versions, replace(TONE, version=number), allow_older=older)
                    assert number >= highest or older
                except SignedVersionOlder:
                    assert number < highest
                    assert not older
                highest = max(highest, number)
                assert versions.highest(TONE) == (highest, digest_of(highest))


def test_names_models_kinds_and_keys_have_versions_of_their_own(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        versions = SignedVersions(ledger)
        accept(versions, TONE)
        for other in (
            replace(TONE, name="calm"),
            replace(TONE, model="llama"),
            replace(TONE, kind="model"),
            replace(TONE, key_id="SHA256:b"),
        ):
            assert versions.highest(other) is None
            accept(versions, replace(other, version=1))
        assert versions.highest(TONE) == (7, digest_of(7))


def test_a_version_is_one_content_and_the_same_again_is_no_error(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        versions = SignedVersions(ledger)
        accept(versions, TONE)
        accept(versions, TONE)
        with pytest.raises(SignedVersionTaken, match="sign this one with a higher version"):
            versions.check(TONE, digest_of(8), allow_older=True)


def test_a_manifest_without_a_verified_signature_counts_for_nothing(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        versions = SignedVersions(ledger)
        accept(versions, replace(TONE, version=99, key_id=None, key_name=None))
        accept(versions, TONE)
        assert versions.highest(TONE) == (7, digest_of(7))


def test_a_backup_has_the_highest_versions(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path / "one")) as ledger:
        accept(SignedVersions(ledger), TONE)
        (tmp_path / "two").mkdir(mode=0o700)
        copy_ledger(ledger.file, tmp_path / "two" / ledger.file.name)
    with closing(Ledger.open(tmp_path / "two")) as restored, pytest.raises(SignedVersionOlder):
        accept(SignedVersions(restored), replace(TONE, version=6))


def test_a_ledger_of_an_earlier_release_gets_the_table(tmp_path: Path) -> None:
    Ledger.open(tmp_path, migrations=MIGRATIONS[:-1]).close()
    with closing(Ledger.open(tmp_path)) as ledger:
        accept(SignedVersions(ledger), TONE)
        assert SignedVersions(ledger).highest(TONE) == (7, digest_of(7))


def test_what_cannot_be_stored_is_not_accepted(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        versions = SignedVersions(ledger)
        ledger._database.execute("PRAGMA query_only = ON")
        with pytest.raises(LedgerFailed):
            accept(versions, TONE)
        versions.refused(LINE)  # a refusal stands also where it cannot be audited
        ledger._database.execute("PRAGMA query_only = OFF")
        assert versions.highest(TONE) is None
        assert ledger.audit() == []


def test_an_entry_of_the_audit_log_states_file_signer_and_outcome() -> None:
    declared = replace(claim(TONE, allow_older=True), sha256="ab" * 32, who="ann 192.0.2.7")
    error = ArtifactRefused("no")
    line = audit_line(declared, 5.0, 3, error)
    assert (line.who, line.kind, line.epoch) == ("ann 192.0.2.7", "adapter_upload", 3)
    assert (line.outcome, line.status) == ("artifact_refused", 400)
    assert line.params == {
        "name": "tone",
        "model": "qwen",
        "sha256": "ab" * 32,
        "allow_older": True,
        "signed_version": 7,
        "key": "release",
        "key_id": "SHA256:a",
    }
