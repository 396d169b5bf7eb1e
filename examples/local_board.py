"""A board without a cluster: generate, stream, pause on a condition, edit, resume.

Run it as it is for a simulated board, or on a real one with its library and model folder:

    python examples/local_board.py
    python examples/local_board.py /models/qwen3-1.7b /usr/lib/librkllmrt.so
"""

# ruff: noqa: T201 -- an example talks to a terminal

from __future__ import annotations

import json
import sys
from typing import Any

from rkserve.local import Decoded, Generation, open_board

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def calls_a_tool(piece: Decoded) -> bool:
    """The pause condition: it sees every piece of the answer, with all of the text before it."""
    return piece.text.endswith(">") and piece.answer.endswith("</tool_call>")


def call_it(generation: Generation) -> None:
    """The handler: the generation is paused, and goes on when this returns."""
    call = json.loads(generation.text.split("<tool_call>")[1].split("</tool_call>")[0])
    print("calling", call["name"], "with", call["arguments"])
    generation.edit('{"temperature": 21, "sky": "clear"}', role="tool")


def main(model: str, library: str | None) -> None:
    """Show what a board can do."""
    kind: dict[str, Any] = {"library": library} if library else {"simulated": {"time_scale": 0.2}}
    with open_board(model, **kind) as board:
        answer = board.generate("Count to 8", temperature=0, max_tokens=64)
        print(answer.text, f"({answer.usage.completion_tokens} tokens, {answer.finish_reason})")
        print("the KV cache holds", sum(board.kv().entries), "positions")

        for piece in board.stream("Count to 8", temperature=0):
            print(piece, end="", flush=True)
        print()

        # By hand: pause, take tokens back, put others there, go on.
        with board.start("Count to 60", temperature=0, native_pause=True) as generation:
            for _ in generation:
                if len(generation.text) > 20:
                    break
            paused = generation.pause()
            print("paused with the KV cache", paused.kv.value if paused.kv else "gone")
            generation.edit(" (the rest is left out)", replace_last=3)
            generation.resume()
            print(generation.answer().text)

        # By a condition and a handler, which here answers the call of a tool in mid-stream.
        answer = board.generate(
            "What is the weather in Oslo?",
            tools=[WEATHER],
            temperature=0,
            pause_when=calls_a_tool,
            on_pause=call_it,
        )
        print(answer.message.get("content") or answer.text)


if __name__ == "__main__":
    given = sys.argv[1:]
    main(given[0] if given else "models/sim-chat", given[1] if len(given) > 1 else None)
