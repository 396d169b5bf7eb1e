"""OpenAI's answers, streamed or whole.

One object belongs to one call; ``BaseAnswer`` counts its tokens. Streams have events for pauses and
for text that an edit retracted after it was sent; a whole answer has the final text only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from typing_extensions import NotRequired, TypedDict

from rkserve.api.common import output
from rkserve.api.common.answer import (
    AnswerOrigin,
    AnyCall,
    Dialect,
    DialectAnswer,
    FinishedBy,
    TimingsAnswer,
    UsageAnswer,
    WeightSpans,
    pause_status,
    retracted,
    timings_of,
)
from rkserve.api.common.calls import ChatCall, CompletionCall, parse_chat, parse_completion
from rkserve.api.common.logprobs import (
    ChatLogprobs,
    Chosen,
    CompletionLog,
    CompletionLogprobLists,
    TokenTexts,
    chat_logprobs,
    of_prompt,
)
from rkserve.api.json.fields import JsonObject
from rkserve.api.json.schemas import Count
from rkserve.api.parsing.answer_parser import TOOL_CALLS
from rkserve.api.parsing.tools.base import (
    Part,
    ReasoningPart,
    Retraction,
    TextPart,
    ToolCallDelta,
    ToolCallStart,
)
from rkserve.core.messages import Delta, Finished, Paused
from rkserve.core.run_params import Scored


class _Head(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


class _Whole(_Head):
    timings: TimingsAnswer
    weight_version: str
    usage: UsageAnswer


class _Chunk(_Head):
    usage: NotRequired[UsageAnswer | None]
    rkserve: NotRequired[JsonObject]
    prompt_token_ids: NotRequired[list[int]]
    timings: NotRequired[TimingsAnswer]
    weight_version: NotRequired[str]
    error: NotRequired[JsonObject]


class _Choice(WeightSpans):
    index: Count
    token_ids: NotRequired[list[int]]


class CalledFunction(TypedDict):
    """A call of a function; its arguments are JSON text."""

    name: str
    arguments: str


class CalledTool(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    """The message of an answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    function_call: NotRequired[CalledFunction]
    tool_calls: NotRequired[list[CalledTool]]


class ChatChoice(_Choice):
    """One of the answers to a conversation."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishedBy


class ChatCompletion(_Whole):
    """The answer to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: NotRequired[list[int]]


class MessageDelta(TypedDict):
    """More of a message."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    refusal: NotRequired[None]
    reasoning_content: NotRequired[str]
    function_call: NotRequired[JsonObject]
    tool_calls: NotRequired[list[JsonObject]]


class ChatChunkChoice(_Choice):
    """More of one of the answers."""

    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishedBy | None


class ChatChunk(_Chunk):
    """An event of a streamed chat. The tests hold it to what the frames below are made of."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class TextChoice(_Choice):
    """One of the answers to the prompts."""

    text: str
    logprobs: CompletionLogprobLists | None
    finish_reason: FinishedBy
    prompt_token_ids: NotRequired[list[int]]


class TextChunkChoice(_Choice):
    """More of one of the answers."""

    text: str
    logprobs: CompletionLogprobLists | None
    finish_reason: FinishedBy | None
    prompt_token_ids: NotRequired[list[int]]


class Completion(_Whole):
    """The answer to prompts."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class CompletionChunk(_Chunk):
    """An event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]


