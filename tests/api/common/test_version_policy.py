"""Which version a request means: names, policies, and what a line serves."""

from __future__ import annotations

import pytest

from rkserve.api.common.answer import AnswerOrigin
from rkserve.api.common.version_policy import (
    ANY,
    Freshness,
    ResolvedModel,
    VersionPolicy,
    bind,
    find_line,
    read_policy,
)
from rkserve.core.desired_state import AdapterVersions, Desired
from rkserve.core.errors import RequestError, VersionUnavailable
from tests.support.cluster.fake_head import line, version

OLD, NEW = version("tone", "v9"), version("tone", "v10")
MODELS = ("sim-chat", "other")


def at_least(called: str) -> VersionPolicy:
    return VersionPolicy(Freshness.MINIMUM, called)


@pytest.mark.promise("Versions in answers", "`x-version-policy` is satisfied, or refused")
@pytest.mark.parametrize(
    ("header", "policy"),
    [
        pytest.param(" any ", ANY, id="any"),
        pytest.param("latest-only", VersionPolicy(Freshness.LATEST), id="latest"),
        pytest.param("min-version: v3", at_least("v3"), id="minimum"),
    ],
)
def test_policies_are_read_and_say_themselves(header: str, policy: VersionPolicy) -> None:
    assert read_policy(header) == policy
    assert read_policy(policy.text) == policy


@pytest.mark.parametrize("header", ["", "latest", "ANY", "min-version:", "min-version", "v3"])
def test_other_policies_are_refused(header: str) -> None:
    with pytest.raises(RequestError, match="x-version-policy"):
        read_policy(header)


@pytest.mark.parametrize(
    ("serving", "policy", "meant"),
    [
        pytest.param(line(active="v9"), ANY, "line", id="one version"),
        pytest.param(line(active="v9", candidate=NEW), ANY, "line", id="staged only"),
        pytest.param(
            line(active="v9", candidate=NEW),
            VersionPolicy(Freshness.LATEST),
            "line",
            id="the latest served",
        ),
        pytest.param(
            line(active="v9", candidate=NEW, switched=("a",)),
            VersionPolicy(Freshness.LATEST),
            "v10",
            id="the latest on one board",
        ),
        pytest.param(
            line(active="v9", candidate=NEW, weight=0.1), at_least("v10"), "v10", id="v9 < v10"
        ),
        pytest.param(
            line(active="v10", candidate=OLD, weight=0.1), at_least("v10"), "v10", id="going back"
        ),
        pytest.param(
            line(active="v9", candidate=NEW, weight=0.1), at_least("v2"), "line", id="both will do"
        ),
        pytest.param(line(active=None), ANY, None, id="no version of its own"),
        pytest.param(
            line(active=None, candidate=NEW, weight=0.5), ANY, "line", id="nothing but a trial"
        ),
    ],
)
def test_what_a_bare_name_gets(
    serving: AdapterVersions, policy: VersionPolicy, meant: str | None
) -> None:
    found = bind(serving, None, policy)
    if meant is None:
        assert found is None
        return
    assert found is not None
    assert (found.line or (found.adapter and found.adapter.version)) == (
        "tone" if meant == "line" else meant
    )
    assert found.min_epoch == serving.epoch
    assert found.adapter_name == "tone"


@pytest.mark.promise("Versions in answers", "`x-version-policy` is satisfied, or refused")
@pytest.mark.parametrize(
    "least", ["v11", pytest.param("\u00b2", id="a digit that is no number is a text")]
)
def test_a_policy_that_nothing_meets_says_what_there_is(least: str) -> None:
    serving = line(active="v9", candidate=NEW, weight=0.1)
    with pytest.raises(VersionUnavailable, match="v9 and v10"):
        bind(serving, None, at_least(least))


@pytest.mark.promise("Adapters", "Versions live side by side and have names of their own")
@pytest.mark.parametrize(
    ("asked", "found"),
    [
        pytest.param("tone", ("sim-chat", None), id="the name"),
        pytest.param("sim-chat:tone@v9", ("sim-chat", "v9"), id="all of it"),
        pytest.param("tone@", ("sim-chat", ""), id="an empty version is one that is not there"),
        pytest.param("other:tone", None, id="of another model"),
        pytest.param("gone", None, id="of a model that is not served"),
        pytest.param("other", None, id="a model of that name"),
        pytest.param("", None, id="nothing"),
    ],
)
def test_names_find_their_line(asked: str, found: tuple[str, str | None] | None) -> None:
    lines = (line(), line("other"), AdapterVersions("unserved", "gone", OLD))
    got = find_line(asked, MODELS, Desired(1, lines=lines))
    assert (None if got is None else (got[0].model, got[1])) == found


def test_a_name_that_two_models_have_is_asked_back() -> None:
    lines = (line(), AdapterVersions("other", "tone", OLD))
    with pytest.raises(RequestError, match="'sim-chat:tone', 'other:tone'"):
        find_line("tone", MODELS, Desired(1, lines=lines))


def test_what_is_made_of_a_version_takes_the_active_one() -> None:
    meant = bind(line(active="v9"), None, ANY)
    assert meant is not None
    assert meant.ref == OLD.ref
    assert ResolvedModel("m").ref is None


def test_fingerprints_tell_contents_apart_and_not_names() -> None:
    stamp = AnswerOrigin("m", "1.3.0", key_of={"tone@v1": "x", "tone@v2": "y", "same@v1": "x"}.get)
    one, two, same = (stamp.fingerprint([v]) for v in ("tone@v1", "tone@v2", "same@v1"))
    assert one == same != two
    assert stamp.fingerprint(["tone@v1", "tone@v2"]) == stamp.fingerprint(["tone@v2", "tone@v1"])
    assert stamp.fingerprint(["default"]) != stamp.fingerprint(["step-2"])
