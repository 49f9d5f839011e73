"""OpenAI's Responses API: items in, items out, as typed events or in one piece."""
