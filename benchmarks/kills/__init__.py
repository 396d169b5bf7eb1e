"""``make bench-kills``: boards killed under load, and every answer checked."""
