"""How a token is drawn from logits, and what the model itself thought of it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.core.run_params import Sampling
from rkserve.sampling.draw import LEAST_LOGPROB, Row, Sampler, score, scores, uniform

OPEN = Sampling(temperature=1.0, top_p=1.0, top_k=0, repeat_penalty=1.0)
LIKELY: Row = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)


def sampler(sampling: Sampling = OPEN, seed: int = 1, **extra: Any) -> Sampler:
    return Sampler(sampling, seed, **extra)


def drawn(
    count: int, row: Any = LIKELY, sampling: Sampling = OPEN, **extra: Any
) -> Counter[int | None]:
    """Draw the first token of so many seeds."""
    return Counter(sampler(sampling, seed, **extra).choose(row) for seed in range(count))


def with_(**changes: Any) -> Sampling:
    fields = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repeat_penalty": 1.0}
    return Sampling(**(fields | changes))


# -- chance -----------------------------------------------------------------------------------


def test_draws_follow_the_probabilities() -> None:
    found = drawn(4000)
    for token_id, share in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert found[token_id] / 4000 == pytest.approx(share, abs=0.03)


def test_the_number_of_a_place_is_known_for_good() -> None:
    # Written down: another release of numpy, or another machine, must not draw otherwise.
    assert [round(uniform(7, 0, place), 6) for place in range(3)] == UNIFORM


UNIFORM = [0.872073, 0.082843, 0.014108]


@given(seed=st.integers(-(2**63), 2**64), choice=st.integers(0, 15), place=st.integers(0, 10**5))
def test_every_seed_gives_a_number_below_one(seed: int, choice: int, place: int) -> None:
    assert 0 <= uniform(seed, choice, place) < 1


def test_seed_choice_and_place_each_change_the_draws() -> None:
    def run(**extra: Any) -> list[int | None]:
        one = sampler(**extra)
        found = []
        for _ in range(30):
            found.append(one.choose(LIKELY))
            one.take(0)
        return found

    assert run(seed=1) == run(seed=1)
    assert len({tuple(run(seed=1)), tuple(run(seed=2)), tuple(run(seed=1, choice=1))}) == 3
    assert len(set(run(seed=1))) > 1


@given(seed=st.integers(0, 2**32), cut=st.integers(0, 12))
def test_who_goes_on_with_a_transcript_draws_what_would_have_been_drawn(
    seed: int, cut: int
) -> None:
    rows = np.random.default_rng(seed).normal(size=(12, 50)).astype(np.float32)
    penalised = with_(repeat_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.3)

    def run(said: list[int]) -> list[int]:
        one = sampler(penalised, seed, context=(3, 4), generated=tuple(said))
        said = list(said)
        for row in rows[len(said) :]:
            token_id = one.choose(row)
            assert token_id is not None
            one.take(token_id)
            said.append(token_id)
        return said

    whole = run([])
    assert run(whole[:cut]) == whole


# -- cuts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "extra", "left"),
    [
        pytest.param(with_(top_k=2), {}, {0, 1}, id="top_k"),
        pytest.param(with_(top_k=9), {}, {0, 1, 2, 3}, id="a top_k beyond the vocabulary"),
        pytest.param(with_(top_p=0.7), {}, {0, 1}, id="top_p takes the one that reaches it"),
        pytest.param(with_(top_p=0.01), {}, {0}, id="top_p leaves one at least"),
        pytest.param(OPEN, {"min_p": 0.25}, {0, 1, 2}, id="min_p is a share of the likeliest"),
        pytest.param(OPEN, {"min_p": 1.0}, {0}, id="a min_p of 1"),
        pytest.param(OPEN, {"logit_bias": ((0, -100.0),)}, {1, 2, 3}, id="a ban"),
        pytest.param(OPEN, {"logit_bias": ((3, 100.0),)}, {3}, id="a wish"),
        pytest.param(OPEN, {"logit_bias": ((99, 100.0),)}, {0, 1, 2, 3}, id="of no token"),
        pytest.param(with_(temperature=0.0), {}, {0}, id="temperature 0"),
        pytest.param(with_(top_k=1), {}, {0}, id="top_k 1"),
        pytest.param(with_(temperature=0.05), {}, {0}, id="a cold one"),
    ],
)
def test_what_is_cut_is_never_drawn(
    sampling: Sampling, extra: dict[str, Any], left: set[int]
) -> None:
    assert set(drawn(300, sampling=sampling, **extra)) == left


def test_of_equals_the_lower_ids_are_kept() -> None:
    assert set(drawn(200, np.zeros(10, np.float32), with_(top_k=3))) == {0, 1, 2}


@pytest.mark.parametrize(
    ("sampling", "context", "said", "best"),
    [
        pytest.param(with_(temperature=0.0), (0,), (0,), 0, id="none"),
        pytest.param(with_(temperature=0.0, frequency_penalty=0.4), (), (0,), 0, id="once"),
        pytest.param(with_(temperature=0.0, frequency_penalty=0.4), (), (0, 0), 1, id="twice"),
        pytest.param(with_(temperature=0.0, presence_penalty=0.6), (), (0,), 1, id="presence"),
        pytest.param(with_(temperature=0.0, presence_penalty=2.0), (0,), (), 0, id="the prompt"),
        pytest.param(with_(temperature=0.0, repeat_penalty=2.0), (0,), (), 1, id="RKLLM's own"),
        pytest.param(with_(temperature=0.0, presence_penalty=-2.0), (), (2,), 2, id="a reward"),
    ],
)
def test_penalties_hold_the_answer_against_a_token_and_the_factor_the_context(
    sampling: Sampling, context: tuple[int, ...], said: tuple[int, ...], best: int
) -> None:
    assert sampler(sampling, context=context, generated=said).choose(LIKELY) == best


def test_only_what_is_allowed_comes() -> None:
    allowed = np.array([False, False, True])
    assert sampler(with_(temperature=0.0)).choose(LIKELY, allowed) == 2
    assert set(Counter(sampler(seed=s).choose(LIKELY, allowed) for s in range(50))) == {2}
    assert sampler().choose(LIKELY, np.zeros(4, np.bool_)) is None
    assert sampler().choose(LIKELY[:2], np.array([False, True, True, True])) == 1


def test_logits_that_are_no_numbers_never_come() -> None:
    row = np.array([np.nan, -np.inf, 1.0, np.nan], np.float32)
    assert set(drawn(50, row)) == {2}
    assert sampler().choose(np.full(3, np.nan, np.float32)) is None


# -- logprobs ---------------------------------------------------------------------------------


def test_a_score_is_the_models_own_and_the_likeliest_come_first() -> None:
    found = score(LIKELY, 2, top=3)
    assert found.logprob == pytest.approx(math.log(0.15), abs=1e-5)
    assert [token_id for token_id, _ in found.top] == [0, 1, 2]
    assert [math.exp(value) for _, value in found.top] == pytest.approx([0.5, 0.3, 0.15], abs=1e-5)


def test_large_logits_do_not_overflow() -> None:
    found = score(np.array([3e38, -3e38, 0.0], np.float32), 1, top=1)
    assert found.logprob == LEAST_LOGPROB
    assert found.top == ((0, 0.0),)


def test_what_cannot_come_has_the_least_logprob_and_json_can_say_it() -> None:
    found = scores(np.array([[np.nan, -np.inf]], np.float32), [0], top=5)
    assert found[0].logprob == LEAST_LOGPROB
    assert all(value == LEAST_LOGPROB for _, value in found[0].top)


def test_a_token_that_is_no_column_has_the_least_logprob() -> None:
    assert score(LIKELY, 4711, top=0).logprob == LEAST_LOGPROB


def test_each_row_is_scored_with_its_own_token() -> None:
    rows = np.stack([LIKELY, LIKELY[::-1]])
    assert [one.logprob for one in scores(rows, [0, 0], top=0)] == pytest.approx(
        [math.log(0.5), math.log(0.05)], abs=1e-5
    )


@given(
    seed=st.integers(0, 2**32),
    top_p=st.floats(0.01, 0.999),
    spread=st.floats(0.1, 8),
    size=st.integers(1, 300),
)
def test_top_p_leaves_the_smallest_set_that_reaches_it(
    seed: int, top_p: float, spread: float, size: int
) -> None:
    row = np.random.default_rng(seed).normal(scale=spread, size=size).astype(np.float32)
    shares = np.exp(row.astype(np.float64))
    order = np.argsort(-shares, kind="stable")
    reached = np.cumsum(shares[order]) / shares.sum()
    allowed = set(order[: int(np.searchsorted(reached, top_p + 1e-9)) + 1].tolist())
    chosen = {sampler(with_(top_p=top_p), one).choose(row) for one in range(20)}
    assert chosen <= allowed


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [1.5, 3.0])
def test_mirostat_keeps_the_average_surprise(version: int, tau: float) -> None:
    ranks = np.arange(1, 501, dtype=np.float64)
    row: Row = (-1.1 * np.log(ranks)).astype(np.float32)  # Zipf's law, 6.8 bits on average
    shares = np.exp(row.astype(np.float64))
    shares /= shares.sum()
    how = with_(mirostat=version, mirostat_tau=tau, mirostat_eta=0.1)
    one = sampler(how, seed=4)
    bits = []
    for _ in range(600):
        token = one.choose(row)
        assert token is not None
        one.take(token)
        bits.append(-math.log2(shares[token]))
    # Of the truncated distribution it is exactly tau; of the whole one a token is rarer.
    assert tau < np.mean(bits[100:]) < tau + 2
    assert max(bits[100:]) < -math.log2(shares[-1])


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_has_a_token_left_in_any_row(version: int) -> None:
    how = with_(mirostat=version, mirostat_tau=0.1, mirostat_eta=1.0)
    rows = ([0.0], [5.0, -np.inf, -np.inf], [1.0, 1.0, 1.0], [90.0, 0.0, -90.0])
    for values in rows:
        one = sampler(how, seed=2)
        for _ in range(20):
            token = one.choose(np.array(values, np.float32))
            assert token is not None
            assert values[token] > -np.inf
            one.take(token)
