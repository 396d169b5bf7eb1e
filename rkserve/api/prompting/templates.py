"""A model's chat template in a sandbox.

The dialect is that of Hugging Face's ``apply_chat_template``, for which the templates in model
folders are written: its whitespace rules, its globals and its ``tojson``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rkserve.api.json.body import JsonObject, JsonText
from rkserve.api.json.limits import CHARS_PER_TOKEN
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
            source, self.markers = named_template(name)
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

    Raises:
        ContextOverflow: there are too many tokens even if each has the most characters.
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


class NamedTemplate(NamedTuple):
    """Jinja source and the markers that only the template may write."""

    source: str
    markers: tuple[str, ...]


_CHATML = """\
{%- set turns = messages -%}
{%- if tools -%}
{%- set system = 'You are a helpful assistant.' -%}
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}
{%- set turns = messages[1:] -%}
{%- endif -%}
{{- '<|im_start|>system\n' + system + '\n\n# Tools\n\nYou may call one or more functions to' -}}
{{- ' assist with the user query.\n\nYou are provided with function signatures within' -}}
{{- ' <tools></tools> XML tags:\n<tools>' -}}
{%- for tool in tools -%}
{{- '\n' + tool | tojson -}}
{%- endfor -%}
{{- '\n</tools>\n\nFor each function call, return a json object with function name and' -}}
{{- ' arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": ' -}}
{{- '<function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' -}}
{%- endif -%}
{%- for message in turns -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user' if loop.first or turns[loop.index0 - 1].role != 'tool' else '' -}}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{{- '<|im_end|>\n' if loop.last or turns[loop.index0 + 1].role != 'tool' else '' -}}
{%- else -%}
{{- '<|im_start|>' + message.role -}}
{{- '\n' + message.content if message.content or not message.tool_calls else '' -}}
{%- for call in message.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- endif -%}"""

_LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'ipython' if message.role == 'tool' else message.role -%}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' -}}
{{- message.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{%- endif -%}"""

# No system role of its own: its text opens the first user turn, as both vendors' templates do.
_MISTRAL = """\
{{- bos_token -}}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- set ns.system = ns.system + message.content + '\n\n' -%}
{%- elif message.role == 'user' -%}
{{- '[INST] ' + ns.system + message.content + ' [/INST]' -}}
{%- set ns.system = '' -%}
{%- elif message.role == 'assistant' -%}
{{- ' ' + message.content | trim + '</s>' -}}
{%- else -%}
{{- raise_exception('The template "mistral" knows no role ' + message.role) -}}
{%- endif -%}
{%- endfor -%}"""

_GEMMA = """\
{{- bos_token -}}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- set ns.system = ns.system + message.content + '\n\n' -%}
{%- elif message.role in ('user', 'assistant') -%}
{%- set role = 'model' if message.role == 'assistant' else 'user' -%}
{{- '<start_of_turn>' + role + '\n' + ns.system + message.content | trim + '<end_of_turn>\n' -}}
{%- set ns.system = '' -%}
{%- else -%}
{{- raise_exception('The template "gemma" knows no role ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<start_of_turn>model\n' -}}
{%- endif -%}"""

_PLAIN = """\
{%- for message in messages -%}
{{- message.role | capitalize + ': ' + message.content + '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- 'Assistant:' -}}
{%- endif -%}"""

NAMED = {
    "chatml": NamedTemplate(_CHATML, ("<|im_start|>", "<|im_end|>", "<|endoftext|>")),
    "llama3": NamedTemplate(
        _LLAMA3,
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|python_tag|>",
        ),
    ),
    "mistral": NamedTemplate(_MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]")),
    "gemma": NamedTemplate(_GEMMA, ("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>")),
    "plain": NamedTemplate(_PLAIN, ()),
}


def named_template(name: str) -> NamedTemplate:
    """Return a built-in template.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in NAMED:
        raise ConfigError(
            f"chat_template: there is no built-in template {name!r}. Use one of "
            f"{', '.join(sorted(NAMED))}."
        )
    return NAMED[name]
