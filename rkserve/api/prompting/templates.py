"""A model's chat template in a sandbox.

The dialect is that of Hugging Face's ``apply_chat_template``, for which the templates in model
folders are written: its whitespace rules, its globals and its ``tojson``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rkserve.api.json.fields import CHARS_PER_TOKEN, JsonObject, JsonText
from rkserve.api.prompting.conversation import Message
from rkserve.api.prompting.tokenizer import VERBATIM
from rkserve.core.errors import ConfigError, ContextOverflow, RequestError
from rkserve.models.folder import ModelFolder

Clock = Callable[[], datetime]

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def local_time() -> datetime:
    """Return the local time, for ``strftime_now``."""
    return datetime.now().astimezone()


class ChatTemplate:
    """The chat template of one model folder, and its separate template for tools if it has one.

    A name in rkserve.yaml takes precedence over the folder's own template. ``markers`` are those of
    a built-in template, for models without a tokenizer.
    """

    def __init__(
        self,
        folder: ModelFolder,
        now: Clock = local_time,
        chars_per_token: int = CHARS_PER_TOKEN,
    ) -> None:
        self._chars_per_token = chars_per_token
        self.markers: tuple[str, ...] = ()
        source, name = folder.chat_template, folder.settings.chat_template
        tool_source = folder.tool_template
        if name is not None:
            source, self.markers = named_template(name), NAMED[name]
            tool_source = None
        self._model = folder.id
        self.tokens = _special_tokens(folder)
        self.source = source or ""
        self.tool_source = tool_source or self.source
        self._template = None if source is None else _compile(source, folder, now)
        self._tool_template = self._template
        if tool_source is not None:
            self._tool_template = _compile(tool_source, folder, now)

    def render(
        self,
        messages: Sequence[Message],
        context_len: int,
        *,
        answer: bool = True,
        tools: Sequence[JsonObject] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation; ``answer`` adds the header of the answer to it.

        ``variables`` are for the template, beside those that rkserve sets.

        Raises:
            RequestError: the model has no template, or it refuses these messages.
            ContextOverflow: the text is too long for any tokenization to fit.
        """
        template = self._tool_template if tools else self._template
        if template is None:
            raise RequestError(
                f"The model '{self._model}' has no chat template. Use /v1/completions, or name a "
                "built-in one as 'chat_template' in the rkserve.yaml of its folder.",
                "messages",
            )
        try:
            return self._joined(
                template,
                context_len,
                {
                    **(variables or {}),
                    "messages": list(messages),
                    "tools": list(tools) or None,
                    "documents": None,
                    "add_generation_prompt": answer,
                    **self.tokens,
                },
            )
        except RequestError:
            raise
        except Exception as exc:  # a template is foreign code and may raise anything
            raise RequestError(
                f"The chat template of '{self._model}' refuses these messages: {exc}", "messages"
            ) from exc

    def _joined(
        self, template: jinja2.Template, context_len: int, variables: Mapping[str, Any]
    ) -> str:
        parts, size = [], 0
        for part in template.generate(
            variables
        ):  # piece by piece, so that a runaway template is stopped
            parts.append(part)
            size += len(part)
            hold_to_context(size, context_len, "messages", self._chars_per_token)
        return "".join(parts)


def hold_to_context(
    characters: int, context_len: int, param: str, chars_per_token: int = CHARS_PER_TOKEN
) -> None:
    """Refuse a text that cannot fit before it costs time and memory.

    Raises ``ContextOverflow``: there are too many tokens even if each has the most characters.
    """
    fewest = characters // chars_per_token
    if fewest >= context_len:
        raise ContextOverflow(fewest, context_len, param, at_least=True)


def _compile(source: str, folder: ModelFolder, now: Clock) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        autoescape=False,  # the output is a prompt, not HTML
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as exc:
        raise ConfigError(
            f"The chat template of {folder.path} is not valid Jinja: {exc} (line {exc.lineno})"
        ) from exc


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's text for training; here its body is all of it."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, and models were not trained on that.
    as_it_came: list[str] = []
    if not (ensure_ascii or indent or separators or sort_keys):
        value = _with_stand_ins(value, as_it_came)
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    for index, given in enumerate(as_it_came):
        text = text.replace(f'"{VERBATIM}{index}{VERBATIM}"', given, 1)
    return text


def _with_stand_ins(value: Any, as_it_came: list[str]) -> Any:
    """Replace objects whose text is known: arguments of a call are printed as the model wrote
    them, so that the conversation is found in the KV cache again.
    """
    if isinstance(value, JsonText):
        as_it_came.append(value.text)
        return f"{VERBATIM}{len(as_it_came) - 1}{VERBATIM}"
    if isinstance(value, dict):
        return {key: _with_stand_ins(item, as_it_came) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_stand_ins(item, as_it_came) for item in value]
    return value


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _special_tokens(folder: ModelFolder) -> dict[str, str]:
    """The texts of bos_token and its like; empty where the model has none."""
    return {name: _token_text(folder.tokenizer_config.get(name)) for name in _TOKEN_NAMES}


def _token_text(entry: object) -> str:
    if isinstance(entry, dict):  # the long form of older files
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""


# The files of the built-in templates are beside this module. These markers only they may write.
NAMED: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "llama3": (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    ),
    "mistral": ("<s>", "</s>", "[INST]", "[/INST]"),
    "gemma": ("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>"),
    "plain": (),
}


def named_template(name: str) -> str:
    """Return the source of a built-in template. Raises ``ConfigError``: there is none."""
    if name not in NAMED:
        raise ConfigError(
            f"chat_template: there is no built-in template {name!r}. Use one of "
            f"{', '.join(sorted(NAMED))}."
        )
    file = Path(__file__).with_name("named") / f"{name}.jinja"
    return file.read_text(encoding="utf-8").removesuffix("\n")
