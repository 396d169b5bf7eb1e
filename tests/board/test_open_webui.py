"""What Open WebUI does to a board: after a turn it asks for a title, tags and follow-ups, each with
the conversation quoted in one message. The next turn must find its KV cache all the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.storage.prompt_cache import CacheFingerprint, CacheStore
from tests.support.boards.fakes import run_loop
from tests.support.http.tool_talk import Talk, message, user
from tests.support.sim.sim_board import Sim

# The beginnings of the tasks' prompts, and what they quote.
TITLE = (
    "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n"
    "### Guidelines:\n- The title should clearly represent the main theme or subject of the "
    "conversation.\n- Write the title in the chat's primary language; default to English if "
    'multilingual.\n### Output:\nJSON format: { "title": "your concise title here" }\n'
)
TAGS = (
    "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history, along "
    "with 1-3 more specific subtopic tags.\n\n### Guidelines:\n- Start with high-level domains "
    '(e.g. Science, Technology)\n### Output:\nJSON format: { "tags": ["tag1", "tag2"] }\n\n'
)
FOLLOW_UPS = (
    "### Task:\nSuggest 3-5 relevant follow-up questions or prompts that the user might naturally "
    "ask next in this conversation as a **user**, based on the chat history.\n### Guidelines:\n- "
    "Write all follow-up questions from the user's point of view\n### Output:\nJSON format: "
    '{ "follow_ups": ["Question 1?"] }\n'
)
TASKS = (FOLLOW_UPS, TITLE, TAGS)
MIN_TOKENS = 60
Turns = list[dict[str, Any]]


def task(prompt: str, turns: Turns) -> dict[str, Any]:
    """The body of a task: nothing of what Open WebUI knows of it besides reaches the server."""
    quoted = "\n".join(f"{turn['role'].upper()}: {turn['content']}" for turn in turns)
    content = f"{prompt}### Chat History:\n<chat_history>\n{quoted}\n</chat_history>"
    return {"messages": [user(content)], "stream": False, "max_completion_tokens": 20}


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def turn(talk: Talk, turns: Turns, text: str) -> dict[str, Any]:
    """Add a turn of the user and its answer to a conversation."""
    turns.append(user(text))
    answer, _ = await talk.say(messages=turns, stream=True)
    turns.append(message(answer))
    return answer


async def tasks(talk: Talk, turns: Turns, which: tuple[str, ...] = TASKS) -> None:
    """Ask for what Open WebUI asks for after a turn, one after the other as it does."""
    for prompt in which:
        await talk.say(**task(prompt, turns[-4:]))
    await talk.board.caching.settled()


def talked(
    place: Path, body: Callable[[Talk], Awaitable[None]], budget_bytes: int = 1 << 30
) -> None:
    """Do something with a board that parks conversations."""

    async def go() -> None:
        store = CacheStore(place / "cache", CacheFingerprint("m", "1.3.0"), budget_bytes)
        sim = Sim(place)
        async with sim.board(caches=store, park_min_tokens=MIN_TOKENS) as board:
            await body(Talk(board))

    run_loop(go())


LONG = "Repeat after me: " + "the sea is deep and cold and blue, " * 12


def test_after_title_tags_and_follow_ups_the_next_turn_finds_its_conversation(
    tmp_path: Path,
) -> None:
    async def body(talk: Talk) -> None:
        turns: Turns = []
        before = await turn(talk, turns, LONG)
        for number in range(4):
            # A title and tags come once, follow-ups after each turn.
            await tasks(talk, turns, TASKS if number == 0 else TASKS[:1])
            answer = await turn(talk, turns, f"Repeat after me: number {number}")
            held = before["usage"]["total_tokens"]
            # The last token of a run is not in its file, nor is the end of the turn.
            assert held - 3 <= cached(answer) <= held
            before = answer

    talked(tmp_path, body)


def test_what_is_asked_once_is_not_written_to_the_disk(tmp_path: Path) -> None:
    async def body(talk: Talk) -> None:
        turns: Turns = []
        await turn(talk, turns, LONG)
        await tasks(talk, turns)
        await turn(talk, turns, "Repeat after me: so it is")
        await tasks(talk, turns)
        kept = talk.board.caches()
        assert len(kept) == 1, "the conversation, and none of six tasks"
        assert talk.board.report().parked <= 2

    talked(tmp_path, body)


def test_many_tasks_do_not_push_a_conversation_off_a_small_disk(tmp_path: Path) -> None:
    sizes: list[int] = []

    async def measured(talk: Talk) -> None:
        await turn(talk, [], LONG)
        await tasks(talk, [user(LONG)], TASKS[:1])
        (entry,) = talk.board.caches()
        sizes.append(entry.file_bytes)

    async def body(talk: Talk) -> None:
        turns: Turns = []
        before = await turn(talk, turns, LONG)
        for _ in range(3):
            await tasks(talk, turns)
        answer = await turn(talk, turns, "Repeat after me: still here")
        assert cached(answer) >= before["usage"]["total_tokens"] - 3

    (tmp_path / "first").mkdir()
    talked(tmp_path / "first", measured)
    talked(tmp_path, body, budget_bytes=sizes[0] * 3 // 2)


@pytest.mark.parametrize("words", ["### Task:\n", "Summarize: "], ids=["a task", "no task"])
def test_conversations_that_begin_like_a_task_are_kept_once_they_go_on(
    tmp_path: Path, words: str
) -> None:
    async def body(talk: Talk) -> None:
        turns: Turns = []
        await turn(talk, turns, words + LONG)
        second = await turn(talk, turns, "Repeat after me: go on")
        await talk.say(**task(TITLE, turns))
        await talk.board.caching.settled()
        third = await turn(talk, turns, "Repeat after me: and on")
        assert cached(third) >= second["usage"]["total_tokens"] - 3

    talked(tmp_path, body)
