"""`python -m parashard` is the command `parashard`."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] == os.getcwd() != os.path.dirname(
    os.path.dirname(os.path.abspath(__file__))
):
    del sys.path[0]  # the working directory, whose `protos.py` would be taken for ours

from parashard.cli import main

main()