class _Answer(DialectAnswer):
    """Base of chat and completion answers."""

    _whole_object: ClassVar[str]
    _chunk_object: ClassVar[str]

    def __init__(self, call: AnyCall, answer_id: str, created: int, stamp: AnswerOrigin) -> None:
        super().__init__(call, answer_id, created, stamp)
        self._fingerprint = stamp.fingerprint(stamp.accepted)
        self._call = call
        self._include_usage = call.include_usage
        self._lexicon, self._top = stamp.lexicon, call.steps.top_logprobs
        self._lists_tokens = self._top is not None or call.token_ids  # of single tokens
        self._begun: set[int] = set()  # choices of which a chunk was sent
        self._frames: dict[tuple[int, str], output.EventTemplate] = {}

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the chunks of a delta; nothing if it neither adds nor retracts text.

        Log-probabilities and IDs are sent in the chunk of their text, also if it was held back.
        """
        delta = self._taken(index, delta)
        if delta.retract:
            piece = self._piece(index, delta.text, None)
            return self._sent(index, piece, {"rkserve": {"retract": delta.retract}})
        return self._filled(index, "content", delta.text) if delta.text else b""

    def _token_fields(self, index: int) -> JsonObject:
        """Return the requested facts about the tokens of a whole choice."""
        if not self._lists_tokens:
            return {}
        return self._of_prompt_ids(index) | self._of_tokens(index, self._tokens[index].chosen)

    def _of_tokens(self, index: int, found: list[Chosen]) -> JsonObject:
        """Return log-probabilities and ids of the next tokens of a choice."""
        entry: JsonObject = {}
        if self._top is not None:
            entry["logprobs"] = self._logprobs(index, found)
        if self._call.token_ids:
            entry["token_ids"] = [token_id for token_id, _ in found]
        return entry

    def _of_prompt_ids(self, index: int) -> JsonObject:  # noqa: ARG002 - chats have them elsewhere
        """Return the IDs of the prompt, if they belong to each choice."""
        return {}

    def _sent(self, index: int, piece: JsonObject, more: JsonObject | None = None) -> bytes:
        """Return a chunk of a piece, with the new tokens of its choice."""
        if not self._lists_tokens:
            return output.data({**self._chunk([piece]), **(more or {})})
        found, void = self._tokens[index].news()
        if index not in self._begun:
            self._begun.add(index)
            piece = piece | self._of_prompt_ids(index)
        if found:
            piece = piece | self._of_tokens(index, found)
        if void:
            more = more or {}
            more = {**more, "rkserve": {**more.get("rkserve", {}), "retract_tokens": void}}
        return output.data({**self._chunk([piece]), **(more or {})})

    @abstractmethod
    def _logprobs(self, index: int, found: list[Chosen]) -> JsonObject:
        """Return the logprobs of the next tokens of a choice."""

    def paused(self, index: int, paused: Paused) -> bytes:
        """Return a comment for a pause, and an event for clients that asked for pauses."""
        if not self._tells_of_pauses:
            return output.PAUSED
        return output.PAUSED + output.data(
            {**self._chunk([]), "rkserve": pause_status(index, paused)}
        )

    def finish(self, index: int, finished: Finished) -> bytes:
        held_back = b"".join(self._part(index, part) for part in self.end(index, finished))
        reason = self.speech(index).reason(finished)
        piece = self._piece(index, "", reason) | self._spans(index)
        entry = {**self._seal([self._version(index)]), "timings": timings_of([finished])}
        return held_back + self._sent(index, piece, entry)

    def _part(self, index: int, part: Part) -> bytes:
        """Return the chunk of a part."""
        assert isinstance(part, TextPart)  # raw prompts have neither tools nor reasoning
        return self._filled(index, "content", part.text)

    def closing(self) -> bytes:
        """Return the usage, a chunk without choices, if the client asked for it, and the end."""
        usage = output.data({**self._chunk([]), "usage": self.usage()})
        return (usage if self._include_usage else b"") + output.DONE

    def whole(self) -> JsonObject:
        return {
            **self._head(self._whole_object),
            **self._seal(self.versions),
            "choices": [
                self._choice(i) | self._spans(i) | self._token_fields(i)
                for i in range(self._choices)
            ],
            "usage": self.usage(),
            "timings": timings_of([self._ends[i] for i in range(self._choices)]),
        }

    @property
    def _words(self) -> TokenTexts:
        """The tokens' texts; answers that list tokens always have them."""
        assert self._lexicon is not None
        return self._lexicon

    def _head(self, kind: str) -> JsonObject:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }

    def _chunk(self, choices: list[JsonObject]) -> JsonObject:
        chunk = {**self._head(self._chunk_object), "choices": choices}
        # As OpenAI: with include_usage every chunk has the key, and only the last one a value.
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _filled(self, index: int, kind: str, text: str) -> bytes:
        """Return a chunk of which only the text is new."""
        if self._lists_tokens:
            return self._sent(index, self._piece(index, text, None, kind))
        frame = self._frames.get((index, kind))
        if frame is None:
            piece = self._piece(index, output.EventTemplate.HOLE, None, kind)
            frame = self._frames[index, kind] = output.EventTemplate(self._chunk([piece]))
        return frame.fill(text)

    @abstractmethod
    def _piece(
        self, index: int, text: str, reason: str | None, kind: str = "content"
    ) -> JsonObject:
        """One choice of a chunk."""

    @abstractmethod
    def _choice(self, index: int) -> JsonObject:
        """One choice of a whole answer."""


