"""``rkserve update``, ``backup`` and ``restore``: options, errors and exit codes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import yaml

from rkserve.board.storage.ledger_copies import LedgerCopies, copies_of_node
from rkserve.bringup.update import FleetUpdater, UpdateOptions
from rkserve.cli import app
from rkserve.cli.context import Exit
from rkserve.coordinator.boards.head_files import pack
from rkserve.coordinator.state.ledger import MIGRATIONS, Ledger
from rkserve.coordinator.state.ledger_files import BACKUPS, FILE, back_up, backups_of
from rkserve.core.board_report import LedgerCopy
from rkserve.core.desired_state import Desired
from tests.support.http.terminal import Runner
from tests.support.values.config_args import args


@pytest.mark.parametrize(
    ("words", "code", "output"),
    [
        pytest.param([], Exit.FAILED, "No head runs that", id="no head"),
        pytest.param(["nowhere"], Exit.USAGE, "does not exist", id="no folder"),
        pytest.param([".", "--rollback"], Exit.USAGE, "takes no folder", id="back to a folder"),
        pytest.param([".", "--only-head"], Exit.USAGE, "takes no folder", id="a folder for none"),
        pytest.param(["--only-head", "--dry-run"], Exit.USAGE, "no --dry-run", id="dry head"),
        pytest.param(["--min-speed", "2"], Exit.USAGE, "min-speed", id="faster than before"),
        pytest.param(["--max-unavailable", "0"], Exit.USAGE, "max-unavailable", id="no board"),
    ],
)
def test_a_command_exits_with_its_reason(
    tmp_path: Path, words: list[str], code: Exit, output: str
) -> None:
    done = Runner().invoke(app, ["update", "--state", str(tmp_path / "node"), *words])
    assert done.exit_code == code, done.output
    assert output in done.output


@pytest.mark.parametrize(
    ("end", "code"),
    [(True, Exit.DONE), (False, Exit.FAILED), (KeyboardInterrupt, Exit.INTERRUPTED)],
)
def test_the_exit_code_tells_whether_all_nodes_came_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bool | type[BaseException], code: Exit
) -> None:
    given: list[UpdateOptions] = []

    def run(_self: FleetUpdater, options: UpdateOptions) -> bool:
        given.append(options)
        if isinstance(end, bool):
            return end
        raise end

    monkeypatch.setattr(FleetUpdater, "run", run)
    words = ["update", str(tmp_path), "--canary", "b1", "--max-unavailable", "3", "--dry-run"]
    done = Runner().invoke(app, [*words, "--state", str(tmp_path / "node")])
    assert done.exit_code == code
    assert given == [UpdateOptions(tmp_path, canary="b1", max_unavailable=3, dry_run=True)]


def run(*words: str | Path) -> tuple[int, str]:
    done = Runner().invoke(app, [str(word) for word in words])
    return done.exit_code, done.output


def test_a_backup_is_restored_where_the_application_is_down(tmp_path: Path) -> None:
    folder, copy = tmp_path / "data", tmp_path / "copy.sqlite3"
    with closing(Ledger.open(folder)) as ledger:
        ledger.write(desired=Desired(7))
        code, output = run("backup", copy, "--data-dir", folder)
        assert (code, str(copy) in output) == (Exit.DONE, True), output
        ledger.write(desired=Desired(8))
        code, output = run("restore", copy, "--data-dir", folder)
        assert (code, "End the application first" in output) == (Exit.FAILED, True), output
    code, output = run("restore", copy, "--data-dir", folder)
    assert (code, f"{FILE}.aside-" in output) == (Exit.DONE, True), output
    with closing(Ledger.open(folder)) as ledger:
        assert ledger.desired() == Desired(7)


def test_backups_are_made_and_listed_in_the_folder_of_a_configuration(tmp_path: Path) -> None:
    folder, config = tmp_path / "data", tmp_path / "serve_config.yaml"
    given = {**args(), "coordinator": {"data_dir": str(folder)}}
    one = {"name": "rkserve", "import_path": "rkserve.app:build", "args": given}
    config.write_text(yaml.safe_dump({"applications": [one]}), encoding="utf-8")
    code, output = run("backup", "--config", config)
    assert (code, "no ledger" in output) == (Exit.FAILED, True), output
    Ledger.open(folder).close()
    for _ in range(2):
        assert run("backup", "--config", config)[0] == Exit.DONE
    newest, oldest = backups_of(folder)
    oldest.path.write_bytes(b"x" * 4096)
    code, output = run("restore", "--config", config)
    assert code == Exit.DONE
    assert [*output.split()].count("damaged:") == 1
    assert str(newest.path) in output


def test_a_backup_replaces_no_file_but_a_backup(tmp_path: Path) -> None:
    folder, other = tmp_path / "data", tmp_path / "letter"
    Ledger.open(folder).close()
    other.write_text("Dear reader", encoding="utf-8")
    code, output = run("backup", other, "--data-dir", folder)
    assert (code, "no backup of a ledger" in output) == (Exit.FAILED, True), output
    assert other.read_text() == "Dear reader"
    for _ in range(2):
        assert run("backup", tmp_path / "copy", "--data-dir", folder)[0] == Exit.DONE
    assert not (folder / BACKUPS).exists()


def test_the_copies_of_this_node_are_listed_and_one_is_restored(tmp_path: Path) -> None:
    folder, state = tmp_path / "data", tmp_path / "state"
    code, output = run("backup", "--list", "--state-dir", state)
    assert (code, "no copy of a ledger" in output) == (Exit.DONE, True), output
    with closing(Ledger.open(folder)) as ledger:
        ledger.write(desired=Desired(7))
        content, digest = pack(back_up(folder, 1_700_000_000).path)
        copy = LedgerCopy(ledger.cluster, 3, 1_700_000_000, digest, len(content))
    copies = LedgerCopies(state / "ledgers" / "b", "b")
    copies.begin(copy)
    copies.chunk(digest, 0, content)
    copies.commit(copy)
    ((path,),) = copies_of_node(state).values()
    path.with_name(path.name.replace("000003", "000002")).write_bytes(b"x" * 100)
    code, output = run("backup", "--list", "--state-dir", state)
    assert code == Exit.DONE
    cluster, newest, older = output.splitlines()
    assert cluster == f"Cluster {copy.cluster}:"
    schema = len(MIGRATIONS)
    assert newest.split() == f"3 2023-11-14 22:13:20 UTC schema {schema} {path}".split()
    assert "damaged: " in older
    code, output = run("restore", path, "--data-dir", tmp_path / "new")
    assert code == Exit.DONE, output
    with closing(Ledger.open(tmp_path / "new")) as ledger:
        assert ledger.desired() == Desired(7)


@pytest.mark.parametrize(
    "words", [["x", "--list"], ["--list", "--data-dir", "x"], ["--state-dir", "x"]]
)
def test_a_list_and_a_backup_exclude_each_other(words: list[str]) -> None:
    assert run("backup", *words)[0] == Exit.USAGE
