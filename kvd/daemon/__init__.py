"""The daemon: the composition root, worker processes, the journal and memory estimates."""
