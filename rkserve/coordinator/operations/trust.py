"""Trust in files: the check of a signed manifest against its declaration, the boards and the pinned
keys, before any byte of the file is taken.

``checked`` decides; ``ArtifactTrust`` does so for the Coordinator, and keeps the highest versions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from rkserve.config.serve_config import SecurityConfig, SignatureRule
from rkserve.control.calls import (
    ADAPTER,
    AcceptedManifest,
    ArtifactMetadata,
    DeclaredArtifact,
)
from rkserve.coordinator.state.signed_versions import SignedVersions, audit_line
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.errors import (
    ConfigError,
    ManifestExpired,
    ManifestMismatch,
    RkserveError,
    SignatureRequired,
)
from rkserve.models.signing import (
    ArtifactManifest,
    TrustedKey,
    check_envelope,
    read_trusted_keys,
    trusted_keys,
)

ANY_SOC = ("", "any")


@dataclass(frozen=True)
class TrustRules:
    """The pinned keys, and the files that need a signature by one of them."""

    keys: tuple[TrustedKey, ...] = ()
    require: SignatureRule = SignatureRule.NONE

    @classmethod
    def of(cls, security: SecurityConfig) -> TrustRules:
        """Read the keys of the configuration. Raises ``ConfigError``."""
        lines = list(security.trusted_keys)
        keys = trusted_keys(lines, "security.trusted_keys")
        if security.trusted_keys_file is not None:
            known = {one.key_id for one in keys}
            found = read_trusted_keys(security.trusted_keys_file.expanduser())
            keys += tuple(one for one in found if one.key_id not in known)
        if not keys and security.require_signatures is not SignatureRule.NONE:
            raise ConfigError(
                f"security.require_signatures is '{security.require_signatures.value}', and "
                f"{security.trusted_keys_file} has no key."
            )
        return cls(keys, security.require_signatures)


def checked(
    declared: DeclaredArtifact,
    rules: TrustRules,
    boards: Iterable[BoardReport],
    now_s: float,
    *,
    adapters: bool = False,
) -> DeclaredArtifact:
    """Return a declaration with all that its manifest states; ``boards`` are those of its model,
    and ``adapters`` tells that it is a folder with some.

    Raises:
        SignatureRequired: the rules want a signed manifest, and there is none.
        SignatureInvalid, ManifestInvalid: as ``check_envelope``.
        ManifestExpired: its time has passed.
        ManifestMismatch: it is for another file, model or kind of board than declared.
    """
    required = rules.require.covers(adapters=adapters or declared.what == ADAPTER)
    if declared.manifest is None:
        if required:
            raise _required(declared.what)
        return replace(declared, accepted=None)
    found = check_envelope(declared.manifest, rules.keys)
    if found.key is None and required:
        raise _required(declared.what)
    manifest, key = found.manifest, found.key
    if manifest.expires is not None and manifest.expires <= now_s:
        raise ManifestExpired(
            f"The manifest of '{manifest.name}' version {manifest.version} expired "
            f"{now_s - manifest.expires:.0f} s ago: sign it anew.",
            "manifest",
        )
    _require_alike(declared, manifest)
    for board in boards:
        if board.state is not BoardState.LOST:
            _require_board(manifest, board)
    return replace(
        declared,
        version=_label(declared.version, manifest),
        size_bytes=manifest.size,
        sha256=manifest.sha256,
        base_digest=declared.base_digest or (manifest.base.sha256 if manifest.base else None),
        accepted=AcceptedManifest(
            declared.model,
            declared.name,
            manifest.version,
            declared.what,
            None if key is None else key.key_id,
            None if key is None else key.name,
        ),
    )


def _required(kind: str) -> SignatureRequired:
    return SignatureRequired(
        f"This cluster takes a file of kind '{kind}' only with a manifest that one of its "
        "keys has signed (`security.require_signatures`): rkserve sign makes one.",
        "manifest",
    )


def _require_alike(declared: DeclaredArtifact, manifest: ArtifactManifest) -> None:
    """Raise ``ManifestMismatch`` unless a manifest is for the declared file."""
    base = None if manifest.base is None else manifest.base.sha256
    for key, stated, given in (
        ("kind", manifest.kind, declared.what),
        ("name", manifest.name, declared.name),
        ("base model", manifest.model, declared.model),
        ("sha256", manifest.sha256, declared.sha256),
        ("size", manifest.size, declared.size_bytes),
        ("base sha256", base, declared.base_digest),
    ):
        if None not in (stated, given) and stated != given:
            raise ManifestMismatch(
                f"The manifest states the {key} '{stated}', and the file is declared as '{given}'.",
                "manifest",
            )


def _require_board(manifest: ArtifactManifest, board: BoardReport) -> None:
    """Raise ``ManifestMismatch`` for a board that certainly cannot load the file."""
    known = "" if board.hardware is None else board.hardware.soc
    soc = (known or board.platform).lower()
    # A board may be of a revision, such as rk3588s.
    if soc not in ANY_SOC and manifest.soc and not soc.startswith(manifest.soc):
        raise ManifestMismatch(
            f"The manifest is for the SoCs {', '.join(manifest.soc)}, and board {board.board_id} "
            f"is a {soc}.",
            "manifest",
        )
    found = _numbers(board.release)
    if found is None:
        return
    runs = manifest.runtime
    oldest, newest = (None, None) if runs is None else (runs.min, runs.max)
    # The vendor supports no release that is older than the toolkit.
    for limit, words in ((oldest, "from runtime release"), (manifest.toolkit, "of toolkit")):
        least = _numbers(limit or "")
        if least is not None and found < least:
            raise _release(manifest, f"{words} {limit}", board)
    most = _numbers(newest or "")
    if most is not None and found > most:
        raise _release(manifest, f"up to runtime release {newest}", board)


def _release(manifest: ArtifactManifest, wanted: str, board: BoardReport) -> ManifestMismatch:
    return ManifestMismatch(
        f"The manifest of '{manifest.name}' is {wanted}, and board {board.board_id} has runtime "
        f"{board.release}.",
        "manifest",
    )


def _numbers(release: str) -> tuple[int, ...] | None:
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", release)
    return None if match is None else tuple(int(one) for one in match.groups())


def _label(given: str | None, manifest: ArtifactManifest) -> str:
    """Return the version's label; a given one ends with the signed number."""
    if given is None:
        return manifest.label
    number = re.search(r"(\d+)$", given, re.ASCII)
    if number is None or int(number[1]) != manifest.version:
        raise ManifestMismatch(
            f"The manifest is for version {manifest.version}, and the label '{given}' does not end "
            "with that number.",
            "version",
        )
    return given


