"""How the simulated runtime chooses: penalties, mirostat, and what is checked of them at init.

Choices exist at the borders between sentences. There the best candidate has a logit of 2.5 and the
others have 1.0, so the best is taken in 6 of 10 cases at temperature 1.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.support.sim.sim_driver import Event, Sim, chat, ids_of

pytest_plugins = ["tests.support.sim.sim_fixtures"]
pytestmark = pytest.mark.usefixtures("fast_env")

PROMPT = chat("Tell me about the sea")
ROUNDS = 400
PLAIN = {
    "top_k": 40,
    "top_p": 1.0,
    "temperature": 1.0,
    "repeat_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "mirostat": 0,
}


@pytest.fixture(autouse=True)
def _same_draws(fast_env: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RKSIM_SEED", "3")


def first_tokens(prompt: list[int], **sampling: Any) -> Counter[int]:
    """How often each token came first, on a board with this sampling."""
    sim = Sim("1.2.3", max_new_tokens=1, **{**PLAIN, **sampling})
    counted = Counter(sim.run(prompt).ids[0] for _ in range(ROUNDS))
    assert sim.destroy() == 0
    return counted


def share_of(token: int, counted: Counter[int]) -> float:
    return counted[token] / ROUNDS


def candidates(sim: Sim, prompt: list[int]) -> list[int]:
    """What may come next, best first, as the logits of the last position show it."""
    row: list[float] = []

    def look(_event: Event, result: Any) -> int:
        width, rows = result.logits.vocab_size, result.logits.num_tokens
        row.extend(sim.ffi.unpack(result.logits.logits + (rows - 1) * width, width))
        return 0

    sim.run(prompt, look, mode=2)
    meant = [at for at, logit in enumerate(row) if logit > 0]
    return sorted(meant, key=row.__getitem__, reverse=True)


def greedy_token(prompt: list[int]) -> int:
    return first_tokens(prompt, top_k=1).most_common()[0][0]


def prompt_that_repeats(back: int) -> tuple[list[int], int]:
    """A prompt with its best candidate in it, twice, so many tokens back, and no other candidate.

    Any token changes which candidates there are, so this has to be searched for.
    """
    sim = Sim("1.2.3", max_new_tokens=1)
    for number in range(2000):
        gap = ids_of(f" {number} is a number." * back)[-back:]
        for said in candidates(sim, gap):
            prompt = [said, said, *gap]
            if sim.run(prompt).ids == [said] and not set(candidates(sim, prompt)) & set(gap):
                assert sim.destroy() == 0
                return prompt, said
    raise AssertionError("no such prompt")


def test_the_best_candidate_leads_by_its_logit() -> None:
    counted = first_tokens(PROMPT)
    assert len(counted) == 4
    assert share_of(greedy_token(PROMPT), counted) == pytest.approx(0.6, abs=0.08)


@pytest.mark.parametrize(
    ("sampling", "low", "high"),
    [
        pytest.param({}, 0.52, 0.68, id="none"),
        pytest.param({"repeat_penalty": 3.0}, 0.15, 0.35, id="repeat"),
        pytest.param({"presence_penalty": 1.5}, 0.17, 0.33, id="presence"),
        pytest.param({"frequency_penalty": 1.5}, 0.02, 0.13, id="frequency, which counts twice"),
        pytest.param({"presence_penalty": -3.0}, 0.95, 1.0, id="a negative one rewards"),
        pytest.param({"frequency_penalty": 1.5, "top_k": 1}, 1.0, 1.0, id="greedy has none"),
        pytest.param({"presence_penalty": 9.0, "temperature": 0.0}, 1.0, 1.0, id="cold has none"),
        pytest.param(
            {"presence_penalty": 9.0, "top_k": 3}, 0.0, 0.0, id="it can fall out of top_k"
        ),
    ],
)
def test_a_penalty_weighs_on_what_was_said_before(
    sampling: dict[str, Any], low: float, high: float
) -> None:
    prompt, token = prompt_that_repeats(back=20)
    assert low <= share_of(token, first_tokens(prompt, **sampling)) <= high


def test_top_k_counts_what_is_best_after_the_penalties() -> None:
    prompt, token = prompt_that_repeats(back=20)
    every = set(first_tokens(prompt))
    assert set(first_tokens(prompt, presence_penalty=9.0, top_k=3)) == every - {token}


def test_a_penalty_forgets_what_is_more_than_64_tokens_back() -> None:
    shares = []
    for back in (63, 64):
        prompt, token = prompt_that_repeats(back)
        assert prompt[-back - 1] == token
        shares.append(share_of(token, first_tokens(prompt, presence_penalty=9.0)))
    assert shares[0] == 0.0
    assert shares[1] == pytest.approx(0.6, abs=0.08)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_with_a_high_target_cuts_nothing(version: int) -> None:
    counted = first_tokens(PROMPT, mirostat=version, mirostat_tau=5.0, mirostat_eta=0.1)
    assert counted == first_tokens(PROMPT)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_with_a_low_target_takes_the_best(version: int) -> None:
    counted = first_tokens(PROMPT, mirostat=version, mirostat_tau=0.01, mirostat_eta=0.0)
    assert counted == {greedy_token(PROMPT): ROUNDS}


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_learns_within_a_run_at_the_rate_eta(version: int) -> None:
    """After too little surprise the cut opens; without a rate it never does."""

    def replies(eta: float) -> set[str]:
        how = {**PLAIN, "mirostat": version, "mirostat_tau": 0.3, "mirostat_eta": eta}
        sim = Sim("1.3.0", max_new_tokens=150, **how, ignore_eos_token=True)
        heard = {sim.run(PROMPT).reply for _ in range(30)}
        assert sim.destroy() == 0
        return heard

    assert len(replies(0.0)) == 1
    assert len(replies(1.0)) > 5


def test_mirostat_starts_afresh_with_each_run() -> None:
    """What one run learned does not open the cut of the next one's first choice."""
    sim = Sim("1.3.0", **{**PLAIN, "mirostat": 2, "mirostat_tau": 0.3, "mirostat_eta": 1.0})
    first = {sim.run(PROMPT).ids[0] for _ in range(40)}
    assert first == {greedy_token(PROMPT)}
    assert sim.destroy() == 0


