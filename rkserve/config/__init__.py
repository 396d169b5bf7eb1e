"""serve_config.yaml as frozen pydantic models."""
