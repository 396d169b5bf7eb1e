"""The highest signed version of each adapter and model, in the ledger, by signing key.

An earlier version that is signed as well is refused after it, also after a restart: a file that is
known to be bad must not come back under a signature that was good.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rkserve.control.calls import ADAPTER, FOLDER, MODEL, AcceptedManifest, DeclaredArtifact
from rkserve.coordinator.state.ledger import AuditEntry, Ledger
from rkserve.core.errors import LedgerFailed, RkserveError, SignedVersionOlder, SignedVersionTaken

log = logging.getLogger(__name__)

# Kinds of audit entries.
UPLOADED = {ADAPTER: "adapter_upload", MODEL: "weights_upload", FOLDER: "model_upload"}


class SignedVersions:
    """The table in the ledger. Use it from the event loop of the ledger; calls raise
    ``LedgerFailed``.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def highest(self, manifest: AcceptedManifest) -> tuple[int, str] | None:
        """Return the highest version of that name with that key, and the sha256 of its file."""
        rows = self._ledger.rows(
            "SELECT version, digest FROM signed_versions "
            "WHERE model = ? AND name = ? AND kind = ? AND key_id = ?",
            *_place(manifest),
        )
        return (rows[0][0], rows[0][1]) if rows else None

    def check(self, manifest: AcceptedManifest, digest: str, *, allow_older: bool = False) -> None:
        """Raise unless the version is the highest one, or a higher one.

        Raises:
            SignedVersionOlder: it is lower, and ``allow_older`` is not set.
            SignedVersionTaken: it is the highest one with another content.
        """
        known = None if manifest.key_id is None else self.highest(manifest)
        if known is None:
            return
        version, content = known
        if manifest.version < version and not allow_older:
            raise SignedVersionOlder(
                f"Version {manifest.version} of '{manifest.name}' is older than version {version}, "
                f"which key '{manifest.key_name}' has signed too. Send a later one; a key with the "
                "scope 'admin' may return to it with 'allow_older'.",
                "manifest",
            )
        if manifest.version == version and digest != content:
            raise SignedVersionTaken(
                f"Version {version} of '{manifest.name}' by key '{manifest.key_name}' is another "
                f"content (sha256 {content[:12]}...): sign this one with a higher version.",
                "manifest",
            )

    def accept(self, declared: DeclaredArtifact, digest: str, line: AuditEntry) -> None:
        """Store that a file with a manifest is taken; raises as ``check``."""
        manifest = declared.accepted
        assert manifest is not None  # callers have checked it
        self.check(manifest, digest, allow_older=declared.allow_older)
        with self._ledger.transaction() as database:
            if manifest.key_id is not None:
                database.execute(
                    "INSERT INTO signed_versions VALUES (?, ?, ?, ?, ?, ?) "
                    "ON CONFLICT (model, name, kind, key_id) DO UPDATE SET "
                    "version = excluded.version, digest = excluded.digest "
                    "WHERE excluded.version > version",
                    (*_place(manifest), manifest.version, digest),
                )
            self._ledger.append(database, line)

    def refused(self, line: AuditEntry) -> None:
        """Add a refused file to the audit log; if that fails it is logged."""
        try:
            self._ledger.write(audit=[line])
        except LedgerFailed as failed:
            log.warning("a refused file of %s could not be audited: %s", line.who, failed)


def audit_line(
    declared: DeclaredArtifact, at_s: float, epoch: int, error: RkserveError | None = None
) -> AuditEntry:
    """Return the entry of a file that was taken, or refused with an error."""
    found = declared.accepted
    signed: Mapping[str, Any] = (
        {}
        if found is None
        else {"signed_version": found.version, "key": found.key_name, "key_id": found.key_id}
    )
    stated = {
        "name": declared.name,
        "version": declared.version,
        "model": declared.model,
        "sha256": declared.sha256,
        "allow_older": declared.allow_older or None,
        **signed,
    }
    return AuditEntry(
        at_s,
        declared.who,
        UPLOADED[declared.what],
        {name: value for name, value in stated.items() if value is not None},
        "succeeded" if error is None else error.code or "invalid_request",
        200 if error is None else error.http_status,
        epoch=epoch,
    )


def _place(manifest: AcceptedManifest) -> tuple[str, str, str, str | None]:
    return *manifest.target, manifest.key_id
