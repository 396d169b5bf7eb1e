"""What the Coordinator has written down is there after any end, and nothing else is."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from rkserve.control import state_changes
from rkserve.control.calls import OperationKind, PauseAction
from rkserve.control.codec import SCHEMA, write_operation
from rkserve.control.operations import BoardOutcome, OperationState, ResultStatus
from rkserve.coordinator.state.ledger import (
    DAMAGED,
    MIGRATIONS,
    AuditEntry,
    Ledger,
)
from rkserve.coordinator.state.ledger_files import FILE, RESERVE, RESERVE_BYTES, back_up
from rkserve.core.desired_state import Desired, PauseMode, Scope
from rkserve.core.errors import LedgerFailed
from tests.support.values.control_values import recorded

pytestmark = pytest.mark.slow

PAUSED = state_changes.pause(
    Desired(), "op-1", Scope(models=("m",)), PauseMode.KEEP, 5.0, lease_s=2.0
)
DONE = recorded(
    "op-1",
    OperationKind.PAUSE,
    OperationState.SUCCEEDED,
    params={"models": ["m"]},
    key="k1",
    epoch=1,
    results={"a": BoardOutcome(ResultStatus.OK, 1.5, details={"stopped": 2})},
)


def test_what_was_written_is_there_after_it_is_opened_again(tmp_path: Path) -> None:
    line = AuditEntry(1.0, "trainer", "pause", {"models": ["m"]}, "succeeded", 200, "op-1", 1)
    with closing(Ledger.open(tmp_path)) as ledger:
        assert ledger.desired() == Desired()
        ledger.write(desired=PAUSED, operations=[DONE], audit=[line])
    with closing(Ledger.open(tmp_path)) as ledger:
        assert ledger.desired() == PAUSED
        assert ledger.operation("op-1") == ledger.by_key("k1") == DONE
        assert ledger.operations() == [DONE]
        assert ledger.audit() == [line]
        assert ledger.running() == []
        assert ledger.operation("op-2") is ledger.by_key("k2") is None


def test_what_is_long_to_read_is_read_in_other_threads_and_holds_up_no_write(
    tmp_path: Path,
) -> None:
    stagings = [recorded(f"op-s{n}", OperationKind.ADAPTER_STAGE) for n in range(3)]
    line = AuditEntry(1.0, "trainer", "label")
    with closing(Ledger.open(tmp_path)) as ledger, ThreadPoolExecutor(4) as threads:
        ledger.write(operations=[DONE, *stagings], audit=[line])
        asked = [threads.submit(ledger.operations, 100) for _ in range(20)]
        for n in range(20):
            ledger.write(operations=[recorded(f"op-l{n}", OperationKind.LABEL)])
        assert all(DONE in one.result() for one in asked)
        assert len(threads.submit(ledger.operations, 100).result()) == 24
        assert threads.submit(ledger.of_kind, OperationKind.ADAPTER_STAGE).result() == stagings
        assert threads.submit(ledger.audit).result() == [line]


def test_an_operation_is_one_record_through_all_its_states(tmp_path: Path) -> None:
    begun = recorded("op-1", OperationKind.LABEL)
    with closing(Ledger.open(tmp_path)) as ledger:
        ledger.write(operations=[begun])
        assert ledger.running() == [begun]
        ended = begun.end(OperationState.SUCCEEDED, 9.0)
        ledger.write(operations=[ended])
        assert ledger.running() == []
        assert ledger.operations() == [ended]


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from rkserve.coordinator.state.ledger import Ledger\n"
        "ledger = Ledger.open(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(LedgerFailed, match=rf"in use by another .* \(process {other.pid}\)"):
            Ledger.open(tmp_path)
        other.kill()
        other.wait()
    Ledger.open(tmp_path).close()


WRITER = """
import sys
from pathlib import Path
from rkserve.control import state_changes as changes
from rkserve.control.calls import LabelAction
from rkserve.control.operations import ControlOperation
from rkserve.coordinator.state.ledger import AuditEntry, Ledger
action = LabelAction(model="m", label="l")
ledger = Ledger.open(Path(sys.argv[1]))
desired = ledger.desired()
while True:
    desired = changes.set_label(desired, "m", f"label {desired.epoch + 1}")
    name = f"op-{desired.epoch}"
    ledger.write(
        desired=desired,
        operations=[ControlOperation(name, action, epoch=desired.epoch)],
        audit=[AuditEntry(0.0, "w", "label", operation=name, epoch=desired.epoch)],
    )
    print(desired.epoch, flush=True)
