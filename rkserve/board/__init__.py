"""One board as plain Python, without Ray or C. Start with ``board/board.py``."""
