"""``make soak``: a whole cluster under all kinds of traffic and faults, for hours."""
