"""Published figures: names of files, speeds of models, and the drivers that a release needs."""

from __future__ import annotations

import pytest

from rkserve.doctor.known import (
    ESTIMATED_SHARE,
    PUBLISHED_SHARE,
    driver_row,
    dtype_in,
    expected_speed,
    platform_in,
    speeds,
    toolkit_in,
)
from rkserve.native.sim import telemetry
from rkserve.verdicts.hardware import MEGA, SOCS, soc_of


@pytest.mark.parametrize(
    ("name", "dtype", "platform", "toolkit"),
    [
        ("Qwen2.5-1.5B-Instruct_W8A8_RK3588.rkllm", "w8a8", "RK3588", None),
        ("Qwen3-0.6B-rk3576-w4a16_g128-opt1-v1.2.3.rkllm", "w4a16_g128", "RK3576", "1.2.3"),
        ("model_rv1126b_w4a16-g32_1.3.0.rkllm", "w4a16_g32", "RV1126B", "1.3.0"),
        ("gemma-rk3588s.rkllm", None, "RK3588", None),
        ("model.rkllm", None, None, None),
        ("Qwen2.5-1.5B-v1.2.1b1.rkllm", None, None, None),
    ],
)
def test_names_of_files_tell_what_a_model_is(
    name: str, dtype: str | None, platform: str | None, toolkit: str | None
) -> None:
    assert (dtype_in(name), platform_in(name), toolkit_in(name)) == (dtype, platform, toolkit)


@pytest.mark.parametrize(
    ("soc", "name", "rate"),
    [
        pytest.param("RK3588", "Qwen2.5-1.5B-Instruct-w8a8", 16.69, id="the vendor's"),
        pytest.param("RK3588S", "Qwen2.5-1.5B-Instruct", 16.69, id="only one quantization"),
        pytest.param("RK3588", "Qwen3-1.7B", 12.5, id="a user's"),
        pytest.param("RK3576", "Qwen3-VL-2B-w4a16", 12.68, id="vision"),
        pytest.param("RK3576", "Qwen3-0.6B-w4a16_g128", 23.48, id="a group size"),
        pytest.param("RK3562", "Qwen3.5-0.8B", 7.69, id="not Qwen3"),
        pytest.param("RK3588", "DeepSeek-R1-Distill-Qwen-1.5B", 15.28, id="the longer name"),
    ],
)
def test_a_published_speed_is_found_by_name(soc: str, name: str, rate: float) -> None:
    found = expected_speed(soc, (name, "model.rkllm"), 0)
    assert found is not None
    assert (found.decode_tokens_per_s, found.slow_share) == (rate, PUBLISHED_SHARE)


@pytest.mark.parametrize(
    "name",
    ["Qwen2.5-VL-1.5B", "Qwen2.5-15B", "Qwen2.5-1.5B-w4a16", "MyQwen2.5x-1.5B", "Qwen2-1.5B"],
)
def test_another_model_is_estimated_by_its_size(name: str) -> None:
    found = expected_speed("RK3588", (name,), 1400 * MEGA)
    assert found is not None
    assert found.decode_tokens_per_s == pytest.approx(19.9, abs=0.1)
    assert found.slow_share == ESTIMATED_SHARE
    assert expected_speed("RK3588", (name,), 0) is None
    assert expected_speed("RK3399", (name,), 1400 * MEGA) is None


def test_no_published_model_counts_as_slow_by_its_own_estimate() -> None:
    """With its memory in the place of its file's size, which is not published."""
    slow = [
        row
        for row in speeds()
        if (found := expected_speed(row.platform, ("?",), int(row.memory_mb * MEGA))) is not None
        and row.decode_tokens_per_s < found.slow_share * found.decode_tokens_per_s
    ]
    assert slow == []


def test_every_row_has_a_source_and_a_known_soc() -> None:
    assert len(speeds()) > 80
    for row in speeds():
        assert row.source
        known = soc_of(row.platform)
        assert known is not None
        assert row.dtype.startswith(known.dtypes)


@pytest.mark.parametrize("soc", SOCS, ids=lambda soc: soc.name)
def test_the_simulated_board_is_the_same_soc(soc: object) -> None:
    known = soc_of(getattr(soc, "name", ""))
    assert known is not None
    simulated = telemetry.SOCS[known.name]
    assert (simulated.npu, simulated.cores) == (known.npu_node, known.npu_cores)
    assert max(simulated.npu_mhz) == known.npu_mhz
    assert max(simulated.ddr_mhz) == known.ddr_mhz


@pytest.mark.parametrize(
    ("version", "release", "size_mb", "stops"),
    [
        ((0, 8, 2), "1.2.3", 600, True),
        ((0, 9, 6), "1.3.0", 4000, True),
        ((0, 9, 6), "1.3.0", 600, False),
        ((0, 9, 7), "1.3.0", 4000, None),
        ((0, 9, 7), "1.3.1", 600, False),
        ((0, 9, 8), "1.3.1", 8000, None),
        ((0, 10, 0), "1.3.1", 8000, None),
    ],
)
def test_the_driver_matrix(
    version: tuple[int, ...], release: str, size_mb: int, stops: bool | None
) -> None:
    row = driver_row(version, release, size_mb * MEGA)
    assert (None if row is None else row.stops) is stops
