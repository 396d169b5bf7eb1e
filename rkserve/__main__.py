"""``python -m rkserve`` is the command ``rkserve``."""

from __future__ import annotations

from rkserve.cli import main

if __name__ == "__main__":
    main()
