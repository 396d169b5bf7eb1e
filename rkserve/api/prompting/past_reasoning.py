"""Thoughts of earlier turns, as a model's card wants them; it knows messages and no templates."""

from __future__ import annotations

from collections.abc import Iterable

from rkserve.api.prompting.conversation import Message

_THOUGHTS = "reasoning_content"


def with_thoughts(
    messages: Iterable[Message],
    history: str,
    marks: tuple[str, str] | None,
    *,
    prefill: bool = False,
) -> list[Message]:
    """Return the messages as the template gets them.

    With ``template`` that is as they came: most templates take out what they do not want, whether
    it comes as ``reasoning_content`` or within the words. ``strip`` takes out both, and ``keep``
    puts the thoughts before the words of their turn. The last message of a ``prefill`` is no
    earlier turn, so nothing is taken out of it.
    """
    found = list(messages)
    if history == "template" or marks is None:
        return found
    change = _kept if history == "keep" else _stripped
    changed = [
        change(message, marks) if message["role"] == "assistant" else message for message in found
    ]
    return [*changed[:-1], found[-1]] if prefill and history == "strip" else changed


def _kept(message: Message, marks: tuple[str, str]) -> Message:
    rest = {key: value for key, value in message.items() if key != _THOUGHTS}
    thoughts = message.get(_THOUGHTS)
    if thoughts is None:
        return rest
    begin, end = marks
    return {**rest, "content": f"{begin}\n{thoughts}\n{end}\n\n{message['content']}"}


def _stripped(message: Message, marks: tuple[str, str]) -> Message:
    rest = {key: value for key, value in message.items() if key != _THOUGHTS}
    begin, end = marks
    content: str = rest["content"]
    thoughts, found, words = content.partition(end)
    if found and thoughts.lstrip().startswith(begin):
        rest["content"] = words.lstrip("\n")
    return rest
