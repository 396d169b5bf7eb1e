"""The words of other APIs than OpenAI's chats: bodies to calls, events to answers."""
