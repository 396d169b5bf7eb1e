"""One board in this process, without Ray: generate, stream, pause on a condition, edit, resume.

The public entry point for programs without a cluster. ``open_board`` is for synchronous code,
``AsyncLocalBoard`` for code with an event loop of its own; both have the same calls. The library
still runs in an engine process, so that its crash ends an answer and not the program.
docs/how-to/local.md is the guide.
"""

from __future__ import annotations

from rkserve.board.answer.hooks import Decoded
from rkserve.local.board import AsyncLocalBoard, LocalBoard, open_board
from rkserve.local.generation import AsyncGeneration, LocalAnswer, LocalGeneration, LocalPiece

# The public names; the classes are named apart from those of the board and the API.
Answer = LocalAnswer
Generation = LocalGeneration
Piece = LocalPiece

__all__ = [
    "Answer",
    "AsyncGeneration",
    "AsyncLocalBoard",
    "Decoded",
    "Generation",
    "LocalBoard",
    "Piece",
    "open_board",
]
