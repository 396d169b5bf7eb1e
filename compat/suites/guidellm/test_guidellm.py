"""GuideLLM with loads of its own making, over each of the calls that it knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from scene import CHAT, EMBED, URL

MODELS = Path(__file__).resolve().parents[3] / "models"
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 6, 48, 12


def loaded(out: Path, model: str, call: str, *profile: str, **data: Any) -> dict[str, Any]:
    """Run the program and return its one benchmark."""
    words = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, **data}
    backend = {"target": URL, "model": model, "request_format": call}
    if words.get("turns") and call == "/v1/responses":
        backend["server_history"] = "true"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "guidellm", "run", "--disable-progress"),
            *("--backend", _given("openai_http", backend)),
            *("--data", _given("synthetic_text", words)),
            *("--tokenizer", _given("hf_auto", {"model": MODELS / model})),
            *("--profile", *(profile or ("kind=synchronous",))),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--output", _given("json", {"path": out / "benchmarks.json"})),
        ],
        env={**os.environ, "HF_HOME": str(out / "hf")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((out / "benchmarks.json").read_text(encoding="utf-8"))
    (found,) = report["benchmarks"]
    return dict(found)


def _given(kind: str, values: dict[str, Any]) -> str:
    return ",".join([f"kind={kind}", *(f"{key}={value}" for key, value in values.items())])


def expect_all(found: dict[str, Any]) -> dict[str, Any]:
    """Nothing failed; return the measured figures."""
    figures: dict[str, Any] = found["metrics"]
    totals = figures["request_totals"]
    assert (totals["successful"], totals["incomplete"], totals["errored"]) == (REQUESTS, 0, 0)
    return figures


def test_chats_are_measured_two_at_a_time(tmp_path: Path) -> None:
    found = loaded(tmp_path, CHAT, "/v1/chat/completions", "kind=concurrent,streams=2")
    figures = expect_all(found)
    # As many tokens as were asked for, by the server's own count.
    tokens = figures["output_token_count"]["successful"]
    assert (tokens["min"], tokens["max"]) == (OUTPUT_TOKENS, OUTPUT_TOKENS)
    assert figures["time_to_first_token_ms"]["successful"]["min"] > 0


def test_completions_are_measured(tmp_path: Path) -> None:
    figures = expect_all(loaded(tmp_path, CHAT, "/v1/completions"))
    tokens = figures["output_token_count"]["successful"]
    assert (tokens["min"], tokens["max"]) == (OUTPUT_TOKENS, OUTPUT_TOKENS)


def test_conversations_that_the_server_keeps_are_measured(tmp_path: Path) -> None:
    expect_all(loaded(tmp_path, CHAT, "/v1/responses", turns=3))


def test_embeddings_are_measured(tmp_path: Path) -> None:
    expect_all(loaded(tmp_path, EMBED, "/v1/embeddings"))
