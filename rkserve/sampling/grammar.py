"""Grammars that answers have to follow: checked, compiled, and followed token by token.

llguidance does the work, within limits of size and of steps. It knows no runtime and draws nothing.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from rkserve.core.errors import StepsRefused
from rkserve.core.run_params import Guide, GuideKind
from rkserve.models.vocabulary import Vocabulary
from rkserve.sampling.draw import Allowed
from rkserve.sampling.finite_schemas import is_endless
from rkserve.sampling.tool_call_grammar import as_lark, one_by_one
from rkserve.sampling.trial_limits import refuse, too_long

# Without bounds a small model goes on with blank lines for ever.
_WHITESPACE = r"[ \n\r\t]{0,32}"
_JSON = {
    "whitespace_pattern": _WHITESPACE,
    # Not for a schema to say: what is accepted is kept to the letter.
    "lenient": False,
    "coerce_one_of": False,
}

# The same, as a schema within a grammar says it.
_JSON_IN_LARK = {"x-guidance": _JSON}


def check_guide(guide: Guide, param: str) -> None:
    """Hold a grammar to what can be followed; it takes some milliseconds, or tenths of a second.

    Raises:
        RequestError: naming ``param``, with the reason.
    """
    reason = refusal(guide)
    if reason is not None:
        refuse(reason, param)


def refusal(guide: Guide) -> str | None:
    """Return what is wrong with a grammar. A hostile one takes minutes: see ``trial``."""
    if (reason := too_long(guide)) is not None:
        return reason
    if guide.kind is GuideKind.JSON_SCHEMA and is_endless(json.loads(guide.text)):
        return "the schema demands itself within itself, so that nothing finite follows it."
    try:
        grammar = _grammar(guide)
    except Exception as exc:  # noqa: BLE001 - a converter in Python, of text that anybody sent
        return _said(exc) if guide.kind is GuideKind.CALLS else f"it is no grammar: {_said(exc)}"
    reason = _uncompilable(grammar)
    if reason is None or guide.kind is not GuideKind.CALLS:
        return reason
    for name, alone in one_by_one(guide.text):
        if (why := _uncompilable(_grammar(Guide(guide.kind, alone)))) is not None:
            return f"the tool '{name}': {why}"
    return reason


def _uncompilable(grammar: str) -> str | None:
    refused, reasons = LLMatcher.validate_grammar_with_warnings(grammar, _bytes(), limits=_limits())
    if refused:
        return _said(reasons[0])
    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=_limits())
    if matcher.is_error() or not any(_bits(matcher)) or matcher.is_error():
        return _said(matcher.get_error() or "nothing follows it")
    return None


class GrammarCompiler:
    """Compiles grammars for the vocabulary of one model; one engine has one."""

    def __init__(self) -> None:
        self._known: tuple[Vocabulary, frozenset[int], LLTokenizer] | None = None

    def follow(
        self, guide: Guide, vocabulary: Vocabulary, eos: frozenset[int], said: tuple[int, ...]
    ) -> GrammarMatcher:
        """Return where a grammar stands after what was said.

        The first call for a vocabulary takes a second where that is large.

        Raises:
            StepsRefused: the grammar cannot be used with it, or was not followed.
        """
        tokenizer = self._tokenizer(vocabulary, eos)
        trail = GrammarMatcher(
            LLMatcher(tokenizer, _compiled(guide), log_level=0, limits=_limits())
        )
        for token_id in said:
            trail.take(token_id)
        return trail

    def _tokenizer(self, vocabulary: Vocabulary, eos: frozenset[int]) -> LLTokenizer:
        known = self._known
        if known is None or known[0] is not vocabulary or known[1] != eos:
            if not all(0 <= token_id < len(vocabulary) for token_id in eos):
                raise StepsRefused("the ids that end an answer are not in the vocabulary")
            wrapped = TokenizerWrapper(_Speller(vocabulary, min(eos)))
            known = (vocabulary, eos, LLTokenizer(wrapped, eos_token=sorted(eos)))
            self._known = known
        return known[2]


class _Speller:
    """A vocabulary as llguidance takes one, with a way to spell what a grammar leaves no choice of.

    The model's own tokenizer would make control tokens of markup that a schema demands as text,
    and these are not the text. So words are spelled by the longest pieces that are no markup.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos: int) -> None:
        self.eos_token_id = eos
        self.tokens = [piece or b"" for piece in vocabulary.pieces]
        self.special_token_ids = sorted(vocabulary.special)
        self._ids: dict[bytes, int] = {}
        for token_id, piece in enumerate(self.tokens):
            if piece and token_id not in vocabulary.special:
                self._ids.setdefault(piece, token_id)
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, data: bytes) -> list[int]:
        """Return ids that spell ``data``; bytes that no piece has are left out."""
        found, at = [], 0
        while at < len(data):
            for end in range(min(at + self._longest, len(data)), at, -1):
                if (token_id := self._ids.get(data[at:end])) is not None:
                    found.append(token_id)
                    break
            else:
                end = at + 1
            at = end
        return found


