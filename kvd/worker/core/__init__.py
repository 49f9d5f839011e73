"""The engine: requests become rows, rows run in steps, memory comes and goes between steps."""
