"""The cluster's page in a real Chromium, on scripted events. ``make page-test`` installs the rest.

Whatever a test does, the page must neither complain nor ask another server for anything.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from rkserve.core.api_keys import KeyScope
from tests.support.http.cluster_server import (
    EXAMPLE,
    ClusterServer,
    Json,
    example_snapshot,
    fleet_snapshot,
)

api = pytest.importorskip("playwright.sync_api", reason="make page-test installs Playwright")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="make page-test")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.page,
    pytest.mark.skipif(CHROMIUM is None, reason="needs the Debian package chromium"),
]

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
WIDE, PHONE = {"width": 1440, "height": 900}, {"width": 320, "height": 640}
VIEWS = (
    "boards",
    "board/rock-02",
    "requests",
    "operations",
    "audit",
    "usage",
    "connect",
    "runbook",
)
LOST: Json = EXAMPLE["events"][2]["data"]
DDR = "echo performance | sudo tee /sys/class/devfreq/dmc/governor"
# The keyboard's way to an action: its button, and what is sent when it is confirmed.
BOARD_ACTIONS = {
    "Drain": ("/v1/boards/drain", {"boards": ["rock-02"], "async": True}),
    "Pause": ("/pause", {"boards": ["rock-02"], "mode": "keep", "clear_cache": False}),
    "Sleep": ("/sleep", {"boards": ["rock-02"], "level": 1, "mode": "keep"}),
    "Restart engine": ("/v1/boards/rock-02/restart", {}),
    "Clear KV": ("/v1/cache/kv/clear", {"boards": ["rock-02"]}),
    "Measure": ("/v1/boards/rock-02/measure", {"seconds": 10}),
}

OTHER_KEYS = {"viewer": KeyScope.READ, "chat-client": KeyScope.INFER}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium for all tests."""
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox"],  # tests may run as root, and call nobody but themselves
        )
        yield made
        made.close()


