"""Embeddings on a cluster: the official client, batches over real replicas, a board that dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.support.cluster.local_cluster import App, LocalCluster, wait_for

pytestmark = pytest.mark.ray

MODEL = "sim-embed"
GROUP = "embed"


@pytest.fixture(scope="module")
def embedding(ray_cluster: LocalCluster) -> Iterator[App]:
    """Two boards that make embeddings."""
    app = App.deploy(ray_cluster, GROUP, 2, model=f"models/{MODEL}", simulated={"time_scale": 0})
    app.ready()
    app.settled()
    yield app
    ray_cluster.delete(GROUP)


def client(app: App, *, strict: bool = False) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{app.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=60,
        _strict_response_validation=strict,
    )


def test_the_official_client_gets_the_same_vectors_in_both_formats(embedding: App) -> None:
    texts = [f"The cat number {n} sat on a warm mat" for n in range(64)]
    # Base64 is what the client asks for by itself; in its strict mode it does not read that.
    with client(embedding) as lax, client(embedding, strict=True) as strict:
        coded = lax.embeddings.create(model=MODEL, input=texts)
        plain = strict.embeddings.create(model=MODEL, input=texts, encoding_format="float")
        raw = lax.embeddings.with_raw_response.create(model=MODEL, input=texts)
    assert [one.index for one in coded.data] == list(range(64))
    assert coded.usage == plain.usage
    for one, other in zip(coded.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, rel=1e-6)
    assert set(raw.headers["x-rkserve-board"].split(", ")) == {"embed-0", "embed-1"}


def test_a_batch_survives_the_death_of_an_engine_in_the_middle_of_it(embedding: App) -> None:
    before = {report.board_id: report for report in embedding.settled()}
    cluster, texts = embedding.cluster, [f"The river number {n} carries rain" for n in range(64)]
    cluster.control("embed-0", "gate=prefill", "time_scale=0")
    with client(embedding) as lax, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lax.embeddings.create, model=MODEL, input=texts)
        wait_for("a text at the gate", (cluster.control_dir / "embed-0.control.gate").exists)
        os.kill(before["embed-0"].engine_pid, signal.SIGKILL)
        cluster.control("embed-0", "time_scale=0")
        made = asked.result(60)
        again = lax.embeddings.create(model=MODEL, input=texts)
    assert [one.embedding for one in made.data] == [one.embedding for one in again.data]
    after = {report.board_id: report for report in embedding.settled()}
    assert after["embed-0"].engine_starts == before["embed-0"].engine_starts + 1
    assert after["embed-0"].failed == 1
