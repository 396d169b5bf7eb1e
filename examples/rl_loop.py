"""A reinforcement loop: sample answers, have the boards sleep while it trains, wake them, go on.

    python examples/rl_loop.py --rounds 3 --prompts 6

The training is pretended and the adapters are simulated ones, so it runs against `make demo`; put
your own step in `train` and your exporter in `export`. While the boards sleep their memory is free.
The last answers of a round are still being written when they fall asleep: these requests wait, and
end after the boards have woken. The new adapter is brought to the boards in their sleep, and they
wake with it. The admin key is taken from RKSERVE_ADMIN_KEY; rkserve's own machine needs none where
none is configured.
"""

# ruff: noqa: T201 -- an example talks to a terminal

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx

from rkserve.client import Client, ClientError, Progress
from rkserve.native.sim import models

TRAIN_S = 0.5


def train(answers: list[str]) -> None:
    """Stand in for the reward and the optimizer step on what was sampled."""
    time.sleep(TRAIN_S)
    print(f"  trained on {len(answers)} answers")


def export(folder: Path, name: str, number: int) -> Path:
    """Write what the boards load; the real thing is converted by the vendor's toolkit."""
    return models.write_adapter(folder / f"{name}-{number}.rkllm", f"{name} {number}", seed=number)


def ask(http: httpx.Client, model: str, number: int) -> tuple[str, str]:
    """Return an answer, and the version of the weights that wrote its end."""
    question = [{"role": "user", "content": f"Tell me something about the number {number}."}]
    body = {"model": model, "messages": question, "max_tokens": 64}
    response = http.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    text = response.json()["choices"][0]["message"]["content"]
    return text, response.headers.get("x-weight-version", "no version")


def tell(progress: Progress) -> None:
    """Say what the boards are at."""
    if progress.operation is not None and progress.operation.over:
        ms = ", ".join(f"{name} {ms:.0f} ms" for name, ms in progress.operation.phases.items())
        print(f"    {progress.step}: {progress.operation.state} ({ms})")


def main(args: argparse.Namespace) -> int:
    """Sample, sleep, train, wake, and report; 1 where a request failed."""
    versions: Counter[str] = Counter()
    model = args.model
    with (
        tempfile.TemporaryDirectory() as place,
        Client(args.url, admin_key=os.environ.get("RKSERVE_ADMIN_KEY")) as client,
        httpx.Client(base_url=client.url, timeout=300.0) as http,
        ThreadPoolExecutor(args.prompts + 1) as pool,
    ):
        base = model or client.models()[0]["id"]
        model = base
        for number in range(1, args.rounds + 1):
            print(f"round {number}: {args.prompts} prompts to {model}")
            asked = [pool.submit(ask, http, model, one) for one in range(args.prompts)]
            # One answer is enough to begin with; the others are cut short by the sleep.
            first = asked[0].result()
            with client.asleep(args.level, models=base, on_progress=tell) as lease:
                train([first[0], *done(asked[1:])])
                file = export(Path(place), args.name, number)
                version = f"round-{number}-{os.getpid()}"
                client.push_adapter(file, args.name, version, model=base, on_progress=tell)
                lease.check()
            versions.update(one.result()[1] for one in asked)
            model = args.name
    for what, count in sorted(versions.items()):
        print(f"{count:5} {what}")
    return 0


def done(asked: list[Future[tuple[str, str]]]) -> list[str]:
    """Return the answers that are complete."""
    return [one.result()[0] for one in asked if one.done()]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default=os.environ.get("RKSERVE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--name", default="policy", help="what the adapter is called")
    parser.add_argument("--model", help="the base model, where several are served")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=6, help="answers for each round")
    parser.add_argument("--level", type=int, choices=(0, 1, 2), default=2, help="of the sleep")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        raise SystemExit(main(arguments()))
    except (ClientError, httpx.HTTPError) as exc:
        raise SystemExit(f"rl_loop: {exc}") from exc
