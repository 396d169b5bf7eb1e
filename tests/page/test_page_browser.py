"""The chat page in a real Chromium, on scripted boards. ``make page-test`` installs what it needs.

Whatever a test does, the page must neither complain nor ask another server for anything.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rkserve.config.router import RouterConfig
from rkserve.core.errors import EngineDied
from rkserve.core.messages import Delta
from rkserve.models.folder import open_model_folder
from rkserve.router.served_models import ServedModel
from tests.support.boards.fake_boards import Step, accepted, finished
from tests.support.http.page_server import PageServer, words
from tests.support.paths import PROJECT

api = pytest.importorskip("playwright.sync_api", reason="make page-test installs Playwright")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="make page-test")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.page,
    pytest.mark.skipif(CHROMIUM is None, reason="needs the Debian package chromium"),
]

Page = Any  # Playwright is not there where the types are checked
Answers = Sequence[Step | int]
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
PHONE = {"width": 320, "height": 640}
LONG = """## A heading

Some **strong** and *soft* words, `code`, ~~gone~~ and [a link](https://example.org/).

1. one
   - inside
2. two

> A quote

| Board | tokens/s |
|:--|--:|
| RK3588 | 15.4 |

```python
print("a line of code that is much longer than what a telephone can show at once, and more")
```
"""


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


class Tab:
    """The page in a browser of its own, and the Router behind it."""

    def __init__(self, server: PageServer, context: Any) -> None:
        self.server, self.context = server, context
        self.complaints: list[str] = []
        self.page = self.another()

    def another(self) -> Page:
        """Open the page in one more tab."""
        page = self.context.new_page()
        page.on("console", lambda said: self._said(said.type, said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self._asked(request.url))
        page.goto(self.server.url)
        return page

    def _said(self, kind: str, text: str) -> None:
        # The browser itself notes each refusal of the server; those are what some tests are about.
        if kind in ("error", "warning") and "Failed to load resource" not in text:
            self.complaints.append(text)

    def _asked(self, url: str) -> None:
        if not url.startswith((self.server.url, "data:", "blob:")):
            self.complaints.append(f"asks {url}")

    def ask(self, text: str, page: Page | None = None) -> None:
        """Type a message and send it."""
        page = page or self.page
        page.locator("#model:not([disabled])").wait_for()
        page.locator("#input").fill(text)
        page.locator("#input").press("Enter")

    @property
    def last(self) -> Any:
        """The last answer."""
        return self.page.locator(".answer").last

    def done(self) -> None:
        """Wait until the last answer is over."""
        self.page.get_by_role("button", name="Ask again").wait_for()

    def violations(self) -> list[str]:
        """What axe finds wrong, with the elements."""
        found = axe.Axe().run(self.page, options={"runOnly": RULES}).response["violations"]
        return [f"{one['id']}: {[n['html'][:90] for n in one['nodes']]}" for one in found]


OpenTab = Callable[..., Tab]


def seeing() -> ServedModel:
    """A model that is shown images."""
    folder = PROJECT / "models" / "sim-vision"
    return ServedModel.open(open_model_folder(folder))


def picture(*, noise: bool = False) -> bytes:
    """A PNG of one colour, or one that no browser makes small."""
    size = (300, 300)
    made = Image.effect_noise(size, 200).convert("RGB") if noise else Image.new("RGB", size, "red")
    out = io.BytesIO()
    made.save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def tab(browser: Any) -> Iterator[OpenTab]:
    """Open the page on boards that give these answers, one after the other."""
    with ExitStack() as stack:
        opened: list[Tab] = []

        def make(
            *answers: Answers,
            config: RouterConfig | None = None,
            sees: bool = False,
            script: str = "",
            **context: Any,
        ) -> Tab:
            server = PageServer(
                config or RouterConfig(queue_limit=9),
                *(answers or (words("x"),)),
                served=seeing() if sees else None,
            )
            stack.enter_context(server.running())
            opening = stack.enter_context(browser.new_context(**context))
            if script:
                opening.add_init_script(script)
            made = Tab(server, opening)
            opened.append(made)
            return made

        yield make
        for one in opened:
            assert one.complaints == []


def said(text: str, *more: Step | int) -> list[Step | int]:
    """An answer in pieces of five characters, and what follows them."""
    pieces: list[Step | int] = [
        Delta(text[at : at + 5], (7,)) for at in range(0, max(1, len(text)), 5)
    ]
    return [accepted("a"), *pieces, *more, finished(len(pieces), cached=3)]


# -- asking and answering -------------------------------------------------------------------------


def test_a_question_is_answered_with_figures_and_both_are_there_after_a_reload(
    tab: OpenTab,
) -> None:
    one = tab(words("Hello you there"))
    one.ask("Who\nare you?")
    one.done()
    for _ in range(2):
        api.expect(one.page.locator(".asked .words")).to_have_text("Who\nare you?")
        api.expect(one.last.locator(".words").last).to_have_text("Hello you there")
        figures = one.last.locator(".figures").inner_text()
        assert "100.0 tokens/s" in figures
        assert "3 tokens" in figures
        assert "3 of 5 prompt tokens cached" in figures
        assert "board a" in figures
        one.page.reload()
        one.page.locator(".answer").wait_for()


def test_the_conversation_goes_with_each_question_and_settings_with_it(tab: OpenTab) -> None:
    one = tab(words("first"), words("second"))
    one.ask("one")
    one.done()
    one.page.get_by_role("button", name="Settings").click()
    one.page.get_by_label("System prompt").fill("Be brief.")
    one.page.get_by_label("Temperature").fill("0.5")
    one.page.get_by_label("Longest answer").fill("7")
    one.page.get_by_role("button", name="Done").click()
    with one.page.expect_request("**/v1/chat/completions") as asked:
        one.ask("two")
    body = json.loads(asked.value.post_data)
    assert [(turn["role"], turn["content"]) for turn in body["messages"]] == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "first"),
        ("user", "two"),
    ]
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0.5, 7, "sim-chat")


def test_stop_frees_the_board_and_keeps_what_was_said(tab: OpenTab) -> None:
    for way in ("button", "Escape"):
        one = tab(said("And then ", 1))
        one.ask("Go on")
        api.expect(one.last.locator(".words").last).to_have_text("And then")
        one.server.wait_until(lambda house: house.boards.running == 1)
        if way == "button":
            one.page.get_by_role("button", name="Stop").click()
        else:
            one.page.keyboard.press("Escape")
        one.server.wait_until(lambda house: house.boards.running == 0)
        one.done()
        assert "stopped" in one.last.locator(".figures").inner_text()
        one.page.reload()
        api.expect(one.last.locator(".words").last).to_have_text("And then")


def test_closing_the_tab_frees_the_board(tab: OpenTab) -> None:
    one = tab(said("And then ", 1))
    one.ask("Go on")
    one.server.wait_until(lambda house: house.boards.running == 1)
    one.page.close()
    one.server.wait_until(lambda house: house.boards.running == 0)


def test_another_conversation_leaves_the_answer_of_the_first_and_frees_the_board(
    tab: OpenTab,
) -> None:
    one = tab(said("And then ", 1), words("Something else"))
    one.ask("First question")
    api.expect(one.last.locator(".words").last).to_have_text("And then")
    one.page.get_by_role("button", name="New chat").click()
    one.server.wait_until(lambda house: house.boards.running == 0)
    one.ask("Second question")
    one.done()
    api.expect(one.page.locator(".asked .words")).to_have_text("Second question")
    one.page.get_by_role("button", name="First question", exact=True).click()
    api.expect(one.last.locator(".words").last).to_have_text("And then")
    one.page.get_by_role("button", name="Delete “First question”").click()
    one.page.reload()
    api.expect(one.page.locator("#chats li")).to_have_text(["Second question"])


def test_who_waits_is_told_so(tab: OpenTab) -> None:
    one = tab([accepted("a"), 1, *words("mine")[1:]], words("yours"))
    one.ask("mine?")
    api.expect(one.last.locator(".state")).to_contain_text("Reading the prompt")
    other = one.another()
    one.ask("yours?", other)
    state = other.locator(".answer .state")
    api.expect(state).to_contain_text("Waiting for a board")
    api.expect(state).to_contain_text(re.compile(r"… \d+ s"))
    one.server.open_gate(1)
    other.get_by_role("button", name="Ask again").wait_for()
    api.expect(other.locator(".answer .words").last).to_have_text("yours")
    api.expect(state).to_be_hidden()


def stream_of(*chunks: dict[str, Any]) -> str:
    """A stream of an answer as a server would send it: deltas, and what is said beside them."""
    told = [
        {"choices": [{"index": 0, "delta": chunk.get("delta", {})}], **chunk} for chunk in chunks
    ]
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    return "".join(f"data: {json.dumps(one)}\n\n" for one in [*told, last]) + "data: [DONE]\n\n"


def test_thoughts_are_shown_folded(tab: OpenTab) -> None:
    one = tab()
    body = stream_of(
        {"delta": {"reasoning_content": "Let me *see*. No"}},
        {"rkserve": {"retract_reasoning": 2}},
        {"delta": {"content": "It is 4."}},
    )
    one.page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    one.ask("2 + 2?")
    one.done()
    thoughts = one.last.locator(".thoughts")
    assert not thoughts.evaluate("node => node.open")
    api.expect(thoughts.locator(".words")).to_be_hidden()
    thoughts.get_by_text("Thinking").click()
    api.expect(thoughts.locator(".words")).to_have_text("Let me see.")
    api.expect(one.last.locator("> .words")).to_have_text("It is 4.")
    assert "cut at the longest length" in one.last.locator(".figures").inner_text()


def test_words_that_an_edit_took_back_are_gone(tab: OpenTab) -> None:
    steps = [accepted("a"), Delta("ab🍵", (1,)), Delta("c", (2,), retract=2), finished(2)]
    one = tab(steps)
    one.ask("Say it")
    one.done()
    api.expect(one.last.locator("> .words")).to_have_text("ac")


def attach(one: Tab, data: bytes, name: str = "a.png") -> None:
    one.page.locator("#attach").wait_for()
    given = [{"name": name, "mimeType": "image/png", "buffer": data}]
    one.page.locator("#file").set_input_files(given)


def test_images_are_attached_seen_again_and_there_after_a_reload(tab: OpenTab) -> None:
    one = tab(words("red"), words("still red"), sees=True)
    waiting = one.page.locator("#images img")
    attach(one, picture())
    api.expect(waiting).to_have_count(1)
    assert one.violations() == []
    one.page.get_by_role("button", name="Remove image 1").click()
    api.expect(waiting).to_have_count(0)
    attach(one, picture())
    api.expect(waiting).to_have_count(1)
    one.ask("What is this?")
    one.done()
    api.expect(waiting).to_have_count(0)
    one.ask("And now?")
    one.page.get_by_text("still red").wait_for()
    one.done()
    for _, request in one.server.house.boards.opened:
        (seen,) = request.images  # of the first turn in both
        red, green, blue = seen.pixels[len(seen.pixels) // 6 * 3 :][:3]
        assert (red > 240, green < 15, blue < 15) == (True, True, True)
    one.page.reload()
    api.expect(one.page.get_by_role("img", name="Image 1 of the message")).to_be_visible()
    assert one.violations() == []


def test_an_image_alone_is_a_question_and_what_is_none_is_told(tab: OpenTab) -> None:
    one = tab(words("red"), sees=True)
    attach(one, b"no image", "x.png")
    said = one.page.locator("#image-trouble")
    api.expect(said).to_have_text("x.png is no image that this browser can read.")
    attach(one, picture())
    api.expect(said).to_be_hidden()
    one.ask("")
    one.done()
    ((_, request),) = one.server.house.boards.opened
    assert len(request.images) == 1


def test_a_model_that_sees_nothing_is_shown_nothing(tab: OpenTab) -> None:
    one = tab()
    one.ask("Hello")
    one.done()
    api.expect(one.page.locator("#attach")).to_be_hidden()


FULL = """
const set = Storage.prototype.setItem;
Storage.prototype.setItem = function (name, value) {
  if (value.length > 20000) throw new Error("full");
  return set.call(this, name, value);
};
"""


def test_where_there_is_no_room_the_words_are_kept_without_the_images(tab: OpenTab) -> None:
    one = tab(words("noise"), sees=True, script=FULL)
    attach(one, picture(noise=True))
    api.expect(one.page.locator("#images img")).to_have_count(1)
    one.ask("What is this?")
    one.done()
    one.page.reload()
    api.expect(one.page.locator(".asked .words")).to_contain_text("An image was not kept.")
    api.expect(one.page.locator(".asked .words")).to_contain_text("What is this?")


def test_what_breaks_is_told_and_can_be_asked_again(tab: OpenTab) -> None:
    lost = EngineDied("a", "SIGSEGV")
    one = tab([accepted("a"), Delta("half", (1,)), lost], words("whole"),
              config=RouterConfig(queue_limit=9, max_continuations=0))  # fmt: skip
    one.ask("Say it")
    one.done()
    api.expect(one.last.get_by_role("alert")).to_contain_text("SIGSEGV")
    api.expect(one.last.locator("> .words")).to_have_text("half")
    one.page.get_by_role("button", name="Ask again").click()
    api.expect(one.last.locator("> .words")).to_have_text("whole")
    assert one.page.locator(".answer").count() == 1


def sent_by(one: Tab, act: Callable[[], None]) -> list[tuple[str, str]]:
    """The conversation that the page sends when something is done."""
    with one.page.expect_request("**/v1/chat/completions") as asked:
        act()
    return [(t["role"], t["content"]) for t in json.loads(asked.value.post_data)["messages"]]


def test_an_earlier_message_is_edited_and_what_came_after_it_is_gone(tab: OpenTab) -> None:
    one = tab(words("first"), words("second"), words("changed"))
    for question in ("one", "two"):
        one.ask(question)
        one.done()
    one.page.get_by_role("button", name="Edit").first.click()
    field = one.page.get_by_label("Edit your message")
    api.expect(field).to_be_focused()
    api.expect(field).to_have_value("one")
    assert one.violations() == []
    field.press("Escape")
    api.expect(one.page.locator(".asked .words").first).to_have_text("one")
    api.expect(one.page.get_by_role("button", name="Edit").first).to_be_focused()
    one.page.get_by_role("button", name="Edit").first.click()
    field.fill("uno")
    assert sent_by(one, lambda: field.press("Enter")) == [("user", "uno")]
    one.done()
    for _ in range(2):
        api.expect(one.page.locator(".asked .words")).to_have_text(["uno"])
        api.expect(one.page.locator(".answer > .words")).to_have_text(["changed"])
        one.page.reload()
        one.page.locator(".answer").wait_for()


def test_the_last_message_is_taken_back_into_the_field(tab: OpenTab) -> None:
    one = tab(words("first"), words("second"), words("third"))
    for question in ("one", "two"):
        one.ask(question)
        one.done()
    one.page.locator("#input").fill("more")
    one.page.get_by_role("button", name="Undo").click()
    api.expect(one.page.locator("#input")).to_be_focused()
    api.expect(one.page.locator("#input")).to_have_value("two\nmore")
    api.expect(one.page.locator(".asked .words")).to_have_text(["one"])
    sent = sent_by(one, lambda: one.page.locator("#input").press("Enter"))
    assert sent == [("user", "one"), ("assistant", "first"), ("user", "two\nmore")]
    one.done()
    for _ in range(2):
        one.page.get_by_role("button", name="Undo").click()
    api.expect(one.page.get_by_text("A new conversation")).to_be_visible()
    one.page.reload()
    api.expect(one.page.locator("#chats li")).to_have_count(0)


def test_images_of_a_message_outlive_an_edit_and_an_undo(tab: OpenTab) -> None:
    one = tab(words("red"), words("blue"), sees=True)
    attach(one, picture())
    api.expect(one.page.locator("#images img")).to_have_count(1)
    one.ask("What is this?")
    one.done()
    one.page.get_by_role("button", name="Edit").click()
    one.page.get_by_label("Edit your message").fill("Which colour?")
    one.page.locator(".editor").get_by_role("button", name="Send").click()
    one.done()
    api.expect(one.page.locator(".asked img")).to_have_count(1)
    one.page.get_by_role("button", name="Undo").click()
    api.expect(one.page.locator("#images img")).to_have_count(1)


def test_nothing_is_edited_while_an_answer_comes(tab: OpenTab) -> None:
    one = tab(said("And then ", 1))
    one.ask("Go on")
    api.expect(one.last.locator(".words").last).to_have_text("And then")
    api.expect(one.page.get_by_role("button", name="Edit")).to_be_hidden()
    one.server.open_gate(1)
    one.done()
    api.expect(one.page.get_by_role("button", name="Edit")).to_be_visible()


def test_a_server_that_wants_a_key_gets_it_asked_for(tab: OpenTab, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame\n", encoding="utf-8")
    one = tab(words("Come in"), config=RouterConfig(api_keys_file=keys, queue_limit=9))
    key = one.page.get_by_label("API key")
    api.expect(key).to_be_focused()
    key.fill("sesame")
    key.press("Enter")
    one.ask("Open")
    one.done()
    api.expect(one.last.locator("> .words")).to_have_text("Come in")
    kept = one.page.evaluate("JSON.stringify(localStorage)")
    assert "sesame" not in kept  # it is forgotten with the tab


# -- Markdown -------------------------------------------------------------------------------------

HOSTILE = """<script>window.hit = 1</script><img src=x onerror="window.hit = 1">

[a](javascript:window.hit=1) [b](JaVaScRiPt:x) [c](data:text/html,x) [d]( vbscript:x "t")
![p](https://elsewhere.example/pixel.png) <https://ok.example/> https://two.example/a_b_c.

<a href="javascript:x">y</a> &lt;b&gt; <svg onload=alert(1)>

```html"><script>window.hit = 1</script>
<script>window.hit = 1</script>
```

| <img src=x onerror=alert(1)> | b |
|--|--|
| [x](javascript:1) | <b>c</b> |
"""


def test_an_answer_never_becomes_markup(tab: OpenTab) -> None:
    one = tab(said(HOSTILE))
    one.ask("<img src=x onerror='window.hit = 1'>")
    one.done()
    assert one.page.evaluate("window.hit") is None
    inside = one.page.locator("#log")
    assert inside.locator("script, img, iframe, object, [onerror], [onload]").count() == 0
    assert inside.locator("svg").count() == 0
    links = inside.locator("a").evaluate_all("all => all.map(one => one.getAttribute('href'))")
    assert links == [
        "https://elsewhere.example/pixel.png",
        "https://ok.example/",
        "https://two.example/a_b_c",
    ]
    rels = inside.locator("a").evaluate_all("all => all.map(one => one.rel)")
    assert set(rels) == {"noopener noreferrer"}
    shown = one.last.locator("> .words").inner_text()
    assert '<script>window.hit = 1</script><img src=x onerror="window.hit = 1">' in shown


CASES = [
    ("plain words", "<p>plain words</p>"),
    ("a\nb", "<p>a<br>b</p>"),
    ("# One\n### Three ###", "<h3>One</h3><h3>Three</h3>"),
    ("#no heading", "<p>#no heading</p>"),
    ("**b** *i* ***bi*** __b__ _i_ ~~s~~", "<p><strong>b</strong> <em>i</em> <em><strong>bi"
     "</strong></em> <strong>b</strong> <em>i</em> <s>s</s></p>"),
    ("snake_case_name 2*3*4 a * b", "<p>snake_case_name 2<em>3</em>4 a * b</p>"),
    ("**never closed", "<p>**never closed</p>"),
    ("**a *b* c** *d **e** f*", "<p><strong>a <em>b</em> c</strong> "
     "<em>d <strong>e</strong> f</em></p>"),
    ("`a *b*` ``c`d``", "<p><code>a *b*</code> <code>c`d</code></p>"),
    ("\\*no\\* \\`x", "<p>*no* `x</p>"),
    ("a `b", "<p>a `b</p>"),
    ("[x](http://y.z/a(b)c) [q]", '<p><a href="http://y.z/a(b)c">x</a> [q]</p>'),
    ("[a [b](http://c.d)](http://e.f)", '<p><a href="http://e.f">a [b](http://c.d)</a></p>'),
    ("(see http://y.z/w).", '<p>(see <a href="http://y.z/w">http://y.z/w</a>).</p>'),
    ("---\n***", "<hr><hr>"),
    ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
    ("- a\n- b\n\n- c", "<ul><li>a</li><li>b</li><li>c</li></ul>"),
    ("- a\n  - b\n    - c\n- d", "<ul><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li>"
     "<li>d</li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("1. a\n\n   more\n2. b", "<ol><li>a<p>more</p></li><li>b</li></ol>"),
    ("words\n- a", "<p>words</p><ul><li>a</li></ul>"),
    ("it was\n1990. A year", "<p>it was<br>1990. A year</p>"),
    ("| a | b |\n|--|:-:|\n| 1 | \\| |\n| 2 |", "<table><thead><tr><th>a</th><th>b</th></tr>"
     "</thead><tbody><tr><td>1</td><td>|</td></tr><tr><td>2</td><td></td></tr></tbody></table>"),
    ("a | b", "<p>a | b</p>"),
    ("- ```\n  x\n  ```\n- y", "<ul><li><pre>x</pre></li><li>y</li></ul>"),
    ("```js\na < b\n\n  c\n```\nafter", "<pre>a &lt; b\n\n  c</pre><p>after</p>"),
    ("```\nnot closed", "<pre>not closed</pre>"),
    ("~~~\n```\n~~~", "<pre>```</pre>"),
]  # fmt: skip

SHOWN = """async ([modules, texts]) => {
  const { Prose } = await import(modules);
  return texts.map((text) => {
    const place = document.createElement("div");
    new Prose(place).show(text);
    for (const code of place.querySelectorAll(".code")) {
      const plain = document.createElement("pre");
      plain.textContent = code.querySelector("code").textContent;
      code.replaceWith(plain);
    }
    for (const table of place.querySelectorAll(".table")) table.replaceWith(table.firstChild);
    for (const one of place.querySelectorAll("*")) {
      for (const name of one.getAttributeNames()) {
        if (name !== "href" && name !== "start") one.removeAttribute(name);
      }
    }
    return place.innerHTML;
  });
}"""


def test_markdown_is_what_it_means(tab: OpenTab) -> None:
    one = tab()
    texts = [source for source, _ in CASES]
    shown = one.page.evaluate(SHOWN, [f"{one.server.url}page/draw.js", texts])
    found = dict(zip(texts, shown, strict=True))
    assert found == dict(CASES)


GROWN = """async ([modules, text]) => {
  const { Prose } = await import(modules);
  const place = document.createElement("div");
  const growing = new Prose(place);
  for (let at = 1; at <= text.length; at += 3) growing.show(text.slice(0, at));
  growing.show(text);
  const whole = document.createElement("div");
  new Prose(whole).show(text);
  return [place.innerHTML === whole.innerHTML, place.children.length];
}"""


def test_a_text_that_grows_becomes_what_it_is_as_a_whole(tab: OpenTab) -> None:
    one = tab()
    for text in (LONG, HOSTILE, "\n\n".join(source for source, _ in CASES)):
        same, blocks = one.page.evaluate(GROWN, [f"{one.server.url}page/draw.js", text])
        assert same
        assert blocks > 3


NASTY = """async (modules) => {
  const { parse } = await import(modules);
  const often = (text) => text.repeat(20000);
  const parts = ["*a ", "**a_ ", "[", "[a](", "`", "`` ` ", "> ", "- ", "| ", "~~a ", "!["];
  const texts = parts.map(often);
  texts.push(often("*a ") + often("b* "), often(">"), often("- a\\n  "), "`".repeat(50000) + "a");
  texts.push(Array.from({ length: 300 }, (_, at) => "`".repeat(at)).join(" "), often("a\\n|-|\\n"));
  const began = performance.now();
  const counts = texts.map((text) => parse(text).length);
  return [counts.every((count) => count >= 0), performance.now() - began];
}"""


def test_texts_that_want_to_take_for_ever_do_not(tab: OpenTab) -> None:
    one = tab()
    read, took_ms = one.page.evaluate(NASTY, f"{one.server.url}page/markdown.js")
    assert read
    assert took_ms < 60_000


# -- for everybody --------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [{"width": 1200, "height": 800}, PHONE], ids=["wide", "phone"])
def test_axe_finds_nothing_wrong(tab: OpenTab, scheme: str, size: dict[str, int]) -> None:
    lost = EngineDied("a", "SIGSEGV")
    one = tab(said(LONG), [accepted("a"), Delta("half", (1,)), lost],
              config=RouterConfig(queue_limit=9, max_continuations=0),
              color_scheme=scheme, viewport=size)  # fmt: skip
    one.page.locator("#model:not([disabled])").wait_for()
    assert one.violations() == []
    one.ask("Show me everything")
    one.done()
    one.ask("And what breaks")
    one.page.get_by_role("alert").last.wait_for()
    one.done()
    assert one.violations() == []
    width = one.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1]
    if size is PHONE:
        one.page.get_by_role("button", name="Conversations", exact=True).click()
        api.expect(one.page.get_by_role("button", name="Close conversations")).to_be_focused()
        assert one.violations() == []
        one.page.keyboard.press("Escape")
        api.expect(one.page.get_by_role("navigation")).to_be_hidden()
    one.page.get_by_role("button", name="Settings").click()
    assert one.violations() == []


def test_the_keyboard_is_enough(tab: OpenTab) -> None:
    one = tab(words("one"), words("two"))
    one.page.locator("#model:not([disabled])").wait_for()
    api.expect(one.page.locator("#input")).to_be_focused()
    one.page.keyboard.type("first")
    one.page.keyboard.press("Shift+Enter")
    one.page.keyboard.type("line")
    one.page.keyboard.press("Enter")
    one.done()
    api.expect(one.page.locator(".asked .words")).to_have_text("first\nline")
    reached = set()
    for _ in range(40):
        one.page.keyboard.press("Tab")
        now = one.page.evaluate(
            "document.activeElement.getAttribute('aria-label') || document.activeElement.id"
            " || document.activeElement.textContent.trim()"
        )
        reached.add(now)
        if now == "Ask again":
            break
    assert {"new", "model", "settings-open", "Messages", "Copy", "Ask again"} <= reached
    one.page.keyboard.press("Enter")
    api.expect(one.last.locator("> .words")).to_have_text("two")


def test_dark_and_light_can_be_chosen(tab: OpenTab) -> None:
    one = tab(color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = one.page.evaluate(paper)
    one.page.get_by_role("button", name="Settings").click()
    one.page.get_by_label("Appearance").select_option("dark")
    one.page.get_by_role("button", name="Done").click()
    dark = one.page.evaluate(paper)
    one.page.reload()
    assert (one.page.evaluate(paper), dark != light) == (dark, True)
