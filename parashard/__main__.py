"""`python -m parashard` is the command `parashard`."""

from parashard.cli import main

main()
