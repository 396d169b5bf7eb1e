"""The units of systemd: their environment file, their commands, and systemd's own check."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from rkserve.bringup.settings import environment_file
from rkserve.cli import app
from tests.support.paths import PROJECT

FOLDER = PROJECT / "cluster" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
PROGRAM = "/opt/rkserve/venv/bin/rkserve"


def test_the_environment_file_has_the_settings_of_the_code() -> None:
    assert (FOLDER / "rkserve.env").read_text(encoding="utf-8") == environment_file()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_calls_the_command_with_options_that_it_has(unit: Path) -> None:
    text = unit.read_text(encoding="utf-8")
    for line in re.findall(rf"^ExecStart={PROGRAM} (.*)", text, re.MULTILINE):
        name, *words = line.split()
        command = get_command(app).commands[name]  # type: ignore[attr-defined]
        known = {option for one in command.params for option in one.opts}
        options = re.findall(r"--[a-z-]+", line) + re.findall(r"JOIN_OPTIONS=(--[a-z-]+)", text)
        assert options
        assert set(options) <= known
        assert words


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_finds_nothing_to_complain_about(unit: Path, tmp_path: Path) -> None:
    # The program is not installed here; the other units are, so that a mention is found.
    for one in UNITS:
        text = one.read_text(encoding="utf-8").replace(PROGRAM, "/bin/true")
        (tmp_path / one.name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "rkserve" in line]
    assert (done.returncode, ours) == (0, [])
