"""Ray's view of the parts: the only room, with app, that knows Ray and FastAPI."""
