"""The pages' routes: what is sent, with which headers, and that nothing of it leads elsewhere.

What the pages do in a browser is in ``test_page_browser.py`` and ``test_cluster_browser.py``.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import pytest

from rkserve.config.router import RouterConfig
from rkserve.page import POLICY, page_files
from rkserve.verdicts.rules import RULES
from tests.support.boards.fake_boards import FakeBoards
from tests.support.http.router_house import House, house, send
from tests.support.paths import PROJECT

FILES = page_files()
FRONTS = {
    "index.html": ("main.js", "style.css"),
    "cluster/index.html": ("cluster/main.js", "cluster/style.css", "cluster/views.css"),
}


def test_the_page_and_its_files_are_sent_with_a_policy_that_keeps_to_this_server() -> None:
    of = house()
    paths = {
        "/": "index.html",
        "/cluster": "cluster/index.html",
        **{f"/page/{name}": name for name in FILES},
    }
    for path, name in paths.items():
        response = send(of, "GET", path)
        assert (response.status_code, response.content) == (200, FILES[name].content)
        assert response.headers["content-type"] == FILES[name].media_type
        assert response.headers["content-security-policy"] == POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-cache"
        head = send(of, "HEAD", path)
        assert (head.status_code, head.headers["etag"]) == (200, response.headers["etag"])


def test_the_policy_lets_in_nothing_but_the_page_s_own_files() -> None:
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    assert {rules[f"{kind}-src"] for kind in ("script", "style", "connect")} == {"'self'"}
    assert rules["img-src"] == "'self' data:"  # what the user shows; a data URI fetches nothing
    assert "unsafe" not in POLICY


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_file_of_the_page_names_another_server_or_makes_markup_of_text(name: str) -> None:
    text = FILES[name].content.decode()
    known = ("http://www.w3.org/2000/svg",)  # the name of a language, which nobody fetches
    addresses = [one for one in re.findall(r"https?://[^\s\"'`)<]+", text) if one not in known]
    patterns = [r":\/\/", r"?:"]  # what the Markdown reader looks for
    assert [one for one in addresses if not one.startswith(tuple(patterns))] == []
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in text
    assert not re.search(r"<[^>]+\son\w+=|<[^>]+\sstyle=|<script>|<style", text)


def test_a_browser_that_has_a_file_is_not_sent_it_again() -> None:
    of = house()
    etag = send(of, "GET", "/page/main.js").headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}'):
        again = send(of, "GET", "/page/main.js", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["content-security-policy"] == POLICY
    other = send(of, "GET", "/page/main.js", headers={"if-none-match": '"other"'})
    assert other.status_code == 200
    assert len({file.digest for file in FILES.values()}) == len(FILES)


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        pytest.param("gzip, deflate, br", "gzip", id="browsers"),
        pytest.param("br;q=1.0, gzip;q=0.5", "gzip", id="with weights"),
        pytest.param("*", "gzip", id="anything"),
        pytest.param("identity", None, id="nothing compressed"),
        pytest.param("gzip;q=0, *", None, id="gzip refused"),
        pytest.param("", None, id="no word of it"),
    ],
)
def test_files_are_compressed_where_the_client_accepts_it(
    accepted: str, encoding: str | None
) -> None:
    of = house()
    for name, file in FILES.items():
        answered = send(of, "GET", f"/page/{name}", headers={"accept-encoding": accepted})
        assert answered.headers.get("content-encoding") == encoding
        assert answered.content == file.content  # as the client reads it
        assert answered.headers["vary"] == "accept-encoding"
        sent = int(answered.headers["content-length"])
        assert sent == len(file.compressed if encoding else file.content)
        again = {"accept-encoding": accepted, "if-none-match": answered.headers["etag"]}
        assert send(of, "GET", f"/page/{name}", headers=again).status_code == 304
    text = [one for name, one in FILES.items() if name.endswith(("js", "css", "html"))]
    assert sum(len(one.compressed) for one in text) < sum(len(one.content) for one in text) / 2


@pytest.mark.parametrize("name", FRONTS)
def test_a_page_has_a_description(name: str) -> None:
    front = FILES[name].content.decode()
    (description,) = re.findall(r'<meta name="description" content="([^"]+)">', front)
    assert 50 <= len(description) <= 160  # what search results show


@pytest.mark.parametrize(
    "path",
    ["/page/", "/page/none.js", "/page/../config.py", "/page/..%2fconfig.py", "/page/__init__.py"],
)
def test_nothing_else_is_to_be_had_there(path: str) -> None:
    response = send(house(), "GET", path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


def test_the_page_can_be_turned_off() -> None:
    of = House(FakeBoards.answering("a"), RouterConfig(page=False))
    for path in ("/", "/cluster", "/page/main.js"):
        assert send(of, "GET", path).status_code == 404


def test_the_page_needs_no_key_and_what_it_asks_does(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n", encoding="utf-8")
    of = House(FakeBoards.answering("a"), RouterConfig(api_keys_file=keys))
    assert send(of, "GET", "/").status_code == 200
    assert send(of, "GET", "/cluster").status_code == 200
    assert send(of, "GET", "/page/main.js").status_code == 200
    assert send(of, "GET", "/v1/models").status_code == 401


@pytest.mark.parametrize("name", FRONTS)
def test_a_page_s_own_addresses_are_relative(name: str) -> None:
    front = FILES[name].content.decode()
    asked = re.findall(r"(?:src|href)=\"(page/[^\"#]+)\"", front)
    assert set(asked) == {f"page/{one}" for one in ("icon.svg", "base.css", *FRONTS[name])}
    links = re.findall(r"(?:src|href)=\"([^\"#]+)\"", front)
    assert set(links) - set(asked) <= {"./", "cluster"}  # one page leads to the other


def test_modules_import_files_of_the_pages_only() -> None:
    for name, file in FILES.items():
        for module in re.findall(r"from \"([^\"]+)\"", file.content.decode()):
            assert module.startswith(("./", "../")), name
            assert posixpath.normpath(posixpath.join(posixpath.dirname(name), module)) in FILES


def test_rules_that_mark_a_figure_are_rules_and_lead_to_the_runbook() -> None:
    figures = FILES["cluster/figures.js"].content.decode()
    named = re.findall(r'"(\w+)"', " ".join(re.findall(r"rules: \[(.*?)\]", figures)))
    assert len(named) > 5
    assert set(named) <= {rule.name for rule in RULES}
    runbook = (PROJECT / "docs" / "how-to" / "runbook.md").read_bytes()
    assert FILES["cluster/runbook.md"].content == runbook


def test_the_files_are_part_of_what_is_installed() -> None:
    project = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"rkserve.page" = ["files/*", "files/cluster/*"]' in project
    assert {posixpath.dirname(name) for name in FILES} == {"", "cluster"}
