"""``rkserve update``: options, errors and exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rkserve.bringup.update import FleetUpdater, UpdateOptions
from rkserve.cli import app
from rkserve.cli.context import Exit


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
    done = CliRunner().invoke(app, ["update", "--state", str(tmp_path / "node"), *words])
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
    done = CliRunner().invoke(app, [*words, "--state", str(tmp_path / "node")])
    assert done.exit_code == code
    assert given == [UpdateOptions(tmp_path, canary="b1", max_unavailable=3, dry_run=True)]
