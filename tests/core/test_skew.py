"""Versions that serve together, and values that cross from one to the other."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from rkserve.config.board_group import BoardGroupConfig
from rkserve.config.router import ChannelConfig
from rkserve.core import skew
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.messages import Delta, EmbedRequest, GenerateRequest
from rkserve.core.skew import crosses_versions, skew_problem
from rkserve.deployments.board import BoardReplica
from rkserve.transport.codec import EVENTS, METHODS

GROUP = {"name": "chat", "model": "m", "library": "/usr/lib/librkllmrt.so"}


@pytest.mark.parametrize(
    ("board", "head", "together"),
    [
        ("0.1.0", "0.1.7", True),
        ("0.1.0", "0.2.0", True),
        ("0.3.1.dev4", "0.2.9", True),
        ("", "0.2.0", True),  # a release that sent no version
        ("0.1.0", "0.3.0", False),
        ("0.4.0", "0.2.0", False),
        ("1.0.0", "0.9.0", False),
        ("", "0.3.0", False),
        ("two", "0.1.0", False),
    ],
)
def test_one_minor_version_apart_is_served(board: str, head: str, together: bool) -> None:
    problem = skew_problem(board, head)
    assert (problem == "") is together
    if not together:
        assert problem.endswith(".")
        assert problem.count(".  ") == 0


def kinds(hint: Any, seen: set[type[Any]]) -> Iterator[type[Any]]:
    """Yield every dataclass that a type hint leads to."""
    for inner in typing.get_args(hint):
        yield from kinds(inner, seen)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint not in seen:
        seen.add(hint)
        yield hint
        for one in typing.get_type_hints(hint).values():
            yield from kinds(one, seen)


def crossing() -> list[type[Any]]:
    """Return the dataclasses in the calls between a head and a board."""
    seen: set[type[Any]] = set()
    methods = [
        one
        for name, one in vars(BoardReplica).items()
        if inspect.isfunction(one) and name[0] != "_"
    ]
    hints = [hint for one in methods for hint in typing.get_type_hints(one).values()]
    hints += [*EVENTS, *(kind for args, answer in METHODS.values() for kind in (*args, answer))]
    return [kind for hint in hints for kind in kinds(hint, seen)]


@pytest.mark.parametrize("kind", crossing(), ids=lambda kind: kind.__name__)
def test_all_values_between_head_and_board_cross_versions(kind: type[Any]) -> None:
    assert vars(kind).get("__getstate__") is skew._getstate
    assert vars(kind).get("__setstate__") is skew._setstate


def test_the_calls_were_found() -> None:
    names = {kind.__name__ for kind in crossing()}
    assert names >= {"GenerateRequest", "Delta", "BoardReport", "Hardware", "Desired", "Adoption"}


def state_of(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = value.__getstate__()
    return found


def test_a_field_of_a_later_version_is_left_out() -> None:
    request = EmbedRequest("id", "m", (), 0, inputs=((1, 2),))
    state = {**state_of(request), "urgency": 5}
    made: Any = EmbedRequest.__new__(EmbedRequest)
    made.__setstate__(state)
    assert made == request
    assert not hasattr(made, "urgency")


def test_a_field_that_an_earlier_version_lacks_has_its_default() -> None:
    report = BoardReport("sim-0", "m", BoardState.READY, decode_tokens=5, last_recovery="x")
    state = state_of(report)
    del state["last_recovery"], state["versions"]
    made: Any = BoardReport.__new__(BoardReport)
    made.__setstate__(state)
    assert made == dataclasses.replace(report, last_recovery="", versions=())
    del state["board_id"]
    with pytest.raises(TypeError, match="a BoardReport of another version has no 'board_id'"):
        made.__setstate__(state)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_values_are_pickled_unchanged(protocol: int) -> None:
    for value in (
        Delta("a", (1,), lengths=(1,)),
        GenerateRequest("id", "m", (1, 2), 8),
        EmbedRequest("id", "m", (), 0, texts=("a",)),
    ):
        assert pickle.loads(pickle.dumps(value, protocol)) == value


def test_a_field_between_others_does_not_shift_them() -> None:
    """A later GenerateRequest shifts the fields of EmbedRequest, which inherits them."""

    @crosses_versions
    @dataclasses.dataclass(frozen=True, slots=True)
    class Earlier:
        one: int
        two: tuple[int, ...] = ()

    @crosses_versions
    @dataclasses.dataclass(frozen=True, slots=True)
    class Later:
        one: int
        between: list[str] = dataclasses.field(default_factory=list)
        two: tuple[int, ...] = ()

    later: Any = Later.__new__(Later)
    later.__setstate__(state_of(Earlier(1, (2,))))
    assert later == Later(1, [], (2,))
    earlier: Any = Earlier.__new__(Earlier)
    earlier.__setstate__(state_of(Later(1, ["x"], (2,))))
    assert earlier == Earlier(1, (2,))


def test_settings_of_another_version_are_taken() -> None:
    group = BoardGroupConfig.model_validate({**GROUP, "queue_limit": 7})
    assert pickle.loads(pickle.dumps(group)) == group
    state = group.__getstate__()
    state["__dict__"] = {**state["__dict__"], "colour": "blue"}
    del state["__dict__"]["drain_timeout_s"]
    made = BoardGroupConfig.__new__(BoardGroupConfig)
    made.__setstate__(state)
    assert made == group
    assert "colour" not in vars(made)
    assert pickle.loads(pickle.dumps(ChannelConfig())) == ChannelConfig()
