"""`python -m parashard` is the command `parashard`."""

from parashard.cli.main import main

main()
