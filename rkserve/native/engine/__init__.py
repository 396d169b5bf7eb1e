"""The engine: the process that owns one RKLLM handle."""
