"""Prometheus metrics, from counters and a snapshot of the system at the scrape."""
