"""The head's store: what is taken in, from where, and what is left of what is not."""

from __future__ import annotations

import hashlib
import http.server
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rkserve.control.calls import DeclaredArtifact
from rkserve.coordinator.artifacts.sources import allows
from rkserve.coordinator.artifacts.store import ArtifactRules, ArtifactStore
from rkserve.core.desired_state import AdapterVersion, Artifact
from rkserve.core.errors import (
    ArtifactNotFound,
    ArtifactRefused,
    BodyTooLarge,
    ConfigError,
    RkserveError,
)
from rkserve.core.messages import AdapterRef
from tests.support.boards.own_time import SetClock

CONTENT = bytes(range(256)) * 40
DIGEST = hashlib.sha256(CONTENT).hexdigest()
V1 = AdapterVersion(AdapterRef("legal", "v1", DIGEST), len(CONTENT))
MIB = 1 << 20


def store_in(
    folder: Path, *, free: int = 1 << 40, clock: Any = None, **rules: Any
) -> ArtifactStore:
    made = ArtifactStore(
        folder,
        ArtifactRules(**{"max_bytes": 2 * len(CONTENT), "reserve_bytes": 0} | rules),
        now_s=clock or SetClock(100.0),
        free=lambda _: free,
    )
    made.open()
    return made


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return store_in(tmp_path / "store")


def left(store: ArtifactStore, folder: Path) -> list[str]:
    """Every file of the store, those of uploads too."""
    return sorted(file.name for file in folder.rglob("*") if file.is_file())


def upload(store: ArtifactStore, content: bytes = CONTENT, **said: Any) -> str:
    key = store.upload_begin(DeclaredArtifact("legal", "v1", "qwen", **said))
    for offset in range(0, len(content), 1000):
        there = store.upload_part(key, offset, content[offset : offset + 1000])
    assert there == len(content)
    return key


# -- uploads --------------------------------------------------------------------------------------


def test_an_upload_is_kept_under_the_digest_of_its_content(
    store: ArtifactStore, tmp_path: Path
) -> None:
    key = upload(store, size_bytes=len(CONTENT), sha256=DIGEST)
    assert store.digests() == ()
    assert store.upload_end(key, {"base_model": "qwen"}) == V1
    assert store.digests() == (DIGEST,)
    assert left(store, tmp_path) == [DIGEST]
    assert store.read(DIGEST, 1000, 50) == CONTENT[1000:1050]
    assert store.read(DIGEST, len(CONTENT) - 5, 50) == CONTENT[-5:]
    store.check(V1)


def test_without_a_version_the_content_is_the_version(store: ArtifactStore) -> None:
    key = store.upload_begin(DeclaredArtifact("legal", None, "qwen"))
    store.upload_part(key, 0, CONTENT)
    made = store.upload_end(key, {"scale": 2})
    assert isinstance(made, AdapterVersion)
    assert made.ref == AdapterRef("legal", DIGEST[:12], DIGEST, 2.0)


def test_the_same_content_twice_is_one_file(store: ArtifactStore) -> None:
    for _ in range(2):
        store.upload_end(upload(store))
    assert store.digests() == (DIGEST,)


