"""lm-evaluation-harness with tiny tasks of this folder, by completions and by chats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scene import CHAT, V1

FOLDER = Path(__file__).resolve().parents[3] / "models" / CHAT
COUNTING = [{"question": f"Count to {n}", "answer": ", ".join(map(str, range(1, n + 1))) + "."}
            for n in range(2, 8)]  # fmt: skip
CHOICES = [
    {"question": f"The sea is {word}", "choices": [" deep", " made of wood"], "answer": 0}
    for word in ("very", "so", "quite", "often")
]
TASKS = {
    "rk_count": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 40, temperature: 0.0, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true,
               ignore_punctuation: false}]
filter_list:
  - name: trimmed
    filter: [{function: remove_whitespace}, {function: take_first}]
""",
    "rk_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with the tasks and their data."""
    for name, docs in (("counting", COUNTING), ("choices", CHOICES)):
        lines = "".join(json.dumps(doc) + "\n" for doc in docs)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    for name, text in TASKS.items():
        data = "choices" if name == "rk_choice" else "counting"
        head = (
            f"task: {name}\ndataset_path: json\ntest_split: test\n"
            f"dataset_kwargs:\n  data_files:\n    test: {tmp_path / data}.jsonl\n"
        )
        (tmp_path / f"{name}.yaml").write_text(head + text, encoding="utf-8")
    return tmp_path


def evaluated(
    tasks: Path, task: str, model: str, path: str, *more: str, backend: str = "None"
) -> dict[str, Any]:
    """Run the program and return the task's results."""
    out = tasks / "out"
    arguments = (
        f"model={CHAT},base_url={V1}/{path},tokenizer_backend={backend},tokenized_requests=False,"
        "num_concurrent=2,max_retries=1,max_length=2048"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "run", "--model", model),
            *("--model_args", arguments, "--tasks", task, "--include_path", str(tasks)),
            *("--output_path", str(out), "--batch_size", "1", *more),
        ],
        env={**os.environ, "OPENAI_API_KEY": "unused", "HF_HOME": str(tasks / "hf")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = out.rglob("results_*.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["results"][task]
    return found


def test_generations_are_scored_by_completions(tasks: Path) -> None:
    found = evaluated(tasks, "rk_count", "local-completions", "completions")
    assert found["exact_match,trimmed"] == 1.0


def test_generations_are_scored_by_chats(tasks: Path) -> None:
    found = evaluated(
        tasks, "rk_count", "local-chat-completions", "chat/completions", "--apply_chat_template"
    )
    assert found["exact_match,trimmed"] == 1.0


def test_likelihoods_are_compared(tasks: Path) -> None:
    # It counts the tokens of each context itself, so it needs the model's own tokenizer.
    found = evaluated(
        tasks,
        "rk_choice",
        "local-completions",
        "completions",
        backend=f"huggingface,tokenizer={FOLDER}",
    )
    assert found["sample_len"] == len(CHOICES)
    assert 0 <= found["acc,none"] <= 1
