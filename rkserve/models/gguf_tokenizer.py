"""The tokenizer of a GGUF file's metadata, as the contents of a tokenizer.json.

It makes the same token ids as llama.cpp does, which reads the same metadata: llama.cpp splits texts
by expressions of its own, one set for each name in ``tokenizer.ggml.pre``, and these are stated
here again. Vocabularies and names that are not here are refused, because a wrong split makes other
ids of a text without any error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

Metadata = Mapping[str, Any]
Json = dict[str, Any]

# llama.cpp's types of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BLANK = "\u2581"  # SentencePiece's character for a space


class UnknownTokenizer(ValueError):
    """A vocabulary of which no tokenizer can be made; the message names its kind."""


# -- how texts are split before byte pairs are merged ---------------------------------------------

_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r"!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _words(digits: str, *, rest: str = r"[\r\n]*", lines: str = _LINES) -> str:
    """Return the expression of GPT-4's family, in which ``digits`` are what counts as a number."""
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+{rest}"
        rf"|{lines}"
    )


def _cased(digits: str, ending: str) -> str:
    """Return the expression of GPT-4o's family, which splits words where small letters end."""
    any_case, small = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
    front = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{front}{any_case}*{small}+{ending}|{front}{any_case}+{small}*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
    )


_DEEPSEEK = (
    rf"[{_MARKS}][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
)
_LLAMA3 = (_words(r"\p{N}{1,3}"),)
_QWEN2 = (_words(r"\p{N}"),)
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}",
)
_DIGITS_GPT2 = (r"\p{N}", _GPT2)
_DEEPSEEK3 = (r"\p{N}{1,3}", _CJK, _DEEPSEEK)
_DEEPSEEK_CODER = (
    *(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
    r"\p{N}",
)
_GPT4O = (_cased(r"\p{N}{1,3}", f"{_CONTRACTION}?"),)
_TEKKEN = (_cased(r"\p{N}", ""),)
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
)
_SEED = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
    rf"|{_LINES}",
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_MINICPM5 = (r"\p{N}{1,3}", _words(r"\p{N}+"))


def _named() -> Iterator[tuple[str, tuple[str, ...]]]:
    families = {
        _LLAMA3: "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano "
        "dbrx smaug-bpe glm4 chatglm-bpe",
        _QWEN2: "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        _QWEN35: "qwen35",
        (_GPT2,): "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion "
        "granite-docling",
        _DIGITS_GPT2: "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        _DEEPSEEK3: "deepseek-v3 hunyuan-dense joyai-llm",
        _DEEPSEEK_CODER: "deepseek-coder",
        _GPT4O: "gpt-4o llama4 kanana2 minimax-m2",
        _TEKKEN: "tekken",
        _BAILING: "bailingmoe bailingmoe2 llada-moe",
        _SEED: "seed-coder",
        _DEFAULT: "default",
        _FALCON: "falcon",
        _MINICPM5: "minicpm5",
    }
    for expressions, names in families.items():
        yield from ((name, expressions) for name in names.split())


EXPRESSIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(dict(_named()))
# A word that is a token is taken whole, whatever the merges make of it.
_IGNORES_MERGES = frozenset(
    (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
        *("lfm2", "jina-v5-nano", "tekken", "minicpm5"),
    )
)
# A BOS is added although the metadata does not say so.
_ADDS_BOS = _IGNORES_MERGES - {"minicpm5"}


# -- the two kinds of vocabularies ----------------------------------------------------------------


