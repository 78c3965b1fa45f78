"""`python -m bessemer` is the same as `bessemer`."""

from bessemer.cli import main

main()