@pytest.mark.promise(
    "Adapters", "A version is identified by content: digest, size, base model, scale"
)
@pytest.mark.parametrize(
    ("begun", "ended", "words"),
    [
        pytest.param({"sha256": "0" * 64}, {}, "sha256 is declared as 000", id="digest before"),
        pytest.param({}, {"sha256": "0" * 64}, "sha256 is declared as 000", id="digest after"),
        pytest.param({"size_bytes": 20_000}, {}, "size_bytes is declared as 20000", id="short"),
        pytest.param({}, {"size": 3}, "size is declared as 3", id="size after"),
        pytest.param({}, {"base_model": "llama"}, "is declared as llama, but is qwen", id="base"),
        pytest.param({}, {"scale": 0}, "scale: must be a number above 0", id="scale"),
        pytest.param({}, {"scale": float("nan")}, "scale", id="no number"),
        pytest.param({}, {"skale": 1}, "did you mean 'scale'", id="an unknown key"),
    ],
)
def test_a_file_that_differs_from_its_declaration_is_refused_and_removed(
    store: ArtifactStore, tmp_path: Path, begun: Any, ended: Any, words: str
) -> None:
    key = upload(store, **begun)
    with pytest.raises(ArtifactRefused, match=words):
        store.upload_end(key, ended)
    assert left(store, tmp_path) == []
    with pytest.raises(ArtifactNotFound, match="begin again"):
        store.upload_part(key, 0, b"x")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        pytest.param({"name": "../legal"}, "Invalid 'name'", id="a name upwards"),
        pytest.param({"name": "a@b"}, "Invalid 'name'", id="a name with a version"),
        pytest.param({"version": "a/b"}, "Invalid 'version'", id="a version that is a path"),
        pytest.param({"version": ""}, "Invalid 'version'", id="an empty version"),
        pytest.param({"sha256": DIGEST.upper()}, "64 lower-case", id="a digest in capitals"),
        pytest.param({"size_bytes": 0}, "is empty", id="an empty file"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_comes(
    store: ArtifactStore, said: dict[str, Any], words: str
) -> None:
    with pytest.raises(ArtifactRefused, match=words):
        store.upload_begin(
            DeclaredArtifact(**{"name": "legal", "version": "v1", "model": "qwen"} | said)
        )


def test_a_file_that_is_announced_too_large_is_not_begun(store: ArtifactStore) -> None:
    with pytest.raises(BodyTooLarge, match="max_adapter_bytes"):
        store.upload_begin(DeclaredArtifact("legal", "v1", "qwen", 2 * len(CONTENT) + 1))


def test_a_file_that_turns_out_too_large_is_removed_at_once(
    store: ArtifactStore, tmp_path: Path
) -> None:
    key = store.upload_begin(DeclaredArtifact("legal", "v1", "qwen"))
    store.upload_part(key, 0, CONTENT)
    store.upload_part(key, len(CONTENT), CONTENT)
    with pytest.raises(BodyTooLarge):
        store.upload_part(key, 2 * len(CONTENT), b"x")
    assert left(store, tmp_path) == []


def test_more_than_was_announced_is_refused_and_removed(
    store: ArtifactStore, tmp_path: Path
) -> None:
    key = store.upload_begin(DeclaredArtifact("legal", "v1", "qwen", 10))
    with pytest.raises(ArtifactRefused, match="More bytes come than the 10"):
        store.upload_part(key, 0, CONTENT)
    assert left(store, tmp_path) == []


def test_an_empty_upload_is_refused(store: ArtifactStore) -> None:
    with pytest.raises(ArtifactRefused, match="is empty"):
        store.upload_end(store.upload_begin(DeclaredArtifact("legal", "v1", "qwen")))


def test_a_part_that_does_not_follow_is_refused_and_the_upload_goes_on(
    store: ArtifactStore,
) -> None:
    key = store.upload_begin(DeclaredArtifact("legal", "v1", "qwen"))
    store.upload_part(key, 0, CONTENT[:100])
    for offset in (0, 99, 101):
        with pytest.raises(ArtifactRefused, match=f"begins at byte {offset}, and 100 are there"):
            store.upload_part(key, offset, b"x")
    store.upload_part(key, 100, CONTENT[100:])
    assert store.upload_end(key) == V1


def test_uploads_that_were_abandoned_are_removed_and_busy_ones_are_not(tmp_path: Path) -> None:
    clock = SetClock(100.0)
    store = store_in(tmp_path, clock=clock, upload_idle_s=60)
    gone, busy = (
        store.upload_begin(DeclaredArtifact(name, "v1", "qwen")) for name in ("gone", "busy")
    )
    clock.now_s += 59
    store.upload_part(busy, 0, b"x")
    clock.now_s += 2
    assert store.sweep() == 1
    assert left(store, tmp_path) == [busy]
    with pytest.raises(ArtifactNotFound):
        store.upload_part(gone, 0, b"x")
    assert store.upload_part(busy, 1, b"y") == 2


def test_uploads_of_before_a_restart_are_removed_and_files_stay(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.upload_end(upload(store))
    upload(store, b"half of it")
    again = store_in(tmp_path)
    assert left(again, tmp_path) == [DIGEST]
    again.check(V1)


def test_an_upload_can_be_given_up(store: ArtifactStore, tmp_path: Path) -> None:
    key = upload(store)
    assert store.upload_abort(key) is True
    assert store.upload_abort(key) is False
    assert left(store, tmp_path) == []


def test_an_upload_that_is_given_up_while_a_part_is_written_leaves_nothing(tmp_path: Path) -> None:
    begun: list[str] = []

    def free(_: Path) -> int:
        if begun:
            made.upload_abort(begun[0])
        return 1 << 40

    made = ArtifactStore(tmp_path, ArtifactRules(max_bytes=2 * len(CONTENT)), free=free)
    made.open()
    begun.append(made.upload_begin(DeclaredArtifact("legal", "v1", "qwen")))
    with pytest.raises(ArtifactNotFound, match="begin again"):
        made.upload_part(begun[0], 0, CONTENT)
    assert left(made, tmp_path) == []


def test_only_so_many_uploads_come_in_at_once(tmp_path: Path) -> None:
    store = store_in(tmp_path, max_uploads=2)
    keys = [store.upload_begin(DeclaredArtifact("legal", "v1", "qwen")) for _ in range(2)]
    with pytest.raises(ArtifactRefused, match="which is the limit"):
        store.upload_begin(DeclaredArtifact("legal", "v1", "qwen"))
    store.upload_abort(keys[0])
    store.upload_begin(DeclaredArtifact("legal", "v1", "qwen"))


def test_parts_of_several_uploads_at_once_are_not_mixed_up(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    contents = [bytes([n + 1]) * 10_000 for n in range(6)]
    made: dict[int, Artifact] = {}

    def send(n: int) -> None:
        made[n] = store.upload_end(upload(store, contents[n]))

    threads = [threading.Thread(target=send, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    expected = {n: hashlib.sha256(content).hexdigest() for n, content in enumerate(contents)}
    assert {n: version.digest for n, version in made.items()} == expected


def test_what_is_no_adapter_is_refused_and_leaves_nothing(
    store: ArtifactStore, tmp_path: Path
) -> None:
    key = upload(store, b"PK\x03\x04" + bytes(500))
    with pytest.raises(ArtifactRefused, match="cannot be an adapter of 'qwen': it is a ZIP"):
        store.upload_end(key)
    assert store.digests() == ()


# -- the disk -------------------------------------------------------------------------------------


def test_what_does_not_fit_on_the_disk_is_refused_before_it_comes(tmp_path: Path) -> None:
    store = store_in(tmp_path, free=MIB, reserve_bytes=MIB - 6000)
    first = store.upload_begin(DeclaredArtifact("legal", "v1", "qwen", 5000))
    with pytest.raises(ArtifactRefused, match="The head's disk is full: 1 MiB are free"):
        store.upload_begin(
            DeclaredArtifact("legal", "v2", "qwen", 5000)
        )  # the first one has a claim to the rest
    with pytest.raises(ArtifactRefused, match="disk is full"):
        store.upload_part(
            store.upload_begin(DeclaredArtifact("legal", "v2", "qwen")), 0, b"x" * 1001
        )
    assert left(store, tmp_path) == [first]


def test_a_disk_that_fills_up_meanwhile_costs_that_upload_alone(
    store: ArtifactStore, tmp_path: Path
) -> None:
    kept = upload(store)
    key = store.upload_begin(DeclaredArtifact("legal", "v2", "qwen"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(ArtifactRefused, match="The head's disk is full"):
            store.upload_part(key, 0, CONTENT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert left(store, tmp_path) == [kept]
    assert store.upload_end(kept) == V1


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param({"allowed_urls": ("ftp://host/",)}, id="another scheme"),
        pytest.param({"allowed_urls": ("https:///x",)}, id="no host"),
        pytest.param({"allowed_urls": ("https://host/a/../b",)}, id="a path upwards"),
        pytest.param({"allowed_urls": ("https://host:99999/",)}, id="no port"),
        pytest.param({"allowed_paths": (Path("models"),)}, id="a relative folder"),
    ],
)
def test_invalid_allow_lists_are_refused_at_the_start(
    tmp_path: Path, rules: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"coordinator\.allowed_"):
        store_in(tmp_path, **rules)


def test_an_unusable_folder_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"adapter files .* cannot be used"):
        store_in(tmp_path / "file" / "store")


# -- what is there --------------------------------------------------------------------------------


def test_a_file_with_a_checksum_mismatch_is_removed_and_reported(
    store: ArtifactStore, tmp_path: Path
) -> None:
    store.upload_end(upload(store))
    (tmp_path / "store" / DIGEST).write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(ArtifactNotFound, match="legal@v1 is damaged"):
        store.check(V1)
    assert store.digests() == ()
    with pytest.raises(ArtifactNotFound, match="has no file of adapter legal@v1"):
        store.check(V1)
    with pytest.raises(ArtifactNotFound):
        store.read(DIGEST, 0, 5)


@pytest.mark.parametrize("digest", ["../file", "", DIGEST.upper(), f"{DIGEST}\n"])
def test_only_a_digest_names_a_file(store: ArtifactStore, tmp_path: Path, digest: str) -> None:
    (tmp_path / "file").write_text("secret")
    for call in (store.remove, lambda name: store.read(name, 0, 9)):
        with pytest.raises(ArtifactNotFound, match="not the sha256"):
            call(digest)


def test_a_file_that_nobody_needs_goes_and_the_others_stay(store: ArtifactStore) -> None:
    store.upload_end(upload(store))
    other = store.upload_end(upload(store, b"other")).digest
    assert (store.remove(other), store.remove(other)) == (True, False)
    assert store.digests() == (DIGEST,)


def test_a_file_that_came_a_moment_ago_is_not_removed_as_idle(tmp_path: Path) -> None:
    now_s = 1000.0
    store = ArtifactStore(tmp_path / "store", ArtifactRules(), now_s=lambda: now_s)
    store.open()
    store.upload_end(upload(store))
    now_s += 100.0
    assert not store.remove(DIGEST, idle_s=101.0)
    store.upload_end(upload(store))  # it comes once more
    now_s += 99.0
    assert not store.remove(DIGEST, idle_s=100.0)
    now_s += 1.0
    assert store.remove(DIGEST, idle_s=100.0)
    assert store.digests() == ()


def test_a_restart_leaves_every_file_its_time(tmp_path: Path) -> None:
    now_s = 1000.0
    first = ArtifactStore(tmp_path / "store", ArtifactRules(), now_s=lambda: now_s)
    first.open()
    first.upload_end(upload(first))
    now_s = 50.0  # another process, another clock
    store = ArtifactStore(tmp_path / "store", ArtifactRules(), now_s=lambda: now_s)
    store.open()
    assert not store.remove(DIGEST, idle_s=10.0)
    now_s += 10.0
    assert store.remove(DIGEST, idle_s=10.0)


# -- from a folder --------------------------------------------------------------------------------


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder that adapters may be taken from, beside one that is nobody's business."""
    made = tmp_path / "shop"
    made.mkdir()
    (made / "legal.rkllm").write_bytes(CONTENT)
    (made / "dir").mkdir()
    (made / "dir" / "adapter.rkllm").write_bytes(CONTENT)
    (tmp_path / "shop-of-others").mkdir()
    (tmp_path / "shop-of-others" / "x").write_bytes(b"secret")
    return made


@pytest.mark.parametrize("asked", ["legal.rkllm", "dir", "dir/../legal.rkllm", "link"])
def test_a_file_of_an_allowed_folder_is_copied(tmp_path: Path, shop: Path, asked: str) -> None:
    (shop / "link").symlink_to(shop / "legal.rkllm")  # within the folder a link is fine
    store = store_in(tmp_path / "store", allowed_paths=(shop,))
    made = store.register(
        "path", str(shop / asked), DeclaredArtifact("legal", "v1", "qwen", sha256=DIGEST)
    )
    assert made == V1
    (shop / "legal.rkllm").write_bytes(b"changed later")
    store.check(V1)


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        pytest.param("shop-of-others/x", ArtifactRefused, "in none of the folders", id="beside"),
        pytest.param("shop/../shop-of-others/x", ArtifactRefused, "in none", id="upwards"),
        pytest.param("shop/out", ArtifactRefused, "in none", id="a link out"),
        pytest.param("shop/outdir/x", ArtifactRefused, "in none", id="a folder linked out"),
        pytest.param("shop/trap", ArtifactRefused, "in none", id="a folder with a link out"),
        pytest.param("nowhere/x", ArtifactRefused, "in none", id="outside, and not there"),
        pytest.param("shop/loop", ArtifactRefused, "in none|itself", id="a link to itself"),
        pytest.param("shop/pipe", ArtifactRefused, "not a regular file", id="a pipe"),
        pytest.param("shop/gone", ArtifactNotFound, "no file", id="not there"),
        pytest.param("shop/legal.rkllm/x", ArtifactNotFound, "no file", id="below a file"),
        pytest.param("shop/empty", ArtifactNotFound, "no file", id="a folder without one"),
    ],
)
def test_nothing_else_is_taken_from_this_machine(
    tmp_path: Path, shop: Path, asked: str, error: type[RkserveError], words: str
) -> None:
    (shop / "out").symlink_to(tmp_path / "shop-of-others" / "x")
    (shop / "outdir").symlink_to(tmp_path / "shop-of-others")
    (shop / "trap").mkdir()
    (shop / "trap" / "adapter.rkllm").symlink_to(tmp_path / "shop-of-others" / "x")
    (shop / "empty").mkdir()
    (shop / "loop").symlink_to(shop / "loop")
    os.mkfifo(shop / "pipe")
    store = store_in(tmp_path / "store", allowed_paths=(shop,))
    with pytest.raises(error, match=words) as caught:
        store.register("path", str(tmp_path / asked), DeclaredArtifact("legal", "v1", "qwen"))
    assert type(caught.value) is error
    assert left(store, tmp_path / "store") == []


@pytest.mark.parametrize("asked", ["legal.rkllm", "~/x", ""])
def test_a_path_must_be_absolute(tmp_path: Path, shop: Path, asked: str) -> None:
    store = store_in(tmp_path / "store", allowed_paths=(shop,))
    with pytest.raises(ArtifactRefused, match="must be absolute"):
        store.register("path", asked, DeclaredArtifact("legal", "v1", "qwen"))


def test_without_an_allow_list_nothing_is_taken(store: ArtifactStore, shop: Path) -> None:
    with pytest.raises(ArtifactRefused, match=r"coordinator\.allowed_paths"):
        store.register("path", str(shop / "legal.rkllm"), DeclaredArtifact("legal", "v1", "qwen"))
    with pytest.raises(ArtifactRefused, match=r"coordinator\.allowed_urls"):
        store.register("url", "http://127.0.0.1/x", DeclaredArtifact("legal", "v1", "qwen"))


def test_a_path_to_a_file_that_is_too_large_is_not_copied(tmp_path: Path, shop: Path) -> None:
    store = store_in(tmp_path / "store", allowed_paths=(shop,), max_bytes=100)
    with pytest.raises(BodyTooLarge):
        store.register("path", str(shop / "legal.rkllm"), DeclaredArtifact("legal", "v1", "qwen"))
    assert left(store, tmp_path / "store") == []


# -- from the web ---------------------------------------------------------------------------------


class Site(http.server.BaseHTTPRequestHandler):
    """A web server that does what its path says."""

    asked: list[str]

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        {
            "/shop/file": self.file,
            "/shop/endless": self.endless,
            "/shop/short": self.short,
            "/shop/packed": lambda: self.file({"content-encoding": "gzip"}),
            "/shop/error": lambda: self.answer(500),
            "/shop/inside": lambda: self.answer(302, {"location": "file"}),
            "/shop/outside": lambda: self.answer(302, {"location": "/secret"}),
            "/shop/elsewhere": lambda: self.answer(302, {"location": "http://localhost:1/shop/"}),
            "/shop/round": lambda: self.answer(301, {"location": "/shop/round"}),
            "/shop/slow": self.slow,
        }.get(self.path, lambda: self.answer(404))()

    def answer(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()

    def file(self, headers: dict[str, str] | None = None) -> None:
        self.answer(200, {"content-length": str(len(CONTENT))} | (headers or {}))
        self.wfile.write(CONTENT)

    def short(self) -> None:
        self.answer(200, {"content-length": str(len(CONTENT))})
        self.wfile.write(CONTENT[:100])

    def endless(self) -> None:
        self.answer(200)
        self.send_all()

    def slow(self) -> None:
        self.answer(200)
        self.send_all(pause_s=0.02)

    def send_all(self, pause_s: float = 0.0) -> None:
        ended = threading.Event()
        try:
            for _ in range(2000):
                self.wfile.write(b"x" * (10 if pause_s else 10_000))
                ended.wait(pause_s)
        except OSError:
            return  # the client has gone

    def log_message(self, *_: object) -> None:
        """Keep the test's output to itself."""


@pytest.fixture
def site() -> Iterator[str]:
    Site.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


@pytest.mark.parametrize("asked", ["/shop/file", "/shop/inside"])
def test_a_file_below_an_allowed_url_is_fetched(tmp_path: Path, site: str, asked: str) -> None:
    store = store_in(tmp_path, allowed_urls=(f"{site}/shop/",))
    assert (
        store.register(
            "url", f"{site}{asked}", DeclaredArtifact("legal", "v1", "qwen", sha256=DIGEST)
        )
        == V1
    )
    store.check(V1)


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        pytest.param("/secret", ArtifactRefused, "below none", id="beside"),
        pytest.param("/shop/outside", ArtifactRefused, "below none", id="redirected outside"),
        pytest.param("/shop/elsewhere", ArtifactRefused, "below none", id="redirected elsewhere"),
        pytest.param("/shop/round", ArtifactRefused, "more than 5 times", id="in a circle"),
        pytest.param("/shop/error", ArtifactRefused, "answered 500", id="an error"),
        pytest.param("/shop/packed", ArtifactRefused, "packed", id="packed"),
        pytest.param("/shop/short", ArtifactRefused, "did not send the file", id="cut off"),
        pytest.param("/shop/endless", BodyTooLarge, "larger than", id="endless"),
        pytest.param("/shop/slow", ArtifactRefused, "took too long", id="a trickle"),
        pytest.param("/shop/gone", ArtifactNotFound, "no such file", id="not there"),
    ],
)
def test_nothing_else_is_fetched(
    tmp_path: Path, site: str, asked: str, error: type[RkserveError], words: str
) -> None:
    limit_s = 1.0 if asked == "/shop/slow" else 60.0
    store = store_in(tmp_path, allowed_urls=(f"{site}/shop/",), fetch_timeout_s=limit_s)
    with pytest.raises(error, match=words) as caught:
        store.register("url", f"{site}{asked}", DeclaredArtifact("legal", "v1", "qwen"))
    assert type(caught.value) is error
    assert "/secret" not in Site.asked
    assert left(store, tmp_path) == []


def test_an_unreachable_server_is_an_error(tmp_path: Path) -> None:
    store = store_in(tmp_path, allowed_urls=("http://127.0.0.1:1/",))
    with pytest.raises(ArtifactRefused, match="did not send the file"):
        store.register("url", "http://127.0.0.1:1/x", DeclaredArtifact("legal", "v1", "qwen"))


PREFIXES = ("https://host/shop/", "http://other:8080/one")


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        pytest.param("https://host/shop/a/b?x=1", True, id="below"),
        pytest.param("https://HOST:443/shop/a", True, id="the port said"),
        pytest.param("http://other:8080/one", True, id="the prefix itself"),
        pytest.param("http://other:8080/one/x", True, id="below one without a slash"),
        pytest.param("http://other:8080/oneself", False, id="a name that only begins like it"),
        pytest.param("http://host/shop/a", False, id="another scheme"),
        pytest.param("https://host:8443/shop/a", False, id="another port"),
        pytest.param("https://host.evil.org/shop/a", False, id="a host that begins like it"),
        pytest.param("https://host/shopping", False, id="a path that begins like it"),
    ],
)
def test_what_is_below_a_prefix_and_what_only_looks_so(url: str, allowed: bool) -> None:
    assert allows(url, PREFIXES) is allowed


@pytest.mark.parametrize(
    "url",
    [
        "https://host/shop/../secret",
        "https://host/shop/%2e%2e/secret",
        "https://host/shop/%252e%252e/secret",
        "https://host/shop/..%2fsecret",
        "https://host/shop\\..\\secret",
        "https://host/shop/%5c..",
        "https://host@evil.org/shop/a",
        "https://evil.org\\@host/shop/a",
        "https://user:word@host/shop/a",
        "file:///etc/passwd",
        "//host/shop/a",
        "https://host:port/shop/a",
        "https://host/shop/a\r\nx: y",
        "https://[host/shop/a",
        "",
    ],
)
def test_urls_that_hide_where_they_lead_are_refused(url: str) -> None:
    with pytest.raises(ArtifactRefused):
        allows(url, PREFIXES)
