"""Forms in which models call tools, by the names that a model folder uses."""

from __future__ import annotations

from rkserve.api.parsing.tools.base import ToolCallParser
from rkserve.api.parsing.tools.json_objects import Hermes, Llama
from rkserve.api.parsing.tools.mistral import Mistral, MistralArgs, Pythonic

FORMATS: dict[str, type[ToolCallParser]] = {
    "hermes": Hermes,
    "llama": Llama,
    "mistral": Mistral,
    "mistral-args": MistralArgs,
    "pythonic": Pythonic,
}
# What only the template of one form holds, the surest first.
_SIGNS = (
    ("<tool_call>", "hermes"),
    ("[ARGS]", "mistral-args"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama"),
    ('"parameters": dictionary of argument name', "llama"),
    ("ipython", "llama"),
)


def guess(template: str) -> str | None:
    """Return the form that a chat template teaches its model, or None."""
    return next((name for sign, name in _SIGNS if sign in template), None)
