"""Recognition of a model's properties from its file, its names and its tokenizer's files.

The format of real ``.rkllm`` files is not published, so names are the main source; each property
has the source that it was taken from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rkserve.api.parsing.tools.formats import guess
from rkserve.api.prompting.templates import ChatTemplate
from rkserve.api.prompting.tokenizer import Tokenizer
from rkserve.core.errors import ConfigError, RequestError
from rkserve.doctor.file_rules import MISREADS_EOS
from rkserve.doctor.known import dtype_in, platform_in, toolkit_in
from rkserve.models.files import UnfitWeights, WeightsMetadata, weights_facts
from rkserve.models.folder import ModelFolder
from rkserve.models.settings import CONTEXT_MAX, CONTEXT_STEP, FAMILIES, SamplingDefaults
from rkserve.native.binding.releases import RELEASES
from rkserve.verdicts.hardware import SOCS, soc_of

SMALLEST_BYTES = 1_000_000
TOOLKIT_CONTEXT = 4096  # the toolkit's own default of max_context
OLDEST_TOOLKIT = (1, 2, 0)
ANY_SOC = "any"
_VISION_VALUES = ("size", "tokens", "tags")
REASONING_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)
# Tokens that end a turn in chat templates, beside a tokenizer's own end token.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|return|>")
# Families of models, by name, whose template is one of the built-in ones.
BUILT_IN = (
    (re.compile(r"llama[-_ ]?3", re.IGNORECASE), "llama3"),
    (re.compile(r"gemma[-_ ]?[123]", re.IGNORECASE), "gemma"),
    (re.compile(r"mi[sx]tral", re.IGNORECASE), "mistral"),
    (re.compile(r"qwen|internlm|smollm|minicpm|yi-", re.IGNORECASE), "chatml"),
)
_CONTEXT = re.compile(
    r"(?<![a-z0-9.])(?:(?:ctx|context)[-_]?(\d{1,6})(k?)|(\d{1,2})(k)|(1024|2048|4096|8192|16384)())"
    r"(?![a-z0-9.])"
)
_BUILD = re.compile(
    r"(?<![a-z0-9])(?:rk35\d\d(?:s\d?)?|rv11\d\d[a-z]?|w\d{1,2}a\d{1,2}(?:[-_]g\d{2,4})?"
    r"|v?1\.[0-9]\.[0-9]{1,2}(?:b\d)?|opt[-_]?[01]|hybrid[-_](?:ratio|rate)[-_]\d(?:\.\d+)?"
    r"|(?:ctx|context)[-_]?\d{1,6}k?|(?:1024|2048|4096|8192|16384)|rkllm)(?![a-z0-9])",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Found:
    """A value, and its source; ``assumed`` if nothing states it."""

    value: Any
    source: str
    assumed: bool = False


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """The properties of a converted model; None is unknown."""

    size_bytes: int
    platform: Found | None
    dtype: Found | None
    toolkit: Found | None
    max_context: Found | None
    simulated: bool = False


Named = Sequence[tuple[str, str]]


def read_traits(weights: Path, names: Named) -> ModelTraits:
    """Return a model's properties from its file and from ``names``: pairs of a name and its source.

    Raises:
        ConfigError: the file certainly is no model for RKLLM, or cannot be read.
    """
    try:
        header = weights_facts(weights)
    except UnfitWeights as exc:
        raise ConfigError(f"{weights} is no model for RKLLM: {exc}.") from exc
    except OSError as exc:
        raise ConfigError(f"{weights} cannot be read: {exc.strerror or exc}") from exc
    if not header.simulated and header.size_bytes < SMALLEST_BYTES:
        raise ConfigError(
            f"{weights} has {header.size_bytes} bytes, and no model has fewer than "
            f"{SMALLEST_BYTES}: it was cut off"
        )
    return traits_of(header, names)


def traits_of(header: WeightsMetadata, names: Named) -> ModelTraits:
    """Return a model's properties by its header, and where that is silent by its names."""

    def either(stated: Any, read: Callable[[str], Any]) -> Found | None:
        if stated is not None:
            return Found(stated, "the file's header")
        found = (Found(value, source) for name, source in names if (value := read(name)))
        return next(found, None)

    return ModelTraits(
        header.size_bytes,
        either(header.platform, platform_in),
        either(header.dtype, dtype_in),
        either(header.toolkit, toolkit_in),
        either(header.max_context, context_in),
        header.simulated,
    )


