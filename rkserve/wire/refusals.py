"""Parameters that would change the answer and that rkserve cannot honour, as one table.

Each has a test for values that ask for nothing (OpenAI's own defaults, mostly), because clients
send those without meaning anything by it. A parameter that is not in the table is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rkserve.errors import UnsupportedParameter
from rkserve.wire.fields import Fields, quoted

Harmless = Callable[[Any, Fields], bool]


def _never(_value: Any, _body: Fields) -> bool:
    return False


def _only(*harmless: Any) -> Harmless:
    # `is` for booleans: 0 == False and 1 == True, and a client that sends 0 means a number.
    return lambda value, _body: any(
        value is h if isinstance(h, bool) else value == h and not isinstance(value, bool)
        for h in harmless
    )


def _empty(value: Any, _body: Fields) -> bool:
    return value in ([], {}, "")


_BOTH: dict[str, Harmless] = {
    "typical_p": _only(1),
    "use_beam_search": _only(False),
    "stop_token_ids": _empty,
    "bad_words": _empty,
    "allowed_token_ids": _never,
    "logits_processors": _empty,
    "include_stop_str_in_output": _only(False),
    "skip_special_tokens": _only(True),
    "prompt_logprobs": _only(False),
    "truncate_prompt_tokens": _never,
    "guided_whitespace_pattern": _never,
    "grammar": _empty,
}

CHAT: dict[str, Harmless] = {
    **_BOTH,
    "modalities": _only(["text"]),
    "audio": _never,
    "web_search_options": _never,
    "chat_template": _never,
    "documents": _empty,
    "add_generation_prompt": _only(True),
    "continue_final_message": _only(False),
    "echo": _only(False),
}

COMPLETION: dict[str, Harmless] = {
    **_BOTH,
    "suffix": _empty,
    "prompt_embeds": _never,
}


def refuse(body: Fields, table: dict[str, Harmless]) -> None:
    """Raise for the first parameter that asks for something rkserve cannot do.

    Raises:
        UnsupportedParameter: its ``param`` names the parameter.
    """
    for name, harmless in table.items():
        value = body.get(name)
        if value is not None and not harmless(value, body):
            raise UnsupportedParameter(
                f"Unsupported parameter: '{name}' with the value {quoted(value)} would change the "
                "answer, and rkserve cannot honour it.",
                body.path(name),
            )
