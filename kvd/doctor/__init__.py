"""`kvctl doctor`: checks, which change nothing, and `selftest`, which uses separate homes."""
