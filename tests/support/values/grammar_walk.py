"""Walks at random through grammars, as a sampler would that knows nothing of what it says."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np

from rkserve.core.run_params import Guide, GuideKind
from rkserve.models.files import read_vocabulary
from rkserve.sampling.grammar import GrammarCompiler, refusal
from rkserve.sampling.trial import refuse, too_long
from tests.support.paths import PROJECT

TOKENS = PROJECT / "models" / "sim-chat" / "tokenizer.json"
VOCABULARY = read_vocabulary(TOKENS)
IDS = {VOCABULARY.piece(at): at for at in range(len(VOCABULARY))}
END = IDS[b"<|im_end|>"]
EOS = frozenset({END, IDS[b"<|endoftext|>"]})
GUIDES = GrammarCompiler()
LONGEST = 400


def schema(value: Any) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(value))


def regex(text: str) -> Guide:
    return Guide(GuideKind.REGEX, text)


def lark(text: str) -> Guide:
    return Guide(GuideKind.LARK, text)


def check_guide(guide: Guide, param: str) -> None:
    """Raise ``RequestError`` for a grammar that a trial process refuses, without such a process."""
    reason = too_long(guide) or refusal(guide)
    if reason is not None:
        refuse(reason, param)


def followed(guide: Guide, seed: int = 0) -> tuple[str, bool]:
    """Follow a grammar at random, and rather to its end; return the text and whether it came."""
    chance = random.Random(seed)
    trail, said = GUIDES.follow(guide, VOCABULARY, EOS, ()), b""
    for at in range(LONGEST):
        ids = np.flatnonzero(trail.allowed())
        if END in ids and (len(ids) <= len(EOS) or chance.random() < 0.1 + at / LONGEST):
            return said.decode(), True
        # Tokens that end something are few among those that go on.
        closing = [one for one in ids if VOCABULARY.piece(int(one))[:1] in (b'"', b"]", b"}")]
        chosen = int(chance.choice(closing if closing and at > 50 else list(ids)))
        said += VOCABULARY.bytes_of(chosen)
        trail.take(chosen)
        if trail.over:
            return said.decode(), True
    return said.decode(errors="ignore"), False
