"""What Prometheus reads of kvd: counted from the actors' moments, and a snapshot at the scrape.

Nothing here decides anything, and the actors count nothing: they hand moments to an observer
(`actors.telemetry`), which is a `Tally` here. `Exposition` puts it beside a snapshot of the system.
"""
