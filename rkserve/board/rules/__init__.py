"""Pure rules of a board: admission, states, obligations, versions, counters."""
