"""Ollama's API, as far as its clients need it: ``/api/...``."""
