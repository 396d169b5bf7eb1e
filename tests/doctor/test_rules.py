"""Healthy boards, faults of the node and of the measured speed, and the order of a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from rkserve.core.board_report import Hardware
from rkserve.doctor.facts import (
    BoardFacts,
    ClockState,
    HeadAnswer,
    MeasuredSpeed,
    ReportedState,
    Severity,
)
from rkserve.doctor.rules import findings_of
from tests.support.boards.doctor_board import MODELS, PROCESS, DoctorBoard, Fault, check

ERROR, WARNING, UNKNOWN = Severity.ERROR, Severity.WARNING, Severity.UNKNOWN
NTP = "sudo timedatectl set-ntp true"
RAY_ENVIRON = "proc/77/environ"


def changed(board: DoctorBoard, **process: object) -> DoctorBoard:
    board.process = PROCESS.model_copy(update=process)
    return board


def raylet(board: DoctorBoard, **environ: str) -> DoctorBoard:
    usual = {"RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0", "HOME": "/home/ray"}
    board.put("proc/77/comm", "raylet\n")
    listed = {**usual, **environ}
    return board.put(RAY_ENVIRON, "".join(f"{k}={v}\0" for k, v in listed.items() if v))


def measured(board: DoctorBoard, rate: float, **hardware: object) -> DoctorBoard:
    figures: dict[str, object] = {
        "soc": "RK3588",
        "npu_hz": 1_000_000_000,
        "npu_max_hz": 1_000_000_000,
        "ddr_hz": 2_112_000_000,
        "temperature_c": 50.0,
        **hardware,
    }
    board.measured = MeasuredSpeed(
        release="1.3.0",
        decode_tokens_per_s=rate,
        decode_tokens=128,
        expected_tokens_per_s=16.69,
        slow_share=0.8,
        basis="published",
        hardware=Hardware(**figures),  # type: ignore[arg-type]
    )
    return board


FAULTS = {
    # -- the node
    "few open files": Fault(
        "nofile",
        lambda b: changed(b, open_files=4096),
        WARNING,
        "At most 4096 files may be open; the vendor's demo sets 102400.",
        "echo '* - nofile 102400' | sudo tee /etc/security/limits.d/rkserve.conf"
        "  # in a unit of systemd: LimitNOFILE=102400",
    ),
    "two CPUs for three cores": Fault(
        "cpus-few",
        lambda b: changed(b, cpus=2),
        ERROR,
        "This process may use 2 CPUs; RKLLM loads no model with fewer CPUs than NPU cores, of "
        "which RK3588 has 3.",
        "taskset -pc 0-7 $$  # or take CPUAffinity= out of the unit",
    ),
    "Python 3.14": Fault(
        "python-version",
        lambda b: changed(b, python=(3, 14)),
        ERROR,
        "Python is 3.14; rkserve needs 3.10 to 3.13.",
        "uv python install 3.12 && uv venv --python 3.12",
    ),
    "old glibc": Fault(
        "libc-old",
        lambda b: changed(b, libc=(2, 28)),
        ERROR,
        "glibc is 2.28; the wheels need 2.31 or later (Debian 11, Ubuntu 20.04).",
        "# install a newer image on the board",
    ),
    "no localhost": Fault(
        "localhost-unknown",
        lambda b: changed(b, localhost_problem="Name or service not known"),
        ERROR,
        "The name localhost has no loopback address here (Name or service not known): each start "
        "of Ray takes minutes, and fails without naming the cause.",
        "echo '127.0.0.1 localhost' | sudo tee -a /etc/hosts",
    ),
    "no Ray": Fault(
        "ray-missing",
        lambda b: changed(b, ray=None),
        ERROR,
        "Ray is not installed.",
        "pip install 'ray[serve]==2.60.*'",
    ),
    "another Ray": Fault(
        "ray-version",
        lambda b: changed(b, ray="2.59.1"),
        ERROR,
        "Ray is 2.59.1; rkserve needs 2.60.*.",
        "pip install 'ray[serve]==2.60.*'",
    ),
    "another Ray on the head": Fault(
        "ray-version",
        lambda b: setattr(b, "head", HeadAnswer(address="10.0.0.1:6379", ray="2.60.1")),
        ERROR,
        "Ray is 2.60.0 here and 2.60.1 on the head; a node joins only with the same.",
        "pip install 'ray[serve]==2.60.1'",
    ),
    "head unreachable": Fault(
        "head-unreachable",
        lambda b: setattr(
            b, "head", HeadAnswer(address="10.0.0.1:6379", problem="Connection refused")
        ),
        ERROR,
        "The head's port 10.0.0.1:6379 cannot be reached: Connection refused.",
        "nc -vz 10.0.0.1 6379  # and on the head: rkserve boards, and the firewall's rules",
    ),
    "no rkserve on the head": Fault(
        "head-silent",
        lambda b: setattr(
            b,
            "head",
            HeadAnswer(
                address="10.0.0.1:6379", url="http://10.0.0.1:8000", url_problem="timed out"
            ),
        ),
        WARNING,
        "rkserve does not answer at http://10.0.0.1:8000: timed out.",
        "serve status  # on the head; serve deploy CONFIG.yaml, if nothing is deployed yet",
    ),
    "no token": Fault(
        "token-missing",
        lambda b: b.drop("home/ray/.ray/auth_token"),
        WARNING,
        "Ray has no token file /home/ray/.ray/auth_token: with it and RAY_AUTH_MODE=token only "
        "nodes that have the same one join.",
        "scp HEAD:.ray/auth_token /home/ray/.ray/auth_token && chmod 600 /home/ray/.ray/auth_token",
    ),
    "token for all": Fault(
        "token-mode",
        lambda b: (b.root / "home/ray/.ray/auth_token").chmod(0o644),
        WARNING,
        "Other accounts may read Ray's token /home/ray/.ray/auth_token (mode 0644).",
        "chmod 600 /home/ray/.ray/auth_token",
    ),
    "no Landlock": Fault(
        "kernel-landlock",
        lambda b: b.put("sys/kernel/security/lsm", "capability,yama\n"),
        WARNING,
        "The kernel has no Landlock: engine processes are confined by seccomp alone, and may read "
        "every file that this user may.",
        "zcat /proc/config.gz | grep LANDLOCK  # if it is built in: add landlock to lsm= of the "
        "kernel's command line",
    ),
    "raylet at nice 15": Fault(
        "raylet-nice",
        lambda b: raylet(b, RAY_worker_niceness=""),
        WARNING,
        "The running Ray starts its workers, and with them the engine, at a low priority.",
        "export RAY_worker_niceness=0  # then start Ray again",
    ),
    "raylet without a token": Fault(
        "raylet-auth",
        lambda b: raylet(b, RAY_AUTH_MODE="disabled"),
        WARNING,
        "The running Ray lets every host that reaches its ports run code.",
        "export RAY_AUTH_MODE=token  # then start Ray again, on all nodes",
    ),
    "raylet with a log level": Fault(
        "raylet-log",
        lambda b: raylet(b, RKLLM_LOG_LEVEL="2"),
        WARNING,
        "RKLLM_LOG_LEVEL is 2: the library prints figures in each run, and from level 2 on "
        "parameters and sizes.",
        "unset RKLLM_LOG_LEVEL  # then start Ray again",
    ),
    "year 1970": Fault(
        "clock-wrong",
        lambda b: setattr(b, "clock", ClockState(year=1970)),
        ERROR,
        "The clock is in the year 1970: certificates are not valid then.",
        f"{NTP} && sudo systemctl restart systemd-timesyncd",
    ),
    "no NTP": Fault(
        "clock-unkept",
        lambda b: setattr(b, "clock", ClockState(year=2026)),
        WARNING,
        "No service keeps the clock, and boards without a battery start in the past.",
        NTP,
    ),
    "behind the head": Fault(
        "clock-skew",
        lambda b: setattr(b, "clock", ClockState(year=2026, kept_by="ntpd", skew_s=-90.2)),
        WARNING,
        "The clock is 90 s behind that of the head.",
        NTP,
    ),
    # -- the measurement
    "slow by its NPU": Fault(
        "slow",
        lambda b: measured(b, 9.1, npu_hz=400_000_000, temperature_c=91.0),
        WARNING,
        "decode 9.1 tokens/s, expected 16.7: NPU at 400 of 1000 MHz, 91 degrees Celsius.",
        "# mend the other findings first",
    ),
    "slow without a cause": Fault(
        "slow",
        lambda b: measured(b, 9.1),
        WARNING,
        "decode 9.1 tokens/s, expected 16.7: no cause found in clocks or heat.",
        "uptime; ps -eo pcpu,pid,comm --sort=-pcpu | head",
    ),
    "the model crashes": Fault(
        "measurement-failed",
        lambda b: setattr(
            b, "measured", MeasuredSpeed(problem="the library ended its process by SIGBUS")
        ),
        ERROR,
        "The model could not be measured: the library ended its process by SIGBUS.",
        "sudo dmesg | tail -n 20",
    ),
}


@pytest.mark.parametrize("soc", MODELS)
def test_a_healthy_board_has_no_findings(tmp_path: Path, soc: str) -> None:
    report = DoctorBoard(tmp_path / "board", soc).report()
    assert report.findings == ()
    assert report.healthy


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_each_fault_has_one_finding_with_its_command(tmp_path: Path, fault: Fault) -> None:
    check(fault, tmp_path / "board")


def test_a_report_of_a_cluster_has_the_same_findings_without_the_board(tmp_path: Path) -> None:
    board = DoctorBoard(tmp_path / "board")
    board.sensors(ddr_mhz=528, npu_celsius=90.0)
    hardware = board.facts().hardware
    facts = BoardFacts(hardware=hardware, status=ReportedState(id="g@a", state="hung", reason="x"))
    assert [one.id for one in findings_of(facts)] == ["board-down", "ddr-slow", "hot"]


def test_the_gravest_finding_is_the_first(tmp_path: Path) -> None:
    board = DoctorBoard(tmp_path / "board")
    board.drop("usr/lib/aarch64-linux-gnu/libgomp.so.1", "home/ray/.ray/auth_token")
    board.raw("sys/kernel/debug/rknpu/load", b"?")
    found = [one.severity for one in board.report().findings]
    assert found == [ERROR, WARNING, UNKNOWN]


def test_root_may_use_every_device(tmp_path: Path) -> None:
    board = DoctorBoard(tmp_path / "board", user="root")
    (board.root / "dev/dri/renderD129").chmod(0o600)
    board.put("root/.ray/auth_token", "secret", 0o600)
    assert board.report().findings == ()


def test_a_slow_board_names_the_clock_that_the_reading_under_load_shows(tmp_path: Path) -> None:
    board = DoctorBoard(tmp_path / "board")
    measured(board, 9.1, ddr_hz=528_000_000, ddr_governor="dmc_ondemand")
    found = {one.id: one.sentence for one in board.report().findings}
    assert found == {
        "ddr-slow": "The DDR clock is 528 of 2112 MHz (governor dmc_ondemand), which halves "
        "decoding on some boards.",
        "slow": "decode 9.1 tokens/s, expected 16.7: DDR at 528 of 2112 MHz.",
    }


def test_a_ddr_clock_that_rises_under_load_is_no_fault(tmp_path: Path) -> None:
    board = DoctorBoard(tmp_path / "board")
    board.sensors(ddr_mhz=528)
    measured(board, 16.0)
    assert board.report().findings == ()


def test_a_serving_board_has_its_model_in_memory_already(tmp_path: Path) -> None:
    board = DoctorBoard(tmp_path / "board")
    raylet(board.sensors(available_mb=1000))
    assert board.report().findings == ()
