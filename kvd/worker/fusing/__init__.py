"""Whether decode attention runs as kernels of kvd's own (`kvd.worker.attention.fused`).

`choice` says what is to be tried, `verdict` what came of it: `watch` looks at kernels while the
self-check runs over them, `timing` compares them with plain operations.
"""
