"""The schemas of the cluster's view, and the recorded example of its answers."""

from __future__ import annotations

import json

import pytest
from pydantic import TypeAdapter

from rkserve.api.admin.cluster_view import (
    BoardHistoryAnswer,
    KeyUsageAnswer,
    SnapshotEvent,
    VerdictAnswer,
    ViewDocument,
)
from rkserve.verdicts.history import FIGURES
from tests.support.paths import TESTS

EXAMPLE = json.loads((TESTS / "data/cluster_view/example.json").read_text("utf-8"))


@pytest.mark.parametrize(
    ("name", "schema"),
    [("verdict", VerdictAnswer), ("board_history", BoardHistoryAnswer), ("usage", KeyUsageAnswer)],
)
def test_the_recorded_answers_follow_their_schemas(name: str, schema: type) -> None:
    TypeAdapter(schema).validate_python(EXAMPLE[name])


def test_the_recorded_snapshot_has_every_figure_of_every_board() -> None:
    first = EXAMPLE["events"][0]
    assert first["event"] == "snapshot"
    TypeAdapter(SnapshotEvent).validate_python(first["data"])
    view: ViewDocument = first["data"]["view"]
    assert [*view["now"]] == [*FIGURES]
    assert {len(values) for values in view["now"].values()} == {len(view["order"])}
    assert sorted(view["order"]) == sorted(view["boards"])
