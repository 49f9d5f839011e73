"""Admission, queue, prefill order and memory budget of one worker: integers, no tensors."""
