"""The Coordinator's durable state."""
