"""The parts of `kvd.worker.scheduler`: one request, the queue, and whose chunk is next."""
