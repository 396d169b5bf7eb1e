"""Validation errors in words: the key, the allowed values and the given one."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from rkserve.config.explain import explain
from rkserve.config.serve_config import (
    parse_config,
)
from rkserve.core.errors import ConfigError
from tests.support.values.config_args import REAL, SETTINGS, args


def wrong(given: Any) -> str:
    """Return what is said about wrong settings, without what is said about all of them."""
    with pytest.raises(ConfigError) as caught:
        parse_config(given)
    said = str(caught.value)
    begin, end = "serve_config.yaml, args: ", " docs/reference/configuration.md lists all keys."
    assert said.startswith(begin)
    assert said.endswith(end)
    return said.removeprefix(begin).removesuffix(end)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param(
            {},
            "boards: this key is missing; it must be a list with at least one entry, each entry a "
            "block of keys.",
            id="nothing",
        ),
        pytest.param(
            {"boards": []},
            "boards: must be a list with at least one entry, each entry a block of keys, not an "
            "empty list.",
            id="no boards",
        ),
        pytest.param([1], "must be a block of keys, not a list.", id="a list"),
        pytest.param(None, "must be a block of keys, not null.", id="null"),
        pytest.param(
            {**args(), "router": None},
            "router: must be a block of keys, not null.",
            id="a block that was left empty",
        ),
        pytest.param(
            {"boards": ["sim"]},
            "boards[0]: must be a block of keys, not 'sim'.",
            id="text as group",
        ),
        pytest.param(
            {**args(), "bords": 1},
            "bords: unknown key 'bords'; did you mean 'boards'?",
            id="a typo",
        ),
        pytest.param(
            args(simulated={"relase": "1.3.0"}),
            "boards[0].simulated.relase: unknown key 'relase'; did you mean 'release'?",
            id="a typo further down",
        ),
        pytest.param(
            {**args(), "router": {"port": 8000}},
            "router.port: unknown key 'port'; did you mean 'report_s'?",
            id="an unknown key that is a bit like one",
        ),
        pytest.param(
            {**args(), "x": 1},
            "x: unknown key 'x'; the keys here are boards, router, coordinator, channel, "
            "state_dir.",
            id="an unknown key like none",
        ),
        pytest.param(
            dict([*args().items(), (7, 1)]),
            "7: unknown key '7'; the keys here are boards, router, coordinator, channel, "
            "state_dir.",
            id="a number as key",
        ),
        pytest.param(
            args(name="my boards"),
            "boards[0].name: use up to 32 letters, digits and '-', beginning with a letter; not "
            "'my boards'.",
            id="a bad name",
        ),
        pytest.param(args(name=None), "boards[0].name: must be text, not null.", id="no name"),
        pytest.param(args(model=3), "boards[0].model: must be a path, not 3.", id="no path"),
        pytest.param(
            args(queue_limit=-1),
            "boards[0].queue_limit: must be a whole number from 0 to 10000, not -1.",
            id="a negative queue",
        ),
        pytest.param(
            args(queue_limit=1.5),
            "boards[0].queue_limit: must be a whole number from 0 to 10000, not 1.5.",
            id="half a request",
        ),
        pytest.param(
            args(crash_limit=0),
            "boards[0].crash_limit: must be a whole number of at least 1, not 0.",
            id="no crash",
        ),
        pytest.param(
            args(rknpu=2),
            "boards[0].rknpu: must be a number above 0, up to 1, not 2.",
            id="two NPUs",
        ),
        pytest.param(
            {**args(), "router": {"ping_s": 0}},
            "router.ping_s: must be a number above 0, not 0.",
            id="no pause",
        ),
        pytest.param(
            args(queue_timeout_s=float("inf")),
            "boards[0].queue_timeout_s: must be a number above 0, not inf.",
            id="for ever",
        ),
        pytest.param(
            args(load_timeout_s="x" * 100),
            f"boards[0].load_timeout_s: must be a number above 0, not '{'x' * 40}...'.",
            id="long nonsense",
        ),
        pytest.param(
            args(simulated={"load_s": [1]}),
            "boards[0].simulated.load_s: must be a number from 0 to 600, not a list.",
            id="a list for an optional number",
        ),
        pytest.param(
            args(simulated={"strict": "maybe"}),
            "boards[0].simulated.strict: must be true or false, not 'maybe'.",
            id="neither true nor false",
        ),
        pytest.param(
            args(simulated={"release": "1.2.4"}),
            "boards[0].simulated.release: must be 1.2.3 or 1.3.0, not '1.2.4'.",
            id="a release that is not simulated",
        ),
        pytest.param(
            args(simulated={"release": 1.3}),
            "boards[0].simulated.release: must be 1.2.3 or 1.3.0, not 1.3.",
            id="a release that YAML reads as a number",
        ),
        pytest.param(
            args(pin_cpus=[0, -4]),
            "boards[0].pin_cpus[1]: must be a whole number of at least 0, not -4.",
            id="a negative core to pin to",
        ),
        pytest.param(
            args(library_cpus=[-1]),
            "boards[0].library_cpus[0]: must be a whole number of at least 0, not -1.",
            id="a negative core for the library",
        ),
        pytest.param(
            args(library_cpus="4-7"),
            "boards[0].library_cpus: must be a list, each entry a whole number of at least 0, not "
            "'4-7'.",
            id="a range of cores",
        ),
        pytest.param(
            args(**REAL),
            "boards[0]: set exactly one of 'library' (real boards) and 'simulated'.",
            id="both kinds of board",
        ),
        pytest.param(
            args(simulated=None),
            "boards[0]: set exactly one of 'library' (real boards) and 'simulated'.",
            id="neither kind of board",
        ),
        pytest.param(
            {"boards": args()["boards"] * 2},
            "group names must differ; used twice: sim.",
            id="a name twice",
        ),
        pytest.param(
            {"boards": [{**REAL, "name": "a"}, {**REAL, "name": "b", "rknpu": 0.5}]},
            "the shares 'rknpu' of the groups with a library add up to 1.5 (a: 1, b: 0.5), but "
            "every one of these groups gets a replica on every board; give them 1 at most "
            "together, 0.5 each for example.",
            id="more shares than an NPU has",
        ),
        pytest.param(
            {
                "boards": [
                    {**REAL, "name": name, "rknpu": 0.3, "base_domain_id": number}
                    for name, number in (("a", 1), ("b", 0), ("c", 1))
                ]
            },
            "the groups a and c have the same base_domain_id 1, but they meet on every board, and "
            "each model needs a domain of its own; give each group another number from 0 to 15.",
            id="two models in a domain",
        ),
    ],
)
def test_an_error_says_what_is_wrong_and_what_would_be_right(given: Any, said: str) -> None:
    assert wrong(given) == said


def test_every_wrong_key_is_named_at_once_and_once() -> None:
    group = {"name": "sim", "modle": "m", "simulated": {}, "queue_limit": "many"}
    assert wrong({"boards": [args()["boards"][0], group], "router": {"ping_s": -1}}) == (
        "boards[1].model: this key is missing; it must be a path. "
        "boards[1].queue_limit: must be a whole number from 0 to 10000, not 'many'. "
        "boards[1].modle: unknown key 'modle'; did you mean 'model'? "
        "router.ping_s: must be a number above 0, not -1."
    )


# What pydantic says to programmers.
JARGON = re.compile(
    r"Input|instance of|dictionary|tuple|Value error|validation|pydantic|<class", re.I
)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda model: model.__name__)
@pytest.mark.parametrize("given", [None, [], [[]], {}, {"x": 1}, object(), "x", -1e9, b""])
def test_no_wrong_value_of_any_key_is_answered_in_jargon(
    settings: type[BaseModel], given: Any
) -> None:
    said = ""
    for name in settings.model_fields:
        try:
            settings.model_validate({name: given})
        except ValidationError as exc:
            said += explain(exc, settings)
    assert not JARGON.search(said), said
    assert said