def context_in(name: str) -> int | None:
    """Return the context that a file's name states, for example by ``ctx16384`` or ``16k``.

    RKLLM's limit is 16384: more is the context of the model before its conversion.
    """
    for found in _CONTEXT.finditer(name.lower()):
        digits, k = (one for one in found.groups() if one is not None)
        value = int(digits) * (1024 if k else 1)
        if CONTEXT_STEP <= value <= CONTEXT_MAX and value % CONTEXT_STEP == 0:
            return value
    return None


def plain_name(name: str) -> str:
    """Return a model's name without SoC, quantization, toolkit and context, fit for an id."""
    kept = _BUILD.sub("", name)
    kept = re.sub(r"[^A-Za-z0-9._-]+", "-", kept)
    kept = re.sub(r"[-_]{2,}|[-_.]+$", lambda found: "-" if found[0][1:] else "", kept)
    return kept.strip("-_.")[:128] or "model"


def releases_of(toolkit: str | None) -> tuple[str, ...]:
    """Return the accepted releases that run models of a toolkit; all for an unknown one.

    The vendor supports no release that is older than the toolkit. Models from before 1.2 do not
    load in 1.2 and later.
    """
    if toolkit is None:
        return tuple(RELEASES)
    version = _version(toolkit)
    if version < OLDEST_TOOLKIT:
        return ()
    return tuple(release for release in RELEASES if _version(release) >= version)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def warnings(traits: ModelTraits) -> Iterator[str]:
    """Yield the reasons why a model may not run on a board."""
    accepted = ", ".join(RELEASES)
    if traits.platform is None:
        yield (
            "the SoC is unknown, and a wrong one shows when a board loads the model; the file's "
            f"name may state it ({', '.join(soc.name for soc in SOCS)})"
        )
    elif traits.platform.value != ANY_SOC:
        yield from _on_soc(traits.platform.value, traits.dtype)
    if traits.toolkit is None:
        yield (
            "the toolkit's version is unknown, and a library that is older than it may refuse the "
            f"model; accepted releases are {accepted}"
        )
    elif not releases_of(traits.toolkit.value):
        oldest = ".".join(map(str, OLDEST_TOOLKIT))
        yield (
            f"no accepted release runs a model of toolkit {traits.toolkit.value} (accepted are "
            f"{accepted}): convert it again with a toolkit from {oldest} on"
        )


def _on_soc(platform: str, dtype: Found | None) -> Iterator[str]:
    soc = soc_of(platform)
    if soc is None:
        names = ", ".join(one.name for one in SOCS)
        yield f"it was converted for {platform}; rkserve knows {names}"
    elif dtype is not None and not dtype.value.lower().startswith(soc.dtypes):
        yield (
            f"it is quantized as {dtype.value}; published models for {soc.name} are "
            f"{' or '.join(soc.dtypes)}"
        )


def misreads_end(traits: ModelTraits) -> bool:
    """Return True if some release that runs the model may misread its end token."""
    releases = releases_of(traits.toolkit.value if traits.toolkit is not None else None)
    older = traits.toolkit is None or _version(traits.toolkit.value) < MISREADS_EOS
    return older and any(_version(release) >= MISREADS_EOS for release in releases)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty for a missing one. Raises ``ConfigError``."""
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{file} is not valid JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return found


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The contents of a model's tokenizer and configuration files; empty for missing ones.

    ``template_problem`` is the reason why the template refuses a conversation of one message.
    """

    template: str
    template_problem: str
    tokenizer: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    generation: Mapping[str, Any]
    config: Mapping[str, Any]


def read_files(folder: ModelFolder) -> TokenizerFiles:
    """Read and try a folder's files.

    Raises:
        ConfigError: one is damaged, or the tokenizer or the template cannot be loaded.
    """
    path, problem = folder.path, ""
    try:
        if folder.tokenizer_file is not None:
            Tokenizer(folder.tokenizer_file)
        template = ChatTemplate(folder)
        if template.source:
            template.render([{"role": "user", "content": "Hello"}], CONTEXT_MAX)
    except RequestError as exc:
        problem = str(exc)
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the files of {path} cannot be read: {exc}") from exc
    return TokenizerFiles(
        template.source,
        problem,
        read_json(path / "tokenizer.json"),
        folder.tokenizer_config,
        read_json(path / "generation_config.json"),
        read_json(path / "config.json"),
    )


