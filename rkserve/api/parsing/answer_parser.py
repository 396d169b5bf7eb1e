"""The parser of one answer: reasoning with its options, text and tool calls.

Reasoning stands between markers such as ``<think>``. The parser is fed a board's deltas. When an
edit retracts text, the answer is parsed again, and the difference is returned.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from rkserve.api.json.fields import JsonObject, quoted
from rkserve.api.parsing.tools.base import (
    Part,
    ReasoningPart,
    Retraction,
    TextPart,
    ToolCallDelta,
    ToolCallParser,
    ToolCallStart,
    overlap,
)
from rkserve.core.errors import RequestError
from rkserve.core.messages import (
    Delta,
    Finished,
    FinishReason,
    Thinking,
    TokenOrigin,
    UpstreamDelta,
)

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_OFF = ("none", "minimal")  # the least effort of a model that can also answer without reasoning
_SWITCHES = ("enable_thinking", "thinking")  # as templates call it
# Variables that rkserve itself sets.
RESERVED = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("bos_token", "eos_token", "unk_token", "pad_token", "chat_template", "tokenize"),
)
MOST_TOKENS = 1_000_000


@dataclass(frozen=True)
class ReasoningOptions:
    """The reasoning options of a call. ``variables`` are for the template.

    With ``max_tokens`` of None the model folder decides, by ``effort``.
    """

    enabled: bool | None = None
    effort: str | None = None
    max_tokens: int | None = None
    variables: JsonObject = field(default_factory=dict)

    def given(self, default: bool | None) -> JsonObject:
        """Return the template's variables; ``default`` is the model folder's setting."""
        enabled = default if self.enabled is None else self.enabled
        switches = {} if enabled is None else dict.fromkeys(_SWITCHES, enabled)
        return {**switches, **self.variables}


NO_WISH = ReasoningOptions()


def read_wish(
    variables: JsonObject, enabled: bool | None, effort: str | None, most: int | None
) -> ReasoningOptions:
    """Return the options of the keys ``chat_template_kwargs``, ``enable_thinking``,
    ``reasoning_effort`` and ``max_reasoning_tokens``. The first one yields to the others.

    Raises ``RequestError``.
    """
    for name in variables:
        if name in RESERVED:
            path = f"chat_template_kwargs.{name}"
            raise RequestError(f"Invalid '{path}': rkserve itself sets {quoted(name)}.", path)
    if enabled is None and effort is not None:
        enabled = effort not in _OFF
    if effort is not None:
        variables = {**variables, "reasoning_effort": effort}
    if enabled is not None:
        variables = {**variables, **dict.fromkeys(_SWITCHES, enabled)}
    wanted = variables.get("enable_thinking", variables.get("thinking"))
    return ReasoningOptions(
        enabled=wanted if isinstance(wanted, bool) else None,
        effort=effort,
        max_tokens=most,
        variables=variables,
    )


class ReasoningSplitter:
    """Tells the block of thoughts at the beginning of an answer from the answer itself.

    The marks, and the line breaks next to them, belong to neither.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._open, self._close = thinking.open, thinking.close
        self._left = ""
        self._parts: list[Part] = []
        self._state: Callable[[], bool] = self._opened if thinking.begun else self._before

    @property
    def over(self) -> bool:
        """Return whether the reasoning has ended."""
        return self._state == self._answer

    def feed(self, text: str) -> list[Part]:
        """Take more of what the model says."""
        self._left += text
        while self._left and self._state():
            pass
        return self._taken()

    def end(self) -> list[Part]:
        """End the answer."""
        left, self._left = self._left, ""
        if self._state == self._inside:
            self._think(left.rstrip("\n"))
        elif self._state in (self._before, self._answer):
            self._add_text(left)
        return self._taken()

    def _before(self) -> bool:
        text = self._left.lstrip()
        if text.startswith(self._open):
            self._left, self._state = text[len(self._open) :], self._opened
            return True
        if self._open.startswith(text):
            return False
        self._state = self._answer
        return True

    def _opened(self) -> bool:
        text = self._left.lstrip()
        if self._open.startswith(text):  # some models repeat the template's marker
            return False
        again = text.startswith(self._open)
        # A blank before the first word is part of a prefill's reasoning.
        self._left = (text.removeprefix(self._open) if again else self._left).lstrip("\n")
        self._state = self._inside
        return True

    def _inside(self) -> bool:
        thought, found, rest = self._left.partition(self._close)
        if found:
            self._think(thought.rstrip("\n"))
            self._left, self._state = rest, self._behind
            return True
        # Line breaks before the mark are not known to be that before it comes.
        certain = thought[: len(thought) - overlap(thought, self._close)].rstrip("\n")
        self._think(certain)
        self._left = thought[len(certain) :]
        return False

    def _behind(self) -> bool:
        self._left = self._left.lstrip("\n")
        if self._left:
            self._state = self._answer
        return bool(self._left)

    def _answer(self) -> bool:
        self._add_text(self._left)
        self._left = ""
        return False

    def _think(self, text: str) -> None:
        if text:
            self._parts.append(ReasoningPart(text))

    def _add_text(self, text: str) -> None:
        if text:
            self._parts.append(TextPart(text))

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


