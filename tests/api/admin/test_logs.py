"""Log lines as the API shows them."""

from __future__ import annotations

import pytest

from rkserve.api.admin.logs import LogsQuery, log_entry
from rkserve.api.admin.query import ControlRequest
from rkserve.core.errors import RequestError
from rkserve.core.logs import LogLine

LINE = LogLine(7, 1.23456, "INFO", "rkserve.x", "loaded", "r/0")


def test_a_line_names_its_source_and_an_engine_only_where_it_is_the_engines() -> None:
    entry = log_entry("sim-0", LINE)
    assert entry == {
        "source": "sim-0",
        "time_s": 1.235,
        "level": "INFO",
        "logger": "rkserve.x",
        "request_id": "r/0",
        "message": "loaded",
    }
    engines = LogLine(8, 2.0, "INFO", "rkserve.x", "E rkllm", engine_pid=12)
    assert log_entry("sim-0", engines)["engine_pid"] == 12


@pytest.mark.parametrize(
    ("query", "tail", "follow"),
    [
        pytest.param((), None, None, id="nothing"),
        pytest.param((("tail", "0"), ("follow", "true")), 0, True, id="only new lines"),
        pytest.param((("tail", "1000"), ("follow", "0")), 1000, False, id="all that there are"),
    ],
)
def test_a_query_is_read(
    query: tuple[tuple[str, str], ...], tail: int | None, follow: bool | None
) -> None:
    asked = ControlRequest(query).read(LogsQuery)
    assert (asked.tail, asked.follow) == (tail, follow)


@pytest.mark.parametrize(
    "query",
    [
        pytest.param(("tail", "1001"), id="more lines than a process remembers"),
        pytest.param(("follow", "maybe"), id="no flag"),
        pytest.param(("request_id", ""), id="an empty id"),
        pytest.param(("request_id", "x" * 81), id="a long one"),
    ],
)
def test_a_query_with_a_wrong_value_names_it(query: tuple[str, str]) -> None:
    with pytest.raises(RequestError, match=query[0]):
        ControlRequest((query,)).read(LogsQuery)
