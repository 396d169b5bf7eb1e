"""Board profiles of the simulator: from published figures to the coefficients of its clock.

The module knows the formulas, and which coefficient is measured, derived or assumed. ``build``
turns the resulting table into a C header.

    prefill_ms(m, p) = a + b*m + c*((p + m)**2 - p**2)      m new tokens after p in the KV cache
    decode_ms(ctx)   = d0 + k*min(ctx, window)              ctx tokens in the KV cache

`python -m rkserve.native.sim.profiles` writes profiles.csv from benchmarks.csv.
"""

from __future__ import annotations

import csv
import io
from dataclasses import astuple, dataclass, fields
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE / "benchmarks.csv"
PROFILES = HERE / "profiles.csv"

# Assumed for the published rows, which give one point each. Their orders of magnitude come from the
# fitted rows below: a is 5 % of the time to first token on Qwen3-0.6B, attention takes 6.5 % of it
# at 128 tokens on Qwen2-0.5B and Qwen3-0.6B, and decoding grows by 1e-4 to 3e-4 per token.
FIXED_SHARE = 0.05
ATTENTION_SHARE = 0.065
DECODE_GROWTH = 2e-4


@dataclass(frozen=True)
class Profile:
    """The speed of one board with one model, and its memory."""

    name: str
    platform: str
    a: float
    b: float
    c: float
    d0: float
    k: float
    window: int
    memory_mb: float
    source: str

    def prefill_ms(self, fresh: int, past: int = 0) -> float:
        return self.a + self.b * fresh + self.c * ((past + fresh) ** 2 - past**2)

    def decode_ms(self, context: int) -> float:
        return self.d0 + self.k * (min(context, self.window) if self.window else context)

    def tokens_per_s(self, prompt_tokens: int, new_tokens: int) -> float:
        """The rate between the first token, which the prefill gives, and the last."""
        steps = range(prompt_tokens + 1, prompt_tokens + new_tokens)
        return 1000 * len(steps) / sum(self.decode_ms(context) for context in steps)


# Fitted to several published points of one board. The last line of each says what is assumed.
FITTED = (
    Profile("rk3588-qwen2-0.5b-w8a8-fitted", "RK3588", 0, 1.34, 0.00058, 24, 0.005, 0, 669.56,
            "fitted: llm part of a long prompt, pinned clocks; k assumed"),
    Profile("rk3588-qwen3-0.6b-w8a8-fitted", "RK3588", 10, 1.5, 0.0008, 30.4, 0.01, 0, 791.11,
            "fitted: pinned clocks; k assumed"),
    Profile("rk3588-qwen3-0.6b-w8a8-unpinned", "RK3588", 42, 3.27, 0.0008, 55.9, 0.033, 0, 890,
            "fitted: free DDR clock, 16k build; c assumed"),
    Profile("rk3588-gemma3-1b-w8a8-unpinned", "RK3588", 49, 3.09, 0.0005, 63, 0.036, 600, 1243,
            "fitted: sliding window; c assumed"),
    Profile("rk3588-qwen3-1.7b-w8a8-fitted", "RK3588", 63, 2.34, 0.001, 71, 0.0092, 0, 2343,
            "fitted; c assumed"),
    Profile("rk3588-phi3-3.8b-w8a8-fitted", "RK3588", 116, 6.9, 0, 138, 0, 0, 3758.34,
            "fitted; c and k unknown, taken as 0; memory from the published row"),
    Profile("rk3588-qwen3-4b-w8a8-unpinned", "RK3588", 183, 28.6, 0, 315, 0.017, 0, 5030,
            "fitted: free DDR clock; c unknown, taken as 0"),
)  # fmt: skip


def published_profile(row: dict[str, str]) -> Profile:
    """Solve for b and d0 so that the published point is met; the other coefficients are assumed."""
    ttft_ms, rate = float(row["ttft_ms"]), float(row["decode_tokens_per_s"])
    prompt, new = int(row["prompt_tokens"]), int(row["new_tokens"])
    # A recurrent model has no attention: neither prefill nor decoding grows with the context.
    recurrent = row["model"].startswith("RWKV")
    a = FIXED_SHARE * ttft_ms
    c = 0.0 if recurrent else ATTENTION_SHARE * ttft_ms / prompt**2
    k = 0.0 if recurrent else DECODE_GROWTH * 1000 / rate
    mean_context = prompt + new / 2
    size = row["size"].split("(")[0]
    return Profile(
        name=f"{row['platform']}-{row['model']}-{size}-{row['dtype']}".lower(),
        platform=row["platform"],
        a=a,
        b=(ttft_ms - a - c * prompt**2) / prompt,
        c=c,
        d0=1000 / rate - k * mean_context,
        k=k,
        window=0,
        memory_mb=float(row["memory_mb"]),
        source="published: b and d0 derived; a, c and k assumed",
    )


def read_benchmarks() -> list[dict[str, str]]:
    """The vendor's published table, row by row."""
    with BENCHMARKS.open(newline="") as rows:
        return list(csv.DictReader(rows))


def derive() -> list[Profile]:
    return [*(published_profile(row) for row in read_benchmarks()), *FITTED]


def render(profiles: list[Profile]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([field.name for field in fields(Profile)])
    for profile in profiles:
        writer.writerow(
            [f"{value:.7g}" if isinstance(value, float) else value for value in astuple(profile)]
        )
    return out.getvalue()


def load() -> list[Profile]:
    """The committed table, as the simulator is built from it."""
    with PROFILES.open(newline="") as rows:
        return [
            Profile(
                name=row["name"],
                platform=row["platform"],
                a=float(row["a"]),
                b=float(row["b"]),
                c=float(row["c"]),
                d0=float(row["d0"]),
                k=float(row["k"]),
                window=int(row["window"]),
                memory_mb=float(row["memory_mb"]),
                source=row["source"],
            )
            for row in csv.DictReader(rows)
        ]


if __name__ == "__main__":
    PROFILES.write_text(render(derive()))
