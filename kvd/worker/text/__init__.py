"""Text and tokens: prompts to tokens, tokens to streamed text, stop strings."""
