"""What the configuration may say of the channel, and what of it reaches boards and metrics."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from rkserve.config.router import ChannelConfig
from rkserve.config.serve_config import parse_config
from rkserve.core.errors import ConfigError
from rkserve.core.metrics import StreamCollector

BOARDS = [{"name": "sim", "model": "models/sim-chat", "simulated": {}}]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        pytest.param({}, ChannelConfig(), id="nothing"),
        pytest.param({"channel": False}, ChannelConfig(enabled=False), id="off"),
        pytest.param({"channel": True}, ChannelConfig(), id="on"),
        pytest.param(
            {"channel": {"ports": [10100, 10131]}}, ChannelConfig(ports=(10100, 10131)), id="ports"
        ),
    ],
)
def test_the_channel_is_on_unless_it_is_switched_off(
    said: dict[str, Any], expected: ChannelConfig
) -> None:
    assert parse_config({"boards": BOARDS, **said}).channel == expected


@pytest.mark.parametrize(
    ("said", "words"),
    [
        pytest.param({"ports": [5, 4]}, "5 to 4 is no range", id="a range that goes down"),
        pytest.param({"ports": [0, 4]}, "no range", id="port 0"),
        pytest.param({"ports": [1, 70000]}, "no range", id="beyond the last port"),
        pytest.param({"heartbeat_s": 3, "silence_s": 5}, "twice heartbeat_s", id="one beat missed"),
        pytest.param({"port": 1}, "port", id="an unknown key"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_name(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({"boards": BOARDS, "channel": said})


def test_ports_are_tried_from_first_to_last_and_any_where_none_is_named() -> None:
    assert list(ChannelConfig(ports=(7, 9)).candidates()) == [7, 8, 9]
    assert list(ChannelConfig().candidates()) == [0]


def test_the_way_of_tokens_can_be_seen_in_the_metrics() -> None:
    registry = CollectorRegistry()
    registry.register(StreamCollector(lambda: ({"channel": 3, "ray": 1}, 2)))
    assert registry.get_sample_value("rkserve_token_streams_total", {"path": "channel"}) == 3
    assert registry.get_sample_value("rkserve_token_streams_total", {"path": "ray"}) == 1
    assert registry.get_sample_value("rkserve_channels") == 2


@pytest.mark.parametrize(
    ("said", "loopback", "network"),
    [("auto", False, True), ("always", True, True), ("never", False, False)],
)
def test_the_channel_is_encrypted_on_the_network_unless_it_is_said_otherwise(
    said: str, loopback: bool, network: bool
) -> None:
    channel = parse_config({"boards": BOARDS, "channel": {"encrypt": said}}).channel
    assert [channel.encrypts(host) for host in ("127.0.0.1", "::1", "localhost")] == [loopback] * 3
    assert [channel.encrypts(host) for host in ("192.0.2.1", "2001:db8::1", "pi")] == [network] * 3