class GrammarMatcher:
    """One answer on its way through a grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._allowed: Allowed | None = None  # here, if somebody asked
        self._check()

    @property
    def over(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> Allowed:
        """Return for each id whether it may follow. Raises ``StepsRefused``."""
        if self._allowed is None:
            self._allowed = _bits(self._matcher)
            self._check()
        return self._allowed

    @property
    def may_end(self) -> bool:
        """Whether the answer may be over."""
        return self._matcher.is_accepting()

    def may_take(self, token_id: int, *, is_end: bool) -> bool:
        """Whether a token may follow: less work than to ask for all that may."""
        if is_end:
            return self.may_end
        return self._matcher.validate_tokens([token_id]) == 1

    def only(self) -> int | None:
        """Return the token that must follow; None where there are several, or the answer ends."""
        if self.over or self.may_end:
            return None
        found = np.flatnonzero(self.allowed())
        return int(found[0]) if len(found) == 1 else None

    def take(self, token_id: int) -> None:
        """Note what followed. Raises ``StepsRefused`` where it may not."""
        self._allowed = None
        if not self._matcher.consume_token(token_id):
            raise StepsRefused(f"the answer leaves its grammar: {_said(self._matcher.get_error())}")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise StepsRefused(
                f"the grammar cannot be followed: {_said(self._matcher.get_error())}"
            )


def _grammar(guide: Guide) -> str:
    if guide.kind is GuideKind.JSON_SCHEMA:
        return LLMatcher.grammar_from_json_schema(guide.text, overrides=_JSON)  # type: ignore[arg-type] # more keys than it names
    if guide.kind is GuideKind.REGEX:
        return LLMatcher.grammar_from_regex(guide.text)
    if guide.kind is GuideKind.CALLS:
        return LLMatcher.grammar_from_lark(as_lark(guide.text, _JSON_IN_LARK))
    return LLMatcher.grammar_from_lark(any_to_lark(guide.text))


def _compiled(guide: Guide) -> str:
    try:
        return _grammar(guide)
    except Exception as exc:  # of whoever came without a Router
        raise StepsRefused(f"the grammar cannot be followed: {_said(exc)}") from exc


@cache
def _bytes() -> LLTokenizer:
    """A vocabulary of single bytes: whether a grammar is one does not depend on the model's."""
    return LLTokenizer("byte")


@cache
def _limits() -> LLParserLimits:
    """Its defaults, but for memory: 50 MB of states for one answer is enough."""
    return LLParserLimits(
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def _bits(matcher: LLMatcher) -> Allowed:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return bits.view(np.bool_)


def _said(reason: Any) -> str:
    """One line of what the library says."""
    return " ".join(str(reason).split())
