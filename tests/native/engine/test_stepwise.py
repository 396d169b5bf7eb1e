"""Runs of single steps on a scripted library: what it is sent, and what comes of its logits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from rkserve.core.errors import StepsRefused
from rkserve.core.run_params import Guide, GuideKind, Sampling, Scored, Stepwise
from rkserve.native import engine_frames as frames
from rkserve.native.engine.stepwise import LogitsMemory, StepwiseRuns
from rkserve.native.engine_frames import FrameKind, FrameReader, StepParams
from rkserve.native.runtime import EvaluateMode, Matrix, Runtime, TokenInput

GREEDY = Sampling(temperature=0.0, repeat_penalty=1.0)
# Id 0 ends answers; 1 to 3 are the bytes of a character; then letters.
PIECES = ["<end>", "<0xE2>", "<0x82>", "<0xAC>", *"abcdefghij"]
EURO = (1, 2, 3)


def last_plus_one(context: tuple[int, ...]) -> int:
    return (context[-1] + 1) % len(PIECES)


class Library:
    """A model whose next token is a function of all ids that it holds."""

    def __init__(self, model: Callable[[tuple[int, ...]], int]) -> None:
        self.model = model
        self.kv: tuple[int, ...] = ()
        self.calls: list[tuple[tuple[int, ...], bool, bool]] = []

    def evaluate(
        self,
        given: TokenInput,
        mode: EvaluateMode,
        *,
        keep_history: bool = False,
        adapter: str | None = None,
        last: bool = False,
    ) -> Matrix:
        assert (mode, adapter) == (EvaluateMode.LOGITS, "a@1")
        self.calls.append((given.ids, keep_history, last))
        held = self.kv if keep_history else ()
        rows = np.zeros((len(given.ids), len(PIECES) + 2), np.float32)
        for at in range(len(given.ids)):
            rows[at, self.model((*held, *given.ids[: at + 1]))] = 5
        rows[:, len(PIECES) :] = 9  # padding, which must never come
        self.kv = (*held, *given.ids) if keep_history else ()
        wanted = rows[-1:] if last else rows
        return Matrix(wanted.shape[0], wanted.shape[1], wanted.tobytes())

    def kv_cache_sizes(self) -> tuple[int, ...]:
        return (len(self.kv),)


class Desk:
    """One engine's steps, and what it says."""

    def __init__(self, place: Path, room: LogitsMemory | None = None) -> None:
        self.library = Library(last_plus_one)
        self.file = place / "tokenizer.json"
        vocabulary = {piece: at for at, piece in enumerate(PIECES)}
        self.file.write_text(
            json.dumps(
                {
                    "model": {"vocab": vocabulary},
                    "decoder": {"type": "ByteFallback"},
                    "added_tokens": [{"id": 0, "content": "<end>", "special": True}],
                }
            )
        )
        self.said: list[bytes] = []
        self._steps = StepwiseRuns(self.said.append, room)

    def run(
        self,
        ids: tuple[int, ...] = (4, 5),
        *,
        history: bool = True,
        left: Callable[[], bool] = lambda: False,
        **changes: Any,
    ) -> Mapping[str, Any]:
        fields: dict[str, Any] = {
            "limit": 3,
            "wanted": Stepwise(1),
            "eos": frozenset({0}),
        } | changes
        params = StepParams(tokenizer=self.file, sampling=GREEDY, **fields)
        wire = json.loads(json.dumps(params.as_json()))  # as it travels
        assert StepParams.read(wire) == params
        command = {"steps": wire, "keep_history": history, "adapter": "a@1"}
        return self._steps.run(cast(Runtime, self.library), 7, command, ids, left)

    @property
    def frames(self) -> list[tuple[FrameKind, bytes]]:
        return list(FrameReader().feed(b"".join(self.said)))

    @property
    def tokens(self) -> list[tuple[int, bytes, bool]]:
        found = [frames.unpack_token(data) for kind, data in self.frames if kind is FrameKind.TOKEN]
        assert all(one[:2] == (7, 0) for one in found)
        return [(token_id, text, waiting) for _, _, token_id, text, waiting in found]

    def scores(self, *, prompt: bool) -> list[Scored]:
        found = [
            frames.unpack_scores(data) for kind, data in self.frames if kind is FrameKind.SCORES
        ]
        assert all(run_id == 7 for run_id, _, _ in found)
        return [one for _, of_prompt, some in found for one in some if of_prompt is prompt]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_with_history_each_step_sends_the_one_new_token(desk: Desk) -> None:
    ended = desk.run()
    assert [token_id for token_id, _, _ in desk.tokens] == [6, 7, 8]
    assert desk.library.calls == [((4, 5), True, True), ((6,), True, True), ((7,), True, True)]
    assert (ended["end"], ended["kv_positions"], ended["cut"]) == ("finished", (4,), False)
    assert (ended["perf"]["prefill_tokens"], ended["perf"]["decode_tokens"]) == (2, 3)


