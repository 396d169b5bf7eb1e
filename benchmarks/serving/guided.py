"""Case (i), answers that follow a grammar: steps, optimistic runs, and the cost of masks.

The binding alone is asked, without board and cluster, which pass its tokens on like any others.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.harness.processes import ANSWER_S, BenchCrew
from benchmarks.harness.prompts import SMALL_PROFILE
from rkserve.bench.processes import CommandProcess, Json, hold
from rkserve.core.run_params import Guide, GuideKind
from rkserve.models.files import Vocabulary
from rkserve.sampling.grammar import GrammarCompiler

MAX_TOKENS = 160
VOCABULARIES = (4_000, 150_000)
_WORDS = [
    "the",
    "sea",
    "is",
    "deep",
    "and",
    "rain",
    "falls",
    "on",
    "hills",
    "where",
    "boats",
    "rest",
    "in",
    "calm",
    "bays",
    "by",
    "old",
    "stone",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["sea", "lake"]},
        "depth": {"type": "integer", "minimum": 0, "maximum": 9999},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 60}, "maxItems": 6},
    },
    "required": ["place", "kind", "depth", "words"],
    "additionalProperties": False,
}
GUIDE = Guide(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA))


@dataclass(frozen=True, slots=True)
class Way:
    """One way to make an answer."""

    name: str
    said: str  # what the model is asked to say
    guided: bool = True
    optimistic: bool = False
    history: bool = False


def saying(kind: str) -> str:
    """Return an answer that follows the grammar where ``kind`` does."""
    words = [" ".join(_WORDS[at : at + 5]) for at in range(0, 15, 5)]
    return json.dumps({"place": "Bay of Oslo", "kind": kind, "depth": 12, "words": words})


GOOD, STRAYS = saying("sea"), saying("river")
WAYS = (
    Way("native, no grammar", GOOD, guided=False),
    Way("steps, context kept", GOOD, history=True),
    Way("steps, context sent again", GOOD),
    Way("optimistic, the model keeps to it", GOOD, optimistic=True),
    Way("optimistic, it strays halfway", STRAYS, optimistic=True),
)


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer: ``cpu_s`` is that of the process, the simulated library's included."""

    tokens: int
    first_s: float
    whole_s: float
    cpu_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Masked:
    """The cost of a vocabulary: loading it, a grammar of it, each token's mask and check."""

    size: int
    vocabulary_ms: float
    grammar_ms: float
    mask_ms: tuple[float, ...]
    check_ms: tuple[float, ...]


@dataclass(frozen=True)
class GuidedFound:
    """Everything of case (i)."""

    answers: Sequence[tuple[Way, Sequence[Answered]]]
    masks: Sequence[Masked]


def measure(crew: BenchCrew, rounds: int) -> GuidedFound:
    """Make ``rounds`` answers in each way, in turns, then masks."""
    found: dict[Way, list[Answered]] = {way: [] for way in WAYS}
    with crew.batching_binding(SMALL_PROFILE, 1, time_scale=1.0, gain="none", quirks=QUIRKS) as one:
        for way in WAYS:
            _answer(crew, one, way, 4)  # warms up: the vocabulary is read, the library loaded
        for number in range(rounds):
            for way in WAYS:
                crew.note(f"{way.name}, {number + 1} of {rounds}")
                found[way].append(_answer(crew, one, way, MAX_TOKENS))
    for way, answers in found.items():
        hold(flaws(way, answers))
    crew.note("masks")
    return GuidedFound(list(found.items()), [masked(size) for size in VOCABULARIES])


QUIRKS = {"logits_with_history": True}  # else steps that keep their context could not be compared


def flaws(way: Way, answers: Sequence[Answered]) -> list[str]:
    """Note what makes these answers unfit for a comparison."""
    found = []
    for one in answers:
        try:
            value = json.loads(one.text)
        except ValueError:
            value = None
        if not isinstance(value, dict) or value.get("kind") not in ("sea", "lake"):
            found.append(f"{way.name}: {one.text[:80]!r} does not follow the grammar")
    return found


def _answer(crew: BenchCrew, child: CommandProcess, way: Way, max_tokens: int) -> Answered:
    turn = {"role": "user", "content": f"Repeat after me: {way.said}"}
    command: Json = {
        "do": "guided",
        "tokenizer": str(crew.model.tokenizer_file),
        "eos": list(crew.model.settings.eos_token_ids),
        "ids": list(crew.renderer.chat([turn]).ids),
        "max_tokens": max_tokens,
        "guide": GUIDE.text if way.guided else None,
        "optimistic": way.optimistic,
        "history": way.history,
    }
    return Answered(**child.ask(command, ANSWER_S))


# -- masks ----------------------------------------------------------------------------------------


def vocabulary(size: int) -> Vocabulary:
    """Return one of so many pieces: all bytes, then words as tokenizers have them."""
    pieces = [b"<end>", *(bytes([at]) for at in range(256))]
    pieces += list(_pieces(size - len(pieces)))
    return Vocabulary(tuple(pieces), frozenset({0}))


def _pieces(count: int) -> Iterator[bytes]:
    """Yield different words of 2 to 12 letters, one in two with a blank before it."""
    letters = b"etaoinshrdlucmfwypvbgkjqxz"
    for number in range(count):
        # A word that is its number, in digits of these letters; what is added makes it no shorter.
        rest, word = number // 2 + len(letters), b""
        while rest:
            rest, digit = divmod(rest, len(letters))
            word += letters[digit : digit + 1]
        yield (b" " if number % 2 else b"") + word + b"ing" * (number % 6 // 4)


def masked(size: int) -> Masked:
    """Follow the grammar over one answer with a vocabulary of this size."""
    guides, known, eos = GrammarCompiler(), vocabulary(size), frozenset({0})
    began_s = time.perf_counter()
    guides.follow(Guide(GuideKind.REGEX, "a"), known, eos, ())
    vocabulary_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    trail = guides.follow(GUIDE, known, eos, ())
    grammar_s = time.perf_counter() - began_s
    masks, checks = [], []
    for token_id in _spelled(known, GOOD.encode()):
        began_s = time.perf_counter()
        trail.may_take(token_id, is_end=False)
        checked_s = time.perf_counter()
        trail.allowed()
        masks.append((time.perf_counter() - checked_s) * 1e3)
        checks.append((checked_s - began_s) * 1e3)
        trail.take(token_id)
    return Masked(size, vocabulary_s * 1e3, grammar_s * 1e3, tuple(masks), tuple(checks))


def _spelled(known: Vocabulary, text: bytes) -> Iterator[int]:
    """Yield ids of a text, the longest pieces first."""
    ids = {piece: at for at, piece in enumerate(known.pieces) if piece and at}
    longest, at = max(map(len, ids)), 0
    while at < len(text):
        end = next(end for end in range(at + longest, at, -1) if text[at:end] in ids)
        end = min(end, len(text))
        yield ids[text[at:end]]
        at = end


def rate(answers: Sequence[Answered]) -> float:
    """Return the tokens per second of the median answer, from its sending to its end."""
    return statistics.median(one.tokens / one.whole_s for one in answers)
