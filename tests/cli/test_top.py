"""The cluster in a terminal: frames of fixed widths, the stream that is lost, and the keyboard."""

from __future__ import annotations

import copy
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import httpx
import pytest
from rich.console import Console

from rkserve.cli.top import Watch, draw, standing, watch
from rkserve.client import Client, NotAllowed
from tests.support.cluster.fake_control import FakeControl, error
from tests.support.http.cluster_server import (
    EXAMPLE,
    ClusterServer,
    Json,
    example_snapshot,
    fleet_snapshot,
)
from tests.support.http.terminal import Terminal

EVENTS = "GET /v1/cluster/events"
DDR = "echo performance | sudo tee /sys/class/devfreq/dmc/governor"


def stream(*events: Json) -> httpx.Response:
    """The stream of some events, which then ends."""
    text = "".join(
        f": alive\n\nid: 1\nevent: {one['event']}\ndata: {json.dumps(one['data'])}\n\n"
        for one in events
    )
    return httpx.Response(200, content=text, headers={"content-type": "text/event-stream"})


def frame(view: Json, width: int, height: int | None = None, notice: str = "") -> list[str]:
    """The lines of a frame."""
    console = Console(width=width, file=StringIO(), record=True)
    console.print(draw(view, width, height, notice))
    return console.export_text().splitlines()


def test_a_drained_board_is_idle_in_words() -> None:
    view = example_snapshot()["view"]
    view["boards"]["rock-01"].update(drained=True, hold="keep")
    assert standing(view["boards"]["rock-01"]).word == "drained"
    (row,) = [line for line in frame(view, 80) if line.startswith("rock-01")]
    assert "‖ drained" in row


def test_boards_that_are_paused_drained_or_asleep_are_counted_in_the_first_line() -> None:
    view = example_snapshot()["view"]
    view["boards"]["rock-01"]["hold"] = view["boards"]["rock-02"]["hold"] = "keep"
    view["boards"]["rock-03"]["state"] = "asleep"
    assert "3 of 3 ready, 2 paused, 1 asleep, " in frame(view, 120)[0]


def test_a_frame_of_80_columns_has_the_verdict_the_command_and_the_boards() -> None:
    lines = frame(example_snapshot()["view"], 80)
    assert lines[0] == (
        "▲ DEGRADED  3 of 3 ready, 1 paused, 30.0 tokens/s, 3 running, 1 queued, epoch 12"
    )
    assert f"  {DDR}  # on rock-02" in lines
    (slow,) = [line for line in lines if line.startswith("rock-02")]
    assert slow.split() == ["rock-02", "▲", "ready", "6.1", "50%", "1/1", "12%", "58",
                            "▲528/2112", "57%"]  # fmt: skip
    assert all(len(line) <= 80 for line in lines)
    assert "…" not in "".join(lines)


@pytest.mark.parametrize("width", [50, 60, 100, 160])
def test_a_frame_fits_its_width_and_cuts_no_figure(width: int) -> None:
    lines = frame(example_snapshot()["view"], width)
    assert all(len(line) <= width for line in lines)
    rows = [line for line in lines if line.startswith("rock-0") and ":" not in line]
    assert len(rows) == 3
    assert "…" not in "".join(rows)
    assert ("qwen3-1.7b" in rows[0]) == (width == 160)
    assert DDR.replace(" ", "") in "".join(lines).replace(" ", "")  # whole, if on two lines


def test_boards_beyond_the_height_are_left_out_the_gravest_last() -> None:
    view = fleet_snapshot(50)["view"]
    view["boards"]["rock-40"].update(state="lost")
    view["boards"]["rock-41"].update(rules=["Hot"])
    lines = frame(view, 80, 14)
    assert len(lines) <= 14
    assert any("✖ lost" in line for line in lines)
    assert any(line.startswith("rock-41") and "▲" in line for line in lines)
    assert lines[-1] == "and 40 more boards; a higher terminal shows them"
    assert len(frame(view, 80)) == 53  # without a height all of them


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "ready"),
        ({"rules": ["Hot"]}, "ready"),
        ({"hold": "keep"}, "paused"),
        ({"circuit": {"state": "open", "reason": "errors"}}, "avoided"),
        ({"state": "asleep", "level": 1}, "asleep"),
        ({"state": "quarantined"}, "quarantined"),
    ],
)
def test_the_state_is_a_word(changes: Json, word: str) -> None:
    board = {**example_snapshot()["view"]["boards"]["rock-03"], **changes}
    assert standing(board).word == word


def test_once_prints_one_frame_or_the_document(server: FakeControl, rkserve: Terminal) -> None:
    server.on(EVENTS, stream(*EXAMPLE["events"]))
    for words in (["--once"], []):  # without a terminal it is the same
        code, out, err = rkserve("top", *words)
        assert (code, err) == (0, "")
        assert out.count("DEGRADED") == 1
        assert DDR in out
    document = json.loads(rkserve("top", "--json")[1])
    assert document == EXAMPLE["events"][0]["data"]["view"]


