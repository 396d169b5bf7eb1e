"""An answer whose boards are lost at any moment, in any way, is the one of a board that lives."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.board.answer.hooks import Action, Continue, Decoded, Hook, HookFactory, Pause, Replace
from rkserve.core.messages import ControlAction, Edit, GenerateRequest
from rkserve.core.run_params import Sampling
from tests.support.boards.continued_house import BOARDS, Heard, How, Loss, Site, site
from tests.support.boards.own_time import run_loop
from tests.support.sampler import Sampler

pytestmark = pytest.mark.slow

GREEDY = Sampling(temperature=0.0)
PROMPT_LENGTH = 3


class Shout:
    """Shows every second piece in capitals, and holds the first ones back."""

    def __init__(self, hold: int) -> None:
        self._hold = hold
        self._held = ""

    def on_piece(self, piece: Decoded) -> Action:
        text = piece.text.upper() if piece.index % 2 else piece.text
        if piece.index < self._hold:
            self._held += text
            return Continue("")
        shown, self._held = self._held + text, ""
        return Continue(shown)

    def on_end(self) -> str:
        return self._held


class Mend:
    """Replaces in the context what ends with an unwanted letter, by other words."""

    def on_piece(self, piece: Decoded) -> Action:
        if piece.text == "c" and not piece.replayed:
            return Replace((1102, 1000), "x a", last=1)
        return Continue()

    def on_end(self) -> str:
        return ""


class Cover:
    """Shows something else instead of the last two pieces, where a letter says so."""

    def on_piece(self, piece: Decoded) -> Action:
        if piece.text == "d" and piece.index > 0:
            return Replace((), "#", last=2, in_context=False)
        return Continue()

    def on_end(self) -> str:
        return ""


class Stumble:
    """Pauses where a letter says so."""

    def on_piece(self, piece: Decoded) -> Action:
        return Pause(reason="a letter") if piece.text in ("f", "é") else Continue()

    def on_end(self) -> str:
        return ""


def hook(kind: type[Hook], *args: int) -> HookFactory:
    def make(_: GenerateRequest) -> Hook:
        return kind(*args)

    return make


CHAINS: dict[str, tuple[HookFactory, ...]] = {
    "none": (),
    "shout": (hook(Shout, 0),),
    "hold": (hook(Shout, 4),),
    "mend": (hook(Mend),),
    "cover": (hook(Cover),),
    "stumble": (hook(Stumble),),
    "all": (hook(Stumble), hook(Mend), hook(Cover), hook(Shout, 2)),
}


@dataclass
class Case:
    """A request, and what a client does at its pauses."""

    prompt: int
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    include_stop: bool = False
    pause_on: tuple[str, ...] = ()
    hooks: str = "none"
    edits: list[Edit | None] = field(default_factory=list)
    per_run: bool = True
    native: bool = False

    @property
    def request(self) -> GenerateRequest:
        return GenerateRequest(
            "c/0",
            "m",
            (5, 6, self.prompt),  # PROMPT_LENGTH
            self.max_tokens,
            sampling=GREEDY,
            stop=self.stop,
            stop_ids=self.stop_ids,
            include_stop=self.include_stop,
            pause_on_text=self.pause_on,
            native_pause=self.native,
        )


def pauser(
    where: Site, case: Case, kills: list[bool]
) -> Callable[[int], AsyncGenerator[None, None]]:
    """What a client does at a pause: an edit perhaps, then it goes on. Its board may die of age."""

    async def act(number: int) -> AsyncGenerator[None, None]:
        edit = case.edits[number - 1] if number <= len(case.edits) else None
        for moment in range(2):
            if kills and kills.pop():
                replica = await where.holder("c/0")
                where.house.benches[replica].die()
            if moment == 0 and edit is not None:
                await where.control("c/0", ControlAction.EDIT, edit)
        await where.control("c/0", ControlAction.RESUME)
        yield

    return act


async def told(
    case: Case, losses: list[Loss], slow: list[int], kills: list[bool], resumed: int = 0
) -> Heard:
    async with site(hooks=CHAINS[case.hooks], per_run=case.per_run) as where:
        where.house.losses, where.house.resumed = list(losses), resumed
        return await where.listen(case.request, pauser(where, case, list(kills)), slow)


async def each(case: Case, *losses: Sequence[Loss]) -> list[Heard]:
    """The answers for several lists of losses, in one loop: a loop of their own takes longer."""
    return [await told(case, list(one), [], []) for one in losses]


EDITS = st.one_of(
    st.none(),
    st.builds(Edit, ids=st.just((1000, 1001)), text=st.just("ab")),
    st.builds(Edit, ids=st.just((1102,)), text=st.just("x "), injected=st.just(True)),
    st.builds(Edit, clear=st.just(((0, 2),))),
    st.builds(Edit, clear=st.just(((1, 4),)), ids=st.just((1003,)), text=st.just("d")),
)


def is_possible(case: Case) -> bool:
    """Whether no edit clears the first token that was said: a cache that is kept is without it."""
    ends = [end for edit in case.edits if edit is not None for _, end in edit.clear]
    return not case.native or max(ends, default=0) <= PROMPT_LENGTH


CASES = st.builds(
    Case,
    prompt=st.integers(10, 400),
    max_tokens=st.integers(1, 30),
    stop=st.sampled_from([(), (), ("END",), ("END", "é"), ("DD",)]),
    stop_ids=st.sampled_from([(), (), (1004,), (1000, 1007)]),
    include_stop=st.booleans(),
    pause_on=st.sampled_from([(), (), ("a",), ("é",), ("END",)]),
    hooks=st.sampled_from(list(CHAINS)),
    edits=st.lists(EDITS, max_size=4),
    per_run=st.booleans(),
    native=st.booleans(),
).filter(is_possible)


def is_accepted(losses: list[Loss]) -> bool:
    """Return whether a board's acceptance arrives; a request that none accepts is refused."""
    return losses.count(Loss(0, How.SWALLOWED, 0)) < BOARDS


