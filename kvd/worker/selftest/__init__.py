"""What only the machine itself can prove, in a worker's place: `kvctl doctor --selftest`.

A run is a list of trials (`trials`), each of which says one thing; `__main__` runs them one after
the other and says each as soon as it has it, so that a crash costs the trial that caused it.
Depends on nothing of the tests: what is right is reckoned here, in float64.
"""
