"""Tool call formats by the names that a model folder uses."""

from __future__ import annotations

from rkserve.api.parsing.tools.base import ToolCallParser
from rkserve.api.parsing.tools.formats import Hermes, Llama, Mistral, MistralArgs, Pythonic

FORMATS: dict[str, type[ToolCallParser]] = {
    "hermes": Hermes,
    "llama": Llama,
    "mistral": Mistral,
    "mistral-args": MistralArgs,
    "pythonic": Pythonic,
}
# Texts that occur in the templates of one format only, the most certain first.
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
    """Return the tool call format that a chat template describes, or None."""
    return next((name for sign, name in _SIGNS if sign in template), None)