LOSSES = st.lists(
    st.builds(Loss, st.integers(0, 12), st.sampled_from(How), st.integers(0, 2)), max_size=5
).filter(is_accepted)


@given(
    case=CASES,
    losses=LOSSES,
    slow=st.lists(st.integers(0, 12), max_size=40),
    kills=st.lists(st.booleans(), max_size=6),
    resumed=st.integers(0, 3),
)
def test_whatever_is_lost_the_client_gets_the_answer_of_a_board_that_lives(
    case: Case, losses: list[Loss], slow: list[int], kills: list[bool], resumed: int
) -> None:
    # Crashes at one place twice are taken for the request's fault, as they should be.
    losses = [loss for at, loss in enumerate(losses) if at == 0 or loss.how is not How.CRASH]

    async def both() -> tuple[Heard, Heard]:
        return await told(case, [], [], []), await told(case, losses, slow, kills, resumed)

    whole, broken = run_loop(both())
    assert broken.told == whole.told
    assert broken.streamed == whole.streamed == broken.token_ids == whole.token_ids
    if case.hooks in ("none", "shout", "hold", "stumble") and not any(case.edits):
        assert broken.retracted == 0
        assert broken.ids == whole.ids


@pytest.mark.parametrize("how", How, ids=lambda how: how.name.lower())
@pytest.mark.parametrize("per_run", [False, True], ids=["1.2.3", "1.3.0"])
def test_after_any_token_of_an_answer(how: How, per_run: bool, sampled: Sampler) -> None:
    for prompt in sampled((11, 17, 23)):
        case = Case(prompt, 24, per_run=per_run)
        losses = [[Loss(tokens, how)] for tokens in range(26)]
        whole, *broken = run_loop(each(case, [], *losses), limit_s=600.0 * len(losses))
        for tokens, one in enumerate(broken):
            assert (one.told, one.ids) == (whole.told, whole.ids), (prompt, tokens)


def test_an_edit_that_fills_the_answer_ends_it_where_its_board_is_lost_before_the_resume() -> None:
    def edit() -> Edit:
        return Edit(clear=((1, 4),), ids=(1003,), text="d")

    case = Case(269, 9, pause_on=("a",), hooks="all", edits=[edit(), edit(), None], per_run=False)
    losses = [Loss(5, How.GONE, 2)] * 2
    kills = [True, False, False, False, True, False]
    slow = [12, 7, 0, 12, 7, 2, 4, 11, 5, 9, 2]
    whole = run_loop(told(case, [], [], []))
    assert run_loop(told(case, losses, slow, kills)).told == whole.told


def test_a_resume_that_was_not_confirmed_is_not_repeated_at_the_next_pause() -> None:
    edits: list[Edit | None] = [Edit(ids=(1000, 1001), text="ab") for _ in range(2)]
    case = Case(134, 10, pause_on=("é",), edits=edits, per_run=False, native=True)
    whole = run_loop(told(case, [], [], []))
    broken = run_loop(told(case, [Loss(0, How.CUT, 0)], [], [True], 1))
    assert broken.told == whole.told
    assert len(whole.pauses) == 2