class ChatAnswer(_Answer):
    """The answer to a call of /v1/chat/completions."""

    _whole_object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> bytes:
        """Return the chunk that names the role, once per choice."""
        role = {"role": "assistant", "content": "", "refusal": None}
        chunk = self._chunk([_chat_piece(index, role, None)])
        return output.data({**chunk, **(self._prompt_ids() if index == 0 else {})})

    def whole(self) -> JsonObject:
        """Return the answer, with the ids of its prompt where they were asked for."""
        return super().whole() | self._prompt_ids()

    def _prompt_ids(self) -> JsonObject:
        if not self._call.token_ids:
            return {}
        return {"prompt_token_ids": list(self._words.prompts[0])}

    def delta(self, index: int, delta: Delta) -> bytes:
        if self._stamp.reading.plain:  # the path of most tokens, which need no parser
            return super().delta(index, delta)
        return b"".join([self._part(index, part) for part in self.add(index, delta)])

    def _part(self, index: int, part: Part) -> bytes:
        match part:
            case TextPart(text=text):
                return self._filled(index, "content", text)
            case ReasoningPart(text=text):
                return self._filled(index, "reasoning_content", text)
            case ToolCallStart() | ToolCallDelta():
                return self._sent(index, _chat_piece(index, self._called(part), None))
            case Retraction():
                piece = _chat_piece(index, {}, None)
                return self._sent(index, piece, {"rkserve": retracted(part)})

    def _called(self, part: ToolCallStart | ToolCallDelta) -> JsonObject:
        """Return the new part of a call: its name first, then its arguments."""
        if isinstance(part, ToolCallDelta):
            function = {"arguments": part.arguments}
            return (
                {"function_call": function}
                if self._legacy
                else {"tool_calls": [{"index": part.index, "function": function}]}
            )
        function = {"name": part.name, "arguments": ""}
        if self._legacy:
            return {"function_call": function}
        call = {"index": part.index, "id": part.call_id, "type": "function", "function": function}
        return {"tool_calls": [call]}

    def _piece(
        self, index: int, text: str, reason: str | None, kind: str = "content"
    ) -> JsonObject:
        return _chat_piece(index, {kind: text} if text else {}, self._reason(reason))

    def _choice(self, index: int) -> JsonObject:
        speech = self.speech(index)
        message: JsonObject = {
            "role": "assistant",
            "content": speech.words or (None if speech.calls else ""),
            "refusal": None,
        }
        if speech.thoughts:
            message["reasoning_content"] = speech.thoughts
        functions = [{"name": one.name, "arguments": one.arguments} for one in speech.calls]
        if functions and self._legacy:
            message["function_call"] = functions[0]
        elif functions:
            message["tool_calls"] = [
                {"id": one.call_id, "type": "function", "function": function}
                for one, function in zip(speech.calls, functions, strict=True)
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": self._reason(speech.reason(self._ends[index])),
        }

    @property
    def _legacy(self) -> bool:
        return isinstance(self._call, ChatCall) and self._call.tools.legacy

    def _reason(self, reason: str | None) -> str | None:
        return "function_call" if reason == TOOL_CALLS and self._legacy else reason

    def _logprobs(self, index: int, found: list[Chosen]) -> JsonObject:  # noqa: ARG002 - all alike
        return chat_logprobs(self._words, found)