def tokenizer_json(metadata: Metadata) -> Json:
    """Return the contents of a tokenizer.json, for the library ``tokenizers``.

    Raises:
        UnknownTokenizer: its kind, or its way of splitting texts, is not known, or it is damaged.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_pairs(metadata)
    if kind == "llama":
        return _sentence_pieces(metadata)
    if kind == "gemma4":
        return _merged_pieces(metadata)
    raise UnknownTokenizer(
        "the file has no tokenizer"
        if kind is None
        else f"a tokenizer of the kind {kind!r} (tokenizer.ggml.model) is not supported"
    )


def _byte_pairs(metadata: Metadata) -> Json:
    name = metadata.get("tokenizer.ggml.pre") or "default"
    if name not in EXPRESSIONS:
        raise UnknownTokenizer(
            f"the pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known, and with it how the "
            "model's texts are split"
        )
    vocabulary = _vocabulary(metadata)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        **_common(metadata, adds_bos=name in _ADDS_BOS),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*map(_split, EXPRESSIONS[name]), {**level, "use_regex": False}],
        },
        "decoder": {**level, "use_regex": False},
        "model": _model(
            vocabulary, _merges(metadata, vocabulary), ignore_merges=name in _IGNORES_MERGES
        ),
    }


def _merged_pieces(metadata: Metadata) -> Json:
    """Return the tokenizer of Gemma 4: merges as of byte pairs, on texts as of SentencePiece."""
    vocabulary = _vocabulary(metadata)
    return {
        **_common(metadata, adds_bos=True),
        "normalizer": _replaced(" ", BLANK),
        "pre_tokenizer": _split(r"[^\n]+|[\n]+"),
        "decoder": {
            "type": "Sequence",
            "decoders": [_replaced(BLANK, " "), {"type": "ByteFallback"}, {"type": "Fuse"}],
        },
        "model": _model(vocabulary, _merges(metadata, vocabulary), byte_fallback=True),
    }


def _sentence_pieces(metadata: Metadata) -> Json:
    vocabulary, scores = _vocabulary(metadata), metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) < len(vocabulary):
        raise UnknownTokenizer("the tokenizer of the file has too few tokenizer.ggml.scores")
    tokens = _tokens(metadata)
    kinds = _kinds(metadata, tokens)
    merged = [
        (float(-scores[number]), number)
        for number, kind in enumerate(kinds)
        if kind in (NORMAL, USER_DEFINED, UNUSED) and len(tokens[number]) > 1
    ]
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    before = [{"type": "Prepend", "prepend": BLANK}] if prefix else []
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    return {
        **_common(metadata, adds_bos=True),
        "normalizer": {"type": "Sequence", "normalizers": [*before, _replaced(" ", BLANK)]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                *(_replaced(BLANK, " "), {"type": "ByteFallback"}, {"type": "Fuse"}),
                *([strip] if prefix else []),
            ],
        },
        "model": _model(
            vocabulary,
            [pair for _, number in sorted(merged) for pair in _halves(tokens[number], vocabulary)],
            unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _split(expression: str) -> Json:
    pattern = {"Regex": expression}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def _replaced(text: str, by: str) -> Json:
    return {"type": "Replace", "pattern": {"String": text}, "content": by}


def _merges(metadata: Metadata, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = [
        pair
        for pair in map(_pair, metadata.get("tokenizer.ggml.merges") or ())
        if pair[0] in vocabulary and pair[1] in vocabulary and "".join(pair) in vocabulary
    ]
    if not merges:
        raise UnknownTokenizer("the tokenizer of the file has no merges (tokenizer.ggml.merges)")
    return merges


def _model(vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], **more: Any) -> Json:
    return {
        "type": "BPE",
        **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix"), None),
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
        "end_of_word_suffix": None,
        **more,
        "vocab": vocabulary,
        "merges": merges,
    }


def _halves(token: str, vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of tokens that make one, whose merge llama.cpp takes by the token's score."""
    for at in range(1, len(token)):
        if token[:at] in vocabulary and token[at:] in vocabulary:
            yield token[:at], token[at:]


def _pair(merge: str) -> tuple[str, str]:
    # A token may begin with the blank that separates them.
    first, _, second = merge[1:].partition(" ")
    return merge[:1] + first, second


def _tokens(metadata: Metadata) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(one, str) for one in tokens):
        raise UnknownTokenizer("the tokenizer of the file has no list of tokens")
    # As llama.cpp calls them.
    return [one or f"[EMPTY_{number}]" for number, one in enumerate(tokens)]


def _kinds(metadata: Metadata, tokens: Sequence[str]) -> list[int]:
    kinds = metadata.get("tokenizer.ggml.token_type")
    return list(kinds) if kinds else [NORMAL] * len(tokens)


def _vocabulary(metadata: Metadata) -> dict[str, int]:
    tokens = _tokens(metadata)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise UnknownTokenizer("the tokenizer of the file has a token twice")
    return vocabulary


def _common(metadata: Metadata, *, adds_bos: bool) -> Json:
    """Return what both kinds have: the tokens that texts are searched for first, BOS and EOS."""
    tokens, strips = _tokens(metadata), _strips(metadata)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": tokens[number],
                **dict.fromkeys(("single_word", "lstrip", "normalized"), False),
                "rstrip": strips and tokens[number] not in _NOT_STRIPPING,
                "special": kind != USER_DEFINED,
            }
            for number, kind in enumerate(_attributes(metadata, tokens))
            if kind in (CONTROL, UNKNOWN, USER_DEFINED)
        ],
        "post_processor": _ends(metadata, tokens, adds_bos=adds_bos),
    }


