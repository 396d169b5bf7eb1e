"""A model's folder: settings, adapters, vision, vocabulary, tensors."""