class ClusterTab:
    """The page in a browser of its own, and the scripted server behind it."""

    def __init__(self, server: ClusterServer, context: Any, view: str) -> None:
        self.server = server
        self.complaints: list[str] = []
        self.page = context.new_page()
        self.page.on("console", lambda line: self._note(line.type, line.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._check(request.url))
        self.page.goto(f"{server.url}cluster#/{view}")

    def _note(self, kind: str, text: str) -> None:
        # The browser itself notes each refusal of the server and each lost connection.
        if kind in ("error", "warning") and "Failed to load" not in text and "net::" not in text:
            self.complaints.append(text)

    def _check(self, url: str) -> None:
        if not url.startswith((self.server.url, "data:")):
            self.complaints.append(f"asks {url}")

    def go(self, view: str) -> None:
        """Show another view, as a link does."""
        self.page.evaluate("view => { location.hash = '#/' + view; }", view)
        api.expect(self.page.locator("h1")).to_have_count(1)

    def violations(self) -> list[str]:
        """The elements that axe finds wrong."""
        found = axe.Axe().run(self.page, options={"runOnly": RULES}).response["violations"]
        return [f"{one['id']}: {[n['html'][:120] for n in one['nodes']]}" for one in found]

    def tab_to(self, name: str) -> None:
        """Press Tab until an element of this name has the focus."""
        names = (
            "(document.activeElement.getAttribute('aria-label') || "
            "document.activeElement.textContent).trim()"
        )
        for _ in range(80):
            self.page.keyboard.press("Tab")
            if self.page.evaluate(names) == name:
                return
        raise AssertionError(f"Tab does not reach {name}")

    def confirm_by_keyboard(self) -> None:
        """Go from the dialog's harmless button to the other one, and press it."""
        api.expect(self.page.locator("#confirm-no")).to_be_focused()
        self.page.keyboard.press("Tab")
        api.expect(self.page.locator("#confirm-yes")).to_be_focused()
        self.page.keyboard.press("Enter")


OpenTab = Callable[..., ClusterTab]


@pytest.fixture
def tab(browser: Any) -> Iterator[OpenTab]:
    """Open the page on a snapshot."""
    with ExitStack() as stack:
        opened: list[ClusterTab] = []

        def make(
            snapshot: Json | None = None, *, view: str = "boards", key: str = "", **context: Any
        ) -> ClusterTab:
            server = ClusterServer(snapshot or example_snapshot(), key=key, keys=OTHER_KEYS)
            stack.enter_context(server.running())
            opening = {"viewport": WIDE, "reduced_motion": "reduce", **context}
            made = ClusterTab(server, stack.enter_context(browser.new_context(**opening)), view)
            opened.append(made)
            return made

        yield make
        for one in opened:
            assert one.complaints == []


# -- the verdict and the boards -------------------------------------------------------------------


def test_a_slow_ddr_clock_is_the_first_reason_with_its_figure_and_its_command(
    tab: OpenTab,
) -> None:
    page = tab().page
    api.expect(page.locator("#verdict-word")).to_have_text("DEGRADED")
    reason = page.locator("#reasons .reason").first
    api.expect(reason).to_contain_text("the DDR clock is 528 of 2112 MHz")
    api.expect(reason.locator(".figure")).to_have_text("528\u00a0MHz (limit 2,006)")
    api.expect(reason.locator("code")).to_have_text(DDR)
    api.expect(reason.locator(".where")).to_have_text("on rock-02")
    card = page.locator(".card", has_text="rock-02")
    api.expect(card.locator("[data-wanting]")).to_have_text("528/2112")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    reason.get_by_role("button", name="Copy the command for DdrBelowMax").click()
    api.expect(reason.get_by_role("button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == DDR


def test_a_board_that_is_lost_is_red_with_the_delta_and_announced(tab: OpenTab) -> None:
    one = tab()
    card = one.page.locator(".card", has_text="rock-03")
    api.expect(card.locator(".state")).to_have_text("Ready")
    one.server.send(LOST)
    api.expect(card).to_have_attribute("data-tone", "bad")
    api.expect(card.locator(".state")).to_have_text("Lost")
    api.expect(card).to_contain_text("the board's replica does not answer")
    api.expect(one.page.locator("#reasons .reason").first).to_contain_text("does not answer")
    api.expect(one.page.locator("#said")).to_have_text(
        "The cluster is DEGRADED. rock-03: its replica does not answer."
    )
    api.expect(one.page).to_have_title("DEGRADED · Boards · rkserve cluster")
    well = {"verdict": {"verdict": "READY", "reasons": [], "more": 0}}
    one.server.send({**well, "boards": {"rock-03": {"state": "ready", "reason": None}}})
    api.expect(one.page.locator("#verdict-word")).to_have_text("READY")
    api.expect(card.locator(".state")).to_have_text("Ready")
    api.expect(one.page.locator("#reasons")).to_be_hidden()
    api.expect(one.page).to_have_title("Boards · rkserve cluster")


def crowded() -> Json:
    """Fifty boards, and as many reasons as a verdict has."""
    made = fleet_snapshot(50)
    view = made["view"]
    slow = EXAMPLE["verdict"]["reasons"][0]
    rules = ("DdrBelowMax", "Hot", "MemoryLow", "DiskLow", "TtftP95")
    reasons = [{**slow, "rule": rule, "boards": [f"rock-0{at}"]} for at, rule in enumerate(rules)]
    view["verdict"] = {"verdict": "DEGRADED", "reasons": reasons, "more": 3}
    view["boards"]["rock-01"]["rules"] = ["Hot"]
    view["boards"]["rock-50"].update(state="lost", rules=["BoardLost"])
    view["boards"]["rock-49"]["driver"] = "0.9.6"
    return made


def test_fifty_boards_fit_without_scrolling(tab: OpenTab) -> None:
    page = tab(crowded()).page
    rows = page.locator(".row[data-tone]")
    api.expect(rows).to_have_count(50)
    size = page.evaluate(
        "[document.documentElement.scrollHeight, document.documentElement.scrollWidth]"
    )
    assert size[0] <= WIDE["height"]
    assert size[1] <= WIDE["width"]
    api.expect(rows.last).to_be_in_viewport(ratio=1)
    cut = rows.first.locator("> :nth-child(n + 5)").evaluate_all(
        "cells => cells.filter(one => one.scrollWidth > one.clientWidth).length"
    )
    assert cut == 0  # no figure is shown in part
    api.expect(rows.nth(48).locator(".about")).to_contain_text("driver 0.9.6")
    api.expect(rows.nth(0).locator(".about")).to_have_text("tone@v2")


TOUCHED = """() => {
  window.touched = new Set();
  const row = node => (node.nodeType === 1 ? node : node.parentElement)?.closest(".row");
  new MutationObserver(all => {
    for (const one of all) window.touched.add(row(one.target)?.querySelector("a")?.textContent);
  }).observe(document.querySelector(".rows"), { subtree: true, childList: true,
    attributes: true, characterData: true });
}"""


def test_a_delta_touches_only_what_it_changes(tab: OpenTab) -> None:
    one = tab(fleet_snapshot(50))
    rows = one.page.locator(".row[data-tone]")
    api.expect(rows).to_have_count(50)
    one.page.evaluate(TOUCHED)
    decode = [*one.server.view["now"]["decode_tokens_per_s"]]
    decode[6] = 3.3
    one.server.send({"now": {"decode_tokens_per_s": decode}})
    api.expect(rows.nth(6)).to_contain_text("3.3")
    assert one.page.evaluate("[...window.touched]") == ["rock-07"]
    one.server.send({"boards": {"rock-09": {"state": "recovering"}}})
    api.expect(rows.nth(8).locator(".state")).to_have_text("Recovering")
    touched = set(one.page.evaluate("[...window.touched]"))
    assert touched - {None} == {"rock-07", "rock-09"}  # None: their group's count of ready ones


def test_boards_join_and_leave(tab: OpenTab) -> None:
    one = tab(fleet_snapshot(12, ("m",)))
    api.expect(one.page.locator(".card")).to_have_count(12)
    view = one.server.view
    entry = {**view["boards"]["rock-01"], "node": "new"}
    now = {column: [*values, values[0]] for column, values in view["now"].items()}
    order = [*view["order"], "new"]
    one.server.send({"boards": {"new": entry}, "order": order, "now": now})
    api.expect(one.page.locator(".row[data-tone]")).to_have_count(13)
    api.expect(one.page.locator(".card")).to_have_count(0)
    one.server.send(
        {
            "boards": {"new": None},
            "order": order[:-1],
            "now": {column: values[:-1] for column, values in now.items()},
        }
    )
    api.expect(one.page.locator(".card")).to_have_count(12)


# -- the stream -----------------------------------------------------------------------------------


def test_a_stream_that_is_cut_is_shown_as_stale_and_opened_again(tab: OpenTab) -> None:
    one = tab()
    page = one.page
    page.locator(".card").first.wait_for()
    one.server.refuses_streams = True
    one.server.cut()
    api.expect(page.locator("#stale")).to_be_visible()
    api.expect(page.locator("#stale-words")).to_contain_text("Stale since")
    api.expect(page.locator("#stale-words")).to_contain_text("The Router starts.", timeout=30_000)
    one.server.view["boards"]["rock-03"]["state"] = "hung"
    one.server.refuses_streams = False
    page.get_by_role("button", name="Try now").click()
    api.expect(page.locator("#stale")).to_be_hidden()
    api.expect(page.locator(".card", has_text="rock-03").locator(".state")).to_have_text("Hung")
    assert one.server.streams == 2


def test_a_stream_without_a_byte_counts_as_lost(tab: OpenTab) -> None:
    snapshot = example_snapshot()
    one = tab(snapshot)
    one.page.locator(".card").first.wait_for()
    one.page.clock.install()
    one.server.tick()  # the time starts again, on the clock that the test moves
    one.page.evaluate("() => new Promise(requestAnimationFrame)")
    one.page.clock.run_for(60_000)
    one.page.wait_for_function("() => !document.getElementById('stale').hidden", polling=50)


def test_a_key_is_asked_for_and_forgotten_with_the_tab(tab: OpenTab) -> None:
    one = tab(key="sesame")
    page = one.page
    key = page.get_by_label("API key", exact=True)
    api.expect(key).to_be_focused()
    api.expect(page.locator("#key-failure")).to_contain_text(
        "rkserve keys create NAME --scope read"
    )
    assert one.violations() == []
    enter(one, "wrong", typed=True)
    api.expect(page.locator("#key-failure")).to_contain_text("Incorrect API key")
    assert one.violations() == []
    enter(one, "sesame", typed=True)  # it replaces the wrong one
    api.expect(page.locator(".card")).to_have_count(3)
    api.expect(page.locator("#stale")).to_be_hidden()
    assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")
    page.reload()
    api.expect(page.locator(".card")).to_have_count(3)


def enter(one: ClusterTab, key: str, *, typed: bool = False) -> None:
    """Give the page a key, into the field that it has opened."""
    field = one.page.get_by_label("API key", exact=True)
    api.expect(field).to_be_focused()
    if typed:
        one.page.keyboard.type(key)
    else:
        field.fill(key)
    one.page.keyboard.press("Enter")


def test_a_key_that_may_only_read_shows_the_cluster_and_actions_ask_for_another_one(
    tab: OpenTab,
) -> None:
    one = tab(key="sesame", view="board/rock-02")
    page = one.page
    enter(one, "chat-client")
    api.expect(page.locator("#key-failure")).to_have_text(
        "This call needs the scope 'read'; the key 'chat-client' has infer."
    )
    enter(one, "viewer")
    api.expect(page.locator(".charts svg")).to_have_count(8)
    for view, button in (
        ("board/rock-02", "Drain"),
        ("requests", "Abort request chatcmpl-77ab10"),
        ("operations", "Pause the cluster"),
    ):
        one.go(view)
        page.get_by_role("button", name=button).click()
        api.expect(page.locator("#key-failure")).to_contain_text(
            "needs a key with the scope operate; the entered one may only read."
        )
        assert (view, one.violations()) == (view, [])
        page.keyboard.press("Escape")
        api.expect(page.get_by_role("button", name=button)).to_be_focused()
    one.go("audit")
    api.expect(page.locator("#view .failure")).to_contain_text("the key 'viewer' has read.")
    one.go("usage")
    api.expect(page.locator("tbody tr").first).to_be_visible()
    assert one.server.changes() == []
    one.go("board/rock-02")
    page.get_by_role("button", name="Drain").click()
    enter(one, "sesame", typed=True)
    api.expect(page.locator("#settings")).to_be_hidden()
    one.server.answers["POST /v1/boards/drain"] = {"state": "succeeded"}
    api.expect(page.locator("#stale")).to_be_hidden()
    api.expect(page.locator(".charts [aria-label^=Decoding]")).to_be_visible()
    page.get_by_role("button", name="Drain").click()
    one.confirm_by_keyboard()
    api.expect(page.locator("#confirm")).to_be_hidden()
    assert [path for _, path, _ in one.server.changes()] == ["/v1/boards/drain"]


# -- one board ------------------------------------------------------------------------------------


def test_a_board_has_its_history_its_engine_s_last_words_and_its_log(tab: OpenTab) -> None:
    snapshot = example_snapshot()
    snapshot["view"]["boards"]["rock-02"].update(
        last_recovery="SIGSEGV in rkllm_run", crashes={"SIGSEGV": 2}
    )
    one = tab(snapshot, view="board/rock-02")
    page = one.page
    chart = page.get_by_role("img", name="Decoding, last 30 min")
    api.expect(chart).to_have_attribute("aria-label", re.compile("expected 12.5"))
    api.expect(page.locator(".charts svg")).to_have_count(8)
    api.expect(page.locator(".facts").first).to_contain_text("SIGSEGV in rkllm_run")
    api.expect(page.locator(".facts").first).to_contain_text("SIGSEGV: 2")
    one.server.tick(temperature_c=[61, 83, 60])
    api.expect(page.locator(".chart", has_text="Temperature").locator("output")).to_have_text(
        "83 °C"
    )
    follow = page.get_by_role("button", name="Follow the log")
    follow.click()
    api.expect(page.locator("#view")).to_contain_text("This server has no live log of rock-02.")
    one.server.lines = [
        {"source": "rock-02", "time_s": 1767225600.1, "level": "ERROR", "logger": "engine",
         "request_id": "", "message": "<b>E RKNN: job timeout</b>"},
    ]  # fmt: skip
    follow.click()
    api.expect(page.locator(".log li")).to_contain_text("<b>E RKNN: job timeout</b>")


def test_a_board_that_is_not_there_is_a_sentence(tab: OpenTab) -> None:
    page = tab(view="board/none").page
    api.expect(page.locator("#view")).to_contain_text("No board named none is in this cluster.")
    page.get_by_role("link", name="All boards").click()
    api.expect(page.locator(".card")).to_have_count(3)


@pytest.mark.parametrize("verb", BOARD_ACTIONS)
def test_an_action_on_a_board_is_confirmed_by_keyboard(tab: OpenTab, verb: str) -> None:
    path, body = BOARD_ACTIONS[verb]
    one = tab(view="board/rock-02")
    one.server.answers[f"POST {path}"] = {"state": "succeeded"}
    one.page.locator(".actions").wait_for()
    one.tab_to(verb)
    one.page.keyboard.press("Enter")
    dialog = one.page.get_by_role("dialog", name=f"{verb}: rock-02?")
    api.expect(dialog).to_contain_text("1 request in progress" if verb == "Pause" else "rock-02")
    one.confirm_by_keyboard()
    api.expect(dialog).to_be_hidden()
    assert one.server.changes() == [("POST", path, body)]
    api.expect(one.page.locator("#said")).to_contain_text("rock-02")
    api.expect(one.page.get_by_role("button", name=verb)).to_be_focused()


def test_states_offer_the_action_that_ends_them(tab: OpenTab) -> None:
    one = tab(view="board/rock-01")
    held = {"state": "asleep", "level": 1, "hold": None}
    api.expect(one.page.get_by_role("button", name="Resume")).to_be_visible()
    api.expect(one.page.get_by_role("button", name="Pause")).to_be_hidden()
    one.server.send({"boards": {"rock-01": held}})
    api.expect(one.page.get_by_role("button", name="Wake")).to_be_visible()
    for hidden in ("Resume", "Pause", "Sleep"):
        api.expect(one.page.get_by_role("button", name=hidden, exact=True)).to_be_hidden()


def test_a_drained_board_is_shown_in_words_and_the_drain_can_be_ended(tab: OpenTab) -> None:
    one = tab()
    card = one.page.locator(".card", has_text="rock-03")
    one.server.send({"boards": {"rock-03": {"drained": True}}})
    api.expect(card.locator(".state")).to_have_text("Drained")
    api.expect(card).to_have_attribute("data-tone", "idle")
    api.expect(card).to_contain_text("It takes no new requests.")
    one.go("board/rock-03")
    api.expect(one.page.get_by_role("button", name="Drain", exact=True)).to_be_hidden()
    one.server.answers["POST /v1/boards/undrain"] = {"state": "succeeded"}
    one.tab_to("End drain")
    one.page.keyboard.press("Enter")
    one.confirm_by_keyboard()
    api.expect(one.page.locator("#said")).to_have_text("rock-03 takes requests again.")
    assert one.server.changes() == [("POST", "/v1/boards/undrain", {"boards": ["rock-03"]})]


def test_a_measurement_is_told_in_the_server_s_sentence(tab: OpenTab) -> None:
    one = tab(view="board/rock-02")
    sentence = "rock-02 decodes 6.1 tokens/s, 49% of 12.5."
    one.server.answers["POST /v1/boards/rock-02/measure"] = {"sentence": sentence}
    one.page.get_by_role("button", name="Measure").click()
    one.page.locator("#confirm-yes").click()
    api.expect(one.page.locator("#said")).to_have_text(sentence)


def test_a_refusal_is_shown_in_the_server_s_words_and_can_be_tried_again(tab: OpenTab) -> None:
    one = tab(view="board/rock-02")
    one.server.answers["POST /pause"] = (403, "This call needs the admin key.")
    one.page.get_by_role("button", name="Pause").click()
    one.page.locator("#confirm-yes").click()
    api.expect(one.page.locator("#confirm-failure")).to_have_text("This call needs the admin key.")
    assert one.violations() == []
    one.server.answers["POST /pause"] = {"state": "succeeded"}
    one.page.locator("#confirm-yes").click()
    api.expect(one.page.locator("#confirm")).to_be_hidden()
    one.page.get_by_role("button", name="Sleep").click()
    one.page.keyboard.press("Escape")
    api.expect(one.page.locator("#confirm")).to_be_hidden()
    assert [path for _, path, _ in one.server.changes()] == ["/pause", "/pause"]


# -- lists ----------------------------------------------------------------------------------------


def test_a_request_is_aborted_by_keyboard(tab: OpenTab) -> None:
    one = tab(view="requests")
    rows = one.page.locator("tbody tr")
    api.expect(rows).to_have_count(2)
    api.expect(rows.nth(1)).to_contain_text("chatcmpl-77ab10prefill")
    api.expect(rows.nth(1)).to_contain_text("qwen3-1.7brock-02bob1")
    path = "/v1/generations/chatcmpl-77ab10/abort"
    one.server.answers[f"POST {path}"] = {"status": "aborted"}
    one.tab_to("Abort request chatcmpl-77ab10")
    one.page.keyboard.press("Enter")
    one.confirm_by_keyboard()
    api.expect(one.page.locator("#confirm")).to_be_hidden()
    assert one.server.changes() == [("POST", path, {})]
    one.server.send({"requests": {"chatcmpl-77ab10": None}})
    api.expect(rows).to_have_count(1)


def test_a_rollout_has_its_progress_and_is_rolled_back_and_a_pause_is_ended(tab: OpenTab) -> None:
    one = tab(view="operations")
    rollout = one.page.locator("tbody tr", has_text="tone of qwen3-1.7b")
    api.expect(rollout).to_contain_text("1 of 3")
    api.expect(rollout.get_by_role("button", name="Promote tone")).to_be_hidden()
    one.server.send({"rollouts": {"qwen3-1.7b:tone": {"switched": 2, "weight": 0.1}}})
    api.expect(rollout).to_contain_text("2 of 3")
    api.expect(rollout.get_by_role("button", name="Promote tone")).to_be_visible()
    path = "/v1/lora_adapters/tone/rollback"
    one.server.answers[f"POST {path}"] = one.server.answers["POST /resume"] = {"state": "succeeded"}
    one.tab_to("Roll back tone")
    one.page.keyboard.press("Enter")
    dialog = one.page.get_by_role("dialog", name="Roll back tone of qwen3-1.7b?")
    api.expect(dialog).to_contain_text("serve v1 of tone instead of v2")
    one.confirm_by_keyboard()
    api.expect(dialog).to_be_hidden()
    one.page.get_by_role("button", name="End op-7").click()
    one.page.locator("#confirm-yes").click()
    api.expect(one.page.locator("#confirm")).to_be_hidden()
    assert one.server.changes() == [
        ("POST", path, {"model": "qwen3-1.7b"}),
        ("POST", "/resume", {"boards": ["rock-01"]}),
    ]


def test_the_cluster_is_paused_by_keyboard_and_its_boards_are_counted_as_paused(
    tab: OpenTab,
) -> None:
    one = tab(view="operations")
    one.server.answers["POST /pause"] = {"state": "succeeded"}
    one.tab_to("Pause the cluster")
    one.page.keyboard.press("Enter")
    dialog = one.page.get_by_role("dialog", name="Pause the whole cluster?")
    api.expect(dialog).to_contain_text("3 requests in progress.")
    one.confirm_by_keyboard()
    api.expect(dialog).to_be_hidden()
    assert one.server.changes() == [("POST", "/pause", {"mode": "keep", "clear_cache": False})]
    whole = {"models": [], "boards": [], "mode": "keep", "since_s": 1.0}
    holds = {name: {"hold": "keep"} for name in one.server.view["order"]}
    one.server.send({"pauses": {"op-9": whole}, "boards": holds})
    api.expect(one.page.locator("#verdict-summary")).to_contain_text(
        "3 of 3 boards ready · 3 paused · "
    )
    held = one.page.locator("#held")
    api.expect(held).to_contain_text(
        "The whole cluster serves nothing, on purpose: 3 paused, since "
    )
    api.expect(one.page.locator("#said")).to_contain_text("serves nothing, on purpose: 3 paused")
    assert one.violations() == []
    api.expect(one.page.get_by_role("button", name="Pause the cluster")).to_be_hidden()
    one.server.send({"boards": {"rock-02": {"hold": None}}})
    api.expect(held).to_be_hidden()
    one.server.send({"pauses": {"op-9": None}})
    api.expect(one.page.get_by_role("button", name="Pause the cluster")).to_be_visible()


def test_audit_and_usage_are_fetched_when_they_are_opened(tab: OpenTab) -> None:
    one = tab(view="audit")
    api.expect(one.page.locator("#view")).to_contain_text("Nothing was changed yet.")
    line = {"at_s": 1.0, "who": "admin 10.0.0.5", "kind": "pause", "outcome": "succeeded",
            "status": 200, "operation": "op-7", "epoch": 12,
            "params": {"boards": ["rock-01", "rock-02"], "adapter": None}}  # fmt: skip
    one.server.answers["GET /v1/audit"] = {"object": "list", "data": [line]}
    one.page.get_by_role("button", name="Refresh").click()
    api.expect(one.page.locator("tbody tr")).to_contain_text("boards rock-01 rock-02")
    one.go("usage")
    first = EXAMPLE["usage"]["data"][0]
    api.expect(one.page.locator("tbody tr").first).to_contain_text(first["key"])
    one.server.answers["GET /v1/usage"] = (403, "This call needs the admin key.")
    one.page.get_by_role("button", name="Refresh").click()
    api.expect(one.page.locator("#view .failure")).to_have_text("This call needs the admin key.")


def test_a_reason_leads_to_its_section_of_the_runbook(tab: OpenTab) -> None:
    one = tab()
    one.page.get_by_role("link", name="Runbook: DdrBelowMax").click()
    api.expect(one.page.locator("h1")).to_have_text("Runbook: DdrBelowMax")
    api.expect(one.page.locator("h1")).to_be_focused()
    api.expect(one.page.locator(".words")).to_contain_text(DDR)
    api.expect(one.page.locator(".words h3")).to_have_count(0)
    assert one.violations() == []
    one.page.get_by_role("link", name="The whole runbook").click()
    api.expect(one.page.locator(".words h3", has_text="BoardLost")).to_have_count(1)
    assert one.violations() == []


def test_the_lines_for_clients_have_this_cluster_s_address(tab: OpenTab) -> None:
    one = tab(view="connect")
    lines = one.page.locator("pre")
    api.expect(lines).to_have_count(5)
    api.expect(lines.nth(0)).to_contain_text(f"{one.server.url}v1/chat/completions")
    api.expect(lines.nth(0)).to_contain_text('"model": "qwen3-1.7b"')
    api.expect(lines.nth(1)).to_contain_text(f'base_url="{one.server.url}v1"')
    assert "YOUR_KEY" not in lines.nth(1).inner_text()
    one.page.get_by_label("This cluster asks for an API key").check()
    api.expect(lines.nth(1)).to_contain_text('api_key="YOUR_KEY"')


# -- for everybody --------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_axe_finds_nothing_wrong_on_any_view(
    tab: OpenTab, scheme: str, size: dict[str, int]
) -> None:
    one = tab(color_scheme=scheme, viewport=size)
    one.server.send(LOST)
    one.page.locator("[data-tone=bad]").first.wait_for()
    for view in VIEWS:
        one.go(view)
        if view == "runbook":
            one.page.locator(".words h3").last.wait_for()
        if view == "board/rock-02":
            one.page.locator(".charts [aria-label^=Decoding]").wait_for()
        assert (view, one.violations()) == (view, [])
        width = one.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert (view, width[0]) <= (view, width[1])
    one.go("board/rock-02")
    one.page.get_by_role("button", name="Sleep").click()
    assert one.violations() == []
    one.page.keyboard.press("Escape")
    one.server.refuses_streams = True
    one.server.cut()
    api.expect(one.page.locator("#stale")).to_be_visible()
    assert one.violations() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_axe_finds_nothing_wrong_with_fifty_boards(
    tab: OpenTab, scheme: str, size: dict[str, int]
) -> None:
    one = tab(crowded(), color_scheme=scheme, viewport=size)
    one.page.locator(".row[data-tone]").last.wait_for()
    assert one.violations() == []
    width = one.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1]


def test_views_are_reached_by_keyboard_and_take_the_focus(tab: OpenTab) -> None:
    one = tab()
    one.page.locator(".card").first.wait_for()
    one.page.keyboard.press("Tab")
    api.expect(one.page.locator("#skip")).to_be_focused()
    one.page.keyboard.press("Enter")
    api.expect(one.page.locator("#view")).to_be_focused()
    one.tab_to("rock-02")
    one.page.keyboard.press("Enter")
    api.expect(one.page.get_by_role("heading", name="rock-02")).to_be_focused()
    api.expect(one.page).to_have_title("DEGRADED · rock-02 · rkserve cluster")
    one.page.go_back()
    api.expect(one.page.locator(".card")).to_have_count(3)
    for name in ("Requests", "Operations", "Audit", "Usage", "Connect", "Boards"):
        one.page.locator("#top nav").get_by_role("link", name=name).focus()
        one.page.keyboard.press("Enter")
        api.expect(one.page.locator("nav [aria-current]")).to_have_text(name)
        api.expect(one.page.locator("h1")).to_be_focused()
