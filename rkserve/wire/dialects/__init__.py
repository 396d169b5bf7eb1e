"""The words of other APIs than OpenAI's, one file each: bodies to calls, events to answers."""