class CompletionAnswer(_Answer):
    """The answer to a call of /v1/completions."""

    _whole_object = _chunk_object = "text_completion"

    def __init__(self, call: AnyCall, answer_id: str, created: int, stamp: AnswerOrigin) -> None:
        super().__init__(call, answer_id, created, stamp)
        self._echo = isinstance(call, CompletionCall) and call.echo
        self._given = call.n
        self._logs: dict[int, CompletionLog] = {}

    def opening(self, index: int) -> bytes:
        """Return the prompt that is echoed, unless it comes with its logprobs."""
        if not self._echo or self._lexicon is None:
            return b""
        if self._top is None:
            return self._prompt(index, {})
        if len(self._lexicon.prompts[index]) > 1:
            return b""
        return self._prompt(index, {"logprobs": self._of_prompt(index, ())})

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the chunks of a delta; the prompt comes with its log-probabilities."""
        before = b""
        if delta.prompt and self._echo:
            before = self._prompt(index, {"logprobs": self._of_prompt(index, delta.prompt)})
        return before + super().delta(index, delta)

    def _prompt(self, index: int, entry: JsonObject) -> bytes:
        piece = self._piece(index, self._words.prompt_text(index), None)
        return output.data(self._chunk([piece | entry]))

    def _of_prompt(self, index: int, scored: Sequence[Scored]) -> JsonObject:
        return self._logs_of(index, of_prompt(self._words.prompts[index], scored))

    def _of_prompt_ids(self, index: int) -> JsonObject:
        if not self._call.token_ids:
            return {}
        return {"prompt_token_ids": list(self._words.prompts[index])}

    def _logprobs(self, index: int, found: list[Chosen]) -> JsonObject:
        return self._logs_of(index, self._words.seen(found))

    def _logs_of(self, index: int, found: list[Chosen]) -> JsonObject:
        log = self._logs.setdefault(index, CompletionLog(self._words))
        return log.of(found, top=self._top or 0)

    def whole(self) -> JsonObject:
        """Return the answer: of each prompt's choices the best, where there are more."""
        answer = super().whole()
        choices, tries = answer["choices"], self._tries
        if tries > self._given:
            choices = [
                choices[index] | {"index": place}
                for place, index in enumerate(
                    index
                    for prompt in range(0, len(choices), tries)
                    for index in self._best(range(prompt, prompt + tries))
                )
            ]
        return {**answer, "choices": choices}

    def _best(self, indexes: range) -> list[int]:
        """Return the likeliest choices, by the mean log-probability of tokens as in OpenAI."""
        ranked = sorted(indexes, key=lambda index: self._tokens[index].mean, reverse=True)
        return ranked[: self._given]

    def _token_fields(self, index: int) -> JsonObject:
        if not self._echo or self._lexicon is None:
            return super()._token_fields(index)
        entry = super()._token_fields(index)
        if self._top is not None:
            found, ids = self._tokens[index], self._lexicon.prompts[index]
            every = [*of_prompt(ids, found.prompt), *self._lexicon.seen(found.chosen)]
            self._logs.pop(index, None)
            entry["logprobs"] = self._logs_of(index, every)
        text = self._lexicon.prompt_text(index) + self.speech(index).words
        return {"text": text, **entry}

    def _piece(
        self,
        index: int,
        text: str,
        reason: str | None,
        kind: str = "content",  # noqa: ARG002 - it has one kind of text
    ) -> JsonObject:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def _choice(self, index: int) -> JsonObject:
        return self._piece(index, self.speech(index).words, self._ends[index].reason.value)


def _chat_piece(index: int, delta: dict[str, Any], reason: str | None) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


CHAT = Dialect(parse_chat, ChatAnswer, "chatcmpl-")
COMPLETION = Dialect(parse_completion, CompletionAnswer, "cmpl-")