def test_once_without_a_server_or_events_fails(server: FakeControl, rkserve: Terminal) -> None:
    server.on(EVENTS, httpx.ConnectError("refused"))
    assert rkserve("top", "--once")[0] == 4
    server.on(EVENTS, stream())
    code, _, err = rkserve("top", "--once")
    assert code == 4
    assert "ended before its first one" in err
    server.on(EVENTS, error(403, "forbidden"))
    assert rkserve("top", "--once")[0] == 1


def test_a_lost_stream_is_opened_again_after_growing_pauses_until_it_is_refused(
    server: FakeControl,
) -> None:
    snapshot, _, lost = EXAMPLE["events"]
    server.on(
        EVENTS,
        httpx.ConnectError("refused"),
        error(503, "starting"),
        stream(snapshot, lost),
        error(503, "starting"),
        error(401, "invalid_api_key"),
    )
    client = Client("http://head:8000", transport=httpx.MockTransport(server.handle))
    notices = []

    def wait(seconds: float) -> None:
        notices.append(found.notice())
        server.sleep(seconds)

    found = Watch(client, server.clock, wait)
    found.read()
    assert server.slept == [1.0, 2.0, 1.0, 2.0]  # from the first again, once it was open
    assert notices[1] == "stale since 1 s: It is starting.; next attempt in 2 s"
    assert "the stream has ended" in notices[2]
    assert isinstance(found.refused, NotAllowed)
    assert found.view is not None
    assert found.view["boards"]["rock-03"]["state"] == "lost"


def test_a_stream_that_ends_in_order_after_a_while_is_opened_again_at_once(
    server: FakeControl,
) -> None:
    def whole(_: httpx.Request) -> httpx.Response:
        server.now += 900
        return stream(*EXAMPLE["events"])

    server.on(EVENTS, whole, whole, error(403, "forbidden"))
    client = Client("http://head:8000", transport=httpx.MockTransport(server.handle))
    found = Watch(client, server.clock, server.sleep)
    found.read()
    assert (len(server.asked), server.slept, found.notice()) == (3, [], "")


def test_events_are_documents_of_their_own(server: FakeControl) -> None:
    server.on(EVENTS, stream(*EXAMPLE["events"]))
    client = Client("http://head:8000", transport=httpx.MockTransport(server.handle))
    first, second, third = (one["view"] for one in client.watch())
    expected = EXAMPLE["events"][0]["data"]["view"]
    assert first == expected
    assert "chatcmpl-0f8d2c" in first["requests"]
    assert [*second["requests"]] == ["chatcmpl-77ab10"]
    assert second["now"] == {**expected["now"], **EXAMPLE["events"][1]["data"]["now"]}
    assert third["boards"]["rock-03"]["state"] == "lost"
    assert second["boards"] == expected["boards"]


class Screen:
    """A screen that is watched in a thread, with its keyboard."""

    def __init__(self, url: str) -> None:
        self._file = StringIO()
        self.console = Console(
            file=self._file, force_terminal=True, width=80, height=30, color_system=None
        )
        self._read, self.keys = os.pipe()
        self.failure: BaseException | None = None
        self._client = Client(url)
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        try:
            watch(Watch(self._client), self.console, self._read)
        except BaseException as exc:  # noqa: BLE001 - the test's thread looks at it
            self.failure = exc

    def shows(self, text: str) -> None:
        """Wait until the screen has shown a text."""
        self.wait(lambda: text in self._file.getvalue())

    def wait(self, look: Callable[[], bool]) -> None:
        """Wait until something is so."""
        until_s = time.monotonic() + 60
        while not look():
            assert time.monotonic() < until_s, self._file.getvalue()[-3000:]
            assert self._thread.is_alive()
            time.sleep(0.02)

    def press(self, key: bytes) -> None:
        """Press a key, and wait for the end."""
        os.write(self.keys, key)
        self._thread.join(60)
        assert not self._thread.is_alive()
        os.close(self.keys)
        os.close(self._read)


@pytest.fixture
def cluster() -> Iterator[ClusterServer]:
    with ClusterServer(copy.deepcopy(example_snapshot())).running() as server:
        yield server


def test_the_screen_follows_events_and_sizes_and_q_quits(cluster: ClusterServer) -> None:
    screen = Screen(cluster.url)
    screen.shows("DEGRADED")
    lost: Any = EXAMPLE["events"][2]["data"]
    cluster.send(lost)
    screen.shows("✖ lost")
    screen.console.size = (160, 40)
    screen.shows("runtime")
    cluster.refuses_streams = True
    cluster.cut()
    screen.shows("stale since")
    cluster.refuses_streams = False
    screen.wait(lambda: cluster.streams == 2)
    screen.press(b"q")
    assert screen.failure is None
