"""Built-in chat templates for model folders without one, by the name used in rkserve.yaml.

Each is written from the published prompt format of its family. Only ``chatml`` shows tools, as
Qwen2.5 does; those of other families need the model's own template.
"""

from __future__ import annotations

from typing import NamedTuple

from rkserve.core.errors import ConfigError


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
