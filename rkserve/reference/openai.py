"""Values of examples."""

from __future__ import annotations

SIM = "sim-chat"
HELLO = [{"role": "user", "content": "Hello"}]
