"""A training loop that pushes an adapter every few steps while requests are answered.

    python examples/train_loop.py --steps 12 --every 4 --load 4

The training is pretended and the adapters are simulated ones, so it runs against `make demo`; for
real boards put your own step in `train` and your exporter in `export`. The load shows that no
request fails while adapters change, and which version answered how many. With --receive an adapter
is only staged by the push, and served by a weight update in PipelineRL's form: steps must grow, and
requests that run go on with the new weights. The admin key is taken from RKSERVE_ADMIN_KEY;
rkserve's own machine needs none where none is configured.
"""

# ruff: noqa: T201 -- an example talks to a terminal

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections import Counter
from pathlib import Path

import httpx

from rkserve.client import AsyncClient, ClientError, Progress
from rkserve.native.sim import models

STEP_S = 0.2


async def train(step: int) -> None:
    """Stand in for one optimizer step on the trainer's own hardware."""
    await asyncio.sleep(STEP_S)
    print(f"step {step}")


def export(folder: Path, name: str, step: int) -> Path:
    """Write what the boards load; the real thing is converted by the vendor's toolkit."""
    return models.write_adapter(folder / f"{name}-{step}.rkllm", f"{name} {step}", seed=step)


def tell(progress: Progress) -> None:
    """Say what a push is at."""
    if progress.operation is not None:
        done = f"{progress.done}/{progress.total} boards"
        print(f"    {progress.step} {progress.phase}: {done}, {progress.operation.state}")


async def load(http: httpx.AsyncClient, model: str, answered: Counter[str]) -> None:
    """Ask again and again, and count what came by version or by error."""
    question = [{"role": "user", "content": "Tell me something about rivers."}]
    body = {"model": model, "messages": question, "max_tokens": 48}
    while True:
        response = await http.post("/v1/chat/completions", json=body)
        if response.is_success:
            answered[response.headers.get("x-weight-version", "no version")] += 1
        else:
            answered[f"error {response.status_code}: {response.text[:120]}"] += 1
            await asyncio.sleep(STEP_S)


async def push(client: AsyncClient, args: argparse.Namespace, file: Path, step: int) -> str:
    """Bring an adapter to all boards and have it served; return its label."""
    version = f"step-{step}"
    if not args.receive:
        how = {"strategy": args.strategy, "in_flight": "pin"}
        pushed = await client.push_adapter(
            file, args.name, version, model=args.model, on_progress=tell, **how
        )
        return pushed.label
    pushed = await client.push_adapter(
        file, args.name, version, model=args.model, activate=False, on_progress=tell
    )
    done = await client.receive_weight_update(step, pushed, on_progress=tell)
    print("    " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in done.phases.items()))
    return pushed.label


async def run(args: argparse.Namespace) -> int:
    """Train, push, and report; 1 where a request failed."""
    answered: Counter[str] = Counter()
    key = os.environ.get("RKSERVE_ADMIN_KEY")
    with tempfile.TemporaryDirectory() as place:
        async with (
            AsyncClient(args.url, admin_key=key) as client,
            httpx.AsyncClient(base_url=client.url, timeout=120.0) as http,
        ):
            askers: list[asyncio.Task[None]] = []
            # A weight update must be newer than the last one, which another run may have made.
            last = (await client.weight_info(args.model))["step"] if args.receive else None
            try:
                for step in range(1 + (last or 0), 1 + (last or 0) + args.steps):
                    await train(step)
                    if step % args.every:
                        continue
                    label = await push(client, args, export(Path(place), args.name, step), step)
                    print(f"  serving {label}")
                    # The adapter's name means something from the first push on.
                    for _ in range(args.load - len(askers)):
                        askers.append(asyncio.create_task(load(http, args.name, answered)))
            finally:
                for asker in askers:
                    asker.cancel()
                ended = await asyncio.gather(*askers, return_exceptions=True)
    for what, count in sorted(answered.items()):
        print(f"{count:5} {what}")
    broken = [exc for exc in ended if isinstance(exc, Exception)]
    for exc in broken:
        print(f"a request broke: {exc!r}")
    return int(bool(broken) or any(what.startswith("error") for what in answered))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default=os.environ.get("RKSERVE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--name", default="trained", help="what the adapter is called")
    parser.add_argument("--model", help="the base model, where several are served")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=4, help="steps between two pushes")
    parser.add_argument("--load", type=int, default=4, help="requests at a time")
    parser.add_argument("--strategy", choices=("atomic", "rolling"), default="atomic")
    parser.add_argument("--receive", action="store_true", help="update in PipelineRL's form")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        raise SystemExit(asyncio.run(run(arguments())))
    except ClientError as exc:
        raise SystemExit(f"train_loop: {exc}") from exc
