"""Gateways of others: their settings, environments and ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.serving.plain import gateways
from benchmarks.serving.plain.gateways import (
    LITELLM,
    SMG,
    Gateway,
    LeftOut,
    last_lines,
    litellm_command,
    litellm_config,
    pinned,
    programs,
    serving,
    smg_command,
)
from rkserve.bench.processes import BenchFailed

PORTS = [4001, 4002]


def test_litellm_has_a_deployment_of_the_model_for_each_server(tmp_path: Path) -> None:
    command = litellm_command(Path("bin"), tmp_path, 4000, PORTS)
    assert command[:1] == ["bin/litellm"]
    assert command[command.index("--port") + 1] == "4000"
    written = Path(command[command.index("--config") + 1]).read_text(encoding="utf-8")
    assert written == litellm_config(PORTS)
    deployments = json.loads(written)["model_list"]
    assert {one["model_name"] for one in deployments} == {"sim-chat"}
    assert [one["litellm_params"]["api_base"] for one in deployments] == [
        "http://127.0.0.1:4001/v1",
        "http://127.0.0.1:4002/v1",
    ]


def test_smg_has_the_url_of_each_server(tmp_path: Path) -> None:
    command = smg_command(Path("bin"), tmp_path, 4000, PORTS)
    assert command[:2] == ["bin/smg", "launch"]
    assert command[-3:] == ["--worker-urls", "http://127.0.0.1:4001", "http://127.0.0.1:4002"]


@pytest.mark.parametrize("gateway", [LITELLM, SMG], ids=lambda one: one.package)
def test_the_lock_pins_the_gateway_with_hashes(gateway: Gateway) -> None:
    assert gateway.version
    text = gateway.lock.read_text(encoding="utf-8")
    assert text.count("==") <= text.count("--hash=sha256:")


def test_the_version_is_not_that_of_a_package_with_a_longer_name() -> None:
    assert pinned("litellm-extras==1 \\\nlitellm==2.3 \\\n", "litellm") == "2.3"


def test_a_gateway_that_cannot_be_installed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "a\nb\nno route\nto a host\n")

    monkeypatch.setattr(gateways, "WORK", tmp_path)
    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(LeftOut, match="smg could not be installed: b / no route / to a host"):
        programs(SMG)
    assert not (tmp_path / "bench-smg" / "installed").exists()


def test_an_environment_is_made_once_for_each_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def succeeds(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(gateways, "WORK", tmp_path)
    monkeypatch.setattr(subprocess, "run", succeeds)
    first = programs(SMG)
    assert (programs(SMG), len(commands)) == (first, 2)


def ends_without_answers(folder: Path) -> None:
    """Run a gateway that does not start, and notice that it gives no answers."""
    code = "import sys; print('no key'); sys.exit(3)"
    with serving([sys.executable, "-c", code], folder, "key") as process:
        process.wait()
        raise BenchFailed("no answer")


def test_a_gateway_that_ended_is_named_with_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match="it ended with exit code 3: no key"):
        ends_without_answers(tmp_path)


def test_a_gateway_is_ended_with_its_block(tmp_path: Path) -> None:
    code = "import time; time.sleep(600)"
    with serving([sys.executable, "-c", code], tmp_path, "key") as process:
        assert process.poll() is None
    assert process.returncode == -signal.SIGTERM


def test_last_lines_are_one_line_without_blank_ones() -> None:
    assert last_lines("a\n\nb \n c\nd\n") == "b / c / d"
