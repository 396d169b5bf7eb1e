"""Ray's HAProxy before the Routers, in a Ray of its own: answers, hang-ups, limits, the channel."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import stat
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.harness.prompts import PROFILE
from rkserve.bench.processes import PROC, snapshot
from rkserve.bench.systems import BenchProcesses, SimulatedDeployment
from rkserve.config.board_group import SimulatedConfig
from rkserve.core.child_process import free_port
from rkserve.deployments.haproxy import available
from rkserve.deployments.haproxy_listeners import CONTROL
from tests.support.boards.fakes import run_loop
from tests.support.cluster.local_cluster import MODEL
from tests.support.http.scraping import Scraper
from tests.support.http.talk import CHAT, ENDLESS, Reply, ask, chat_body, streaming

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(not available(), reason="Ray has no HAProxy for this platform"),
]
BODY_LIMIT = 100_000
ROUTERS = 2


@pytest.fixture(scope="module")
def control() -> Iterator[int]:
    """The control port of HAProxy."""
    with pytest.MonkeyPatch.context() as patched:
        port = free_port()
        patched.setenv(CONTROL, f"127.0.0.1:{port}")
        yield port


@pytest.fixture(scope="module")
def crew(control: int) -> Iterator[BenchProcesses]:
    """A Ray with HAProxy, two Routers behind it, and two boards."""
    assert SimulatedConfig().profile == PROFILE
    assert control
    with tempfile.TemporaryDirectory(prefix="rk-", dir="/tmp") as folder:
        one = BenchProcesses(Path(folder), lambda _: None, front=True)
        try:
            args = {"router": {"max_body_bytes": BODY_LIMIT, "replicas": ROUTERS}}
            one.deploy(SimulatedDeployment(PROFILE, 2, 0.05, park=False, args=args))
            yield one
        finally:
            one.close()


def talk(
    crew: BenchProcesses, main: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]
) -> None:
    """Talk to it as a client."""

    async def whole() -> None:
        async with _client(crew) as http:
            await main(http)

    run_loop(whole(), 300.0)


@asynccontextmanager
async def _client(crew: BenchProcesses) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of the control port, which answers everything."""
    host, port = crew.address[0], os.environ[CONTROL].rpartition(":")[2]
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=120) as http:
        yield http


async def figure(http: httpx.AsyncClient, name: str, **labels: str) -> float:
    """A sum of the Router's metrics."""
    text = (await http.get("/metrics")).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def reaches(
    http: httpx.AsyncClient, name: str, value: float, most: float | None = None
) -> None:
    """Wait until a figure is that, or up to ``most``; the test's own limit is the only one."""
    most = value if most is None else most
    while not value <= await figure(http, name) <= most:  # noqa: ASYNC110 # of another process
        await asyncio.sleep(0.2)  # each look costs both Routers a part of a busy core


def test_it_is_haproxy_that_answers(crew: BenchProcesses) -> None:
    config = [*(crew.folder / "f").rglob("haproxy.cfg")]
    assert config, "Ray has written it"
    assert str(crew.address[1]) in config[0].read_text()
    for socket in [*(crew.folder / "f").rglob("*.sock")]:
        assert stat.S_IMODE(socket.stat().st_mode) & 0o177 == 0, socket.name

    async def main(http: httpx.AsyncClient) -> None:
        assert (await http.get("/-/healthz")).status_code == 200
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == MODEL

    talk(crew, main)


