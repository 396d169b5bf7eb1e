"""Load on any server that speaks OpenAI's API: traces, loops, figures, reports."""