"""


def test_a_kill_at_any_moment_loses_nothing_that_was_written_and_leaves_no_halves(
    tmp_path: Path,
) -> None:
    written = 0
    for wanted in (1, 2, 5, 9, 14, 20):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(wanted):
                written = int(writer.stdout.readline())
            os.kill(writer.pid, signal.SIGKILL)
            rest = writer.stdout.read().split()
            written = int(rest[-1]) if rest else written
        with closing(Ledger.open(tmp_path)) as ledger:
            desired = ledger.desired()
            # The one after the last that was said may have been written before the kill.
            assert written <= desired.epoch <= written + 1
            assert desired.weights_of("m").label == f"label {desired.epoch}"
            assert ledger.operations(1)[0].epoch == desired.epoch
            assert ledger.audit(1)[0].epoch == desired.epoch
            assert len(ledger.operations(10_000)) == desired.epoch


def test_a_full_disk_is_a_clear_error_and_changes_nothing(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        ledger.write(desired=PAUSED, operations=[DONE])
        pages = ledger._database.execute("PRAGMA page_count").fetchone()[0]
        ledger._database.execute(f"PRAGMA max_page_count = {pages}")
        full = replace(DONE, id="op-2", key=None, action=PauseAction(models=("m" * 100_000,)))
        later = state_changes.set_label(PAUSED, "m", "later")
        with pytest.raises(LedgerFailed, match=r"nothing was changed: .*full.* Free space"):
            ledger.write(desired=later, operations=[full])
        assert ledger.desired() == PAUSED
        assert ledger.operations() == [DONE]
        ledger._database.execute(f"PRAGMA max_page_count = {pages + 1000}")
        ledger.write(desired=later, operations=[full])
        assert ledger.desired() == later


def test_an_older_schema_is_migrated_with_all_it_holds(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path, migrations=MIGRATIONS[:1])) as old:
        old._database.execute(
            "INSERT INTO operations (id, state, value) VALUES (?, ?, ?)",
            (DONE.id, DONE.state.value, write_operation(replace(DONE, key="old key"))),
        )
    with closing(Ledger.open(tmp_path)) as ledger:
        assert ledger._database.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
        assert ledger.operations() == [replace(DONE, key="old key")]
        ledger.write(audit=[AuditEntry(1.0, "w", "pause")])
        assert len(ledger.audit()) == 1


def test_a_migration_that_fails_leaves_the_ledger_as_it_was(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        ledger.write(desired=PAUSED)
    broken = (*MIGRATIONS, ("DELETE FROM desired", "no SQL at all"))
    with pytest.raises(LedgerFailed, match="syntax error"):
        Ledger.open(tmp_path, migrations=broken)
    with closing(Ledger.open(tmp_path)) as ledger:
        assert ledger.desired() == PAUSED


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    Ledger.open(tmp_path, migrations=(*MIGRATIONS, ("CREATE TABLE more (id INTEGER)",))).close()
    with pytest.raises(LedgerFailed, match="a newer rkserve wrote it"):
        Ledger.open(tmp_path)


def test_a_ledger_is_copied_before_its_tables_are_migrated(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        ledger.write(desired=PAUSED, operations=[DONE])
    assert not [*tmp_path.glob("*.bak-*")]
    more = (*MIGRATIONS, ("DELETE FROM operations",))
    with closing(Ledger.open(tmp_path, migrations=more)) as ledger:
        assert ledger.operations() == []
        ledger.write(desired=Desired())
    (copy,) = tmp_path.glob("*.bak-*")
    assert copy.name == f"{FILE}.bak-{len(MIGRATIONS)}.{SCHEMA}"
    assert copy.stat().st_mode & 0o777 == 0o600
    # The release before names the way back, and serves from the copy.
    with pytest.raises(LedgerFailed, match=r"go back .*: rm -f .* && cp ") as refused:
        Ledger.open(tmp_path)
    commands = refused.value.message.partition("release: ")[2].rstrip(".")
    subprocess.run(["sh", "-c", commands], check=True, timeout=60)
    with closing(Ledger.open(tmp_path)) as ledger:
        assert (ledger.desired(), ledger.operations()) == (PAUSED, [DONE])


def test_a_ledger_is_copied_before_its_values_are_converted(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        ledger.write(desired=Desired(epoch=4))  # it has no field that schema 1 lacks
        ledger._database.execute(
            "UPDATE desired SET value = replace(value, ?, ?)", (f'"schema":{SCHEMA}', '"schema":1')
        )
        before = ledger.rows("SELECT value FROM desired")
    for _ in range(2):
        with closing(Ledger.open(tmp_path)) as ledger:
            assert ledger.desired() == Desired(epoch=4)
            assert f'"schema":{SCHEMA}' in ledger.rows("SELECT value FROM desired")[0][0]
            ledger.write(desired=Desired(epoch=5))
            ledger.write(desired=Desired(epoch=4))
    copy = tmp_path / f"{FILE}.bak-{len(MIGRATIONS)}.1"
    with closing(sqlite3.connect(copy)) as database:
        assert database.execute("SELECT value FROM desired").fetchall() == before
    assert [*tmp_path.glob("*.bak-*")] == [copy]


def test_values_of_a_later_release_are_refused_with_both_versions(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        ledger.write(desired=PAUSED)
        old, new = f'"schema":{SCHEMA}', f'"schema":{SCHEMA + 1}'
        ledger._database.execute("UPDATE desired SET value = replace(value, ?, ?)", (old, new))
    said = f"schema {SCHEMA + 1} of its values, and this release knows {SCHEMA}: a newer rkserve"
    with pytest.raises(LedgerFailed, match=said):
        Ledger.open(tmp_path)


def test_a_ledger_that_cannot_be_copied_is_not_migrated(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        ledger.write(desired=PAUSED)
    (tmp_path / f"{FILE}.bak-{len(MIGRATIONS)}.{SCHEMA}.new").mkdir()
    with pytest.raises(LedgerFailed, match=r"cannot be copied .* Check the space"):
        Ledger.open(tmp_path, migrations=(*MIGRATIONS, ("DELETE FROM desired",)))
    with closing(Ledger.open(tmp_path)) as ledger:
        assert ledger.desired() == PAUSED


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"not a database, but long enough to be looked at" * 20, id="another file"),
        pytest.param(b"SQLite format 3\x00" + b"\xff" * 4096, id="a damaged header"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / FILE
    file.write_bytes(content)
    with pytest.raises(LedgerFailed, match=rf"{FILE} is damaged: .* move it away"):
        Ledger.open(tmp_path)
    assert file.read_bytes() == content


@pytest.mark.parametrize("gone", [pytest.param(True, id="gone"), pytest.param(False, id="damaged")])
def test_a_lost_ledger_is_refused_with_the_command_that_brings_its_backup_back(
    tmp_path: Path, gone: bool
) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        ledger.write(desired=PAUSED, operations=[DONE])
        backup = back_up(tmp_path, 1e9)
        ledger.write(desired=state_changes.set_label(PAUSED, "m", "later"))
    (tmp_path / FILE).unlink()
    if not gone:
        (tmp_path / FILE).write_bytes(b"SQLite format 3\x00" + b"\xff" * 4096)
    with pytest.raises(LedgerFailed, match="2001-09-09 01:46:40 UTC") as refused:
        Ledger.open(tmp_path)
    command = f"rkserve restore {backup.path} --data-dir {tmp_path}"
    assert command in refused.value.message


@pytest.mark.parametrize(
    ("spoil", "mend"),
    [
        pytest.param("mv {0} {0}.moved", "mv {0}.moved {0}", id="moved away"),
        pytest.param(
            "cp {0} {0}.copy; mv {0} {0}.moved; mv {0}.copy {0}", "mv {0}.moved {0}", id="replaced"
        ),
        pytest.param("mv {0}-wal {0}.log", "mv {0}.log {0}-wal", id="its log moved away"),
    ],
)
def test_a_ledger_that_is_no_longer_in_its_place_is_not_written(
    tmp_path: Path, spoil: str, mend: str
) -> None:
    def run(command: str) -> None:
        subprocess.run(["sh", "-c", command.format(tmp_path / FILE)], check=True, timeout=60)

    later = state_changes.set_label(PAUSED, "m", "later")
    with closing(Ledger.open(tmp_path)) as ledger:
        ledger.write(desired=PAUSED)
        run(spoil)
        with pytest.raises(LedgerFailed, match="was moved, removed or replaced"):
            ledger.write(desired=later)
        assert ledger.desired() == PAUSED
        run(mend)
        ledger.write(desired=later)
    with closing(Ledger.open(tmp_path)) as ledger:
        assert ledger.desired() == later


def test_a_damaged_value_is_an_error_and_not_an_empty_cluster(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        ledger.write(desired=PAUSED)
    with closing(sqlite3.connect(tmp_path / FILE)) as database, database:
        database.execute('UPDATE desired SET value = \'{"epoch": "one"}\'')
    with closing(Ledger.open(tmp_path)) as ledger, pytest.raises(LedgerFailed):
        ledger.desired()


def test_a_damaged_entry_of_the_audit_log_is_shown_among_the_others(tmp_path: Path) -> None:
    entries = [AuditEntry(float(second), "w", "pause") for second in range(3)]
    with closing(Ledger.open(tmp_path)) as ledger:
        ledger.write(audit=entries)
        database = ledger._database
        for number, value in ((1, "{"), (2, '{"who": 1, "unknown": 2}')):
            database.execute("UPDATE audit SET value = ? WHERE number = ?", (value, number))
        assert [one.kind for one in ledger.audit()] == ["pause", DAMAGED, DAMAGED]


def test_what_was_cut_off_while_it_was_created_is_created_anew(tmp_path: Path) -> None:
    fresh = tmp_path / f"{FILE}.new"
    for left in (fresh, Path(f"{fresh}-wal")):
        left.write_bytes(b"half of it")
    with closing(Ledger.open(tmp_path)) as ledger:
        ledger.write(desired=PAUSED)
    assert not list(tmp_path.glob("*.new*"))
    with closing(Ledger.open(tmp_path)) as ledger:
        assert ledger.desired() == PAUSED


def test_a_new_ledger_has_nothing_of_the_log_of_one_that_was_moved_away(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        ledger.write(desired=PAUSED)
        log = (tmp_path / f"{FILE}-wal").read_bytes()
    assert log, "nothing to replay"
    (tmp_path / FILE).rename(tmp_path / "moved away")
    (tmp_path / f"{FILE}-wal").write_bytes(log)
    with closing(Ledger.open(tmp_path)) as ledger:
        assert ledger.desired() == Desired()
        ledger.write(desired=PAUSED)
    with closing(Ledger.open(tmp_path)) as ledger:
        assert ledger.desired() == PAUSED


def test_a_folder_that_others_prepared_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / "linked").symlink_to(elsewhere)
    with pytest.raises(LedgerFailed, match="is a symbolic link"):
        Ledger.open(tmp_path / "linked")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(LedgerFailed, match="other accounts may write"):
        Ledger.open(tmp_path / "open")
    assert not [*elsewhere.iterdir(), *(tmp_path / "open").iterdir()]


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerFailed, match=r"file/data \(coordinator.data_dir\) cannot be used"):
        Ledger.open(tmp_path / "file" / "data")


def test_the_oldest_records_are_forgotten_but_never_what_goes_on(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path, max_operations=3)) as ledger:
        going_on = recorded("op-first", OperationKind.PAUSE, key="first")
        ledger.write(operations=[going_on])
        for number in range(6):
            one = replace(DONE, id=f"op-{number}", key=f"k{number}")
            ledger.write(operations=[one], audit=[AuditEntry(float(number), "w", "pause")])
        assert [one.id for one in ledger.operations()] == ["op-5", "op-4", "op-3", "op-first"]
        assert ledger.by_key("k0") is None
        assert [line.at_s for line in ledger.audit()] == [5.0, 4.0, 3.0]


def test_no_other_account_may_read_the_ledger(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    Ledger.open(folder).close()
    assert folder.stat().st_mode & 0o077 == 0


def test_a_full_disk_gets_the_ledger_s_reserve_to_open_it(tmp_path: Path) -> None:
    reserve = tmp_path / RESERVE
    Ledger.open(tmp_path, free=lambda _: 10 * RESERVE_BYTES).close()
    assert reserve.stat().st_size == RESERVE_BYTES
    seen: list[bool] = []

    def full(_folder: Path) -> int:
        seen.append(reserve.exists())
        return 0

    Ledger.open(tmp_path, free=full).close()
    assert (seen, reserve.exists()) == ([True], False)
    Ledger.open(tmp_path, free=lambda _: 2 * RESERVE_BYTES).close()
    assert not reserve.exists(), "what is left is not taken from others"
    Ledger.open(tmp_path, free=lambda _: 10 * RESERVE_BYTES).close()
    assert reserve.exists()
