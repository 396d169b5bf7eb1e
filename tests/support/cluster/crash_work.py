"""Work on the files that rkserve keeps, for crashes in its middle, and what must be true then.

Each work notes what was confirmed to it; ``check`` opens the folder as a restart does, and fails
where a confirmed change is gone, or anything is there by half.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rkserve.api.responses.stored import StoredResponse
from rkserve.board.storage.cache_files import CacheFolder
from rkserve.board.storage.staged_artifacts import Intake, StagedAdapters, StagedWeights
from rkserve.config.router import IdempotencyConfig
from rkserve.control.calls import DeclaredArtifact, OperationKind
from rkserve.control.operations import OperationState
from rkserve.coordinator.artifacts.store import ArtifactRules, ArtifactStore
from rkserve.coordinator.state.ledger import MIGRATIONS, AuditEntry, Ledger
from rkserve.coordinator.state.ledger_files import back_up, backups_of, defect_of, restore_ledger
from rkserve.core.desired_state import (
    ActivePause,
    AdapterVersion,
    Artifact,
    BaseVersion,
    Desired,
    PauseMode,
    Scope,
)
from rkserve.core.files import private_folder
from rkserve.core.messages import AdapterRef
from rkserve.probe.probe import write_report
from rkserve.probe.verdicts import ProbeReport
from rkserve.router.idempotency.store import AnswerStore, KeyState, name_of
from rkserve.router.response_store import ResponseStore
from tests.support.boards.cache_cabinet import SEAL, Cabinet, keep
from tests.support.cluster.crash_points import ACKS
from tests.support.values.control_values import recorded

MODEL = "sim-chat"
ROOM = 1 << 40
DAY_S = 86_400.0
Ack = Callable[[str], None]


def content(name: str) -> bytes:
    """A file whose content tells its name."""
    return name.encode() * 700


def adapter(name: str) -> AdapterVersion:
    """An adapter version of that content."""
    data = content(name)
    return AdapterVersion(AdapterRef("tone", name, hashlib.sha256(data).hexdigest()), len(data))


# -- the ledger -----------------------------------------------------------------------------------


def state_of(epoch: int) -> Desired:
    """The desired state of an epoch, which tells it in its pauses, too."""
    pauses = [
        ActivePause(f"op-{epoch}-{n}", Scope(boards=(f"b{n}",)), PauseMode.KEEP, since_s=float(n))
        for n in range(epoch % 5)
    ]
    return Desired(epoch, pauses=tuple(pauses))


def ledger_work(root: Path, ack: Ack) -> None:
    """Open a ledger, write 12 epochs with their operations, open it again, and write on."""
    for first in (1, 9):
        ledger = Ledger.open(root, max_operations=100, free=lambda _: 2 << 20)
        for epoch in range(first, first + (8 if first == 1 else 4)):
            operation = recorded(f"op-{epoch}", OperationKind.PAUSE, OperationState.SUCCEEDED)
            line = AuditEntry(at_s=float(epoch), who="tests", kind="pause", epoch=epoch)
            ledger.write(desired=state_of(epoch), operations=[operation], audit=[line])
            ack(str(epoch))
        ledger.close()


def ledger_check(root: Path, acks: Sequence[str]) -> None:
    """The state is that of one epoch, the last that was confirmed or the one being written."""
    ledger = Ledger.open(root, free=lambda _: 2 << 20)
    try:
        desired = ledger.desired()
        confirmed = int(acks[-1]) if acks else 0
        assert confirmed <= desired.epoch <= confirmed + 1, (desired.epoch, acks)
        assert desired == state_of(desired.epoch)
        operations = {one.id for one in ledger.operations()}
        assert operations == {f"op-{epoch}" for epoch in range(1, desired.epoch + 1)}
        assert [line.epoch for line in ledger.audit()] == list(range(desired.epoch, 0, -1))
        following = state_of(desired.epoch + 1)
        ledger.write(desired=following)
        assert ledger.desired() == following
    finally:
        ledger.close()


# -- the head's store of artifacts ----------------------------------------------------------------


def open_store(root: Path) -> ArtifactStore:
    """Open it as the Coordinator does at its start."""
    store = ArtifactStore(root / "artifacts", ArtifactRules(reserve_bytes=0), free=lambda _: ROOM)
    store.open()
    return store


def store_work(root: Path, ack: Ack) -> None:
    """Upload three adapters in parts, and remove one."""
    store = open_store(root)
    for name in ("v1", "v2", "v3"):
        data = content(name)
        upload = store.upload_begin(DeclaredArtifact(MODEL, "tone", name))
        for at in range(0, len(data), 500):
            store.upload_part(upload, at, data[at : at + 500])
        ack(store.upload_end(upload).digest)
    store.remove(adapter("v1").digest)


def store_check(root: Path, acks: Sequence[str]) -> None:
    """Each digest has its content; those that were confirmed are there, but for the removed one."""
    store = open_store(root)
    known = {adapter(name).digest: content(name) for name in ("v1", "v2", "v3")}
    for digest in store.digests():
        assert store.read(digest, 0, 1 << 20) == known[digest]
    may_be_gone = {adapter("v1").digest} if len(acks) == 3 else set()
    assert set(acks) - may_be_gone <= set(store.digests())
    upload = store.upload_begin(DeclaredArtifact(MODEL, "tone", "v3"))
    store.upload_part(upload, 0, content("v3"))
    assert store.upload_end(upload).digest in store.digests()


# -- a board's staged files -----------------------------------------------------------------------


def open_intake(root: Path) -> tuple[Intake, StagedAdapters, StagedWeights]:
    """Open both folders as a board does at its start."""
    adapters = StagedAdapters(root / "adapters", "b", MODEL, free=lambda _: ROOM)
    weights = StagedWeights(root / "weights", "b", MODEL, free=lambda _: ROOM)
    adapters.open()
    weights.open()
    return Intake(adapters, weights, lambda _: False), adapters, weights


def base(name: str) -> BaseVersion:
    """Base weights of that content."""
    data = content(name)
    return BaseVersion(MODEL, name, hashlib.sha256(data).hexdigest(), len(data))


def staged() -> dict[str, Artifact]:
    """The files that are staged, by their names."""
    return {"v1": adapter("v1"), "w1": base("w1"), "v2": adapter("v2"), "w2": base("w2")}


def intake_work(root: Path, ack: Ack) -> None:
    """Stage adapters and base weights in chunks, and remove one of each."""
    intake, _, _ = open_intake(root)
    for name, version in staged().items():
        data = content(name)
        there = intake.begin(version)
        for at in range(there, len(data), 500):
            intake.chunk(version.digest, at, data[at : at + 500])
        intake.commit(version)
        ack(name)
    for name in ("v1", "w1"):
        intake.remove(staged()[name])


def intake_check(root: Path, acks: Sequence[str]) -> None:
    """What is present is whole; what was confirmed is present, but for what was being removed."""
    intake, adapters, weights = open_intake(root)
    present = {one.ref.version for one in adapters.present()}
    for one in adapters.present():
        file = root / "adapters" / "tone" / one.ref.version / "adapter.rkllm"
        assert file.read_bytes() == content(one.ref.version)
    for name, version in staged().items():
        place = weights.path(version) if isinstance(version, BaseVersion) else None
        if place is not None:
            present.add(name)
            assert place.read_bytes() == content(name)
    removed = {"v1", "w1"} if len(acks) == len(staged()) else set()
    assert set(acks) - removed <= present, (acks, present)
    for name, version in staged().items():
        data, there = content(name), intake.begin(version)
        if there < len(data):
            intake.chunk(version.digest, there, data[there:])
        intake.commit(version)


# -- prompt caches --------------------------------------------------------------------------------


def caches_work(root: Path, ack: Ack) -> None:
    """Keep named and parked conversations, one of them twice, and remove one."""
    cabinet = Cabinet(root / "caches")
    store = cabinet.open()
    for at in (1, 100, 1):
        keep(store, tuple(range(at, at + 40)), name=f"n{at}")
    ack("kept")
    store.delete("n100")
    cabinet.close()


def caches_check(root: Path, _acks: Sequence[str]) -> None:
    """Caches may be lost, but every one that is listed is what its manifest says."""
    folder = CacheFolder(root / "caches", SEAL)
    try:
        for entry in folder.open():
            folder.check(entry)
            first = entry.ids[0]
            assert entry.ids == tuple(range(first, first + 40))
    finally:
        folder.close()


# -- stored responses -----------------------------------------------------------------------------


def response(number: int) -> StoredResponse:
    """A response that tells its number."""
    name = f"resp_{number}"
    item = {"type": "message", "role": "user", "content": f"{number} " * 400}
    return StoredResponse(name, None, (item,), {"id": name, "output": []})


def responses_work(root: Path, ack: Ack) -> None:
    """Store responses, and delete some."""
    store = ResponseStore(root / "state" / "responses", 1 << 20, DAY_S)
    for number in range(15):
        store.write("owner", response(number))
        ack(str(number))
        if number % 4 == 3:
            store.delete("owner", f"resp_{number - 1}")
    store.close()


def responses_check(root: Path, acks: Sequence[str]) -> None:
    """Responses are whole, without gaps: the last ones may be lost at a power cut, as promised."""
    store = ResponseStore(root / "state" / "responses", 1 << 20, DAY_S)
    try:
        found = [store.read("owner", f"resp_{number}") for number in range(15)]
        for number, one in enumerate(found):
            assert one is None or one.response == response(number).response
            assert one is None or list(one.items) == list(response(number).items)
        last = max((number for number, one in enumerate(found) if one is not None), default=-1)
        lost = [n for n in range(last) if found[n] is None and n % 4 != 2]
        assert not lost, (lost, acks)
        assert last <= len(acks)
    finally:
        store.close()


# -- backups of the ledger ------------------------------------------------------------------------


def backups_work(root: Path, ack: Ack) -> None:
    """Make three backups of a ledger, each of another epoch, and restore the first."""
    for epoch in (1, 2, 3):
        ledger = Ledger.open(root, free=lambda _: 2 << 20)
        ledger.write(desired=state_of(epoch))
        ledger.close()
        ack(f"ledger {epoch}")
        back_up(root, epoch * DAY_S)
        ack(f"backup {epoch}")
    restore_ledger(backups_of(root)[-1].path, root, len(MIGRATIONS), 4 * DAY_S)
    ack("restored")


def backups_check(root: Path, acks: Sequence[str]) -> None:
    """Confirmed backups are there, each one is whole, and so is the ledger."""
    found = backups_of(root)
    made = sum(ack.startswith("backup") for ack in acks)
    assert made <= len(found) <= made + 1, (len(found), acks)
    for one in found:
        assert not defect_of(one.path)
        place = root / f"restored-{one.number}"
        restore_ledger(one.path, place, len(MIGRATIONS), 0.0)
        assert ledger_epoch(place) == one.number
    written = max((int(ack.split()[1]) for ack in acks if ack.startswith("ledger")), default=0)
    epochs = {1} if "restored" in acks else {written, written + 1, 1 if made == 3 else written}
    assert ledger_epoch(root) in epochs, acks


def ledger_epoch(folder: Path) -> int:
    """The epoch of a ledger, whose state must be that of the epoch."""
    ledger = Ledger.open(folder, free=lambda _: 2 << 20)
    try:
        desired = ledger.desired()
        assert desired == state_of(desired.epoch)
        return desired.epoch
    finally:
        ledger.close()


# -- answers to requests with a key ---------------------------------------------------------------


def answers_work(root: Path, ack: Ack) -> None:
    """Store the answers of ten keys, and free the key of every fourth without one."""
    private_folder(root / "keyed")
    store = AnswerStore(root / "keyed", IdempotencyConfig())
    for number in range(10):
        name = name_of("owner", str(number))
        assert store.claim(name, "digest").state is KeyState.OWN
        if number % 4 == 3:
            store.release(name)
        else:
            store.finish(name, {"number": str(number)}, content(str(number)))
        ack(str(number))
    store.close()


def answers_check(root: Path, acks: Sequence[str]) -> None:
    """Each key has its whole answer or none; the last ones may be lost at a power cut."""
    private_folder(root / "keyed")
    store = AnswerStore(root / "keyed", IdempotencyConfig())
    there = []
    try:
        for number in range(10):
            found = store.claim(name_of("owner", str(number)), "digest")
            assert found.state in (KeyState.OWN, KeyState.DONE), (number, found.state)
            if found.state is KeyState.DONE:
                there.append(number)
                assert found.body == content(str(number))
                assert found.headers == {"number": str(number)}
    finally:
        store.close()
    last = max(there, default=-1)
    assert there == [number for number in range(last + 1) if number % 4 != 3], (there, acks)
    assert last <= len(acks)


# -- the report of a probe ------------------------------------------------------------------------


def probed(number: int) -> ProbeReport:
    """A report that tells its number."""
    library = {"release": "1.3.0", "library_sha256": str(number)}
    model = {"model_digest": str(number)}
    return ProbeReport(True, {}, library, model, results=(), known={})


def report_work(root: Path, ack: Ack) -> None:
    """Write the report of a probe three times into one folder."""
    for number in range(3):
        write_report(probed(number), root / "probe")
        ack(str(number))


def report_check(root: Path, acks: Sequence[str]) -> None:
    """Each file is whole: that of the confirmed report, or of the one being written."""
    for name in ("quirks.json", "report.json"):
        file = root / "probe" / name
        if acks or file.exists():
            found = json.loads(file.read_text(encoding="utf-8"))
            library = found if name == "quirks.json" else found["library"]
            assert int(library["library_sha256"]) in (len(acks) - 1, len(acks)), (name, acks)


class Work(NamedTuple):
    """The work on one kind of files, and the check of what is left of it."""

    do: Callable[[Path, Ack], None]
    check: Callable[[Path, Sequence[str]], None]


WORKS = {
    "ledger": Work(ledger_work, ledger_check),
    "artifacts": Work(store_work, store_check),
    "staged files": Work(intake_work, intake_check),
    "prompt caches": Work(caches_work, caches_check),
    "stored responses": Work(responses_work, responses_check),
    "backups": Work(backups_work, backups_check),
    "keyed answers": Work(answers_work, answers_check),
    "probe's report": Work(report_work, report_check),
}


def main() -> None:
    """Do the work that is named on the command line."""
    root, name = Path(sys.argv[1]), sys.argv[2]

    def ack(what: str) -> None:
        with (root / ACKS).open("a", encoding="utf-8") as file:
            file.write(f"{what}\n")

    WORKS[name].do(root, ack)
    sys.stdout.write(json.dumps("done"))


if __name__ == "__main__":
    main()
