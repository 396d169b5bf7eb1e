"""gradio_client against the functions of the Router, the vendor's two included."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from scene import CHAT, URL


@pytest.fixture
def client() -> Iterator[Client]:
    """A client; telemetry would call another server."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    made = Client(URL, verbose=False, analytics_enabled=False, download_files=False)
    yield made
    made.close()


def test_the_functions_are_listed(client: Client) -> None:
    found = client.view_api(print_info=False, return_format="dict")
    assert isinstance(found, dict)
    assert set(found["named_endpoints"]) == {"/chat", "/get_user_input", "/get_RKLLM_output"}


def test_a_message_is_answered(client: Client) -> None:
    assert client.predict("Count to 5", api_name="/chat") == "1, 2, 3, 4, 5."


def test_keywords_are_taken(client: Client) -> None:
    answer = client.predict(
        message="Count to 9", model=CHAT, max_tokens=3, api_name="/chat", history=[]
    )
    assert "1, 2, 3, 4, 5, 6, 7, 8, 9.".startswith(answer)
    assert len(answer) < len("1, 2, 3, 4, 5, 6, 7, 8, 9.")


def test_an_answer_grows_while_it_comes(client: Client) -> None:
    texts = list(client.submit("Count to 9", api_name="/chat"))
    assert len(texts) > 1
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert texts[-1] == "1, 2, 3, 4, 5, 6, 7, 8, 9."


def test_several_calls_go_on_at_once(client: Client) -> None:
    jobs = [client.submit(f"Count to {most}", api_name="/chat") for most in (3, 4, 5)]
    assert [job.result(60) for job in jobs] == ["1, 2, 3.", "1, 2, 3, 4.", "1, 2, 3, 4, 5."]
    assert client.predict("Count to 3", api_name="/chat") == "1, 2, 3."


def test_a_cancelled_call_ends_and_the_next_one_is_answered(client: Client) -> None:
    job = client.submit("Write a story of 300 words", api_name="/chat")
    next(iter(job))
    job.cancel()
    assert client.predict("Count to 3", api_name="/chat") == "1, 2, 3."


def test_the_vendors_client_goes_through_a_conversation(client: Client) -> None:
    history: list[dict[str, str]] = []
    for most, answer in ((3, "1, 2, 3."), (4, "1, 2, 3, 4.")):
        _, history = client.predict(
            user_message=f"Count to {most}", history=history, api_name="/get_user_input"
        )
        history = client.predict(history=history, api_name="/get_RKLLM_output")
        assert history[-1] == {"role": "assistant", "content": answer}
    assert [one["role"] for one in history] == ["user", "assistant"] * 2


def test_an_error_is_raised_with_its_sentence(client: Client) -> None:
    with pytest.raises(AppError, match="does not exist"):
        client.predict("hi", model="nothing", api_name="/chat")