def _ends(metadata: Metadata, tokens: Sequence[str], *, adds_bos: bool) -> Json | None:
    """Return the template that adds BOS and EOS to a whole text; None where neither is added."""
    wanted = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", adds_bos),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ids = {
        end: metadata.get(f"tokenizer.ggml.{end}_token_id", default)
        for end, default in _DEFAULT_ENDS[metadata["tokenizer.ggml.model"]].items()
        if wanted[end]
    }
    for end, number in ids.items():
        if type(number) is not int or not 0 <= number < len(tokens):
            raise UnknownTokenizer(
                f"tokenizer.ggml.add_{end}_token is set, and tokenizer.ggml.{end}_token_id is not "
                "one of its tokens"
            )
    if not ids:
        return None

    def special(end: str) -> list[Json]:
        return [{"SpecialToken": {"id": tokens[ids[end]], "type_id": 0}}] if end in ids else []

    def sequence(name: str) -> list[Json]:
        return [*special("bos"), {"Sequence": {"id": name, "type_id": 0}}, *special("eos")]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A"),
        "pair": [*sequence("A"), *sequence("B")],
        "special_tokens": {
            tokens[number]: {"id": tokens[number], "ids": [number], "tokens": [tokens[number]]}
            for number in ids.values()
        },
    }


# Ids that llama.cpp takes where the metadata names none.
_DEFAULT_ENDS: Mapping[str, Mapping[str, int | None]] = MappingProxyType(
    {
        "llama": {"bos": 1, "eos": 2},
        "gpt2": {"bos": 11, "eos": 11},
        "gemma4": {"bos": None, "eos": None},
    }
)

# -- tokens with a meaning ------------------------------------------------------------------------

# Tokens that end an answer in llama.cpp by their texts, since metadata names one or two of several.
_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "</s>"),
        *("<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "<|flush|>", "<|tool_response>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<turn|>", "<end_of_turn>"),
        *("<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    )
)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Of texts with a gap to fill: these three end an answer as well.
_FILLERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "fim_pad_token_id": frozenset(
            ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        ),
        "fim_rep_token_id": frozenset(
            ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")
        ),
        "fim_sep_token_id": frozenset(("<|file_sep|>",)),
    }
)
# Parts of an answer in the form of gpt-oss, which llama.cpp shows as text.
_SHOWN = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))
# A token, its type where the others are there, too, and is none of the ends then.
_EXCEPTIONS = (
    ("<|end|>", USER_DEFINED, frozenset(("<|return|>", "<|call|>"))),
    ("<|end|>", USER_DEFINED, frozenset(("<|flush|>", "<|call|>"))),
    ("<|end|>", USER_DEFINED, frozenset(("<|flush|>", "<|calls|>"))),
    ("</s>", NORMAL, frozenset(("<|tool_response>",))),
)
# Control tokens of models with these names take the blanks behind them, but for three.
_STRIPPING = ("phi-3", "phi3")
_NOT_STRIPPING = frozenset(("<unk>", "<s>", "<|endoftext|>"))


def _attributes(metadata: Metadata, tokens: Sequence[str]) -> list[int]:
    """Return the tokens' types as llama.cpp corrects them by their texts."""
    corrected = {
        **dict.fromkeys(_ENDS, CONTROL),
        **dict.fromkeys(_SHOWN, USER_DEFINED),
        **_left_out(tokens),
    }
    kinds = _kinds(metadata, tokens)
    return [corrected.get(token, kind) for token, kind in zip(tokens, kinds, strict=False)]


def _left_out(tokens: Sequence[str]) -> dict[str, int]:
    """Return the types of tokens that are no ends, because the vocabulary has certain others."""
    there = _ENDS.intersection(tokens)
    return {token: kind for token, kind, others in _EXCEPTIONS if others <= there}


def _strips(metadata: Metadata) -> bool:
    name = str(metadata.get("general.name", "")).lower()
    return any(one in name for one in _STRIPPING)


def eos_token_ids(metadata: Metadata) -> tuple[int, ...]:
    """Return the tokens that end an answer: first the metadata's, then those by their texts."""
    tokens = _tokens(metadata)
    ids = [_id(metadata, key, tokens) for key in _END_KEYS]
    ids += [number for number, token in enumerate(tokens) if token in _ENDS]
    for key, texts in _FILLERS.items():
        named = _id(metadata, key, tokens)
        by_text = [number for number, token in enumerate(tokens) if token in texts]
        ids += by_text if named is None else [named]
    left_out = _left_out(tokens)
    found = dict.fromkeys(one for one in ids if one is not None)
    return tuple(one for one in found if tokens[one] not in left_out)


def _id(metadata: Metadata, key: str, tokens: Sequence[str]) -> int | None:
    found = metadata.get(f"tokenizer.ggml.{key}")
    return found if type(found) is int and 0 <= found < len(tokens) else None
