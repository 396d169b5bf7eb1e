"""Images on a cluster: the official client, a conversation, a URL, and what is no image."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from PIL import Image

from rkserve.native.sim.models import SimEncoder, pattern
from tests.support.cluster.local_cluster import App, LocalCluster

pytestmark = pytest.mark.ray

MODEL = "sim-vision"
GROUP = "vision"
SIDE = 392
ENCODER = SimEncoder(SIDE, SIDE, 196)


@pytest.fixture(scope="module")
def seeing(ray_cluster: LocalCluster) -> Iterator[App]:
    """Two boards that see."""
    app = App.deploy(ray_cluster, GROUP, 2, model=f"models/{MODEL}", simulated={"time_scale": 0})
    app.ready()
    app.settled()
    yield app
    ray_cluster.delete(GROUP)


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
        whole = client.chat.completions.create(model=MODEL, messages=[first], temperature=0)
        said = whole.choices[0].message.content or ""
        assert said.startswith(f"The picture shows pattern {shown(1)}.")
        assert whole.usage is not None
        assert whole.usage.prompt_tokens > 196

        second: Any = {"role": "user", "content": [image(2), image(3)]}
        turns: Any = [first, {"role": "assistant", "content": said}, second]
        stream = client.chat.completions.create(
            model=MODEL, messages=turns, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text.startswith(f"The pictures show patterns {shown(2)} and {shown(3)}.")

        for wrong in ("data:image/png;base64,AAAA", f"{seeing.url}/health"):
            turns = [{"role": "user", "content": [part(wrong)]}]
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model=MODEL, messages=turns)
            assert caught.value.param == "messages[0].content[0].image_url.url"
    seeing.settled()