def settings_of(
    traits: ModelTraits, files: TokenizerFiles, name: str, encoder: str | None = None
) -> dict[str, Found]:
    """Return the settings of a model that its files state or suggest, as rkserve.yaml has them.

    ``encoder`` is the file of its image encoder.
    """
    found = {"context_length": _context(traits, files.config)}
    ends = list(end_tokens(files))
    if ends:
        found["eos_token_ids"] = Found(
            [token for token, _ in ends], ", ".join(dict.fromkeys(source for _, source in ends))
        )
    form = guess(files.template)
    if form is not None:
        found["tool_format"] = Found(form, "the chat template")
    added = {str(one.get("content")) for one in _added(files.tokenizer)}
    for begin, end in REASONING_MARKS:
        # Llama's templates mention no marks, but tokenizers of its fine-tuned models have them.
        shown = begin in files.template or end in files.template
        if shown or {begin, end} <= added:
            source = "the chat template" if shown else "tokenizer.json"
            found["thinking"] = Found({"marks": [begin, end]}, source)
            break
    found.update(_dimensions(files.config))
    sampling = _sampling(files.generation)
    if sampling:
        found["sampling"] = Found(sampling, "generation_config.json")
    if re.search(r"(?<![a-z])embed", name.lower()):
        found["embedding"] = Found({"pooling": "last"}, "the name says embedding", assumed=True)
    elif re.search(r"(?<![a-z])rerank", name.lower()):
        found["rerank"] = Found({}, "the name says reranker", assumed=True)
    family = _vision_family(name) if encoder is not None else None
    if family is not None:
        found["vision"] = Found({"family": family, "encoder": encoder}, "the family's name", True)
    return found


def _vision_family(name: str) -> str | None:
    """Return the family of a vision model whose image size, tokens and tags are all published."""
    known = (family for family, values in FAMILIES.items() if len(values) == len(_VISION_VALUES))
    plain = re.sub(r"[-_ ]", "", name.lower())
    return next((family for family in known if family.replace("-", "") in plain), None)


def _context(traits: ModelTraits, config: Mapping[str, Any]) -> Found:
    stated, trained = traits.max_context, _text_config(config).get("max_position_embeddings")
    if stated is not None:
        return stated
    if type(trained) is int and CONTEXT_STEP <= trained < TOOLKIT_CONTEXT:
        length = trained - trained % CONTEXT_STEP
        return Found(length, "max_position_embeddings of config.json", assumed=True)
    return Found(TOOLKIT_CONTEXT, "the default of rkllm-toolkit", assumed=True)


def end_tokens(files: TokenizerFiles) -> Iterator[tuple[int, str]]:
    """Yield the ids of the tokens that end an answer, each once, with the file that names it."""
    seen: set[int] = set()
    for token, source in _ends(files):
        if type(token) is int and token >= 0 and token not in seen:
            seen.add(token)
            yield token, source


def _ends(files: TokenizerFiles) -> Iterator[tuple[Any, str]]:
    ids = {str(one.get("content")): one.get("id") for one in _added(files.tokenizer)}
    end = files.tokenizer_config.get("eos_token")
    yield (
        ids.get(str(end.get("content") if isinstance(end, dict) else end)),
        "tokenizer_config.json",
    )
    for source, given in (
        ("generation_config.json", files.generation.get("eos_token_id")),
        ("config.json", _text_config(files.config).get("eos_token_id")),
    ):
        for one in given if isinstance(given, list) else [given]:
            yield one, source
    for text in TURN_ENDS:
        if text in files.template:
            yield ids.get(text), "the chat template"


def _added(tokenizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    added = tokenizer.get("added_tokens")
    return [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part about the language model; that of a vision model is a block of its own."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _dimensions(config: Mapping[str, Any]) -> Iterator[tuple[str, Found]]:
    text = _text_config(config)

    def number(key: str) -> int:
        value = text.get(key)
        return value if type(value) is int and 0 < value < 1 << 24 else 0

    heads = number("num_attention_heads")
    size = number("hidden_size")
    if size:
        yield "hidden_size", Found(size, "config.json")
    head = number("head_dim") or (size // heads if heads else 0)
    row = number("num_hidden_layers") * (number("num_key_value_heads") or heads) * head
    if row:
        yield "kv_bytes_per_token", Found(4 * row, "config.json")


def _sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling that a model's authors recommend, where RKLLM can have it."""
    if generation.get("do_sample") is not True:
        return {}
    found: dict[str, float] = {}
    for ours, theirs in (
        *(("temperature", "temperature"), ("top_p", "top_p"), ("top_k", "top_k")),
        ("repeat_penalty", "repetition_penalty"),
    ):
        value = generation.get(theirs)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                SamplingDefaults.model_validate({ours: value})
            except ValueError:  # out of the range of RKLLM
                continue
            found[ours] = value
    return found


def template_by_name(name: str) -> str | None:
    """Return the built-in chat template of a model's family, by its name."""
    return next((template for family, template in BUILT_IN if family.search(name)), None)
