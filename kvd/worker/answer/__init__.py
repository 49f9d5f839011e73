"""The parts of an answer: reasoning, text and tool calls, found in the model's tokens."""
