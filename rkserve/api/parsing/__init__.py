"""From tokens to an answer's parts: text, reasoning, tool calls, grammars."""
