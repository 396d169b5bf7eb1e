"""Values that cross rooms: messages, run parameters, board reports, the desired state."""
