"""The web page at ``/``: its files, the stream that feeds it, and its operations on models."""
