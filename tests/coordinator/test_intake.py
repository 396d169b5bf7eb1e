"""Files on their way to the head, with a real store and ledger, and boards that obey: of hostile
manifests, signatures and files nothing is kept, and nothing is staged.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rkserve.config.serve_config import SignatureRule
from rkserve.control.calls import MODEL as MODEL_KIND
from rkserve.control.calls import AcceptedManifest, DeclaredArtifact
from rkserve.control.operations import OperationState
from rkserve.coordinator.artifacts.model_catalog import ModelCatalog
from rkserve.coordinator.artifacts.sources import DownloadPool
from rkserve.coordinator.artifacts.store import ArtifactRules, ArtifactStore
from rkserve.coordinator.intake import ArtifactIntake
from rkserve.coordinator.operations.trust import TrustRules
from rkserve.core.desired_state import AdapterVersion, Artifact, BaseVersion
from rkserve.core.errors import (
    ArtifactRefused,
    ManifestMismatch,
    RkserveError,
    SignatureRequired,
    SignedVersionOlder,
    SignedVersionTaken,
)
from rkserve.core.files import SIGNED_SUFFIX
from rkserve.models.index import PIECE_MIN_BYTES, index_folder, read_piece
from rkserve.models.signing import (
    PAYLOAD_TYPE,
    TrustedKey,
    make_manifest,
    pre_authentication,
    public_line,
    signed_envelope,
    trusted_keys,
)
from tests.support.boards.fakes import run_loop
from tests.support.cluster.fake_cluster import MODEL, Control, FakeCluster

pytestmark = pytest.mark.slow

CONTENT = bytes(range(1, 251)) * 5
SECRET = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
STRANGER = Ed25519PrivateKey.from_private_bytes(bytes(32))
NOW_S = 1_000_000  # as the Coordinator's clock stands


def pinned(secret: Ed25519PrivateKey, name: str) -> TrustedKey:
    (key,) = trusted_keys([public_line(secret, name)], "test")
    return key


RELEASE = pinned(SECRET, "release")
STRICT = TrustRules((RELEASE,), SignatureRule.ALL)


@dataclass
class House:
    """A Coordinator on two boards with its intake; ``models`` is its catalogue."""

    control: Control
    store: ArtifactStore
    intake: ArtifactIntake
    models: Path
    shop: Path

    async def send(self, claim: DeclaredArtifact, content: bytes = CONTENT) -> Artifact:
        """Upload a file as a Router does."""
        key = await self.intake.upload_begin(claim)
        for offset in range(0, len(content), 500):
            await self.intake.upload_part(key, offset, content[offset : offset + 500])
        return await self.intake.upload_end(key, {"scale": 1.0, "base_model": claim.model})

    def audit(self, kind: str = "adapter_upload") -> list[tuple[str, dict[str, Any]]]:
        lines = self.control.it.audit(100)[::-1]
        return [(one.outcome, dict(one.params)) for one in lines if one.kind == kind]

    @property
    def staged(self) -> list[str]:
        return sorted(
            {key for board in self.control.cluster.boards.values() for key in board.whole}
        )


@asynccontextmanager
async def house(folder: Path, trust: TrustRules = STRICT) -> AsyncIterator[House]:
    shop = folder / "shop"
    shop.mkdir(exist_ok=True)
    store = ArtifactStore(
        folder / "artifacts", ArtifactRules(reserve_bytes=0, allowed_paths=(shop,))
    )
    store.open()
    control = Control(
        folder / "ledger",
        FakeCluster.of("a", "b"),
        cast("Any", store),
        settings={"report_s": 0.05},
        trust=trust,
    )
    coordinator = await control.open()
    catalog, downloads = ModelCatalog(folder / "models", PIECE_MIN_BYTES), DownloadPool()
    try:
        yield House(
            control,
            store,
            ArtifactIntake(coordinator, store, catalog, downloads),
            folder / "models",
            shop,
        )
    finally:
        downloads.close()
        catalog.close()
        await control.close()


def stated(content: bytes = CONTENT, **changed: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "kind": "adapter",
        "name": "tone",
        "version": 7,
        "sha256": hashlib.sha256(content).hexdigest(),
        "size": len(content),
        "base": {"model": MODEL},
    }
    return {**known, **changed}


def signed(
    content: bytes = CONTENT, secret: Ed25519PrivateKey = SECRET, **changed: Any
) -> DeclaredArtifact:
    """The declaration of a signed adapter."""
    text = signed_envelope(make_manifest(**stated(content, **changed)), secret)
    return DeclaredArtifact("tone", None, MODEL, manifest=text, who="ann 192.0.2.7")


def played(folder: Path, work: Callable[[House], Any], trust: TrustRules = STRICT) -> None:
    async def main() -> None:
        async with house(folder, trust) as it:
            await work(it)

    run_loop(main())


async def refused(it: House, claim: DeclaredArtifact, error: type[RkserveError]) -> RkserveError:
    """Send a file that is refused, and of which nothing is left; return the error."""
    before = it.store.digests()
    with pytest.raises(error) as found:
        await it.send(claim)
    assert it.store.digests() == before
    assert it.audit()[-1][0] == found.value.code
    return found.value


# -- accepted -------------------------------------------------------------------------------------


def test_a_signed_adapter_gets_to_every_board_with_its_signer_in_the_records(
    tmp_path: Path,
) -> None:
    async def work(it: House) -> None:
        version = await it.send(signed())
        assert isinstance(version, AdapterVersion)
        assert version.ref.version == "v7"
        done = await it.control.stage(version)
        assert done.operation.state is OperationState.SUCCEEDED
        assert it.staged == [version.key]
        found = it.control.it.manifests([version.digest, "0" * 64])
        accepted = AcceptedManifest(MODEL, "tone", 7, "adapter", RELEASE.key_id, "release")
        assert found == {version.digest: (accepted,)}
        ((outcome, params),) = it.audit()
        assert outcome == "succeeded"
        assert (params["signed_version"], params["key"]) == (7, "release")
        assert await it.send(signed()) == version, "the same again changes nothing"

    played(tmp_path, work)


@pytest.mark.parametrize("label", ["v7", "7", "step-7", "step-007"])
def test_a_label_ends_with_the_signed_number(tmp_path: Path, label: str) -> None:
    async def work(it: House) -> None:
        version = await it.send(replace(signed(), version=label))
        assert isinstance(version, AdapterVersion)
        assert version.ref.version == label
        await refused(it, replace(signed(), version="v17"), ManifestMismatch)
        await refused(it, replace(signed(), version="seven"), ManifestMismatch)

    played(tmp_path, work)


def test_a_manifest_beside_a_file_on_the_head_is_found(tmp_path: Path) -> None:
    async def work(it: House) -> None:
        file = it.shop / "tone.rkllm"
        file.write_bytes(CONTENT)
        bare = replace(signed(), manifest=None)
        with pytest.raises(SignatureRequired):
            await it.intake.register("path", str(file), bare)
        beside = it.shop / f"tone.rkllm{SIGNED_SUFFIX}"
        beside.write_text(f"{signed().manifest}\n", encoding="utf-8")
        version = await it.intake.register("path", str(file), bare)
        assert version is not None
        assert it.store.digests() == (version.digest,)
        it.store.remove(version.digest)
        file.write_bytes(CONTENT[:-1])
        with pytest.raises(ManifestMismatch):
            await it.intake.register("path", str(file), bare)
        beside.write_bytes(b"x" * 9000)
        with pytest.raises(ArtifactRefused, match="has 9000 bytes; the limit is 8192"):
            await it.intake.register("path", str(file), bare)
        assert it.store.digests() == ()

    played(tmp_path, work)


def test_without_a_rule_a_trainer_s_files_need_no_manifest_and_leave_no_entry(
    tmp_path: Path,
) -> None:
    async def work(it: House) -> None:
        version = await it.send(replace(signed(), manifest=None, version="step-1"))
        assert isinstance(version, AdapterVersion)
        assert (await it.control.stage(version)).operation.state is OperationState.SUCCEEDED
        done = await it.control.update(version, 1)
        assert done.operation.state is OperationState.SUCCEEDED
        assert it.audit() == []
        assert it.control.it.manifests([version.digest]) == {}

    played(tmp_path, work, TrustRules())


def test_without_keys_a_manifest_is_compared_with_the_file_and_not_verified(
    tmp_path: Path,
) -> None:
    async def work(it: House) -> None:
        version = await it.send(signed(secret=STRANGER))
        (accepted,) = it.control.it.manifests([version.digest])[version.digest]
        assert (accepted.version, accepted.key_name) == (7, None)
        await refused(it, signed(b"another", version=8), ManifestMismatch)

    played(tmp_path, work, TrustRules())


# -- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "code"),
    [
        pytest.param(replace(signed(), manifest=None), "signature_required", id="no manifest"),
        pytest.param(signed(secret=STRANGER), "signature_invalid", id="an unknown key"),
        pytest.param(
            replace(
                signed(),
                manifest=json.dumps({**json.loads(signed().manifest or ""), "signatures": []}),
            ),
            "signature_required",
            id="no signature",
        ),
        pytest.param(signed(base={"model": "llama"}), "manifest_mismatch", id="another base"),
        pytest.param(
            signed(base={"model": MODEL, "sha256": "b" * 64}),
            "manifest_mismatch",
            id="other base weights",
        ),
        pytest.param(signed(name="calm"), "manifest_mismatch", id="another name"),
        pytest.param(
            signed(kind="model", name=MODEL, base=None), "manifest_mismatch", id="another kind"
        ),
        pytest.param(signed(b"another"), "manifest_mismatch", id="another file"),
        pytest.param(signed(size=len(CONTENT) + 1), "manifest_mismatch", id="longer"),
        pytest.param(signed(size=1), "manifest_mismatch", id="shorter"),
        pytest.param(signed(size=2**40), "body_too_large", id="a terabyte"),
        pytest.param(signed(expires=NOW_S), "manifest_expired", id="expired"),
    ],
)
def test_a_file_without_the_right_manifest_is_refused(
    tmp_path: Path, claim: DeclaredArtifact, code: str
) -> None:
    async def work(it: House) -> None:
        with pytest.raises(RkserveError) as found:
            await it.send(claim)
        assert found.value.code == code
        assert it.store.digests() == ()
        assert (tmp_path / "artifacts/.uploads").exists()
        assert list((tmp_path / "artifacts/.uploads").iterdir()) == []
        if code != "body_too_large":
            assert [outcome for outcome, _ in it.audit()] == [code]

    played(tmp_path, work)


def test_a_file_that_was_taken_before_the_rule_is_not_staged(tmp_path: Path) -> None:
    async def work(it: House) -> None:
        claim = DeclaredArtifact("tone", "v1", MODEL)
        version = await asyncio.to_thread(_kept, it.store, claim)
        assert isinstance(version, AdapterVersion)
        with pytest.raises(SignatureRequired):
            await it.control.stage(version)
        assert it.staged == []

    played(tmp_path, work)


def test_base_weights_need_a_signature_by_the_rule_all(tmp_path: Path) -> None:
    model = make_manifest(**stated(kind=MODEL_KIND, name=MODEL, base=None))
    claim = DeclaredArtifact(MODEL, None, MODEL, base=True)

    async def work(it: House) -> None:
        with pytest.raises(SignatureRequired):
            await it.send(claim)
        old = await asyncio.to_thread(_kept, it.store, replace(claim, version="old"), b"old" * 99)
        assert isinstance(old, BaseVersion)
        with pytest.raises(SignatureRequired):
            await it.control.it.find_weights(MODEL, f"{MODEL}@old")
        for change in (it.control.rebase(old), it.control.update(old, 1)):
            with pytest.raises(SignatureRequired):
                await change
        assert it.staged == []
        version = await it.send(replace(claim, manifest=signed_envelope(model, SECRET)))
        assert isinstance(version, BaseVersion)
        assert (await it.control.it.find_weights(MODEL, f"{MODEL}@v7")).version == version
        assert (await it.control.rebase(version)).operation.state is OperationState.SUCCEEDED

    played(tmp_path, work)


def _kept(store: ArtifactStore, claim: DeclaredArtifact, content: bytes = CONTENT) -> Artifact:
    """Keep a file as a Coordinator without rules does."""
    key = store.upload_begin(claim)
    store.upload_part(key, 0, content)
    return store.upload_end(key)


# -- versions -------------------------------------------------------------------------------------


def test_a_lower_signed_version_is_refused_also_after_a_restart(tmp_path: Path) -> None:
    async def work(it: House) -> None:
        await it.send(signed(version=7))
        older = signed(b"older" * 50, version=6)
        await refused(it, older, SignedVersionOlder)
        await refused(it, signed(b"other" * 50, version=7), SignedVersionTaken)

    played(tmp_path, work)

    async def again(it: House) -> None:
        older = signed(b"older" * 50, version=6)
        await refused(it, older, SignedVersionOlder)
        version = await it.send(replace(older, allow_older=True), b"older" * 50)
        assert it.audit()[-1] == (
            "succeeded",
            {
                "name": "tone",
                "version": "v6",
                "model": MODEL,
                "sha256": version.digest,
                "allow_older": True,
                "signed_version": 6,
                "key": "release",
                "key_id": RELEASE.key_id,
            },
        )
        # The exception was for that call: the highest version stays.
        await refused(it, older, SignedVersionOlder)
        await it.send(signed(b"newer" * 50, version=8), b"newer" * 50)

    played(tmp_path, again)


def test_a_later_version_that_overtakes_an_upload_has_it_refused(tmp_path: Path) -> None:
    async def work(it: House) -> None:
        slow = await it.intake.upload_begin(signed(version=7))
        await it.intake.upload_part(slow, 0, CONTENT)
        newer = await it.send(signed(b"newer" * 50, version=8), b"newer" * 50)
        with pytest.raises(SignedVersionOlder):
            await it.intake.upload_end(slow)
        assert it.store.digests() == (newer.digest,)
        assert it.audit()[-1][0] == "signed_version_older"

    played(tmp_path, work)


def test_an_upload_that_fails_does_not_raise_the_highest_version(tmp_path: Path) -> None:
    async def work(it: House) -> None:
        await refused(it, signed(b"absent", version=99), ManifestMismatch)
        await it.send(signed(version=7))

    played(tmp_path, work)


# -- model folders --------------------------------------------------------------------------------


def test_a_model_folder_is_signed_as_a_whole(tmp_path: Path) -> None:
    source = tmp_path / "source" / "chat"
    source.mkdir(parents=True)
    (source / "model.rkllm").write_bytes(CONTENT)
    (source / "rkserve.yaml").write_text("context_length: 512\n", encoding="utf-8")
    index = index_folder(source, PIECE_MIN_BYTES)
    manifest = make_manifest(
        kind="folder", name="chat", version=1, sha256=index.version, size=index.total_bytes
    )
    claim = DeclaredArtifact("chat", None, "chat", manifest=signed_envelope(manifest, SECRET))

    async def work(it: House) -> None:
        with pytest.raises(SignatureRequired):
            await it.intake.folder_begin(index, replaces=False, claim=None)
        (source / "rkserve.yaml").write_text("context_length: 513\n", encoding="utf-8")
        changed = index_folder(source, PIECE_MIN_BYTES)
        with pytest.raises(ManifestMismatch):
            await it.intake.folder_begin(changed, replaces=False, claim=claim)
        assert not it.models.exists() or list(it.models.iterdir()) == []
        (source / "rkserve.yaml").write_text("context_length: 512\n", encoding="utf-8")
        await it.intake.folder_begin(index, replaces=False, claim=claim)
        catalog = it.intake._catalog
        for file in index.files:
            for piece in index.pieces(file.path):
                data = read_piece(source, piece)
                catalog.upload_piece("chat", index.version, piece.path, piece.number, data)
        assert (await it.intake.folder_end("chat", index.version)).complete
        assert [one for one, _ in it.audit("model_upload")] == [
            "signature_required",
            "manifest_mismatch",
            "succeeded",
        ]

    played(tmp_path, work)


def test_a_pushed_folder_brings_no_unsigned_adapters_past_the_rule(tmp_path: Path) -> None:
    source = tmp_path / "source" / "chat"
    (source / "adapters/tone/v1").mkdir(parents=True)
    (source / "model.rkllm").write_bytes(CONTENT)
    rules = TrustRules((RELEASE,), SignatureRule.ADAPTERS)

    async def work(it: House) -> None:
        bare = index_folder(source, PIECE_MIN_BYTES)
        assert not (await it.intake.folder_begin(bare, replaces=False, claim=None)).complete
        (source / "adapters/tone/v1/adapter.rkllm").write_bytes(CONTENT)
        index = index_folder(source, PIECE_MIN_BYTES)
        with pytest.raises(SignatureRequired):
            await it.intake.folder_begin(index, replaces=True, claim=None)

    played(tmp_path, work, rules)


# -- hostile files --------------------------------------------------------------------------------

VALID = signed()
WHOLE = json.loads(VALID.manifest or "")
PAYLOAD = base64.b64decode(WHOLE["payload"])
# Values that other places or times would have; each is another manifest.
HOSTILE: tuple[dict[str, Any], ...] = (
    {"version": 2**63},
    {"version": 2**31},
    {"version": 0},
    {"version": "7"},
    {"size": 2**40},
    {"size": -1},
    {"sha256": "0" * 64},
    {"sha256": f"sha256:{'a' * 57}"},
    {"name": "../../etc/x"},
    {"name": "CON"},
    {"name": "a\0b"},
    {"kind": "model"},
    {"kind": "folder", "base": None},
    {"base": {"model": "llama"}},
    {"base": {"model": MODEL, "sha256": "b" * 64}},
    {"expires": 1},
    {"extra": True},
)


def mutated(rng: random.Random) -> tuple[DeclaredArtifact, bytes]:
    """Return a hostile variant of a signed upload: of its envelope, its payload, its signature, its
    declaration or its file.
    """
    claim, content = VALID, CONTENT
    kind = rng.randrange(12)
    if kind < 2:
        claim = replace(claim, manifest=flipped(rng, VALID.manifest or "").decode("latin-1"))
    elif kind < 4:
        claim = enveloped(payload=flipped(rng, PAYLOAD))
    elif kind < 5:
        claim = enveloped(payload=json_of(stated(**rng.choice(HOSTILE))))
    elif kind < 6:  # signed, by a stranger
        claim = enveloped(payload=json_of(stated(**rng.choice(HOSTILE))), secret=STRANGER)
    elif kind < 7:  # signed by the right key, and yet for nothing like this
        claim = enveloped(payload=json_of(stated(**rng.choice(HOSTILE))), secret=SECRET)
    elif kind < 8:
        signature = bytearray(base64.b64decode(WHOLE["signatures"][0]["sig"]))
        signature[rng.randrange(64)] ^= 1 << rng.randrange(8)
        claim = enveloped(signature=bytes(signature))
    elif kind < 9:
        claim = rng.choice(
            (
                replace(claim, manifest=None),
                enveloped(signatures=[]),
                enveloped(payloadType="application/json"),
                replace(claim, manifest=(VALID.manifest or "")[: rng.randrange(len(PAYLOAD))]),
                enveloped(payload=PAYLOAD + b" ", secret=SECRET),
                enveloped(payload=b'{"version":9,' + PAYLOAD[1:], secret=SECRET),
            )
        )
    elif kind < 10:
        claim = rng.choice(
            (
                replace(claim, name="calm"),
                replace(claim, version="v8"),
                replace(claim, model=MODEL, base=True, name=MODEL),
                replace(claim, sha256="0" * 64),
                replace(claim, size_bytes=len(CONTENT) + 1),
                replace(claim, base_digest="c" * 64),
                replace(claim, accepted=AcceptedManifest(MODEL, "tone", 9), manifest=None),
            )
        )
    else:
        content = flipped(rng, CONTENT)
    return claim, content


def flipped(rng: random.Random, given: bytes | str) -> bytes:
    """Return content with flipped bits, cut, or with more of it."""
    made = bytearray(given.encode() if isinstance(given, str) else given)
    how = rng.randrange(4)
    if how == 0:
        del made[rng.randrange(len(made)) :]
    elif how == 1:
        at = rng.randrange(len(made))
        made[at:at] = rng.randbytes(rng.randrange(1, 20))
    else:
        for _ in range(rng.randrange(1, 4)):
            made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)
    return bytes(made)


def json_of(value: dict[str, Any]) -> bytes:
    known = {key: one for key, one in {"soc": [], **value}.items() if one is not None}
    return json.dumps(known, sort_keys=True, separators=(",", ":")).encode()


def enveloped(
    payload: bytes = PAYLOAD,
    secret: Ed25519PrivateKey | None = None,
    signature: bytes | None = None,
    **changed: Any,
) -> DeclaredArtifact:
    whole = {**WHOLE, "payload": base64.b64encode(payload).decode()}
    if secret is not None:
        signature = secret.sign(pre_authentication(PAYLOAD_TYPE, payload))
    if signature is not None:
        whole["signatures"] = [{"keyid": "", "sig": base64.b64encode(signature).decode()}]
    return replace(VALID, manifest=json.dumps({**whole, **changed}))


def is_equivalent(claim: DeclaredArtifact, content: bytes) -> bool:
    """Return whether it is the signed upload after all: the same statement, file and target, such
    as with other bits in a part of the envelope that is not signed.
    """
    if content != CONTENT or replace(claim, manifest=VALID.manifest) != VALID:
        return False
    try:
        text = json.loads(claim.manifest or "")["payload"].translate(str.maketrans("-_", "+/"))
        return base64.b64decode(text, validate=True) == PAYLOAD
    except (ValueError, TypeError, KeyError, AttributeError):
        return False


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.long)])
def test_no_hostile_manifest_signature_or_file_is_kept(tmp_path: Path, count: int) -> None:
    counts = run_loop(tried(tmp_path, count), 3600.0)
    print(f"{count} mutations: {dict(counts)}")  # noqa: T201 - the figures of the documentation
    assert counts["signature_invalid"] > 0.1 * count
    for code in ("manifest_invalid", "manifest_mismatch", "signature_required"):
        assert counts[code] > 0.01 * count


async def tried(folder: Path, count: int) -> Counter[str]:
    """Send so many variants; return the number that each check refused."""
    rng, counts = random.Random(20261125), Counter[str]()
    async with house(folder) as it:
        for _ in range(count):
            claim, content = mutated(rng)
            try:
                version = await it.send(claim, content)
            except RkserveError as exc:
                counts[str(exc.code)] += 1
                assert it.store.digests() == (), (claim, content)
                continue
            assert is_equivalent(claim, content), (claim, content)
            counts["equivalent"] += 1
            assert it.store.digests() == (version.digest,)
            assert it.store.remove(version.digest)
        assert it.staged == []
        assert list((folder / "artifacts/.uploads").iterdir()) == []
        accepted = await it.send(signed(version=8))
        assert it.store.digests() == (accepted.digest,), "no variant has used a version up"
    return counts
