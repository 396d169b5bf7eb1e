"""OpenAI's client as its users make it, and in the mode in which it checks every answer."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from scene import KEY, V1


@pytest.fixture(params=[True, False], ids=["strict", "lax"])
def strict(request: pytest.FixtureRequest) -> bool:
    """True if the client checks answers against its types."""
    return bool(request.param)


@pytest.fixture
def client(strict: bool) -> Iterator[openai.OpenAI]:
    """The client."""
    with openai.OpenAI(
        base_url=V1, api_key=KEY, max_retries=0, timeout=60, _strict_response_validation=strict
    ) as made:
        yield made