def test_without_history_each_step_sends_the_whole_context(desk: Desk) -> None:
    desk.run(history=False)
    assert [token_id for token_id, _, _ in desk.tokens] == [6, 7, 8]
    assert [ids for ids, _, _ in desk.library.calls] == [(4, 5), (4, 5, 6), (4, 5, 6, 7)]


def test_an_end_of_sequence_is_told_and_ends_the_run(desk: Desk) -> None:
    desk.run((12,), limit=9)
    assert desk.tokens == [(13, b"j", False), (0, b"", False)]


def test_before_so_many_tokens_no_end_may_come(desk: Desk) -> None:
    # Of all others none is likelier than the next, so the first one comes.
    desk.run((12,), limit=9, wanted=Stepwise(1, least=4))
    ids = [token_id for token_id, _, _ in desk.tokens]
    assert ids[0] == 13
    assert 0 not in ids[:4]
    assert len(ids) == 9


def test_the_tokens_before_count_among_those_that_there_must_be(desk: Desk) -> None:
    desk.run((13,), limit=2, generated=(11, 12, 13), wanted=Stepwise(1, least=4))
    desk.run((13,), limit=9, generated=(11, 12, 13), wanted=Stepwise(1, least=3))
    first, *rest = [token_id for token_id, _, _ in desk.tokens]
    assert first != 0
    assert rest[-1] == 0
    assert len(rest) == 2


def test_a_character_of_several_tokens_comes_with_the_last_of_them(desk: Desk) -> None:
    desk.run((0,), limit=4)
    text = "€".encode()
    assert desk.tokens == [(1, b"", True), (2, b"", True), (3, text, False), (4, b"a", False)]


def test_a_run_is_left_between_two_steps_and_says_what_the_cache_holds(desk: Desk) -> None:
    ended = desk.run(left=lambda: len(desk.tokens) == 2, limit=9)
    assert [token_id for token_id, _, _ in desk.tokens] == [6, 7]
    assert ended["kv_positions"] == (3,)


def test_a_run_that_is_left_in_its_prefill_tells_nothing(desk: Desk) -> None:
    assert desk.run(left=lambda: True)["end"] == "finished"
    assert desk.frames == []


def test_logprobs_come_before_their_token_and_those_of_the_prompt_first(desk: Desk) -> None:
    desk.run((4, 9, 10), wanted=Stepwise(1, top_logprobs=2), prompt=True, limit=1)
    assert [kind for kind, _ in desk.frames] == [
        FrameKind.SCORES,
        FrameKind.SCORES,
        FrameKind.TOKEN,
    ]
    prompt = desk.scores(prompt=True)
    assert len(prompt) == 2  # nothing comes before the first
    assert prompt[1].logprob > prompt[0].logprob + 4  # 10 follows 9, and 9 does not follow 4
    (answer,) = desk.scores(prompt=False)
    assert len(answer.top) == 2


def test_without_a_wish_for_logprobs_there_are_none(desk: Desk) -> None:
    desk.run()
    assert {kind for kind, _ in desk.frames} == {FrameKind.TOKEN}


def test_a_limit_of_none_only_scores_the_prompt(desk: Desk) -> None:
    desk.run(wanted=Stepwise(1, top_logprobs=0), prompt=True, limit=0)
    assert [kind for kind, _ in desk.frames] == [FrameKind.SCORES]


def test_padding_behind_the_vocabulary_never_comes(desk: Desk) -> None:
    desk.run(limit=8)
    assert all(token_id < len(PIECES) for token_id, _, _ in desk.tokens)


