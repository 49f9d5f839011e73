"""Measures prefixes on disk: the second turn of a chat, restored instead of prefilled.

``python -m bench.ssd`` uses a real daemon, whose model is evicted and which is restarted and killed
in between. ``python -m bench.ssd.engine`` needs nothing but an engine in its own process, and is
meant for machines with an accelerator.
"""
