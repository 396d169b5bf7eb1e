"""One answer on a board: its text, tokens, hooks and transcript."""
