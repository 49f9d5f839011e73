"""Grammars that answers must match: their text, their compilation, and masks of allowed tokens."""
