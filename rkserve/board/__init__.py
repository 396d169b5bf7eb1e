"""One board as plain Python: admission, text, KV reuse and the engine process, without Ray or C."""
