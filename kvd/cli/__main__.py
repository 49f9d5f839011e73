"""`python -m kvd.cli` is `kvctl`."""

from kvd.cli import main

main()
