"""Trains the embedded model `demo`: text, tokenizer, rows, training and export."""
