"""The parts of `kvd.worker.scheduling.scheduler`: one request, the queue, and whose chunk is next."""