TOOL_CALLS = "tool_calls"
_ALPHABET = string.ascii_letters + string.digits
# Mistral's templates refuse any other length.
_ID_CHARS = 9


@dataclass(frozen=True)
class ParserOptions:
    """Options of the parser for the answers to one call.

    ``form`` is None if no tool was offered: then nothing is a tool call. ``opening`` is the start
    of a call that was put into the prompt. Only the first ``most_calls`` calls count. With
    ``upstream`` answers may come from an upstream, which has parsed them.
    """

    thinking: Thinking | None = None
    form: type[ToolCallParser] | None = None
    names: frozenset[str] = frozenset()
    opening: str = ""
    most_calls: int | None = None
    upstream: bool = False

    @property
    def plain(self) -> bool:
        """Return whether an answer is text only."""
        return self.thinking is None and self.form is None and not self.upstream


PLAIN = ParserOptions()


@dataclass
class ToolCall:
    """One call of a tool; ``arguments`` are JSON text."""

    call_id: str
    name: str
    index: int
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """The arguments received so far."""
        return "".join(self.pieces)


class _Result:
    """The parts of an answer."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[ToolCall] = []

    def take(self, part: Part) -> None:
        """Add or retract a part."""
        match part:
            case TextPart(text=text):
                self.words.append(text)
            case ReasoningPart(text=text):
                self.thoughts.append(text)
            case ToolCallStart(name=name, index=index, call_id=call_id):
                self.calls.append(ToolCall(call_id, name, index))
            case ToolCallDelta(arguments=arguments):
                self.calls[-1].pieces.append(arguments)
            case Retraction(words=words, thoughts=thoughts, calls=calls):
                _cut(self.words, words)
                _cut(self.thoughts, thoughts)
                del self.calls[len(self.calls) - calls :]


class _Reader:
    """Parses an answer from its beginning: reasoning, then text and tool calls."""

    def __init__(self, reading: ParserOptions) -> None:
        self._thoughts = None if reading.thinking is None else ReasoningSplitter(reading.thinking)
        self._calls = None if reading.form is None else reading.form(reading.names)
        self._most = reading.most_calls
        self._count, self._muted = 0, False
        self.news = self._read(TextPart(reading.opening)) if reading.opening else []

    @property
    def settled(self) -> bool:
        """Return whether all that follows is text."""
        return self._calls is None and (self._thoughts is None or self._thoughts.over)

    def feed(self, text: str) -> list[Part]:
        """Add text, and return its parts."""
        parts: list[Part] = [TextPart(text)] if text else []
        if self._thoughts is not None:
            parts = self._thoughts.feed(text)
        return self._all(parts)

    def end(self) -> list[Part]:
        """End the answer, and return the remaining parts."""
        found = self._all([] if self._thoughts is None else self._thoughts.end())
        return found if self._calls is None else [*found, *self._counted(self._calls.end())]

    def _all(self, parts: Iterable[Part]) -> list[Part]:
        found, self.news = self.news, []
        return [*found, *(one for part in parts for one in self._read(part))]

    def _read(self, part: Part) -> list[Part]:
        if self._calls is None or not isinstance(part, TextPart):
            return [part]
        return self._counted(self._calls.feed(part.text))

    def _counted(self, parts: list[Part]) -> list[Part]:
        """Drop the calls beyond the limit."""
        if self._most is None:
            return parts
        return [part for part in parts if not self._is_mute(part)]

    def _is_mute(self, part: Part) -> bool:
        match part:
            case ToolCallStart():
                self._count += 1
                self._muted = self._most is not None and self._count > self._most
            case ToolCallDelta():
                pass
            case Retraction():
                muted, self._muted = self._muted, False
                self._count -= 1
                return muted
            case _:
                self._muted = False
        return self._muted


class AnswerParser:
    """The parser of one choice."""

    def __init__(self, reading: ParserOptions = PLAIN) -> None:
        self._reading = reading
        self._reader = _Reader(reading)
        self._settled = False  # the reader has nothing to look for in the rest of the answer
        self._raw: list[str] = []
        self._result = _Result()
        self._begun = 0  # calls, also void ones
        self._answered = 0  # calls whose results were put into this very answer
        self._parsed = False  # by an upstream, whose parts bypass the reader

    @property
    def words(self) -> str:
        """The text."""
        return "".join(self._result.words)

    @property
    def thoughts(self) -> str:
        """The reasoning before the text."""
        return "".join(self._result.thoughts)

    @property
    def calls(self) -> Sequence[ToolCall]:
        """The tool calls."""
        return self._result.calls

    def feed(self, delta: Delta) -> list[Part]:
        """Add a delta, and return its parts."""
        if not delta.token_ids and isinstance(delta, UpstreamDelta):
            self._parsed = True
            return self._taken(list(self._parts(delta)))
        if self._settled and not delta.retract and delta.splice is None:
            if not delta.text:
                return []
            self._raw.append(delta.text)
            self._result.words.append(delta.text)
            return [TextPart(delta.text)]
        if delta.retract:
            parts = self._reread("".join(self._raw)[: -delta.retract] + delta.text)
        else:
            self._raw.append(delta.text)
            parts = self._taken(self._reader.feed(delta.text))
        if delta.splice and any(one.kind is TokenOrigin.INJECTED for one in delta.splice.slots):
            self._answered = len(self._result.calls)
        self._settled = self._reader.settled
        return parts

    def end(self) -> list[Part]:
        """End the answer, and return the parts that were held back."""
        return [] if self._parsed else self._taken(self._reader.end())

    def _parts(self, delta: UpstreamDelta) -> Iterator[Part]:
        """Yield the parts of an upstream's delta, of its calls those within the limit."""
        most = self._reading.most_calls
        if delta.reasoning:
            yield ReasoningPart(delta.reasoning)
        if delta.text:
            yield TextPart(delta.text)
        for piece in delta.calls:
            if most is not None and piece.index >= most:
                continue
            if piece.name:
                yield ToolCallStart(piece.name, call_id=piece.call_id)
            if piece.arguments:
                yield ToolCallDelta(piece.arguments)

    def reason(self, finished: Finished) -> str:
        """Return OpenAI's finish reason."""
        calls = len(self._result.calls) > self._answered
        if calls and finished.reason is FinishReason.STOP:
            return TOOL_CALLS
        return finished.reason.value

    def _taken(self, parts: list[Part]) -> list[Part]:
        taken = []
        for part in parts:
            taken.append(self._named(part))
            self._result.take(taken[-1])
        return taken

    def _named(self, part: Part) -> Part:
        """Number the call of a part. No index is used twice, since clients merge calls by it."""
        if isinstance(part, ToolCallStart):
            self._begun += 1
            return ToolCallStart(part.name, self._begun - 1, part.call_id or new_call_id())
        if isinstance(part, ToolCallDelta):
            return ToolCallDelta(part.arguments, self._result.calls[-1].index)
        return part

    def _reread(self, raw: str) -> list[Part]:
        """Parse the answer again, and return the difference to the parts already returned."""
        self._raw = [raw]
        self._reader = _Reader(self._reading)
        before, after = self._result, _Result()
        for part in self._reader.feed(raw):
            after.take(part)
        parts: list[Part] = []
        words = _difference(before.words, after.words)
        thoughts = _difference(before.thoughts, after.thoughts)
        same = _same_calls(before.calls, after.calls)
        void = Retraction(words[0], thoughts[0], len(before.calls) - same)
        if void != Retraction():
            parts.append(void)
        parts += [ReasoningPart(thoughts[1])] if thoughts[1] else []
        parts += [TextPart(words[1])] if words[1] else []
        if same and (
            more := after.calls[same - 1].arguments[len(before.calls[same - 1].arguments) :]
        ):
            parts.append(ToolCallDelta(more))
        for call in after.calls[same:]:
            parts += [ToolCallStart(call.name), ToolCallDelta(call.arguments)]
        return self._taken(parts)


def new_call_id() -> str:
    """Return an ID that is unique in a conversation."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(_ID_CHARS))


def _cut(pieces: list[str], count: int) -> None:
    if count:
        text = "".join(pieces)
        pieces[:] = [text[: len(text) - count]]


def _difference(before: list[str], after: list[str]) -> tuple[int, str]:
    """Return the number of retracted characters, and their replacement."""
    old, new = "".join(before), "".join(after)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))
    return len(old) - same, new[same:]


def _same_calls(before: list[ToolCall], after: list[ToolCall]) -> int:
    """Return the number of unchanged calls; the last one may have more arguments."""
    same = 0
    for old, new in zip(before, after, strict=False):
        last = old is before[-1]
        grown = new.arguments.startswith(old.arguments) if last else False
        if old.name != new.name or not (grown or old.arguments == new.arguments):
            break
        same += 1
    return same
