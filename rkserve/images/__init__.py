"""Images of strangers, made into what an encoder takes. The only room that decodes them."""
