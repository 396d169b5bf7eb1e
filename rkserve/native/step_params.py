"""The parameters of a stepwise run, sent by the board to its engine. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rkserve.core.run_params import Guide, GuideKind, Sampling, Stepwise

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepParams:
    """One run. The KV cache already has the prefix ``held``; ``said`` is the answer so far.

    At most ``limit`` tokens are generated, none after one of ``eos``. ``prompt`` requests the
    log-probabilities of the sent tokens. ``optimistic`` lets the library generate as long as its
    tokens follow the guide.
    """

    tokenizer: Path
    sampling: Sampling
    wanted: Stepwise
    eos: frozenset[int]
    limit: int
    held: Ids = ()
    said: Ids = ()
    prompt: bool = False
    optimistic: bool = False

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> StepParams:
        """Build the parameters from the value of ``as_json``."""
        wanted = dict(given["wanted"])
        bias = tuple((token_id, value) for token_id, value in wanted.pop("logit_bias"))
        written, also = wanted.pop("guide"), tuple(wanted.pop("also"))
        guide = None if written is None else Guide(GuideKind(written["kind"]), written["text"])
        return cls(
            tokenizer=Path(given["tokenizer"]),
            sampling=Sampling(**given["sampling"]),
            wanted=Stepwise(**wanted, logit_bias=bias, guide=guide, also=also),
            eos=frozenset(given["eos"]),
            limit=given["limit"],
            held=tuple(given["held"]),
            said=tuple(given["said"]),
            prompt=given["prompt"],
            optimistic=given["optimistic"],
        )

    def as_json(self) -> dict[str, Any]:
        """Return the parameters as a JSON value."""
        return {
            "tokenizer": str(self.tokenizer),
            "sampling": asdict(self.sampling),
            "wanted": asdict(self.wanted),
            "eos": sorted(self.eos),
            "limit": self.limit,
            "held": self.held,
            "said": self.said,
            "prompt": self.prompt,
            "optimistic": self.optimistic,
        }
