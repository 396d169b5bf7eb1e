"""The program `llm`, with rkserve in its extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from scene import CHAT, URL, V1, VISION, png

MODELS = f"""
- model_id: rk
  model_name: {CHAT}
  api_base: {V1}
  supports_schema: true
  supports_tools: true
- model_id: seeing
  model_name: {VISION}
  api_base: {V1}
  vision: true
- model_id: raw
  model_name: {CHAT}
  api_base: {V1}
  completion: true
"""

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the program with settings of its own, and return what it prints."""
    assert URL
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS, encoding="utf-8")

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llm", *words],
            env={**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "unused"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return (done.stdout if code == 0 else done.stderr).strip()

    return run


def test_a_prompt_is_answered(run: Run) -> None:
    assert run("-m", "rk", "Count to 5") == "1, 2, 3, 4, 5."


def test_a_prompt_is_answered_in_one_piece(run: Run) -> None:
    assert run("-m", "rk", "--no-stream", "Count to 5") == "1, 2, 3, 4, 5."


def test_a_system_prompt_is_read(run: Run) -> None:
    assert run("-m", "rk", "-s", "You are Ferris.", "Who are you?") == "I am Ferris."


def test_a_conversation_goes_on(run: Run) -> None:
    run("-m", "rk", "Hello there")
    assert run("-c", "What did I say first?") == 'You said first: "Hello there"'


def test_options_are_sent(run: Run) -> None:
    said = run("-m", "rk", "-o", "max_tokens", "3", "-o", "temperature", "0", "Count to 50")
    assert said.startswith("1")
    assert len(said) < len("1, 2, 3, 4")


def test_an_answer_follows_a_schema(run: Run) -> None:
    said = json.loads(run("-m", "rk", "--schema", "city, celsius int", "The weather in Oslo"))
    assert said["city"] == "Oslo"
    assert isinstance(said["celsius"], int)


def test_a_function_is_called(run: Run) -> None:
    code = "def get_weather(city: str) -> str:\n    return f'3 degrees in {city}'\n"
    said = run("-m", "rk", "--functions", code, "What is the weather in Oslo?")
    assert "The tool answered: 3 degrees in Oslo" in said


def test_an_image_is_seen(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "red.png"
    file.write_bytes(png(10))
    assert run("-m", "seeing", "-a", str(file), "Describe").startswith("The picture shows")


def test_a_raw_prompt_is_completed(run: Run) -> None:
    assert run("-m", "raw", "-o", "max_tokens", "30", "Count to 3") == "1, 2, 3."


def test_what_was_used_is_logged(run: Run) -> None:
    run("-m", "rk", "Count to 3")
    (entry,) = json.loads(run("logs", "--json"))
    assert entry["response"] == "1, 2, 3."
    assert entry["output_tokens"] > 3


def test_an_error_is_told(run: Run) -> None:
    assert "temperature" in run("-m", "rk", "-o", "temperature", "2.5", "Hello", code=1)
