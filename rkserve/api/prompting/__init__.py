"""From messages to a prompt: templates, tokenizer, images, past reasoning."""
