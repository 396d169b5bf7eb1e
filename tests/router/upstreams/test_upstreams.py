"""The upstreams of a Router from its configuration: keys, shares and models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from rkserve.config.board_group import UpstreamConfig
from rkserve.config.serve_config import RkserveConfig, config_digest, parse_config
from rkserve.core.errors import ConfigError
from rkserve.router.upstreams.metrics import UpstreamMetrics
from rkserve.router.upstreams.upstreams import Upstreams, open_upstreams, read_key

URL = "http://gpu.local:8000/v1"


def config(*groups: dict[str, Any]) -> RkserveConfig:
    return parse_config({"boards": list(groups)})


def entry(name: str = "gpu", model: str = "big", **upstream: Any) -> dict[str, Any]:
    return {"name": name, "model": model, "upstream": {"url": URL, **upstream}}


def opened(found: RkserveConfig, *models: str, routers: int = 1) -> Upstreams:
    metrics = UpstreamMetrics(CollectorRegistry())
    return open_upstreams(found.upstreams, metrics, environ={}, models=set(models), routers=routers)


def test_upstreams_are_no_deployments_and_may_share_a_model_with_boards() -> None:
    sim = {"name": "sim", "model": "models/sim-chat", "simulated": {}}
    found = config(sim, entry(model="models/sim-chat"), entry("other"))
    assert [group.name for group in found.deployed] == ["sim"]
    assert [group.model_id for group in found.upstreams] == ["sim-chat", "big"]


async def test_requests_at_once_are_shared_by_the_routers() -> None:
    found = opened(config(entry(concurrency=9), entry("small", concurrency=1)), routers=2)
    places = {name: (await link.reports())[0].n_batch for name, link in found.links.items()}
    assert places == {"gpu": 4, "small": 1}
    await found.aclose()


async def test_models_that_only_upstreams_have_are_known_with_their_contexts() -> None:
    found = opened(
        config(
            entry(context_length=8192),
            entry("b", context_length=4096),
            entry("c", "shared", context_length=2048),
        ),
        "shared",
    )
    assert found.alone == {"big": 8192}
    assert found.serve("shared")
    assert not found.serve("none")
    await found.aclose()


def test_keys_come_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("# of the GPU\n\n sk-file \nsecond\n")
    by_env = UpstreamConfig(url=URL, key_env="GPU_KEY")
    assert read_key("gpu", by_env, {"GPU_KEY": " sk-env\n"}) == "sk-env"
    assert read_key("gpu", UpstreamConfig(url=URL, key_file=file), {}) == "sk-file"
    assert read_key("gpu", UpstreamConfig(url=URL), {"GPU_KEY": "x"}) is None


def test_a_key_that_is_missing_or_wrong_is_named_without_its_value(tmp_path: Path) -> None:
    by_env = UpstreamConfig(url=URL, key_env="GPU_KEY")
    with pytest.raises(ConfigError, match="upstream gpu: the environment variable GPU_KEY has non"):
        read_key("gpu", by_env, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key("gpu", UpstreamConfig(url=URL, key_file=tmp_path / "none"), {})
    with pytest.raises(ConfigError, match="no header takes") as failed:
        read_key("gpu", by_env, {"GPU_KEY": "sk with blanks"})
    assert "sk with" not in str(failed.value)


def test_the_configuration_has_no_place_for_a_key() -> None:
    with pytest.raises(ConfigError, match="unknown key 'key'"):
        config(entry(key="sk-secret"))
    with pytest.raises(ConfigError, match="not the key itself"):
        config(entry(key_env="sk-secret-key"))
    with pytest.raises(ConfigError, match="set one of 'key_env' and 'key_file'"):
        config(entry(key_env="A", key_file="/b"))
    assert "key" in config(entry(key_env="GPU_KEY")).model_dump_json()
    assert config_digest(config(entry())) != config_digest(config(entry(concurrency=3)))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (entry(url="ftp://gpu/v1"), "write a URL with http or https"),
        (entry(url="http://name:word@gpu/v1"), "write a URL with http or https"),
        (entry(url="http://gpu/v1?key=a"), "write a URL with http or https"),
        ({**entry(), "simulated": {}}, "set exactly one of"),
        ({**entry(), "n_batch": 2}, "'n_batch' is a setting of boards"),
        (entry(model="a b"), "is the name of the upstream's model"),
        (entry(health_path="models"), "boards[0].upstream.health_path"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as failed:
        config(given)
    assert words in str(failed.value)


def test_names_of_groups_differ_also_from_those_of_upstreams() -> None:
    with pytest.raises(ConfigError, match="group names must differ"):
        config(entry(), entry())