def test_a_long_prompt_goes_in_parts_where_it_may(tmp_path: Path) -> None:
    desk = Desk(tmp_path, LogitsMemory(part_bytes=3 * 4 * len(PIECES)))
    desk.run((4, 5, 6, 7, 8, 9, 10), prompt=True, wanted=Stepwise(1, top_logprobs=0), limit=1)
    assert [ids for ids, _, _ in desk.library.calls] == [(4, 5, 6), (7, 8, 9), (10,)]
    assert [round(one.logprob, 3) for one in desk.scores(prompt=True)] == [
        round(desk.scores(prompt=True)[0].logprob, 3)
    ] * 6
    assert [token_id for token_id, _, _ in desk.tokens] == [11]


def test_a_context_that_must_go_whole_has_room_for_so_much_and_no_more(tmp_path: Path) -> None:
    desk = Desk(tmp_path, LogitsMemory(context_bytes=3 * 4 * len(PIECES)))
    ended = desk.run((4, 5), history=False, limit=9)
    assert [token_id for token_id, _, _ in desk.tokens] == [6, 7]
    assert ended["cut"]
    with pytest.raises(StepsRefused, match="the context has 4 tokens; the limit is 3"):
        desk.run((4, 5, 6, 7), history=False)


def test_a_tokenizer_that_cannot_be_read_is_a_refusal(desk: Desk) -> None:
    desk.file.write_text("{}")
    with pytest.raises(StepsRefused, match="tokenizer"):
        desk.run()


def test_where_no_token_may_follow_the_run_is_refused(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    everything = tuple((token_id, float("-inf")) for token_id in range(len(PIECES)))
    params = StepParams(
        desk.file, GREEDY, Stepwise(1, logit_bias=everything), frozenset({0}), limit=3
    )
    command = {"steps": params.as_json(), "keep_history": True, "adapter": "a@1"}
    with pytest.raises(StepsRefused, match="no next token"):
        StepwiseRuns(desk.said.append).run(
            cast(Runtime, desk.library), 7, command, (4,), lambda: False
        )


# -- tokens that a grammar leaves no choice of ----------------------------------------------------


def letters(text: str) -> tuple[int, ...]:
    return tuple(PIECES.index(one) for one in text)


def guided(pattern: str, **more: Any) -> dict[str, Any]:
    return {"wanted": Stepwise(1, guide=Guide(GuideKind.REGEX, pattern), **more), "limit": 20}


@pytest.mark.parametrize("history", [True, False])
def test_a_token_that_must_come_needs_no_step(desk: Desk, history: bool) -> None:
    ended = desk.run(letters("ab"), history=history, **guided("gh[a-j]ije"))
    assert [text for _, text, _ in desk.tokens] == [b"g", b"h", b"i", b"i", b"j", b"e"]
    sent = [ids for ids, _, _ in desk.library.calls]
    if history:
        # The prompt, what was forced before the one choice, and what the KV cache lacks at the end.
        assert sent == [letters("ab"), letters("gh"), letters("iij")]
        assert desk.library.kv == letters("abghiij"), "all but the last token, as after any step"
        assert ended["kv_positions"] == (7,)
    else:
        assert sent == [letters("ab"), letters("abgh")]
    assert ended["perf"]["decode_tokens"] == 6


def test_what_is_forced_changes_no_draw(desk: Desk) -> None:
    """The logits of a choice are those behind everything that was forced before it."""
    desk.library.model = lambda held: letters("c")[0] if held[-1] == letters("h")[0] else 5
    desk.run(letters("ab"), **guided("gh[a-j]"))
    assert [text for _, text, _ in desk.tokens] == [b"g", b"h", b"c"]


def test_logprobs_are_computed_also_of_what_is_forced(desk: Desk) -> None:
    desk.run(letters("ab"), **guided("ghij", top_logprobs=0))
    assert len(desk.library.calls) == 4
    assert sum(kind is FrameKind.SCORES for kind, _ in desk.frames) == 4


def test_a_limit_and_an_abort_hold_for_what_is_forced(desk: Desk) -> None:
    ended = desk.run(letters("ab"), **{**guided("ghijabcd"), "limit": 3})
    assert ended["perf"]["decode_tokens"] == 3
    assert desk.library.kv == letters("abgh")
    asked: list[int] = []

    def left() -> bool:
        asked.append(1)
        return len(asked) > 3  # once before the answer, then after each token

    desk.library.kv = ()
    assert desk.run(letters("ab"), left=left, **guided("ghijabcd"))["perf"]["decode_tokens"] == 3
