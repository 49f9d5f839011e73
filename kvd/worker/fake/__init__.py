"""An engine without tensors, for tests and demonstrations."""
