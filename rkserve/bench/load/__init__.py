"""Load on any server that speaks OpenAI's API: traces, open and closed loops, figures, reports.

It knows HTTP and what OpenAI's answers look like, and nothing of Ray or of boards, but for
``boards``, which starts simulated ones to be loaded.
"""
