"""Requests with an ``Idempotency-Key``, which are answered once."""
