"""The examples of docs/interrupting.md, run as they stand there, against a cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from local_cluster import PROJECT, App, LocalCluster
from talk import CHAT, chat_body

pytestmark = pytest.mark.ray

PAGE = (PROJECT / "docs" / "interrupting.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)^```$", PAGE, re.S | re.M))
HOOKS = re.findall(r"^```yaml\nhooks: (\[.*\])\n```$", PAGE, re.M)
FILTERED = "filtered"


def test_every_example_is_found() -> None:
    assert sorted(EXAMPLES) == ["edit", "filter", "function"]
    assert len(HOOKS) == 1
    assert PAGE.count("```python") == len(EXAMPLES)


@pytest.fixture(scope="module")
def app(ray_cluster: LocalCluster) -> Iterator[App]:
    """A board for the examples, and one whose answers are filtered by the page's own hook."""
    (ray_cluster.python_dir / "redact.py").write_text(EXAMPLES["filter"], encoding="utf-8")
    model = ray_cluster.model_copy(FILTERED)
    groups = [
        ray_cluster.simulated("plain", 1, simulated={"strict": True, "time_scale": 0.2}),
        ray_cluster.simulated(
            FILTERED, 1, model=str(model), hooks=json.loads(HOOKS[0]), simulated={"strict": True}
        ),
    ]
    ray_cluster.deploy("docs", {"boards": groups})
    deployed = App(ray_cluster, "docs", "plain", 1)
    deployed.ready()
    yield deployed
    ray_cluster.delete("docs")


def run(example: str, app: App) -> str:
    """Run an example in a process of its own, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLES[example]],
        env={**os.environ, "RKSERVE_URL": app.url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_the_example_of_an_edit_runs(app: App) -> None:
    told, answer = run("edit", app).splitlines()
    assert re.fullmatch(r"paused after '1, 2, 3, .*'.* kept", told)
    assert answer.startswith("1, 2, 3, 4")
    assert " (the rest is left out)" in answer


def test_the_example_of_a_function_call_in_mid_stream_runs(app: App) -> None:
    told, answer = run("function", app).split("\n", 1)
    assert re.fullmatch(r"calling get_weather with \{'city': .*\}", told)
    call, _, rest = answer.partition("</tool_call>")
    assert "<tool_call>" in call
    assert "21" in rest, "the answer goes on with what the tool has said"
    assert "tool_response" not in rest


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_the_example_of_a_filter_masks_what_it_has_to(app: App, stream: bool) -> None:
    text = "card 1234 5678 9012 3456, and 12 34 is none, 1111 2222 3333 4444"
    body = {**chat_body(f"Repeat after me: {text}", stream=stream), "model": FILTERED}
    with app.http_sync() as http:
        response = http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    if stream:
        chunks = [
            json.loads(line.removeprefix("data: "))
            for line in response.text.splitlines()
            if line.startswith("data: {")
        ]
        found = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        assert not any(
            re.search(r"\d{4} \d{4} \d", c["choices"][0]["delta"].get("content") or "")
            for c in chunks
        )
    else:
        found = response.json()["choices"][0]["message"]["content"]
    assert found == "card [card number], and 12 34 is none, [card number]"