def test_1_3_takes_all_nine_for_each_run() -> None:
    prompt, token = prompt_that_repeats(back=20)
    sim = Sim("1.3.0", **PLAIN)
    for field, value, low, high in [
        ("presence_penalty", 9.0, 0.0, 0.0),
        ("presence_penalty", -9.0, 1.0, 1.0),
        ("repeat_penalty", 1000.0, 0.02, 0.25),
    ]:
        how = {**PLAIN, "mirostat_tau": 5.0, "mirostat_eta": 0.1, field: value}
        heard = [sim.run(prompt, sampling_params=how, max_new_tokens=1).ids[0] for _ in range(100)]
        assert low <= heard.count(token) / 100 <= high, field
    assert sim.destroy() == 0


def test_values_that_make_no_sense_harm_nothing() -> None:
    for odd in (float("inf"), float("-inf"), float("nan"), -1.0, 0.0):
        for name in ("repeat_penalty", "frequency_penalty", "presence_penalty", "top_p"):
            sim = Sim("1.2.3", max_new_tokens=60, **{**PLAIN, "mirostat": 2, name: odd})
            assert sim.run(PROMPT).code == 0
            assert sim.destroy() == 0


# --- the end that is not taken


def test_eos_is_delivered_as_a_token_like_any_other_when_it_is_ignored() -> None:
    whole = Sim("1.3.0")
    said = whole.run(chat("Count to 2")).ids
    assert whole.destroy() == 0
    sim = Sim("1.3.0", ignore_eos_token=True, max_new_tokens=len(said) + 40)
    run = sim.run(chat("Count to 2"))
    assert run.ids[: len(said) - 1] == said[:-1]
    assert len(run.ids) == len(said) + 40
    assert said[-1] not in run.ids
    # Forced into the context it ends nothing.
    assert len(sim.run([*chat("Count to 2"), *said]).ids) == len(said) + 40
    assert sim.destroy() == 0


# --- what init checks and shows


def test_level_2_shows_what_the_handle_was_given(
    release: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RKLLM_LOG_LEVEL", "2")
    sim = Sim(
        release,
        extend_base_domain_id=15,
        extend_embed_flash=0,
        extend_enabled_cpus_num=3,
        extend_enabled_cpus_mask=0xE0,
        mirostat=2,
        frequency_penalty=0.25,
    )
    assert sim.code == 0
    printed = capfd.readouterr().err.splitlines()
    for line in (
        "I rkllm: Enabled cpus: [5, 6, 7]",
        "I rkllm: Enabled cpus num: 3",
        "I rkllm: Base Domain ID: 15",
        "I rkllm: Embed Flash: 0",
        "I rkllm: Frequency Penalty: 0.250000",
        "I rkllm: Mirostat: 2, Tau: 5.000000, Eta: 0.100000",
    ):
        assert line in printed
    assert sim.destroy() == 0
