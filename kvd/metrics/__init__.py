"""Prometheus metrics, from counters and a snapshot of the system at the scrape.

The actors pass observations (`actors.telemetry`) to `Counters`. `Exposition` combines the counters
with the snapshot.
"""
