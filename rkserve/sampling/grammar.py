"""Grammars for answers: checked, compiled, and matched token by token, by llguidance.

Size and steps are limited. The module knows no runtime and draws no tokens.
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
from rkserve.models.files import Vocabulary
from rkserve.sampling.draw import Allowed
from rkserve.sampling.schemas import as_lark, is_endless, one_by_one

# Unbounded whitespace lets a small model generate blank lines forever.
_WHITESPACE = r"[ \n\r\t]{0,32}"
_JSON = {
    "whitespace_pattern": _WHITESPACE,
    # Fixed, so that a schema cannot relax its own validation.
    "lenient": False,
    "coerce_one_of": False,
}

# The same options inside a grammar.
_JSON_IN_LARK = {"x-guidance": _JSON}


def refusal(guide: Guide) -> str | None:
    """Return the error of a grammar, or None. A hostile one takes minutes: see ``trial``."""
    if guide.kind is GuideKind.JSON_SCHEMA and is_endless(json.loads(guide.text)):
        return "the schema requires itself within itself, so that it has no finite instance."
    try:
        grammar = _grammar(guide)
    except Exception as exc:  # noqa: BLE001 - a Python converter of untrusted text
        return (
            _message_of(exc)
            if guide.kind is GuideKind.CALLS
            else f"not a grammar: {_message_of(exc)}"
        )
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
        return _message_of(reasons[0])
    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=_limits())
    if matcher.is_error() or not any(_bits(matcher)) or matcher.is_error():
        return _message_of(matcher.get_error() or "no text matches it")
    return None


class GrammarCompiler:
    """Compiles grammars for the vocabulary of one model; one engine has one."""

    def __init__(self) -> None:
        self._known: tuple[Vocabulary, frozenset[int], LLTokenizer] | None = None

    def follow(
        self, guide: Guide, vocabulary: Vocabulary, eos: frozenset[int], ids: tuple[int, ...]
    ) -> GrammarMatcher:
        """Return a matcher that has consumed the answer so far.

        The first call for a large vocabulary takes a second.

        Raises:
            StepsRefused: the grammar does not fit the vocabulary, or the answer violates it.
        """
        tokenizer = self._tokenizer(vocabulary, eos)
        trail = GrammarMatcher(
            LLMatcher(tokenizer, _compiled(guide), log_level=0, limits=_limits())
        )
        for token_id in ids:
            trail.take(token_id)
        return trail

    def _tokenizer(self, vocabulary: Vocabulary, eos: frozenset[int]) -> LLTokenizer:
        known = self._known
        if known is None or known[0] is not vocabulary or known[1] != eos:
            if not all(0 <= token_id < len(vocabulary) for token_id in eos):
                raise StepsRefused("an EOS id is not in the vocabulary")
            wrapped = TokenizerWrapper(_Speller(vocabulary, min(eos)))
            known = (vocabulary, eos, LLTokenizer(wrapped, eos_token=sorted(eos)))
            self._known = known
        return known[2]


class _Speller:
    """A vocabulary for llguidance, with a tokenizer for text that a grammar forces.

    The model's own tokenizer would turn markup that a schema requires as text into control tokens.
    This one uses the longest pieces that are not control tokens.
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
        """Return ids whose text is ``data``; bytes without a piece are left out."""
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
    """The state of one answer in a grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._allowed: Allowed | None = None  # of the current position, once computed
        self._check()

    @property
    def over(self) -> bool:
        """True if no token may follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> Allowed:
        """Return the mask of ids that may follow. Raises ``StepsRefused``."""
        if self._allowed is None:
            self._allowed = _bits(self._matcher)
            self._check()
        return self._allowed

    @property
    def may_end(self) -> bool:
        """True if the answer may end here."""
        return self._matcher.is_accepting()

    def may_take(self, token_id: int, *, is_end: bool) -> bool:
        """Return True if a token may follow; cheaper than ``allowed``."""
        if is_end:
            return self.may_end
        return self._matcher.validate_tokens([token_id]) == 1

    def only(self) -> int | None:
        """Return the only token that may follow; None if several may, or the answer may end."""
        if self.over or self.may_end:
            return None
        found = np.flatnonzero(self.allowed())
        return int(found[0]) if len(found) == 1 else None

    def take(self, token_id: int) -> None:
        """Consume a token. Raises ``StepsRefused`` if it may not follow."""
        self._allowed = None
        if not self._matcher.consume_token(token_id):
            raise StepsRefused(
                f"the answer violates its grammar: {_message_of(self._matcher.get_error())}"
            )

    def _check(self) -> None:
        if self._matcher.is_error():
            raise StepsRefused(
                f"the grammar cannot be compiled: {_message_of(self._matcher.get_error())}"
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
    except Exception as exc:  # a request that no Router checked
        raise StepsRefused(f"the grammar cannot be compiled: {_message_of(exc)}") from exc


@cache
def _bytes() -> LLTokenizer:
    """Return a vocabulary of single bytes: validity does not depend on the model's."""
    return LLTokenizer("byte")


@cache
def _limits() -> LLParserLimits:
    """Return llguidance's defaults, with about 50 MB of states per answer."""
    return LLParserLimits(
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def _bits(matcher: LLMatcher) -> Allowed:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return bits.view(np.bool_)


def _message_of(reason: Any) -> str:
    """Return a library message as one line."""
    return " ".join(str(reason).split())
