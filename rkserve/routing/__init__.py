"""Which board takes a request, decided from figures that are passed in."""
