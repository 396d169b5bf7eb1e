"""Between HTTP bodies and messages: pure translations that know neither boards nor Ray."""