def test_clients_have_a_port_without_control_and_no_port_behind_haproxy(
    crew: BenchProcesses,
) -> None:
    control = ("GET /metrics", "POST /pause", "GET /cluster", "GET /v1/cluster", "POST /v1/keys")
    spelled = ("GET /%6detrics", "POST /%70ause", "POST http://localhost/pause")

    async def main(http: httpx.AsyncClient) -> None:
        base = "http://{}:{}".format(*crew.address)
        async with httpx.AsyncClient(base_url=base, timeout=120) as clients:
            assert (await ask(clients, "Hello!", temperature=0)).done
            for path in ("/v1/models", "/health", "/ready", "/openapi.json", "/"):
                assert (await clients.get(path)).status_code == 200, path
            for call in control:
                method, path = call.split()
                answer = await clients.request(method, path)
                assert answer.status_code == 403, call
                assert answer.json()["error"]["code"] == "control_port_only"
                assert (await http.request(method, path)).status_code != 403, call
            assert (await http.post("/resume")).status_code == 200
        for call in spelled:
            assert b'"code":"control_port_only"' in await said(crew.address, call), call
        ports = listening(crew)
        assert len(ports) == ROUTERS + 1, "Routers, and Serve's own proxy"
        for port in ports:
            for call in ("GET /v1/models", "POST /pause", "GET /", "GET /nothing"):
                refusal = await said((crew.address[0], port), call)
                assert refusal.startswith(b"HTTP/1.1 403 "), call
                assert b'"code":"haproxy_bypassed"' in refusal, call
            assert (await said((crew.address[0], port), "GET /-/healthz"))[9:12] == b"200"

    talk(crew, main)


async def said(address: tuple[str, int], call: str) -> bytes:
    """Return the answer to a request as it is written."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(f"{call} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


def listening(crew: BenchProcesses) -> list[int]:
    """The ports of Routers and of Serve's own proxy."""
    found = set()
    for pid in (*processes(crew, "router"), *processes(crew, "proxy")):
        if (PROC / str(pid) / "comm").read_text() == "haproxy\n":
            continue
        for each in psutil.Process(pid).net_connections("inet"):
            if each.status == psutil.CONN_LISTEN and each.laddr.ip == crew.address[0]:
                found.add(each.laddr.port)
    return sorted(found)


def test_answers_stream_and_come_over_the_channel(crew: BenchProcesses) -> None:
    async def main(http: httpx.AsyncClient) -> None:
        await reaches(http, "rkserve_channels", 2 * ROUTERS)
        before = await figure(http, "rkserve_token_streams_total", path="channel")
        through = await figure(http, "rkserve_token_streams_total", path="ray")
        streamed = await ask(http, "Hello!", temperature=0)
        whole = await http.post(CHAT, json=chat_body("Hello!", temperature=0))
        assert whole.json()["choices"][0]["message"]["content"] == streamed.text
        assert streamed.done
        assert await figure(http, "rkserve_token_streams_total", path="channel") == before + 2
        assert await figure(http, "rkserve_token_streams_total", path="ray") == through

    talk(crew, main)


def test_a_client_that_leaves_frees_its_board(crew: BenchProcesses) -> None:
    async def main(http: httpx.AsyncClient) -> None:
        aborted = await figure(http, "rkserve_board_aborted_total")
        for _ in range(2):
            async with streaming(http, ENDLESS) as reply:
                await reply.read(deltas=3)
        # A request that its Router moves to a free board may have begun, and then counts too.
        await reaches(http, "rkserve_board_aborted_total", aborted + 2, aborted + 4)
        await reaches(http, "rkserve_board_running", 0)

    talk(crew, main)


def test_a_client_that_leaves_before_its_whole_answer_frees_its_board(crew: BenchProcesses) -> None:
    """Its head and its body come in two segments, as those of most HTTP libraries do."""

    async def main(http: httpx.AsyncClient) -> None:
        aborted = await figure(http, "rkserve_board_aborted_total")
        body = json.dumps(chat_body(ENDLESS)).encode()
        _, writer = await asyncio.open_connection(*crew.address)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode())
        await asyncio.sleep(0.2)  # only for two segments: one would pass as well
        writer.write(body)
        await reaches(http, "rkserve_board_running", 1)
        writer.close()
        await reaches(http, "rkserve_board_aborted_total", aborted + 1, aborted + 2)
        await reaches(http, "rkserve_board_running", 0)

    talk(crew, main)


