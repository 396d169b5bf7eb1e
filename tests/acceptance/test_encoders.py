"""Embeddings and images on a cluster: the official client, batches, a board that dies, no image."""

from __future__ import annotations

import base64
import io
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from PIL import Image

from rkserve.native.sim.models import SimEncoder, pattern
from tests.support.cluster.local_cluster import App, wait_for
from tests.support.cluster.varied import EMBED, VISION, of

pytestmark = pytest.mark.ray
pytest_plugins = ["tests.support.cluster.varied_fixtures"]

MODEL, VISION_MODEL = "sim-embed", "sim-vision"


@pytest.fixture(scope="module")
def embedding(varied: App) -> App:
    """Two boards that make embeddings."""
    return of(varied, EMBED, 2)


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


# -- images --------------------------------------------------------------------------------

SIDE = 392
ENCODER = SimEncoder(SIDE, SIDE, 196)


@pytest.fixture
def seeing(varied: App) -> App:
    """The board that sees."""
    return of(varied, VISION)


def noise(seed: int) -> Image.Image:
    return Image.frombytes("RGB", (SIDE, SIDE), random.Random(seed).randbytes(SIDE * SIDE * 3))


def part(url: str) -> Any:
    return {"type": "image_url", "image_url": {"url": url}}


def image(seed: int) -> Any:
    out = io.BytesIO()
    noise(seed).save(out, "PNG")
    return part(f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}")


def shown(seed: int) -> str:
    return pattern(ENCODER.encoded(noise(seed).tobytes()))


def test_the_official_client_is_told_what_is_on_its_images(seeing: App) -> None:
    url = f"{seeing.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        first: Any = {"role": "user", "content": [image(1), {"type": "text", "text": "Describe"}]}
        whole = client.chat.completions.create(model=VISION_MODEL, messages=[first], temperature=0)
        said = whole.choices[0].message.content or ""
        assert said.startswith(f"The picture shows pattern {shown(1)}.")
        assert whole.usage is not None
        assert whole.usage.prompt_tokens > 196

        second: Any = {"role": "user", "content": [image(2), image(3)]}
        turns: Any = [first, {"role": "assistant", "content": said}, second]
        stream = client.chat.completions.create(
            model=VISION_MODEL, messages=turns, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text.startswith(f"The pictures show patterns {shown(2)} and {shown(3)}.")

        for wrong in ("data:image/png;base64,AAAA", f"{seeing.url}/health"):
            turns = [{"role": "user", "content": [part(wrong)]}]
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model=VISION_MODEL, messages=turns)
            assert caught.value.param == "messages[0].content[0].image_url.url"
    seeing.settled()