class ArtifactTrust:
    """The rules of a cluster, and what has been signed so far. Use it from one event loop."""

    def __init__(
        self,
        rules: TrustRules,
        versions: SignedVersions,
        now_s: Callable[[], float],
        boards: Callable[[str], Iterable[BoardReport]],
        epoch: Callable[[], int],
    ) -> None:
        """``now_s`` reads seconds since 1970, ``boards`` returns those of a model, and ``epoch``
        the current one, for the audit log.
        """
        self._rules, self._versions, self._now_s = rules, versions, now_s
        self._boards, self._epoch = boards, epoch

    def admit(self, declared: DeclaredArtifact, *, adapters: bool = False) -> DeclaredArtifact:
        """Return the declaration with all that its manifest states, before its bytes are taken.

        Refusals are in the audit log. Raises as ``checked``, and as ``SignedVersions.check``.
        """
        boards = self._boards(declared.model)
        try:
            found = checked(declared, self._rules, boards, self._now_s(), adapters=adapters)
            if found.accepted is not None:
                assert found.sha256 is not None  # the manifest's
                self._versions.check(found.accepted, found.sha256, allow_older=declared.allow_older)
        except RkserveError as exc:
            self.refused(declared, exc)
            raise
        return found

    def accept(self, declared: DeclaredArtifact, digest: str) -> None:
        """Record a file that is as its manifest states, before it is kept. Raises as
        ``SignedVersions.check``: a later version may have been accepted since ``admit``.
        """
        line = audit_line(declared, self._now_s(), self._epoch())
        try:
            self._versions.accept(declared, digest, line)
        except RkserveError as exc:
            self.refused(declared, exc)
            raise

    def refused(self, declared: DeclaredArtifact, error: RkserveError) -> None:
        """Add a refused file to the audit log."""
        self._versions.refused(audit_line(declared, self._now_s(), self._epoch(), error))

    def require(self, facts: ArtifactMetadata, model: str, name: str, kind: str = ADAPTER) -> None:
        """Raise ``SignatureRequired`` for a stored file that was taken without the signature that
        the rules want, such as one from before they did, or by a key that is pinned no more.
        """
        if not self._rules.require.covers(adapters=kind == ADAPTER):
            return
        found = facts.manifest(model, name, kind)
        if found is None or found.key_id not in {one.key_id for one in self._rules.keys}:
            raise _required(kind)