@pytest.mark.parametrize(
    ("length", "status"),
    [
        pytest.param(BODY_LIMIT - 1000, 400, id="a long prompt is read, and does not fit"),
        pytest.param(BODY_LIMIT + 1, 413, id="a body that is too long"),
    ],
)
def test_bodies_pass_and_their_limit_holds(crew: BenchProcesses, length: int, status: int) -> None:
    async def main(http: httpx.AsyncClient) -> None:
        answer = await http.post(CHAT, json=chat_body("x y " * (length // 4)))
        assert answer.status_code == status
        assert "error" in answer.json()

    talk(crew, main)


def test_what_is_asked_of_this_machine_alone_is_answered_where_only_it_is_listened_to(
    crew: BenchProcesses,
) -> None:
    async def main(http: httpx.AsyncClient) -> None:
        assert (await http.get("/is_paused")).status_code == 200
        assert (await http.post("/pause_generation", json={"mode": "in_place"})).status_code == 200
        assert (await http.post("/continue_generation")).status_code == 200
        from_elsewhere = {"x-forwarded-for": "192.0.2.1"}
        refused = await http.post("/pause", headers=from_elsewhere)
        assert refused.status_code == 403

    talk(crew, main)


def test_a_second_request_in_the_body_of_a_first_one_does_not_run(crew: BenchProcesses) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    pause = "POST /pause HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"

    async def main(http: httpx.AsyncClient) -> None:
        for lengths, body in (
            ("content-length: 4\r\ntransfer-encoding: chunked", "0\r\n\r\n"),
            ("transfer-encoding: chunked\r\ncontent-length: 4", "0\r\n\r\n"),
            ("transfer-encoding: chunked", "fffffffffffffffff\r\n{}\r\n0\r\n\r\n"),
            (f"content-length: {len(pause)}", ""),
        ):
            reader, writer = await asyncio.open_connection(*crew.address)
            writer.write(f"{head}connection: close\r\n{lengths}\r\n\r\n{body}{pause}".encode())
            assert (await reader.read()).count(b"HTTP/1.1 400 ") == 1, lengths
            writer.close()
        assert (await http.get("/is_paused")).json()["is_paused"] is False

    talk(crew, main)


def test_prompts_and_keys_are_in_no_log_no_metric_and_no_error(crew: BenchProcesses) -> None:
    prompt, key = f"prompt{secrets.token_hex(8)}", f"rks-{secrets.token_hex(16)}"
    body = chat_body(prompt, max_tokens=4)

    async def main(http: httpx.AsyncClient) -> None:
        for name in ("authorization", "x-api-key"):
            value = f"Bearer {key}" if name == "authorization" else key
            for method, path, sent, status in (
                ("POST", CHAT, body, 200),
                ("POST", CHAT, {**body, "temperature": 9}, 400),
                ("POST", CHAT, {**body, "messages": [{"role": prompt, "content": prompt}]}, 400),
                ("POST", CHAT, {**body, "max_tokens": prompt}, 400),
                ("POST", CHAT, {**body, "messages": [{"role": "user", "content": [prompt]}]}, 400),
                ("POST", CHAT, {**body, "model": "unknown"}, 404),
                ("POST", "/v1/completions", {"model": MODEL, "prompt": prompt * 4000}, 400),
                ("POST", "/tokenize", {"model": MODEL, "prompt": prompt}, 200),
                ("POST", "/v1/keys", {"name": "n", "scopes": [prompt]}, 400),
            ):
                answer = await http.request(method, path, json=sent, headers={name: value})
                assert answer.status_code in (status, 401, 403), answer.text
                assert key not in answer.text
            broken = await http.post(CHAT, content=f'{{"a": "{prompt}', headers={name: value})
            assert broken.status_code == 400
            assert prompt not in broken.text
        async with streaming(http, f"{ENDLESS} {prompt}") as reply:
            await reply.read(deltas=3)
        await reaches(http, "rkserve_board_running", 0)
        metrics = (await http.get("/metrics")).text
        assert prompt not in metrics
        assert key not in metrics

    talk(crew, main)
    logs = [one for kind in ("log", "out", "err") for one in crew.folder.rglob(f"*.{kind}")]
    assert sum(one.stat().st_size for one in logs) > 10_000, "Ray's logs are there"
    texts = {one: one.read_bytes() for one in logs if one.is_file()}
    assert any(b"access" in text or b"POST" in text for text in texts.values())
    found = [one for one, text in texts.items() if prompt.encode() in text or key.encode() in text]
    assert not found


# -- what ends ------------------------------------------------------------------------------------

STREAMS = 8


def processes(crew: BenchProcesses, part: str) -> list[int]:
    """The processes of a part of the cluster."""
    found = snapshot(PROC, crew.pids())
    return [one.pid for one, (name, _) in found.items() if name == part]


@dataclass
class Ended:
    """A stream as its client saw it, and a repeat of its request."""

    deltas: int = 0
    text: str = ""
    done: bool = False
    broken: bool = False
    error: Any = None


async def long_stream(http: httpx.AsyncClient, key: str, ended: Ended) -> None:
    """Read a long answer to a request with a key until it ends, in whatever way."""
    body = chat_body("Count to 300", stream=True, temperature=0)
    headers = {"Idempotency-Key": key}
    try:
        async with http.stream("POST", CHAT, json=body, headers=headers) as response:
            reply = Reply(response.headers, response.aiter_lines())
            if response.status_code != 200:
                ended.error = json.loads(await response.aread())["error"]
                return
            while not reply.done:
                before = reply.deltas
                await reply.read(deltas=before + 1)
                ended.deltas, ended.text = reply.deltas, reply.text
                if reply.deltas == before:
                    break
            ended.done = reply.done
    except httpx.RemoteProtocolError:
        ended.broken = True


def test_a_killed_router_costs_the_streams_of_the_other_nothing_and_its_own_are_repeated_once(
    crew: BenchProcesses, figures: Callable[[str], None]
) -> None:
    killed, *_ = routers = processes(crew, "router")
    assert len(routers) == ROUTERS

    async def main(http: httpx.AsyncClient) -> None:
        found = [Ended() for _ in range(STREAMS)]
        key = secrets.token_hex(8)
        asked = [
            asyncio.create_task(long_stream(http, f"{key}-{at}", one))
            for at, one in enumerate(found)
        ]
        while sum(one.deltas > 5 for one in found) < 2:  # noqa: ASYNC110 # of other processes
            await asyncio.sleep(0.05)
        os.kill(killed, signal.SIGKILL)
        slowest_s = 0.0
        for _ in range(20):
            began_s = time.monotonic()
            assert (await http.get("/v1/models")).status_code == 200
            slowest_s = max(slowest_s, time.monotonic() - began_s)
        figures(f"slowest of 20 new requests after a Router was killed: {slowest_s:.2f} s")
        await asyncio.gather(*asked)
        whole = {one.text for one in found if one.done}
        assert len(whole) == 1, "those of the other Router are complete"
        cut_off = [at for at, one in enumerate(found) if not one.done]
        figures(f"of {STREAMS} streams, {len(cut_off)} were cut off with their Router")
        assert cut_off, "the killed one had some"
        for at in cut_off:
            assert found[at].broken, found[at]
            again = Ended()
            await long_stream(http, f"{key}-{at}", again)
            assert (again.done, again.text) == (True, *whole)
        while len(processes(crew, "router")) < ROUTERS:  # noqa: ASYNC110 # as above
            await asyncio.sleep(0.2)

    talk(crew, main)


@pytest.mark.long
def test_a_frozen_router_is_killed_and_its_requests_are_answered_by_the_other(
    crew: BenchProcesses, figures: Callable[[str], None]
) -> None:
    frozen, *_ = processes(crew, "router")

    async def read(http: httpx.AsyncClient) -> float:
        began_s = time.monotonic()
        answer = await http.get("/v1/models", headers={"connection": "close"})
        assert answer.status_code == 200
        return time.monotonic() - began_s

    async def main(http: httpx.AsyncClient) -> None:
        os.kill(frozen, signal.SIGSTOP)
        began_s = time.monotonic()
        took_s = await asyncio.gather(*(read(http) for _ in range(20)))
        assert max(took_s) > 2, "the frozen one had some"
        while (PROC / str(frozen)).exists():
            took_s.append(await read(http))
            await asyncio.sleep(0.1)
        gone_s = time.monotonic() - began_s
        figures(
            f"a frozen Router was killed after {gone_s:.0f} s, and all of {len(took_s)} "
            f"requests were answered; {sum(one > 5 for one in took_s)} took more than 5 s, the "
            f"slowest {max(took_s):.0f} s"
        )
        while len(processes(crew, "router")) < ROUTERS:  # noqa: ASYNC110 # as above
            await asyncio.sleep(0.2)

    talk(crew, main)


def test_a_killed_haproxy_is_replaced_and_valid_requests_get_no_answer_that_is_final(
    crew: BenchProcesses, figures: Callable[[str], None]
) -> None:
    async def main(http: httpx.AsyncClient) -> None:
        statuses: Counter[int] = Counter()
        for pid in processes(crew, "proxy"):
            if (PROC / str(pid) / "comm").read_text() == "haproxy\n":
                os.kill(pid, signal.SIGKILL)
        began_s = time.monotonic()
        good = 0
        while good < 20:
            try:
                status = (await http.get("/v1/models")).status_code
            except httpx.TransportError:
                status = 0
            statuses[status] += 1
            good = good + 1 if status == 200 else 0
            if good == 1:
                took_s = time.monotonic() - began_s
                figures(f"an answer {took_s:.2f} s after HAProxy was killed")
            await asyncio.sleep(0.05)
        assert set(statuses) <= {0, 200, 503}, statuses

    talk(crew, main)


# -- metrics --------------------------------------------------------------------------------------

REQUESTS, SCRAPES, CLIENTS = 10_000, 50, 16


@pytest.mark.long
def test_scrapes_at_random_routers_count_every_request_once(
    figures: Callable[[str], None],
) -> None:
    async def count(http: httpx.AsyncClient) -> tuple[Counter[int], Scraper, list[float]]:
        statuses: Counter[int] = Counter()
        seen, took_s = Scraper(), [0.0]
        places = asyncio.Semaphore(CLIENTS)

        async def scrape() -> None:
            began_s = time.monotonic()
            seen.take((await http.get("/metrics")).text)
            took_s.append(time.monotonic() - began_s)

        async def call() -> None:
            async with places:
                answer = await http.post(CHAT, json=chat_body("Hello!", max_tokens=1))
                statuses[answer.status_code] += 1

        while seen.value("rkserve_router_up") != 3:
            await scrape()
        # The first scrape is the one that nothing was counted before.
        for _ in range(SCRAPES):
            await asyncio.gather(*(call() for _ in range(REQUESTS // SCRAPES)), scrape())
        await scrape()
        return statuses, seen, took_s

    async def whole(url: str) -> tuple[Counter[int], Scraper, list[float]]:
        # Each call has a connection of its own, which may lead to any Router.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
            return await count(http)

    with tempfile.TemporaryDirectory(prefix="rk-", dir="/tmp") as folder:
        one = BenchProcesses(Path(folder), lambda _: None, front=True)
        try:
            args = {"router": {"replicas": 3}}
            one.deploy(SimulatedDeployment(PROFILE, 4, 0.0, park=False, args=args))
            host, port = one.address
            began_s = time.monotonic()
            statuses, seen, took_s = run_loop(whole(f"http://{host}:{port}"), 3600.0)
            figures(
                f"{REQUESTS} requests at 3 Routers in {time.monotonic() - began_s:.0f} s, "
                f"{dict(statuses)}; slowest of {len(took_s) - 1} scrapes {max(took_s):.2f} s"
            )
        finally:
            one.close()
    name = "rkserve_requests_total"
    assert statuses.total() == REQUESTS
    for status, number in statuses.items():
        assert seen.increase(name, route=CHAT, status=str(status)) == number
    shares = [seen.increase(name, route=CHAT, router=str(router)) for router in range(3)]
    assert sum(shares) == REQUESTS
    assert min(shares) > 0
    assert seen.increase("rkserve_ttft_seconds_count") == statuses[200]
    assert seen.increase("rkserve_key_requests_total") == REQUESTS
