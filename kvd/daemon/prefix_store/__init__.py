"""The files and the index of the prefix store."""
