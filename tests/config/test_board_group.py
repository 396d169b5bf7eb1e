"""The settings of one group of boards: instances, shares, and groups that cannot work."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from rkserve.config.serve_config import (
    parse_config,
)
from rkserve.core.errors import ConfigError
from tests.support.values.config_args import REAL


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param([{"rknpu": 1 / 3}] * 3, id="three thirds"),
        pytest.param([{"rknpu": 0.1}] * 10, id="ten tenths"),
        pytest.param([{}, {"library": None, "simulated": {}}], id="simulated boards need no NPU"),
        pytest.param(
            [{}, {"library": None, "simulated": {}, "base_domain_id": 0}], id="nor a domain"
        ),
    ],
)
def test_groups_that_fit_on_one_board_may_share_it(groups: list[dict[str, Any]]) -> None:
    boards = [
        {**REAL, "name": f"g{number}", "base_domain_id": number, **group}
        for number, group in enumerate(groups)
    ]
    assert len(parse_config({"boards": boards}).boards) == len(groups)


def real(**changes: Any) -> dict[str, Any]:
    """One group of real boards."""
    return {"name": "npu", "model": "m", "library": "/usr/lib/librkllmrt.so", **changes}


def test_instances_become_groups_with_their_own_domain_cores_and_share() -> None:
    group = real(instances=2, base_domain_id=1, instance_cpus=[[4, 5], [6, 7]])
    deployed = parse_config({"boards": [group]}).deployed
    assert [one.name for one in deployed] == ["npu-i0", "npu-i1"]
    assert [one.base_domain_id for one in deployed] == [1, 2]
    assert [one.library_cpus for one in deployed] == [(4, 5), (6, 7)]
    assert [one.rknpu for one in deployed] == [0.5, 0.5]
    assert all(one.instances == 1 for one in deployed)


def test_a_group_of_one_instance_is_deployed_as_it_stands() -> None:
    (group,) = parse_config({"boards": [real()]}).deployed
    assert group.name == "npu"
    assert group.rknpu == 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param(
            {"instances": 2, "instance_cpus": [[4]]}, "1 lists for 2 instances", id="lists missing"
        ),
        pytest.param(
            {"instances": 3, "base_domain_id": 14}, "more than the 16 domains", id="no domain left"
        ),
        pytest.param({"hooks": ["os.system"]}, "package.module:factory", id="a hook without colon"),
        pytest.param({"quirks": {"x": "maybe"}}, "quirks.x: must be true or false", id="quirk"),
        pytest.param({"quirks": []}, "a block of names, each with true or false", id="quirk list"),
        pytest.param({"n_batch": 0}, "n_batch: must be a whole number from 1 to 100", id="batch 0"),
    ],
)
def test_a_group_that_cannot_work_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_config({"boards": [real(**changes)]})


def test_two_groups_whose_instances_meet_in_a_domain_are_refused() -> None:
    groups = [real(instances=2, rknpu=0.5), real(name="b", rknpu=0.5, base_domain_id=1)]
    with pytest.raises(ConfigError, match="npu-i1 and b have the same base_domain_id 1"):
        parse_config({"boards": groups})


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        pytest.param("confine: on", "on", id="on, which YAML reads as true"),
        pytest.param("confine: off", "off", id="off, which YAML reads as false"),
        pytest.param('confine: "off"', "off", id="a word in quotes"),
        pytest.param("confine: auto", "auto", id="auto"),
    ],
)
def test_confinement_is_switched_by_words_without_quotes(written: str, meant: str) -> None:
    group = real(**yaml.safe_load(written))
    assert parse_config({"boards": [group]}).boards[0].confine == meant
